"""Attention by its definition, with the array of all scores: every kernel is tested against it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxformer.ops.attention.call import Call
from jaxformer.ops.bias import Bias
from jaxformer.ops.dropout import kept, rescaled
from jaxformer.ops.einsum import einsum


def softmax(scores: Float[Array, "B N T S"], sinks: Float[Array, " N"] | None = None) -> Float[Array, "B N T S"]:
    """exp(s_j) / (sum_j exp(s_j) + exp(sink)): rows of -inf give zeros instead of NaN."""
    return softmax_and_log_sum_exp(scores, sinks)[0]


def softmax_and_log_sum_exp(scores, sinks=None) -> tuple[Array, Array]:
    """The weights, and the logarithm of what they were divided by, `[..., 1]`: -inf for rows of -inf."""
    top = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)  # `initial` is the answer for no keys at all
    if sinks is not None:
        ends = jnp.finfo(scores.dtype)  # the largest numbers act as an infinite sink does, without NaN
        sinks = jnp.clip(sinks.astype(scores.dtype), ends.min, ends.max)[None, :, None, None]
        top = jnp.maximum(top, sinks)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    exponentials = jnp.exp(scores - top)
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    some = jnp.where(total == 0, 1, total)
    return exponentials / some, jnp.where(total == 0, -jnp.inf, top + jnp.log(some))


def visible_scores(scores: Float[Array, "B N T S"], call: Call, positions: tuple[Array, Array]) -> Float[Array, "B N T S"]:
    """Scores with bias and softcap, -inf where the mask hides a key. Positions are `[T]` and `[S]`, or by row."""
    if call.bias is not None:
        bias = call.bias
        if isinstance(bias, Bias):
            bias = bias.block(call.mask.first(*scores.shape[2:]), scores.shape[2], 0, scores.shape[3])
        elif callable(bias):
            bias = bias(*positions)
        scores = scores + (bias if bias.ndim == 4 else bias[None]).astype(scores.dtype)
    if call.softcap is not None:
        capped = call.softcap * jnp.tanh(scores / call.softcap)
        scores = jnp.where(scores == -jnp.inf, scores, capped)  # a key that the bias hides stays hidden
    visible = call.mask(*positions)
    if positions[1].ndim > 1:  # a key without a position is an empty slot of a cache
        visible = visible & (positions[1] >= 0)[:, None, None, :]
    return jnp.where(visible, scores, -jnp.inf)


def reference(query: Array, key: Array, value: Array, call: Call, weigh: Callable = softmax) -> tuple[Array, Array]:
    """The output, and before dropout the weights `weigh(scores, sinks)`. Scores are an array `[B, N, T, S]`."""
    (B, T, N, H), (S, K) = query.shape, key.shape[1:3]
    positions = call.mask.positions(T, S) if call.positions is None else call.positions
    accumulate = jnp.promote_types(query.dtype, jnp.float32)
    if N == K:  # the grouped products with groups of one are slower by a tenth on XLA:CPU
        scores = einsum("btnh,bsnh->bnts", query, key, dtype=accumulate) * call.scale
    else:
        grouped = query.reshape(B, T, K, N // K, H)
        scores = einsum("btkgh,bskh->bkgts", grouped, key, dtype=accumulate).reshape(B, N, T, S) * call.scale
    weights = weigh(visible_scores(scores, call, positions), call.sinks)
    dropped = weights
    if call.dropout_seed is not None:
        keep = kept(call.dropout_seed, call.dropout_rate, (B, N), *positions, first_row=call.first_row)
        dropped = rescaled(weights, keep, call.dropout_rate)
    dropped = dropped.astype(value.dtype)
    if N == K:
        return einsum("bnts,bsnh->btnh", dropped, value), weights
    out = einsum("bkgts,bskh->btkgh", dropped.reshape(B, K, N // K, T, S), value)
    return out.reshape(B, T, N, value.shape[-1]), weights


def second_gradients(
    query: Array, key: Array, value: Array, call: Call, d_out: Array, cotangents: tuple, whole: Callable = lambda bias: bias
) -> tuple:
    """The gradients of query, key, value, bias, sinks and d_out through the first five's gradients, for a kernel without them.

    `cotangents` are those of the five gradients, `whole(bias)` is the bias as `reference` takes it.
    """

    def gradients(query, key, value, bias, sinks, d_out):
        def output(query, key, value, bias, sinks):
            return reference(query, key, value, replace(call, bias=whole(bias), sinks=sinks))[0]

        return jax.vjp(output, query, key, value, bias, sinks)[1](d_out)

    return jax.vjp(gradients, query, key, value, call.bias, call.sinks, d_out)[1](cotangents)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def rounded_softmax(dtype, scores, sinks):
    """`softmax` rounded to 16 bits. Its gradient keeps the weights alone: half of the bytes that autodiff would keep."""
    return softmax(scores, sinks).astype(dtype)


def _rounded_forward(dtype, scores, sinks):
    weights = softmax(scores, sinks)
    on_sink = None if sinks is None else 1 - jnp.sum(weights, axis=-1)  # before rounding: it may be small
    return weights.astype(dtype), (weights.astype(dtype), on_sink, sinks, jnp.zeros(0, scores.dtype))  # for its dtype


def _rounded_backward(dtype, residuals, g):
    weights, on_sink, sinks, like = residuals
    weights, g = weights.astype(like.dtype), g.astype(like.dtype)
    mean = jnp.sum(weights * g, axis=-1, keepdims=True)
    d_sinks = None if sinks is None else -jnp.sum(on_sink * mean[..., 0], axis=(0, 2)).astype(sinks.dtype)
    return weights * (g - mean), d_sinks


rounded_softmax.defvjp(_rounded_forward, _rounded_backward)
