"""Exact scaled dot-product attention: one function, many kernels.

`attention` checks a call, and `_choose` finds the kernel that computes it. The kernels are:

- "reference": makes an array of all scores, [B, N, T, S], and computes every call
- "query_blocked": each block of queries reads only the keys between the first and the last it sees
- "blockwise": makes no array of all scores
- "ring": for a sequence split over the mesh axis `context`; "blockwise" is the same there
- "splash": TPU
- "cudnn": NVIDIA GPU
- "tokamax": NVIDIA GPU, for masks that cuDNN lacks; it needs the extra `kernels`

Over `context`, "reference", "query_blocked" and "splash" gather keys and values. The choice of a
tuple of kernels and of None is logged. `Kernel` is the joint: a researcher's own kernel goes where
a name of ours goes. `zoo` has cheaper functions than exact attention.
"""

import logging
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from jaxformer.errors import ConfigError
from jaxformer.masks import Mask, as_mask, rules
from jaxformer.ops.attention import blockwise, query_blocked
from jaxformer.ops.attention.call import (
    Call as Call,
    check_shapes,
    context_devices,
    dropout_seed,
    share as share,
)
from jaxformer.ops.attention.cudnn import CUDNN
from jaxformer.ops.attention.kernel import Implementation, Kernel, as_tuple, names_of
from jaxformer.ops.attention.query_blocked import QUERY_BLOCKED
from jaxformer.ops.attention.reference import REFERENCE, all_gather_length, reference
from jaxformer.ops.attention.ring import BLOCKWISE, RING
from jaxformer.ops.attention.splash import SPLASH
from jaxformer.ops.attention.tokamax import TOKAMAX
from jaxformer.ops.bias import Bias, bias_between
from jaxformer.ops.einsum import in_float32, reverse_mode_alone
from jaxformer.sharding import auto_axes, platform as mesh_platform

KERNELS = REFERENCE, QUERY_BLOCKED, BLOCKWISE, RING, SPLASH, CUDNN, TOKAMAX
# kernels written for a chip, in the order of preference: cuDNN needs no array of a mask
FUSED = SPLASH, CUDNN, TOKAMAX
RENAMED = {"rows": "query_blocked"}  # old names, which configs of older runs have


@jax.named_scope("attention")
def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    *,
    mask: Mask | None = None,
    bias: Float[Array, "#B #N #T #S"] | Bias | Callable | None = None,
    scale: float | Float[Array, ""] | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    return_weights: bool = False,
    implementation: Implementation = None,
    positions: tuple[Int[Array, "#B T"], Int[Array, "#B S"]] | None = None,
) -> Float[Array, "B T N Hv"] | tuple[Float[Array, "B T N Hv"], Float[Array, "B N T S"]]:
    """softmax(mask(softcap(query key^T * scale + bias))) value.

    Vaswani et al. 2017, arXiv:1706.03762, eq. 1. Query head n reads key head n // (N / K) (Ainslie
    et al. 2023). The softmax is float32 or wider. A query that sees no key yields zeros and no
    gradient.

    - `mask`: the last query is aligned with the last key unless it has an offset, `.at(offset)`.
    - `bias`: an array, a value of `ops.bias` (`alibi`, `t5`, `shaw`), or a function of absolute
      positions, `(q_positions [T], kv_positions [S]) -> [N, T, S]`.
    - `scale`: 1/sqrt(H) by default; it may be learned.
    - `softcap`: c maps a score s to c tanh(s / c) (Gemma 2). -inf, which hides a key, stays.
    - `sinks`: one logit a head, added to the denominator alone.
    - `return_weights`: also returns the weights before dropout.
    - `positions`: of queries and keys by batch row; -1 for an empty cache slot; reference only.
    - `implementation`: a name of this file's list, a `Kernel` of your own, or a tuple: its first
      kernel that is for the platform and computes the call. None: our fastest one.

    All implementations give the same values and drop the same weights, or raise NotImplementedError
    that names what they lack. Second derivatives in reverse mode (jax.grad of jax.grad) are those
    of the reference, with its memory; "ring" has none. Forward mode (jax.jvp) needs float64 and the
    reference.
    """
    softcap = None if softcap is None else _number("softcap", softcap)
    dropout_rate = _number("dropout_rate", dropout_rate)
    _check(query, key, value, bias, softcap, sinks, dropout_rate)
    mask = as_mask(mask, "attention")
    if positions is None:
        _check_segments(mask, query.shape[1], key.shape[1])
    query, scale = _with_number_as_scale(query, scale)
    call = Call(
        mask=mask.sized(key.shape[1]),
        positions=positions,
        bias=_bias_of_call(bias, positions),
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        dropout_rate=dropout_rate,
        dropout_seed=dropout_seed(dropout_rate, dropout_key),
    )
    specs = partial(_output_specs, query, return_weights)
    with reverse_mode_alone("attention"):
        attend = auto_axes(specs)(partial(_attend, implementation, return_weights))
        return attend(query, key, value, call)


