"""Exact scaled dot-product attention by the platform's kernel. `linear`, `lsh` and `sparse` are other, cheaper functions."""

import importlib.util
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
from jaxformer.ops.attention import blockwise, cudnn, ring, rows, splash
from jaxformer.ops.attention.call import Call, check_shapes, dropout_seed
from jaxformer.ops.attention.reference import reference, rounded_softmax, softmax
from jaxformer.ops.bias import Bias, bias_between
from jaxformer.ops.einsum import in_float32, reverse_mode_alone
from jaxformer.sharding import auto_axes, platform as mesh_platform, with_logical_constraint


@jax.named_scope("attention")
def attention(
    query: Float[Array, "B T N H"], key: Float[Array, "B S K H"], value: Float[Array, "B S K Hv"], *, mask: Mask | None = None,
    bias: Float[Array, "#B #N #T #S"] | Bias | Callable | None = None, scale: float | Float[Array, ""] | None = None,
    softcap: float | None = None, sinks: Float[Array, " N"] | None = None, dropout_rate: float = 0.0,
    dropout_key: Array | None = None, return_weights: bool = False, implementation: str | None = None,
    positions: tuple[Int[Array, "#B T"], Int[Array, "#B S"]] | None = None,
) -> Float[Array, "B T N Hv"] | tuple[Float[Array, "B T N Hv"], Float[Array, "B N T S"]]:  # fmt: skip
    """softmax(mask(softcap(query key^T * scale + bias))) value. Vaswani et al. 2017, arXiv:1706.03762, eq. 1.

    Query head n reads key head n // (N / K) (Ainslie et al. 2023). The last query is aligned with the last key unless the
    mask has an offset, `.at(offset)`. `bias` is an array, a value of `ops.positions` (`alibi`, `t5`, `shaw`), or a function
    of absolute positions, `(q_positions [T], kv_positions [S]) -> [N, T, S]`. `scale` is 1/sqrt(H) by default;
    it may be learned. `softcap` c maps a score s to c tanh(s / c) (Gemma 2), and leaves -inf, by which a bias hides a key.
    `sinks` adds one logit a head to the denominator alone. `return_weights` adds the weights before dropout. The softmax is
    float32 or wider. A query that sees no key yields zeros and no gradient.
    `positions` are those of queries and keys by row, where -1 is an empty slot of a cache; only the reference takes them.
    Second derivatives in reverse mode (jax.grad of jax.grad) are those of the reference, with its memory; "ring" has none.
    Forward mode (jax.jvp) needs float64 and the reference.

    `implementation`: "reference" (an array [B, N, T, S]), "rows" (of this array the part between the first and the last key
    that each block of queries sees), "blockwise" (no such array), "splash" (TPU), "cudnn" (GPU), "ring" (a sequence split over
    the mesh axis `context`; "blockwise" is the same there, the first two and "splash" gather keys and values). None takes the
    fastest on the platform, and logs which. All give the same values and drop the same weights, or
    raise NotImplementedError that names what they lack.
    """
    softcap = None if softcap is None else _number("softcap", softcap)
    dropout_rate = _number("dropout_rate", dropout_rate)
    _check(query, key, value, bias, softcap, sinks, dropout_rate)
    mask = as_mask(mask, "attention")
    if positions is None:
        _check_segments(mask, mask.first(query.shape[1], key.shape[1]), query.shape[1], key.shape[1])
    if isinstance(scale, Array):  # kernels take a number
        query, scale = (in_float32(query) * scale).astype(query.dtype), 1.0
    for asked, what in ((return_weights, "weights to return"), (positions is not None, "positions by row")):
        if asked and implementation not in (None, "reference"):
            raise NotImplementedError(f"{implementation}: has no {what}; implementation='reference' has")
    if positions is not None and (callable(bias) or isinstance(bias, Bias)):
        bias = bias_between(bias, *positions)
    call = Call(
        mask=mask.sized(key.shape[1]), positions=positions,
        bias=jax.tree_util.Partial(bias) if callable(bias) else bias,
        scale=query.shape[-1] ** -0.5 if scale is None else scale, softcap=softcap, sinks=sinks,
        dropout_rate=dropout_rate, dropout_seed=dropout_seed(dropout_rate, dropout_key),
    )  # fmt: skip

    def specs(*_):
        rows, length, heads, _ = jax.typeof(query).sharding.spec
        return (P(rows, length, heads), P(rows, heads, length)) if return_weights else P(rows, length, heads)

    with reverse_mode_alone("attention"):
        return auto_axes(specs)(partial(_attend, implementation, return_weights))(query, key, value, call)


