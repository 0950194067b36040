"""What attention maps show: numbers of heads, from weights `[..., B, N, T, S]` whose rows sum to 1.

`apply(..., intermediates=("layers/*/attention/weights",))` gives them. Each function has a value for every query;
`head_means` makes one number a head of them, without padding.
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
    """Whether every layer of a model, also with a mixer of your own, gives attention maps; nothing is computed."""
    try:
        jax.eval_shape(lambda: models.apply(config, params, tokens, intermediates=(WEIGHTS,), **options))
    except (NotImplementedError, ConfigError):
        return False
    return True


def entropy(weights: Float[Array, "... B N T S"]) -> Float[Array, "... B N T"]:
    """-sum_s a log a in nats: 0 for one key, log S for the mean of all."""
    return -xlogy(weights, weights).sum(axis=-1)


def distance(weights: Float[Array, "... B N T S"]) -> Float[Array, "... B N T"]:
    """sum_s a |t - s|: how many tokens away a query looks."""
    T, S = weights.shape[-2:]
    gaps = jnp.abs(jnp.arange(T)[:, None] - jnp.arange(S)[None]).astype(weights.dtype)
    return jnp.einsum("...ts,ts->...t", weights, gaps)


def overlap(weights: Float[Array, "... B N T S"]) -> Float[Array, "... M B N T"]:
    """sum_s min(a, b) of every two heads (M = N): 1 where both look at the same keys, 0 where at none together."""
    first = jnp.moveaxis(weights, -3, -4)[..., None, :, :]
    return jnp.minimum(first, weights[..., None, :, :, :, :]).sum(axis=-1)


def weight_at(weights: Float[Array, "... B N T S"], targets: Int[Array, "B T"]) -> Float[Array, "... B N T"]:
    """The weight that each query gives to its key number `targets`; 0 where that is negative."""
    places = jnp.maximum(targets, 0)[:, None, :, None]
    values = jnp.take_along_axis(weights, jnp.broadcast_to(places, (*weights.shape[:-1], 1)), axis=-1)[..., 0]
    return jnp.where(targets[:, None] >= 0, values, 0)


def head_means(values: Float[Array, "... B N T"], real: Bool[Array, "B T"] | None = None) -> Float[Array, "... N"]:
    """The mean over rows and queries where `real` holds (None: everywhere), so without padding or queries without a target."""
    if real is None:
        return values.mean(axis=(-3, -1))
    return jnp.where(real[:, None], values, 0).sum(axis=(-3, -1)) / real.sum()


def previous_tokens(tokens: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The targets of a head that looks one token back; -1 for the first."""
    return jnp.broadcast_to(jnp.arange(tokens.shape[1])[None] - 1, tokens.shape)


def induction_targets(tokens: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Behind the last earlier place of the same token, -1 if there is none: an induction head looks there.

    Of "A B ... A" that is B. Olsson et al. 2022, arXiv:2209.11895.
    """
    T = tokens.shape[1]
    earlier = jnp.arange(T)[None] < jnp.arange(T)[:, None]
    same = (tokens[:, :, None] == tokens[:, None, :]) & earlier[None]
    last = T - 1 - jnp.argmax(same[..., ::-1], axis=-1)
    return jnp.where(same.any(axis=-1), last + 1, -1)


def rollout(weights: Float[Array, "L B N T T"]) -> Float[Array, "B T T"]:
    """The product over layers of (A + I) / 2, A the mean of the heads: what of each token reaches the last layer.

    I stands for the residual stream. Abnar and Zuidema 2020, arXiv:2005.00928.
    """
    identity = jnp.eye(weights.shape[-1], dtype=weights.dtype)[None]
    product = identity
    for layer in weights.mean(axis=2):
        product = (layer + identity) / 2 @ product
    return product
