"""Exact scaled dot-product attention: one signature, and the reference that every kernel is held against."""

import importlib.util
import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

from jaxformer.masks import Mask, as_mask
from jaxformer.ops.contraction import einsum
from jaxformer.ops.dropout import kept, rescaled, seed
from jaxformer.ops.positions import Bias
from jaxformer.parallel.sharding import automatic, constrain

IMPLEMENTATIONS = ("reference", "blockwise", "splash", "cudnn", "ring")


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    *,
    mask: Mask | None = None,
    bias: Float[Array, "#B #N #T #S"] | Bias | Callable | None = None,
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
    says `.at(offset)`. `bias` is an array, a value of `ops.positions` (`alibi`, `t5`, `shaw`), or a function of absolute
    positions, `(q_positions [T], kv_positions [S]) -> [N, T, S]`. `scale` is 1/sqrt(H) by default. `softcap` c maps a
    score s to c tanh(s / c) (Gemma 2). `sinks` adds one logit a head to the denominator alone. Dropout falls on the
    weights; `return_weights` adds the weights before dropout. The softmax is float32 (float64 for float64 inputs). A
    query that sees no key yields zeros and passes no gradient.

    `implementation`: "reference" (the definition, an array [B, N, T, S]), "blockwise" (no such array; any platform),
    "splash" (TPU), "cudnn" (GPU), "ring" (a sequence split over `context`); None takes what the platform has, and logs
    which. All give the same values and drop the same weights, or raise NotImplementedError that names what they lack.
    On a mesh (`jax.set_mesh`) with `context` > 1, None is "ring" or, for what `ring.refuses` (lengths that do not divide),
    what one device would take; "reference", "blockwise" and "splash" gather keys and values on each device. ValueError
    for shapes that do not fit.
    """
    _check(query, key, value, bias, sinks, dropout_rate)
    arrays, known = as_mask(mask, "attention").sized(key.shape[1]).split()
    options: dict[str, Any] = dict(
        scale=scale, softcap=softcap, dropout_rate=dropout_rate, return_weights=return_weights, implementation=implementation
    )  # fmt: skip
    given: dict[str, Any] = dict(sinks=sinks, dropout_key=dropout_key)
    (options if callable(bias) and not isinstance(bias, Bias) else given)["bias"] = bias

    def attend(query, key, value, arrays, given):
        return _attention(query, key, value, mask=known.join(arrays), **options, **given)

    def places(_):
        rows, length, heads, _ = jax.typeof(query).sharding.spec
        return (P(rows, length, heads), P(rows, heads, length)) if return_weights else P(rows, length, heads)

    return automatic(attend, places)(query, key, value, arrays, given)


def _attention(
    query, key, value, *, mask, bias, sinks, dropout_key, scale, softcap, dropout_rate, return_weights, implementation
):
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    options: dict[str, Any] = dict(
        mask=mask, bias=bias, softcap=softcap, sinks=sinks, dropout_rate=dropout_rate, dropout_key=dropout_key
    )  # fmt: skip
    if return_weights and implementation not in (None, "reference"):
        raise NotImplementedError(f"{implementation}: keeps no weights to return; implementation='reference' does")
    name = "reference" if return_weights else implementation or _choose(query, key, value, options)
    match name:
        case "reference":
            if _parts() > 1:
                key, value = (constrain(x, "batch", None, "kv_heads", None) for x in (key, value))
            # nobody sees the weights of a 16-bit model: they may be 16 bits too
            rounded = not return_weights and value.dtype.itemsize < 4
            weigh = partial(_rounded_softmax, value.dtype) if rounded else softmax
            out, weights = reference(query, key, value, scale=scale, weigh=weigh, **options)
            return (out, weights) if return_weights else out
        case "blockwise":
            if _parts() > 1 and _kernel("ring").refuses(query, key, value, bias) is None:
                return _kernel("ring").attention(query, key, value, scale=scale, gather=True, **options)
            return _kernel(name).attention(query, key, value, scale=scale, **options)[0]
        case "splash" | "cudnn" | "ring":
            return _kernel(name).attention(query, key, value, scale=scale, **options)
    raise NotImplementedError(f"attention(implementation={name!r}): there are {', '.join(IMPLEMENTATIONS)}")


def _kernel(name: str):
    return importlib.import_module(f"jaxformer.kernels.{name}")


def _parts() -> int:
    return _kernel("ring").parts()


# Up to here the score array is small, and the reference is differentiable to any order; at the end of it blockwise is ahead
# by a third on XLA:CPU (experiments/bench/attention.py).
_SMALL = 512 * 512


def _choose(query, key, value, options) -> str:
    """The fastest implementation for a call on the platform that it is for: the mesh's, which need not be here, or ours."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    parts = _parts()
    if parts > 1 and _kernel("ring").refuses(query, key, value, options["bias"]) is None:
        return _said(platform, "ring", f" of {parts}")
    kernel = {"tpu": "splash", "gpu": "cudnn", "cuda": "cudnn"}.get(platform)
    if kernel is not None:
        reason = _kernel(kernel).refuses(query, key, value, **options)
        if reason is None and kernel == "cudnn" and platform != jax.default_backend() and not _cudnn_here():
            reason = "cuDNN on this machine to compile for a GPU with: pip install 'jax[cuda13]'"
        if reason is None and parts == 1:
            return _said(platform, kernel, "")
        return _said(platform, "blockwise", f"; {kernel} has no {reason or 'such call under mesh.context'}")
    small = query.shape[1] * key.shape[1] <= _SMALL
    return _said(platform, "reference" if small else "blockwise", " (short)" if small else " (long)")


def _cudnn_here() -> bool:
    return bool(importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cudnn"))


@cache
def _said(platform: str, name: str, why: str) -> str:
    logging.getLogger("jaxformer").info("attention on %s: %s%s", platform, name, why)
    return name


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


def _check(query, key, value, bias, sinks, dropout_rate):
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if not (query.ndim == key.ndim == value.ndim == 4):
        raise ValueError(f"attention takes [B, T, N, H], [B, S, K, H], [B, S, K, H]; got {shapes}")
    if key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0] or query.shape[-1] != key.shape[-1]:
        raise ValueError(f"attention: B, S, K of key and value, B and H of query and key must agree; got {shapes}")
    (B, T, N, _), (S, K) = query.shape, key.shape[1:3]
    if N % K:
        raise ValueError(f"attention: {K} key/value heads do not divide {N} query heads")
    if hasattr(bias, "shape") and (
        bias.ndim != 4 or any(a not in (1, b) for a, b in zip(bias.shape, (B, N, T, S), strict=True))
    ):
        raise ValueError(f"attention: bias must broadcast as [B, N, T, S] = {(B, N, T, S)}; got {bias.shape}")
    if sinks is not None and sinks.shape != (N,):
        raise ValueError(f"attention: one sink a query head, shape ({N},); got {sinks.shape}")
    if dropout_rate and not 0 <= dropout_rate < 1:
        raise ValueError(f"attention: dropout_rate is a probability in [0, 1); got {dropout_rate}")