def _with_number_as_scale(query: Array, scale: Any) -> tuple[Array, float]:
    """(query, scale) for kernels, whose scale is a number: a learned one multiplies the query."""
    if isinstance(scale, Array):
        return (in_float32(query) * scale).astype(query.dtype), 1.0
    return query, query.shape[-1] ** -0.5 if scale is None else scale


def _bias_of_call(bias: Any, positions: tuple[Array, Array] | None) -> Any:
    """The bias as a pytree; with `positions` by batch row, as an array."""
    if positions is not None and (callable(bias) or isinstance(bias, Bias)):
        bias = bias_between(bias, *positions)
    return jax.tree_util.Partial(bias) if callable(bias) else bias


def _output_specs(query: Array, return_weights: bool, *_):
    """The PartitionSpecs of the output, and of the weights: those of the query."""
    batch, length, heads, _ = jax.typeof(query).sharding.spec
    output = P(batch, length, heads)
    return (output, P(batch, heads, length)) if return_weights else output


def _check_segments(mask: Mask, T: int, S: int) -> None:
    """Raises ValueError for ids that end before the sequence does: nobody would see the rest."""
    first = mask.first(T, S)
    for segments in _segments_in(mask):
        q_count = segments.arrays[0].shape[1]
        kv_count = segments.arrays[-1].shape[1]
        if kv_count < S or (isinstance(first, int) and q_count < first + T):
            ids = f"{segments} has ids for {q_count} queries and {kv_count} keys"
            raise ValueError(f"attention: {ids} of {T} and {S}")


def _segments_in(mask: Mask) -> list[Mask]:
    """All masks of `segments` in a mask."""
    inner = [segments for part in mask.parts for segments in _segments_in(part)]
    return [*inner, mask] if mask.rule is rules.segments else inner


def _number(name: str, value: Any) -> float:
    """The value as a float. Raises ValueError for a traced value."""
    if isinstance(value, jax.core.Tracer):
        needed = "is a number, which is known when the program is traced"
        raise ValueError(f"attention: {name} {needed}; got {value}")
    return float(value)


def _check(query, key, value, bias, softcap, sinks, dropout_rate):
    check_shapes("attention", query, key, value)
    B, T, N, S = *query.shape[:3], key.shape[1]
    shape = getattr(bias, "shape", (1,) * 4)
    if len(shape) != 4 or any(a not in (1, b) for a, b in zip(shape, (B, N, T, S), strict=True)):
        expected = f"[B, N, T, S] = {(B, N, T, S)}"
        raise ValueError(f"attention: bias must broadcast as {expected}; got {shape}")
    if softcap is not None and not 0 < softcap < math.inf:
        expected = "is a number above 0 and finite, or None"
        raise ValueError(f"attention: softcap {expected}; got {softcap}")
    if sinks is not None and sinks.shape != (N,):
        raise ValueError(f"attention: one sink a query head, shape ({N},); got {sinks.shape}")
    if not 0 <= dropout_rate < 1:
        raise ValueError(f"attention: dropout_rate is a probability in [0, 1); got {dropout_rate}")


def _check_heads(N: int, call: Call) -> None:
    """Raises ConfigError for a bias or a mask that was made for another number of heads than N."""
    expected = f"expected {N}, those of the query, or 1"
    of_bias = _bias_heads(call.bias)
    if of_bias not in (None, 1, N):
        raise ConfigError(f"attention: the bias is of {of_bias} heads: {expected}")
    for of_mask in call.mask.head_counts():
        if of_mask not in (1, N):
            raise ConfigError(f"attention: {call.mask} has masks of {of_mask} heads: {expected}")


def _bias_heads(bias: Any) -> int | None:
    """The number of heads of a bias of any kind.

    None: there is no bias, or it has arrays by query.
    """
    if bias is None or getattr(bias, "query_arrays", ()):
        return None
    if isinstance(bias, Bias):
        one_pair = partial(Bias.block, q_start=0, q_length=1, kv_start=0, kv_length=1)
        return jax.eval_shape(one_pair, bias).shape[1]
    if callable(bias):
        position = jax.ShapeDtypeStruct((1,), jnp.int32)
        return jax.eval_shape(bias, position, position).shape[-3]
    return bias.shape[1]


def _attend(implementation: Implementation, return_weights: bool, query, key, value, call: Call):
    _check_heads(query.shape[2], call)
    kernel = _choose(implementation, return_weights, query, key, value, call)
    if return_weights:  # only the reference has them
        key, value = all_gather_length(key, value)
        return reference(query, key, value, call)
    return kernel(query, key, value, call)


