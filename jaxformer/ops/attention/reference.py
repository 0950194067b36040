"""Attention by its definition, with the array of all scores: what every kernel is held against."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxformer.ops.dropout import kept, rescaled, seed
from jaxformer.ops.einsum import einsum
from jaxformer.ops.positions import Bias


def reference(query, key, value, *, mask, bias, scale, softcap, sinks, dropout_rate, dropout_key, weigh):
    """The definition, with the whole `[B, N, T, S]` score array. Returns the output and the weights before dropout."""
    B, T, N, H = query.shape
    S, K = key.shape[1:3]
    positions = mask.positions(T, S)
    accumulate = jnp.promote_types(query.dtype, jnp.float32)
    if N == K:  # the grouped products with groups of one, which XLA:CPU runs slower by a tenth
        scores = einsum("btnh,bsnh->bnts", query, key, dtype=accumulate) * scale
    else:
        grouped = query.reshape(B, T, K, N // K, H)
        scores = einsum("btkgh,bskh->bkgts", grouped, key, dtype=accumulate).reshape(B, N, T, S) * scale
    if bias is not None:
        if isinstance(bias, Bias):
            bias = bias.block(mask.first(T, S), T, 0, S)
        elif callable(bias):
            bias = bias(*positions)
        scores = scores + (bias if bias.ndim == 4 else bias[None]).astype(accumulate)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(mask(*positions), scores, -jnp.inf)
    weights = weigh(scores, sinks)
    dropped = weights
    if dropout_rate and dropout_key is not None:
        dropped = rescaled(weights, kept(seed(dropout_key), dropout_rate, (B, N), *positions), dropout_rate)
    dropped = dropped.astype(value.dtype)
    if N == K:
        return einsum("bnts,bsnh->btnh", dropped, value), weights
    out = einsum("bkgts,bskh->btkgh", dropped.reshape(B, K, N // K, T, S), value)
    return out.reshape(B, T, N, value.shape[-1]), weights


def softmax(scores: Float[Array, "B N T S"], sinks: Float[Array, " N"] | None = None) -> Float[Array, "B N T S"]:
    """exp(s_j) / (sum_j exp(s_j) + exp(sink)): rows of -inf give zeros instead of NaN."""
    top = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)  # which is also the answer for no keys at all
    if sinks is not None:
        ends = jnp.finfo(scores.dtype)  # an infinite sink takes nothing or all: as the largest numbers do, without NaN
        sinks = jnp.clip(sinks.astype(scores.dtype), ends.min, ends.max)[None, :, None, None]
        top = jnp.maximum(top, sinks)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    exponentials = jnp.exp(scores - top)
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    return exponentials / jnp.where(total == 0, 1, total)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def rounded_softmax(dtype, scores, sinks):
    """`softmax` rounded to 16 bits. Its gradient needs the weights alone, so only those are kept: half of autodiff's bytes."""
    return softmax(scores, sinks).astype(dtype)


def _rounded_forward(dtype, scores, sinks):
    weights = softmax(scores, sinks)
    on_sink = None if sinks is None else 1 - jnp.sum(weights, axis=-1)  # before rounding: it may be small
    return weights.astype(dtype), (weights.astype(dtype), on_sink, sinks)


def _rounded_backward(dtype, residuals, g):
    weights, on_sink, sinks = residuals
    weights, g = weights.astype(jnp.float32), g.astype(jnp.float32)
    mean = jnp.sum(weights * g, axis=-1, keepdims=True)
    d_sinks = None if sinks is None else -jnp.sum(on_sink * mean[..., 0], axis=(0, 2)).astype(sinks.dtype)
    return weights * (g - mean), d_sinks


rounded_softmax.defvjp(_rounded_forward, _rounded_backward)
