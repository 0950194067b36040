"""Attention in linear time: a product of feature maps replaces the exponential.

So keys can be summed once: Katharopoulos et al. 2020, arXiv:2006.16236. The sums run over the keys
that the mask shows: all keys, those before the query (`causal`), or those of its segment. Other
masks are refused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jaxtyping import Float

from jaxformer.masks import Mask
from jaxformer.models.config import ModelConfig, require_numbers
from jaxformer.models.layer import Mixer
from jaxformer.ops.attention.call import check_shapes
from jaxformer.ops.einsum import einsum
from jaxformer.params import Tree
from jaxformer.zoo.frame import approximation
from jaxformer.zoo.visible import View, hide, visibility

# [B, T, N, H] -> [B, T, N, M], token by token or along the sequence
FeatureMap = Callable[[Array], Array]
FeatureMaps = FeatureMap | tuple[FeatureMap, FeatureMap]


def elu_plus_one(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x + 1 above zero, e^x below. Katharopoulos et al. 2020, arXiv:2006.16236, eq. 7."""
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))


@jax.named_scope("linear_attention")
def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    *,
    mask: Mask | None = None,
    feature_map: FeatureMaps = elu_plus_one,
    eps: float = 1e-6,
    chunk: int = 128,
) -> Float[Array, "B T N Hv"]:
    """phi(q) sum phi(k) v^T / (phi(q) sum phi(k) + eps): Katharopoulos et al. 2020, eqs. 4-9.

    `feature_map` is phi, or a pair for query and key; hidden tokens are zero when it is called.
    `mask` is `full()` or `causal()`, with or without `lengths` and `segments`. A segment is a run
    of one id: a row in which an id comes again after another id is NaN. Raises NotImplementedError
    for other masks.

    With `causal` or `segments`, the sums are carried from chunk to chunk of `chunk` tokens, so
    memory is linear in T. Sums are float32 or wider. A query that sees no key yields zeros.
    """
    check_shapes("linear_attention", query, key, value)
    view = visibility(mask, query.shape[1], key.shape[1], "linear_attention")
    query, key, value, dtype = widen(query, key, value)
    of_query, of_key = feature_map if isinstance(feature_map, tuple) else (feature_map, feature_map)
    query = of_query(hide(query, view.queries))
    key = of_key(hide(key, view.keys))
    numerator, denominator = weighted_sums(query, key, value, view, chunk)
    return divide(numerator, denominator + eps).astype(dtype)


@struct.dataclass
class State:
    """Sums over the tokens so far, of a fixed size."""

    products: Any  # sum of phi(k) v^T, [B, K, M, Hv]
    sums: Any  # sum of phi(k), [B, K, M]


@jax.named_scope("linear_attention_step")
def step(
    state: State,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K Hv"],
    *,
    feature_map: FeatureMaps = elu_plus_one,
    eps: float = 1e-6,
    chunk: int = 128,
) -> tuple[State, Float[Array, "B T N Hv"]]:
    """state += phi(k) v^T, out = phi(q) state, for T further tokens of a causal sequence.

    Katharopoulos et al. 2020, eqs. 16-20.
    """
    check_shapes("linear_attention_step", query, key, value)
    query, key, value, dtype = widen(query, key, value)
    of_query, of_key = feature_map if isinstance(feature_map, tuple) else (feature_map, feature_map)
    view = View(True, 0, jnp.ones((1, 1), int), jnp.ones((1, 1), int), None)
    numerator, denominator, state = _by_chunks(
        of_query(query), of_key(key), value, view, chunk, state
    )
    return state, divide(numerator, denominator + eps).astype(dtype)


@dataclass(frozen=True)
class Linear:
    """Attention in linear time: arXiv:2006.16236. Masks: full(), or causal(), which decodes.

    Katharopoulos et al. 2020.
    """

    feature_map: Callable = elu_plus_one  # of queries and keys, token by token
    eps: float = 1e-6  # added to the denominator
    chunk: int = 128  # tokens that a causal layer takes at a time

    __post_init__ = require_numbers(eps=0, chunk=1)

    def __call__(self, config: ModelConfig) -> Mixer:
        return recurrent(
            self, config, lambda context: (self.feature_map, self.feature_map), self.eps
        )


def recurrent(
    system, config: ModelConfig, maps: Callable, eps: float, features: int | None = None
) -> Mixer:
    """A mixer of `attention` with the feature maps `maps(context)`, a pair for query and key.

    Decoding carries a `State`. `features` is their number, if it is known without tracing.
    """
    name = type(system).__name__

    def mix(params, context, query, key, value):
        of_query, of_key = maps(context)
        options = dict(eps=eps, chunk=system.chunk)
        # it also refuses other masks, by the name of this mixer
        view = visibility(context.mask, query.shape[1], key.shape[1], name)
        if context.state is None:
            return attention(
                query, key, value, mask=context.mask, feature_map=(of_query, of_key), **options
            )
        if not view.causal:
            raise NotImplementedError(f"{name} decodes under causal() alone, not {context.mask}")
        wide = jnp.promote_types(query.dtype, jnp.float32)
        old_state = jax.tree.map(lambda sums: sums.astype(wide), context.state)
        state, out = step(
            old_state,
            query,
            key,
            value,
            feature_map=(of_query, partial(_masked_features, of_key, context.padding_mask)),
            **options,
        )
        return out, jax.tree.map(lambda sums, old: sums.astype(old.dtype), state, context.state)

    def state(batch: int, length: int, dtype) -> Tree:
        K, H = config.kv_heads, config.head_size
        dtype = jnp.promote_types(dtype, jnp.float32)
        x = jax.ShapeDtypeStruct((1, 1, K, H), dtype)
        M = features or jax.eval_shape(maps(None)[1], x).shape[-1]
        return State(jnp.zeros((batch, K, M, H), dtype), jnp.zeros((batch, K, M), dtype))

    return approximation(system, config, mix, has_weights=False, state=state)


