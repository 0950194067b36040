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
from jaxformer.ops.attention.call import Call, check_shapes, dropout_seed
from jaxformer.ops.attention.reference import reference, rounded_softmax, softmax
from jaxformer.ops.positions import Bias
from jaxformer.sharding import auto_axes, with_logical_constraint

IMPLEMENTATIONS = ("reference", "blockwise", "splash", "cudnn", "ring")


@jax.named_scope("attention")
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
    `mask` is a value of `jaxformer.masks` (default: all keys visible). The last query is aligned with the last key unless
    the mask has an offset, `.at(offset)`. `bias` is an array, a value of `ops.positions` (`alibi`, `t5`, `shaw`), or a
    function of absolute positions, `(q_positions [T], kv_positions [S]) -> [N, T, S]`. `scale` is 1/sqrt(H) by default.
    `softcap` c maps a score s to c tanh(s / c) (Gemma 2). `sinks` adds one logit a head to the denominator alone. Dropout
    acts on the weights; `return_weights` adds the weights before dropout. The softmax is float32 (float64 for float64
    inputs). A query that sees no key yields zeros and passes no gradient.

    `implementation`: "reference" (the definition, an array [B, N, T, S]), "blockwise" (no such array; any platform),
    "splash" (TPU), "cudnn" (GPU), "ring" (a sequence split over `context`). None takes the fastest on the platform, and
    logs which. All give the same values and drop the same weights, or raise NotImplementedError that names what they lack.
    On a mesh (`jax.set_mesh`) with `context` > 1, None is "ring", or what one device would take where `ring.refuses`
    (lengths that do not divide); "reference", "blockwise" and "splash" gather keys and values on each device. ValueError
    for shapes that do not fit.
    """
    _check(query, key, value, bias, sinks, dropout_rate)
    if return_weights and implementation not in (None, "reference"):
        raise NotImplementedError(f"{implementation}: keeps no weights to return; implementation='reference' does")
    call = Call(
        mask=as_mask(mask, "attention").sized(key.shape[1]),
        bias=jax.tree_util.Partial(bias) if callable(bias) else bias,
        sinks=sinks,
        dropout_seed=dropout_seed(dropout_rate, dropout_key),
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        softcap=softcap,
        dropout_rate=dropout_rate,
    )

    def specs(*_):
        rows, length, heads, _ = jax.typeof(query).sharding.spec
        return (P(rows, length, heads), P(rows, heads, length)) if return_weights else P(rows, length, heads)

    return auto_axes(specs)(partial(_attend, implementation, return_weights))(query, key, value, call)


def _attend(implementation: str | None, return_weights: bool, query, key, value, call: Call):
    match "reference" if return_weights else implementation or _choose(query, key, value, call):
        case "reference":
            if ring.devices() > 1:
                key, value = (with_logical_constraint(x, "batch", None, "kv_heads", None) for x in (key, value))
            # the weights of a 16-bit model may have 16 bits too, unless they are returned
            rounded = not return_weights and value.dtype.itemsize < 4
            out, weights = reference(
                query, key, value, call, partial(rounded_softmax, value.dtype) if rounded else softmax
            )
            return (out, weights) if return_weights else out
        case "blockwise":
            if ring.devices() > 1 and ring.refuses(query, key, value, call) is None:
                return ring.attention(query, key, value, call, gather=True)
            return blockwise.attention(query, key, value, call)[0]
        case "splash":
            return splash.attention(query, key, value, call)
        case "cudnn":
            return cudnn.attention(query, key, value, call)
        case "ring":
            return ring.attention(query, key, value, call)
    raise NotImplementedError(f"attention(implementation={implementation!r}): there are {', '.join(IMPLEMENTATIONS)}")


# Up to here the score array is small, and the reference is differentiable to any order. At this size blockwise is faster
# by a third on XLA:CPU (experiments/bench/attention.py).
_SMALL = 512 * 512


def _choose(query, key, value, call: Call) -> str:
    """The fastest implementation on the platform of the mesh, which may be absent from this machine, or of this process."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    count = ring.devices()
    if count > 1 and ring.refuses(query, key, value, call) is None:
        return _log_once(platform, "ring", f" of {count}")
    kernels: dict[str, Any] = {"tpu": ("splash", splash), "gpu": ("cudnn", cudnn), "cuda": ("cudnn", cudnn)}
    if platform in kernels:
        name, kernel = kernels[platform]
        reason = kernel.refuses(query, key, value, call)
        if reason is None and name == "cudnn" and platform != jax.default_backend() and not _has_cudnn():
            reason = "cuDNN on this machine to compile for a GPU with: pip install 'jax[cuda13]'"
        if reason is None and count == 1:
            return _log_once(platform, name, "")
        return _log_once(platform, "blockwise", f"; {name} has no {reason or 'such call under mesh.context'}")
    small = query.shape[1] * key.shape[1] <= _SMALL
    return _log_once(platform, "reference" if small else "blockwise", " (short)" if small else " (long)")


def _has_cudnn() -> bool:
    return bool(importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cudnn"))


@cache
def _log_once(platform: str, name: str, why: str) -> str:
    logging.getLogger("jaxformer").info("attention on %s: %s%s", platform, name, why)
    return name


def _check(query, key, value, bias, sinks, dropout_rate):
    check_shapes("attention", query, key, value)
    (B, T, N, _), S = query.shape, key.shape[1]
    if hasattr(bias, "shape") and (
        bias.ndim != 4 or any(a not in (1, b) for a, b in zip(bias.shape, (B, N, T, S), strict=True))
    ):
        raise ValueError(f"attention: bias must broadcast as [B, N, T, S] = {(B, N, T, S)}; got {bias.shape}")
    if sinks is not None and sinks.shape != (N,):
        raise ValueError(f"attention: one sink a query head, shape ({N},); got {sinks.shape}")
    if not 0 <= dropout_rate < 1:
        raise ValueError(f"attention: dropout_rate is a probability in [0, 1); got {dropout_rate}")