def _check_segments(mask: Mask, first: Any, T: int, S: int) -> None:
    """Raises ValueError for ids that end before the sequence does: nobody would see the rest, in silence."""
    for part in mask.parts:
        _check_segments(part, first, T, S)
    if mask.rule is rules.segments:
        of_queries, of_keys = mask.arrays[0].shape[1], mask.arrays[-1].shape[1]
        if of_keys < S or (isinstance(first, int) and of_queries < first + T):
            raise ValueError(f"attention: {mask} has ids for {of_queries} queries and {of_keys} keys of {T} and {S}")


def _number(name: str, value: Any) -> float:
    """The value as a number of the program. Raises ValueError for one that is traced."""
    if isinstance(value, jax.core.Tracer):
        raise ValueError(f"attention: {name} is a number, which is known when the program is traced; got {value}")
    return float(value)


def _check(query, key, value, bias, softcap, sinks, dropout_rate):
    check_shapes("attention", query, key, value)
    B, T, N, S = *query.shape[:3], key.shape[1]
    shape = getattr(bias, "shape", (1,) * 4)
    if len(shape) != 4 or any(a not in (1, b) for a, b in zip(shape, (B, N, T, S), strict=True)):
        raise ValueError(f"attention: bias must broadcast as [B, N, T, S] = {(B, N, T, S)}; got {shape}")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"attention: softcap is a number above 0 and finite, or None; got {softcap}")
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
    """The number of heads of a bias of any kind. None: there is no bias, or it has rows."""
    if bias is None or getattr(bias, "rows", ()):
        return None
    if isinstance(bias, Bias):
        one_pair = partial(Bias.block, q_start=0, q_length=1, kv_start=0, kv_length=1)
        return jax.eval_shape(one_pair, bias).shape[1]
    if callable(bias):
        place = jax.ShapeDtypeStruct((1,), jnp.int32)
        return jax.eval_shape(bias, place, place).shape[-3]
    return bias.shape[1]


def _attend(implementation: str | None, return_weights: bool, query, key, value, call: Call):
    _check_heads(query.shape[2], call)
    only_reference = return_weights or call.positions is not None
    match "reference" if only_reference else implementation or _choose(query, key, value, call):
        case "reference" | "rows" as name:
            if ring.devices() > 1:
                key, value = (with_logical_constraint(x, "batch", None, "kv_heads", None) for x in (key, value))
            # the weights of a 16-bit model may have 16 bits too, unless they are returned
            wide = return_weights or value.dtype.itemsize >= 4
            weigh = softmax if wide else partial(rounded_softmax, value.dtype)
            if name == "rows":
                return rows.attention(query, key, value, call, weigh)
            out, weights = reference(query, key, value, call, weigh)
            return (out, weights) if return_weights else out
        case "blockwise" if ring.refuses(query, key, value, call):
            return blockwise.attention(query, key, value, call)
        case "blockwise" | "ring":
            return ring.attention(query, key, value, call)
        case "splash":
            return splash.attention(query, key, value, call)
        case "cudnn":
            return cudnn.attention(query, key, value, call)
    known = "reference, rows, blockwise, splash, cudnn, ring"
    raise NotImplementedError(f"attention(implementation={implementation!r}): there are {known}")


def _choose(query, key, value, call: Call) -> str:
    """The fastest implementation on the platform of the mesh, which may be absent from this machine, or of this process."""
    platform, count = mesh_platform(), ring.devices()
    if count > 1 and ring.refuses(query, key, value, call) is None:
        return _log_once(platform, "ring", f" of {count}")
    kernels: dict[str, Any] = {"tpu": ("splash", splash), "gpu": ("cudnn", cudnn), "cuda": ("cudnn", cudnn)}
    if platform not in kernels:
        # the longest for which blockwise, which keeps no weights, is slower (bench/attention.py)
        longest = 512 if query.dtype.itemsize >= 4 else 1024
        if query.shape[1] * key.shape[1] > longest**2:
            return _log_once(platform, "blockwise", " (long)")
        by_rows = count == 1 and rows.refuses(call) is None and rows.is_cheaper(query, key, call)
        return _log_once(platform, "rows" if by_rows else "reference", " (short)")
    name, kernel = kernels[platform]
    reason = kernel.refuses(query, key, value, call)
    if reason is None and count > 1:
        reason = "such call under mesh.context"

    def installed():
        return importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cudnn")

    if reason is None and name == "cudnn" and platform != jax.default_backend() and not installed():
        reason = "cuDNN on this machine to compile for a GPU with: pip install 'jax[cuda13]'"
    return _log_once(platform, *((name, "") if reason is None else ("blockwise", f"; {name} has no {reason}")))


@cache
def _log_once(platform: str, name: str, why: str) -> str:
    logging.getLogger("jaxformer").info("attention on %s: %s%s", platform, name, why)
    return name
