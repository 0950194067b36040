"""Exact scaled dot-product attention: one signature, checked here, computed by the kernel that the platform has.

The kernels `blockwise`, `ring`, `splash` and `cudnn` equal `reference` or refuse. `linear`, `low_rank`, `lsh` and `sparse`
compute other functions, at less cost.
"""

import importlib.util
import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

from jaxformer.masks import Mask, as_mask
from jaxformer.ops.attention import blockwise, cudnn, ring, splash
from jaxformer.ops.attention.reference import reference, rounded_softmax, softmax
from jaxformer.ops.positions import Bias
from jaxformer.sharding import in_auto_axes, with_logical_constraint

IMPLEMENTATIONS = ("reference", "blockwise", "splash", "cudnn", "ring")
_KERNELS: dict[str, Any] = {"splash": splash, "cudnn": cudnn, "ring": ring}


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

    return in_auto_axes(attend, places)(query, key, value, arrays, given)


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
            if ring.parts() > 1:
                key, value = (with_logical_constraint(x, "batch", None, "kv_heads", None) for x in (key, value))
            # nobody sees the weights of a 16-bit model: they may be 16 bits too
            rounded = not return_weights and value.dtype.itemsize < 4
            weigh = partial(rounded_softmax, value.dtype) if rounded else softmax
            out, weights = reference(query, key, value, scale=scale, weigh=weigh, **options)
            return (out, weights) if return_weights else out
        case "blockwise":
            if ring.parts() > 1 and ring.refuses(query, key, value, bias) is None:
                return ring.attention(query, key, value, scale=scale, gather=True, **options)
            return blockwise.attention(query, key, value, scale=scale, **options)[0]
        case "splash" | "cudnn" | "ring":
            return _KERNELS[name].attention(query, key, value, scale=scale, **options)
    raise NotImplementedError(f"attention(implementation={name!r}): there are {', '.join(IMPLEMENTATIONS)}")


# Up to here the score array is small, and the reference is differentiable to any order; at the end of it blockwise is ahead
# by a third on XLA:CPU (experiments/bench/attention.py).
_SMALL = 512 * 512


def _choose(query, key, value, options) -> str:
    """The fastest implementation for a call on the platform that it is for: the mesh's, which need not be here, or ours."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    parts = ring.parts()
    if parts > 1 and ring.refuses(query, key, value, options["bias"]) is None:
        return _said(platform, "ring", f" of {parts}")
    kernel = {"tpu": "splash", "gpu": "cudnn", "cuda": "cudnn"}.get(platform)
    if kernel is not None:
        reason = _KERNELS[kernel].refuses(query, key, value, **options)
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
