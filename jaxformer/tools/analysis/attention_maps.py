"""Numbers that describe attention heads, from weights `[..., B, N, T, S]` that sum to 1 over S.

`apply(..., intermediates=("layers/*/attention/weights",))` returns such weights. Each function
gives a value for every query; `head_means` averages these to one number per head, without padding.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import xlogy
from jaxtyping import Bool, Float, Int

from jaxformer import models
from jaxformer.errors import ConfigError

WEIGHTS = "layers/*/attention/weights"


def has_weights(config: Any, params: Any, tokens: Array, **options) -> bool:
    """Whether every layer of a model gives attention maps, also if it has a mixer of your own.

    Only shapes are traced; nothing is computed.
    """
    try:
        jax.eval_shape(
            lambda: models.apply(config, params, tokens, intermediates=(WEIGHTS,), **options)
        )
    except (NotImplementedError, ConfigError):
        return False
    return True


def entropy(weights: Float[Array, "... B N T S"]) -> Float[Array, "... B N T"]:
    """-sum_s a_s log a_s, in nats: 0 if one key has all the weight, log S if all have the same."""
    return -xlogy(weights, weights).sum(axis=-1)


def distance(weights: Float[Array, "... B N T S"]) -> Float[Array, "... B N T"]:
    """sum_s a_s |t - s|: the mean distance in tokens between a query and the keys it attends to."""
    T, S = weights.shape[-2:]
    distances = jnp.abs(jnp.arange(T)[:, None] - jnp.arange(S)[None]).astype(weights.dtype)
    return jnp.einsum("...ts,ts->...t", weights, distances)


def mutual_information(weights: Float[Array, "*rest T S"]) -> Float[Array, "*rest"]:
    """mean_t sum_s a_ts log(a_ts / mean_u a_us): of query and key positions, in nats.

    a_ts / T is a joint distribution of both positions. 0 if all queries look at the same keys, log
    T if each query looks at a key of its own. A causal mask alone tells something.
    """
    of_keys = weights.mean(axis=-2, keepdims=True)
    return (xlogy(weights, weights) - xlogy(weights, of_keys)).sum(axis=-1).mean(axis=-1)


def overlap(weights: Float[Array, "... B N T S"]) -> Float[Array, "... M B N T"]:
    """sum_s min(a_s, b_s) of every two heads a and b (M = N).

    1 if both attend to the same keys with the same weights, 0 if they share no key.
    """
    first = jnp.moveaxis(weights, -3, -4)[..., None, :, :]
    return jnp.minimum(first, weights[..., None, :, :, :, :]).sum(axis=-1)


def weight_at(
    weights: Float[Array, "... B N T S"], targets: Int[Array, "B T"]
) -> Float[Array, "... B N T"]:
    """The weight that each query gives to the key at position `targets`; 0 if that is negative."""
    keys = jnp.maximum(targets, 0)[:, None, :, None]
    keys = jnp.broadcast_to(keys, (*weights.shape[:-1], 1))
    values = jnp.take_along_axis(weights, keys, axis=-1)[..., 0]
    return jnp.where(targets[:, None] >= 0, values, 0)


def head_means(
    values: Float[Array, "... B N T"], valid: Bool[Array, "B T"] | None = None
) -> Float[Array, "... N"]:
    """The mean of each head over the batch and the queries where `valid` holds (None: all).

    `valid` leaves out padding, or queries that have no target.
    """
    if valid is None:
        return values.mean(axis=(-3, -1))
    return jnp.where(valid[:, None], values, 0).sum(axis=(-3, -1)) / valid.sum()


def previous_tokens(tokens: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The targets of a head that attends to the token before: t - 1; -1 for the first token."""
    return jnp.broadcast_to(jnp.arange(tokens.shape[1])[None] - 1, tokens.shape)


def induction_targets(tokens: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The targets of an induction head: one after the last earlier position of the same token.

    In "A B ... A" the target of the second A is B. -1 if the token did not occur before. Olsson et
    al. 2022, arXiv:2209.11895.
    """
    T = tokens.shape[1]
    is_earlier = jnp.arange(T)[None] < jnp.arange(T)[:, None]
    is_same = (tokens[:, :, None] == tokens[:, None, :]) & is_earlier[None]
    last = T - 1 - jnp.argmax(is_same[..., ::-1], axis=-1)
    return jnp.where(is_same.any(axis=-1), last + 1, -1)


def rollout(weights: Float[Array, "L B N T T"]) -> Float[Array, "B T T"]:
    """The product over layers of (A + I) / 2, where A is the mean of the heads.

    It estimates how much of each token reaches the last layer; I stands for the residual stream.
    Abnar and Zuidema 2020, arXiv:2005.00928.
    """
    identity = jnp.eye(weights.shape[-1], dtype=weights.dtype)[None]
    product = identity
    for layer in weights.mean(axis=2):
        product = (layer + identity) / 2 @ product
    return product
