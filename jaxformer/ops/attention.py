"""Exact scaled dot-product attention: one signature, and the reference that every kernel is held against."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxformer.masks import Mask, full
from jaxformer.ops.contraction import einsum


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    *,
    mask: Mask | None = None,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    return_weights: bool = False,
    implementation: str | None = None,
) -> Float[Array, "B T N Hv"] | tuple[Float[Array, "B T N Hv"], Float[Array, "B N T S"]]:
    """softmax(mask(softcap(query key^T * scale + bias))) value. Vaswani et al. 2017, arXiv:1706.03762, eq. 1.

    N query heads share K key/value heads, K dividing N: query head n reads key head n // (N / K) (Ainslie et al. 2023).
    `mask` is a value of `jaxformer.masks` (default: all keys visible); queries are aligned with the last keys unless it
    says `.at(offset)`. `scale` is 1/sqrt(H) by default. `softcap` c maps a score s to c tanh(s / c) (Gemma 2). `sinks`
    adds one logit a head to the denominator alone. Dropout falls on the weights; `return_weights` adds the weights
    before dropout. The softmax is float32 (float64 for float64 inputs). A query that sees no key yields zeros and
    passes no gradient.

    Raises ValueError for shapes that do not fit, NotImplementedError for an implementation that does not exist.
    """
    _check(query, key, value, bias, sinks, dropout_rate, dropout_key)
    if implementation not in (None, "reference"):
        raise NotImplementedError(f"attention(implementation={implementation!r}): there is 'reference' (or None)")
    mask = full() if mask is None else mask
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    # nobody sees the weights of a 16-bit model: they may be 16 bits too
    weigh = softmax if return_weights or value.dtype.itemsize >= 4 else partial(_rounded_softmax, value.dtype)
    out, weights = reference(query, key, value, mask, bias, scale, softcap, sinks, dropout_rate, dropout_key, weigh)
    return (out, weights) if return_weights else out


def reference(query, key, value, mask, bias, scale, softcap, sinks, dropout_rate, dropout_key, weigh):
    """The definition, with the whole `[B, N, T, S]` score array. Returns the output and the weights before dropout."""
    B, T, N, H = query.shape
    S, K = key.shape[1:3]
    accumulate = jnp.promote_types(query.dtype, jnp.float32)
    if N == K:  # the grouped products with groups of one, which XLA:CPU runs slower by a tenth
        scores = einsum("btnh,bsnh->bnts", query, key, dtype=accumulate) * scale
    else:
        grouped = query.reshape(B, T, K, N // K, H)
        scores = einsum("btkgh,bskh->bkgts", grouped, key, dtype=accumulate).reshape(B, N, T, S) * scale
    if bias is not None:
        scores = scores + bias.astype(accumulate)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(mask(*mask.positions(T, S)), scores, -jnp.inf)
    weights = weigh(scores, sinks)
    dropped = dropout(weights, dropout_rate, dropout_key).astype(value.dtype)
    if N == K:
        return einsum("bnts,bsnh->btnh", dropped, value), weights
    out = einsum("bkgts,bskh->btkgh", dropped.reshape(B, K, N // K, T, S), value)
    return out.reshape(B, T, N, value.shape[-1]), weights


def softmax(scores: Float[Array, "B N T S"], sinks: Float[Array, " N"] | None = None) -> Float[Array, "B N T S"]:
    """exp(s_j) / (sum_j exp(s_j) + exp(sink)): rows of -inf give zeros instead of NaN."""
    top = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)  # which is also the answer for no keys at all
    if sinks is not None:
        sinks = sinks.astype(scores.dtype)[None, :, None, None]
        top = jnp.maximum(top, sinks)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    exponentials = jnp.exp(scores - top)
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    return exponentials / jnp.where(total == 0, 1, total)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rounded_softmax(dtype, scores, sinks):
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


_rounded_softmax.defvjp(_rounded_forward, _rounded_backward)


def dropout(x: Float[Array, "..."], rate: float, key: Array | None) -> Float[Array, "..."]:
    """Keeps each entry with probability 1 - rate, divided by it; the identity without a key. Srivastava et al. 2014."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))  # a bfloat16 1 - rate would bias every entry the same way
    return jnp.where(keep, wide / (1.0 - rate), 0).astype(x.dtype)


def _check(query, key, value, bias, sinks, dropout_rate, dropout_key):
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if not (query.ndim == key.ndim == value.ndim == 4):
        raise ValueError(f"attention takes [B, T, N, H], [B, S, K, H], [B, S, K, H]; got {shapes}")
    if key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0] or query.shape[-1] != key.shape[-1]:
        raise ValueError(f"attention: B, S, K of key and value, B and H of query and key must agree; got {shapes}")
    N, K = query.shape[2], key.shape[2]
    if N % K:
        raise ValueError(f"attention: {K} key/value heads do not divide {N} query heads")
    if bias is not None and bias.ndim != 4:
        raise ValueError(f"attention: bias must broadcast as [B, N, T, S] with four axes; got {bias.shape}")
    if sinks is not None and sinks.shape != (N,):
        raise ValueError(f"attention: one sink a query head, shape ({N},); got {sinks.shape}")
    if dropout_rate and not 0 <= dropout_rate < 1:
        raise ValueError(f"attention: dropout_rate is a probability in [0, 1); got {dropout_rate}")
