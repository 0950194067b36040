"""Attention by its definition, with the array of all scores: every kernel is tested against it.

`reference` is the function to read. `attention` is the same as a kernel, `REFERENCE`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxformer.ops.attention.call import Call, context_devices
from jaxformer.ops.attention.kernel import Kernel, never_refuses
from jaxformer.ops.bias import Bias
from jaxformer.ops.dropout import keep_mask, rescaled
from jaxformer.ops.einsum import einsum
from jaxformer.sharding import with_logical_constraint

Scores: TypeAlias = Float[Array, "B N T S"]
Sinks: TypeAlias = Float[Array, " N"]


def softmax(scores: Scores, sinks: Sinks | None = None) -> Scores:
    """exp(s_j) / (sum_j exp(s_j) + exp(sink)); zeros instead of NaN where all scores are -inf."""
    return softmax_and_log_sum_exp(scores, sinks)[0]


def softmax_and_log_sum_exp(scores, sinks=None) -> tuple[Array, Array]:
    """(weights, logarithm of their divisor `[..., 1]`); -inf where all scores are -inf."""
    # `initial` is the answer for no keys at all
    top = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    if sinks is not None:
        # the largest numbers act as an infinite sink does, without NaN
        ends = jnp.finfo(scores.dtype)
        sinks = jnp.clip(sinks.astype(scores.dtype), ends.min, ends.max)[None, :, None, None]
        top = jnp.maximum(top, sinks)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    exponentials = jnp.exp(scores - top)
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    divisor = jnp.where(total == 0, 1, total)
    log_sum_exp = jnp.where(total == 0, -jnp.inf, top + jnp.log(divisor))
    return exponentials / divisor, log_sum_exp


def visible_scores(scores: Scores, call: Call, positions: tuple[Array, Array]) -> Scores:
    """Scores with bias and softcap, -inf where the mask hides a key.

    Positions are `[T]` and `[S]`, or `[B|1, T]` and `[B|1, S]`.
    """
    if call.bias is not None:
        bias = call.bias
        if isinstance(bias, Bias):
            T, S = scores.shape[2:]
            bias = bias.block(call.mask.first(T, S), T, 0, S)
        elif callable(bias):
            bias = bias(*positions)
        scores = scores + (bias if bias.ndim == 4 else bias[None]).astype(scores.dtype)
    if call.softcap is not None:
        capped = call.softcap * jnp.tanh(scores / call.softcap)
        # a key that the bias hides stays hidden
        scores = jnp.where(scores == -jnp.inf, scores, capped)
    visible = call.mask(*positions)
    if positions[1].ndim > 1:
        # a key without a position is an empty slot of a cache
        visible = visible & (positions[1] >= 0)[:, None, None, :]
    return jnp.where(visible, scores, -jnp.inf)


def reference(
    query: Array,
    key: Array,
    value: Array,
    call: Call,
    softmax_fn: Callable = softmax,
) -> tuple[Array, Array]:
    """softmax(scores) value, and the weights before dropout, `softmax_fn(scores, sinks)`.

    The scores are an array `[B, N, T, S]`.
    """
    (B, T, N, H), (S, K) = query.shape, key.shape[1:3]
    positions = call.mask.positions(T, S) if call.positions is None else call.positions
    accumulate = jnp.promote_types(query.dtype, jnp.float32)
    if N == K:
        # the grouped products with groups of one are slower by a tenth on XLA:CPU
        scores = einsum("btnh,bsnh->bnts", query, key, dtype=accumulate) * call.scale
    else:
        grouped = query.reshape(B, T, K, N // K, H)
        scores = einsum("btkgh,bskh->bkgts", grouped, key, dtype=accumulate).reshape(B, N, T, S)
        scores = scores * call.scale
    weights = softmax_fn(visible_scores(scores, call, positions), call.sinks)
    dropped = weights
    if call.dropout_seed is not None:
        seed, rate = call.dropout_seed, call.dropout_rate
        keep = keep_mask(seed, rate, (B, N), *positions, first_row=call.first_row)
        dropped = rescaled(weights, keep, rate)
    dropped = dropped.astype(value.dtype)
    if N == K:
        return einsum("bnts,bsnh->btnh", dropped, value), weights
    out = einsum("bkgts,bskh->btkgh", dropped.reshape(B, K, N // K, T, S), value)
    return out.reshape(B, T, N, value.shape[-1]), weights


def attention(query: Array, key: Array, value: Array, call: Call) -> Array:
    """The output of `reference`, on the mesh of `jax.set_mesh`.

    Weights of a 16-bit model have 16 bits.
    """
    key, value = all_gather_length(key, value)
    return reference(query, key, value, call, softmax_of(value))[0]


REFERENCE = Kernel("reference", attention, never_refuses)


def all_gather_length(*arrays: Array) -> list[Array]:
    """Keys and values `[B, S, K, H]`, with all of S on each device of the mesh axis `context`."""
    if context_devices() == 1:
        return list(arrays)
    return [with_logical_constraint(x, "batch", None, "kv_heads", None) for x in arrays]


def softmax_of(value: Array) -> Callable:
    """`softmax`; for 16-bit values its weights are rounded to 16 bits, as no caller sees them."""
    return softmax if value.dtype.itemsize >= 4 else partial(rounded_softmax, value.dtype)


def second_gradients(
    query: Array,
    key: Array,
    value: Array,
    call: Call,
    d_out: Array,
    cotangents: tuple,
    bias_array: Callable,
) -> tuple:
    """The second derivatives of attention, for a kernel that has none of its own.

    The first derivatives of query, key, value, bias and sinks are functions of these five and of
    d_out. The result is the gradients of these six, from the `cotangents` of the five derivatives.
    `bias_array(bias)` is the bias in a form that `reference` takes.
    """

    def output(query, key, value, bias, sinks):
        return reference(query, key, value, replace(call, bias=bias_array(bias), sinks=sinks))[0]

    def gradients(query, key, value, bias, sinks, d_out):
        _, pullback = jax.vjp(output, query, key, value, bias, sinks)
        return pullback(d_out)

    _, pullback = jax.vjp(gradients, query, key, value, call.bias, call.sinks, d_out)
    return pullback(cotangents)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def rounded_softmax(dtype, scores, sinks):
    """`softmax` rounded to 16 bits.

    The backward pass keeps only these weights: half of the bytes that autodiff would keep.
    """
    return softmax(scores, sinks).astype(dtype)


def _rounded_forward(dtype, scores, sinks):
    weights = softmax(scores, sinks)
    # before rounding: it may be small
    on_sink = None if sinks is None else 1 - jnp.sum(weights, axis=-1)
    like_scores = jnp.zeros(0, scores.dtype)  # has their type
    return weights.astype(dtype), (weights.astype(dtype), on_sink, sinks, like_scores)


def _rounded_backward(dtype, residuals, g):
    weights, on_sink, sinks, like_scores = residuals
    weights = weights.astype(like_scores.dtype)
    g = g.astype(like_scores.dtype)
    mean = jnp.sum(weights * g, axis=-1, keepdims=True)
    d_sinks = None
    if sinks is not None:
        d_sinks = -jnp.sum(on_sink * mean[..., 0], axis=(0, 2)).astype(sinks.dtype)
    return weights * (g - mean), d_sinks


rounded_softmax.defvjp(_rounded_forward, _rounded_backward)