def _masked_features(feature_map, padding_mask, x):
    """phi(x), and 0 for padding."""
    is_token = True if padding_mask is None else padding_mask[:, :, None, None]
    return jnp.where(is_token, feature_map(x), 0)


def weighted_sums(query, key, value, view: View, chunk: int):
    """sum_j (q_i . k_j) v_j and sum_j (q_i . k_j) over the keys j that query i sees."""
    query, key, value = hide(query, view.queries), hide(key, view.keys), hide(value, view.keys)
    if view.causal or view.ids is not None:
        numerator, denominator, _ = _by_chunks(query, key, value, view, chunk)
        return view.refuse_recurring(numerator), denominator
    (B, T, N, M), K = query.shape, key.shape[2]
    numerator, denominator = _apply(query.reshape(B, T, K, N // K, M), _sum_keys(key, value))
    return numerator.reshape(B, T, N, value.shape[-1]), denominator.reshape(B, T, N)


def _by_chunks(query, key, value, view: View, chunk: int, state=None):
    """(numerator, denominator, state after the last key), from chunk to chunk.

    Queries and keys are on one axis of positions, padded to whole chunks.
    """
    if not isinstance(view.first, int):
        problem = (
            "linear attention under causal() or segments(...): "
            "the query offset must be a number, not traced"
        )
        raise NotImplementedError(
            f"{problem}; linear_attention_step continues a sequence at any position"
        )
    (B, T, N, M), (S, K) = query.shape, key.shape[1:3]
    # Queries have the positions first ... first + T - 1, keys 0 ... S - 1. The arrays begin at
    # position -shift.
    shift = max(-view.first, 0)
    start = view.first + shift
    length = max(start + T, shift + S, 1)
    chunk = min(chunk, length)
    length = -(-length // chunk) * chunk

    def pad_to(x, at):
        return jnp.pad(x, [(0, 0), (at, length - at - x.shape[1])] + [(0, 0)] * (x.ndim - 2))

    query = pad_to(query.reshape(B, T, K, N // K, M), start)
    key, value = pad_to(key, shift), pad_to(value, shift)
    runs = view.runs(jnp.arange(length) - shift)
    if state is None:
        state = State(
            jnp.zeros((B, K, M, value.shape[-1]), value.dtype), jnp.zeros((B, K, M), value.dtype)
        )
    within = np.tri(chunk, dtype=bool) if view.causal else np.ones((chunk, chunk), bool)
    numerator, denominator, state = _scan(query, key, value, runs, state, within, chunk)
    if not view.causal:  # add the keys after the chunk
        later = _scan(query, key, value, runs, jax.tree.map(jnp.zeros_like, state), None, chunk)
        numerator, denominator = numerator + later[0], denominator + later[1]

    def cut(x):
        return x.reshape(B, length, N, *x.shape[5:])[:, start : start + T]

    return cut(numerator), cut(denominator), state


def _scan(query, key, value, runs, state, within, chunk):
    """(numerator, denominator, state) of one pass over the chunks.

    A query sees the keys of its segment that are in `state`, and the keys of its chunk that
    `within` shows. `within` is a mask `[chunk, chunk]`. If it is None, the pass goes backwards and
    leaves the chunk out.
    """
    reverse = within is None
    edge = 0 if reverse else -1

    def split(x):
        return x.reshape(x.shape[0], x.shape[1] // chunk, chunk, *x.shape[2:]).swapaxes(0, 1)

    @partial(jax.checkpoint, prevent_cse=False)
    def body(carry, inputs):
        state, run = carry
        query, key, value, runs = inputs
        numerator, denominator = _apply(hide(query, runs == run[:, None]), state)
        if within is not None:
            shown = within[None] & (runs[:, :, None] == runs[:, None, :])
            weights = einsum("bikgm,bjkm->bkgij", query, key) * shown[:, None, None]
            numerator = numerator + einsum("bkgij,bjkv->bikgv", weights, value)
            denominator = denominator + jnp.moveaxis(jnp.sum(weights, axis=-1), 3, 1)
        last = runs[:, edge]
        same_run = jax.tree.map(lambda x: hide(x, last == run), state)
        added = _sum_keys(hide(key, runs == last[:, None]), value)
        return (jax.tree.map(jnp.add, same_run, added), last), (numerator, denominator)

    start = state, runs[:, -1 if reverse else 0]
    (state, _), outputs = jax.lax.scan(
        body, start, tuple(map(split, (query, key, value, runs))), reverse=reverse
    )
    return *(x.swapaxes(0, 1) for x in outputs), state


def _sum_keys(key, value) -> State:
    """The `State` of these keys: sum k v^T and sum k."""
    return State(einsum("bskm,bskv->bkmv", key, value), jnp.sum(key, axis=1))


def _apply(query, state: State):
    """(numerator, denominator) = q state."""
    return (
        einsum("btkgm,bkmv->btkgv", query, state.products),
        einsum("btkgm,bkm->btkg", query, state.sums),
    )


def divide(numerator, denominator):
    """numerator / denominator, and 0 where nothing was summed."""
    return numerator / jnp.where(denominator == 0, 1, denominator)[..., None]


def widen(*arrays):
    """The arrays in float32, or float64 if one is, and the dtype of the answer."""
    dtype = jnp.result_type(jnp.float32, *(x.dtype for x in arrays))
    return *(x.astype(dtype) for x in arrays), arrays[-1].dtype