def _choose(
    implementation: Implementation,
    return_weights: bool,
    query: Array,
    key: Array,
    value: Array,
    call: Call,
) -> Kernel:
    """The kernel that computes the call.

    Raises NotImplementedError if no kernel of `implementation` can.
    """
    if implementation is None:
        only_reference = return_weights or call.positions is not None
        return REFERENCE if only_reference else _fastest(query, key, value, call)
    if (expected := unknown_implementation(implementation)) is not None:
        raise NotImplementedError(f"attention(implementation={implementation!r}): {expected}")
    lacks = partial(_lacks, return_weights, query, key, value, call)
    if isinstance(implementation, tuple):
        return _first([_find(each) for each in implementation], lacks)
    kernel = _find(implementation)
    if (reason := lacks(kernel)) is not None:
        other = "reference" if reason in (NO_WEIGHTS, NO_POSITIONS) else "blockwise"
        raise NotImplementedError(f"{kernel.name}: {reason}; implementation={other!r} has it")
    return kernel


NO_WEIGHTS = "no weights to return"
NO_POSITIONS = "no positions by row"


def _lacks(return_weights: bool, query, key, value, call: Call, kernel: Kernel) -> str | None:
    """The missing feature of a kernel, such as "no bias". None: it computes the call."""
    if kernel is not REFERENCE and return_weights:
        return NO_WEIGHTS
    if kernel is not REFERENCE and call.positions is not None:
        return NO_POSITIONS
    reason = kernel.lacks(query, key, value, call)
    return None if reason is None else f"no {reason}"


def _first(kernels: list[Kernel], lacks: Callable[[Kernel], str | None]) -> Kernel:
    """The first kernel that is for this platform and lacks nothing."""
    platform = mesh_platform()
    reasons = []
    for kernel in kernels:
        if kernel.is_for(platform):
            reason = lacks(kernel)
        else:
            reason = f"for {' and '.join(kernel.platforms)}, not for {platform}"
        if reason is None:
            return _chosen(kernel, "".join(f"; {each}" for each in reasons))
        reasons.append(f"{kernel.name}: {reason}")
    tried = ", ".join(kernel.name for kernel in kernels)
    told = f"none of ({tried}) computes this call: {'; '.join(reasons)}"
    raise NotImplementedError(f"attention: {told}")


def _fastest(query, key, value, call: Call) -> Kernel:
    """The fastest of our kernels on the platform of the mesh.

    This machine may lack that platform: a CPU can compile for a TPU.
    """
    platform = mesh_platform()
    devices = context_devices()
    if devices > 1 and RING.refuses(query, key, value, call) is None:
        return _chosen(RING, f" of {devices}")
    reasons = ""
    for fused in FUSED:
        if fused.is_for(platform):
            reason = fused.refuses(query, key, value, call)
            if reason is None and devices > 1:
                reason = "such call under mesh.context"
            if reason is None:
                return _chosen(fused, reasons)
            reasons += f"; {fused.name} has no {reason}"
    if reasons:
        return _chosen(BLOCKWISE, reasons)
    if blockwise.is_cheaper(query, key):
        return _chosen(BLOCKWISE, " (long)")
    blocks_fit = devices == 1 and QUERY_BLOCKED.refuses(query, key, value, call) is None
    if blocks_fit and query_blocked.is_cheaper(query, key, call):
        return _chosen(QUERY_BLOCKED, " (short)")
    return _chosen(REFERENCE, " (short)")


def _chosen(kernel: Kernel, why: str = "") -> Kernel:
    """The kernel. Its choice and the reason are logged once."""
    _log_once(mesh_platform(), kernel.name, why)
    return kernel


@cache
def _log_once(platform: str, name: str, why: str) -> None:
    logging.getLogger("jaxformer").info("attention on %s: %s%s", platform, name, why)


def _find(implementation: str | Kernel) -> Kernel:
    """Our kernel of that name; a `Kernel` is returned unchanged."""
    if isinstance(implementation, Kernel):
        return implementation
    if implementation in RENAMED:
        _warn_once(implementation, RENAMED[implementation])
    name = RENAMED.get(implementation, implementation)
    return next(kernel for kernel in KERNELS if kernel.name == name)


@cache
def _warn_once(old: str, new: str) -> None:
    logging.getLogger("jaxformer").warning("attention: the implementation %r is now %r", old, new)


def unknown_implementation(implementation: Any) -> str | None:
    """The error text for a value that is no implementation; None if it is one."""
    items = as_tuple(implementation)
    known = {*names_of(KERNELS), *RENAMED}

    def is_known(each):
        return isinstance(each, Kernel) or (isinstance(each, str) and each in known)

    if implementation != () and all(map(is_known, items)):
        return None
    names = ", ".join(names_of(KERNELS))
    return f"expected None, one of {names}, a Kernel, or a tuple of these in order of preference"


def has_own_kernel(implementation: Implementation) -> bool:
    """Whether an implementation holds a kernel that is not ours, which may change numbers."""
    kernels = [each for each in as_tuple(implementation) if isinstance(each, Kernel)]
    return any(kernel not in KERNELS for kernel in kernels)
