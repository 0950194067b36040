"""Attention on NVIDIA GPUs by cuDNN, through `jax.nn.dot_product_attention`.

It refuses masks that cuDNN does not support.
"""

import importlib.util
import itertools
import math
import os
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxformer.errors import install_command
from jaxformer.masks import Mask, rules
from jaxformer.ops.attention.blocks import padded
from jaxformer.ops.attention.call import Call, device_count, refuse, share
from jaxformer.ops.attention.kernel import Kernel
from jaxformer.ops.attention.splash import band
from jaxformer.sharding import platform


def attention(query: Array, key: Array, value: Array, call: Call) -> Array:
    """softmax(mask(query key^T * scale + bias)) value by cuDNN's fused kernel, in 16 bits.

    Masks: `full`, and with as many queries as keys `causal` and `window(l)`; each also `&
    lengths(q, kv)`. Raises NotImplementedError for what `refuses` and `refuses_on_mesh` name.
    """
    refuse("cudnn", refuses(query, key, value, call))
    refuse("cudnn", refuses_on_mesh(query, key))
    (B, T), (S, K) = query.shape[:2], key.shape[1:3]
    planned = plan(call.mask, T, S)
    assert not isinstance(planned, str)  # `refuses` would have named it
    split = share(B, T, K)
    bias = call.bias
    names = [name for name in planned if name.endswith("seq_lengths")]
    lengths = {name: jnp.broadcast_to(planned[name], B) for name in names}
    shape = (1, 1) if bias is None else bias.shape[:2]
    axes = zip(shape, (split.batch, split.heads), strict=True)
    bias_spec = P(*(entry if size > 1 else None for size, entry in axes))

    scale = distinct_scale(call.scale) if is_deterministic() else call.scale

    def run_on_device(query, key, value, bias, lengths):
        planned_here = planned | lengths
        return run(query, key, value, bias, scale, planned=planned_here, implementation="cudnn")

    in_specs = *[split.spec] * 3, bias_spec, P(split.batch)
    return split.run(run_on_device, in_specs, split.spec, query, key, value, bias, lengths)


def refuses(query: Array, key: Array, value: Array, call: Call) -> str | None:
    """The part of a call that cuDNN cannot compute on one device, in a few words; None: it can.

    It looks at shapes and types only.
    """
    T, H = query.shape[1], query.shape[3]
    if call.dropout_seed is not None:
        return "dropout of ours"  # cuDNN draws its own bits
    for name in ("softcap", "sinks"):
        if getattr(call, name) is not None:
            return name
    if not query.dtype == key.dtype == value.dtype:
        return f"query, key, value of different types: {query.dtype}, {key.dtype}, {value.dtype}"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return str(query.dtype)
    if value.shape[3] != H:
        return f"values {value.shape[3]} wide beside keys {H} wide"
    if H % 8 or _widest() < H:
        return f"head width {H} (a multiple of 8, at most {_widest()} on this GPU)"
    planned = plan(call.mask, T, key.shape[1])
    if isinstance(planned, str):
        return planned
    if call.bias is None:
        return None
    if not hasattr(call.bias, "dtype"):
        return "bias that is a function"
    if call.bias.dtype != query.dtype:
        return f"{call.bias.dtype} bias beside {query.dtype} queries"
    return "bias with a window" if "local_window_size" in planned else None


def refuses_on_mesh(query: Array, key: Array) -> str | None:
    """The part of a call that cuDNN cannot compute on the mesh of `jax.set_mesh`; None: it can."""
    B, T = query.shape[:2]
    devices = device_count(share(B, T, key.shape[2]).length)
    return None if devices == 1 else f"queries split over mesh.context={devices}"


def not_installed() -> str | None:
    """What this machine lacks to compile for a GPU that is not in this process; None: nothing."""
    if platform() == jax.default_backend():
        return None
    if importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cudnn"):
        return None
    return f"cuDNN on this machine to compile for a GPU with: {install_command('cuda')}"


def _refuses_here(query: Array, key: Array, value: Array, call: Call) -> str | None:
    return refuses(query, key, value, call) or refuses_on_mesh(query, key) or not_installed()


CUDNN = Kernel("cudnn", attention, _refuses_here, platforms=("gpu",))


def plan(mask: Mask, T: int, S: int) -> dict[str, Any] | str:
    """The keywords of `jax.nn.dot_product_attention` for a mask, or the part that they lack."""
    if not isinstance(mask.offset, int | None):
        return "mask at an offset that is an array"
    if T == 0 or S == 0:
        return "empty queries or keys"
    offset = mask.first(T, S)
    conjuncts = mask.conjuncts()
    ends = band(*(conjunct for conjunct in conjuncts if conjunct.rule is not rules.lengths))
    if ends is None:
        return f"mask {mask}"
    left, right = ends
    if right is not None and offset + right >= S - 1:
        right = None  # the first query sees the last key
    if left is not None and T - 1 + offset - left <= 0:
        left = None  # the last query sees the first key
    planned: dict[str, Any] = {}
    if left is not None or right is not None:
        if right != 0:
            return f"mask {mask} that is not causal"
        if T != S or offset != 0:
            start = f"{T} queries from position {offset} on and {S} keys"
            return f"mask {mask} for {start}: cuDNN's start in the top left corner"
        planned["is_causal"] = True
        if left is not None:
            planned["local_window_size"] = left, 0
    limits = [conjunct.arrays for conjunct in conjuncts if conjunct.rule is rules.lengths]
    if not limits:
        return planned
    # [B] or [1]: the number of queries that see a key, and of keys
    q_length, kv_length = jnp.full(1, T), jnp.full(1, S)
    for q, kv in limits:
        q_length = q_length if q is None else jnp.minimum(q_length, q - offset)
        kv_length = kv_length if kv is None else jnp.minimum(kv_length, kv)
    # queries further than the window from the last key see nothing, and without keys no query does
    reach = T if left is None else min(T, left)
    q_length = jnp.where(kv_length > 0, jnp.clip(q_length, 0, kv_length + reach), 0)
    lengths = {"query_seq_lengths": q_length, "key_value_seq_lengths": jnp.maximum(kv_length, 1)}
    return planned | {name: length.astype(jnp.int32) for name, length in lengths.items()}


def run(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    scale: float,
    *,
    planned: dict[str, Any],
    implementation: Literal["cudnn", "xla"],
) -> Array:
    """The planned call by "cudnn", or by "xla" on any platform and in any type: the same result."""
    (B, T), S = query.shape[:2], key.shape[1]
    lengths = [name for name in planned if name.endswith("seq_lengths")]
    planned = planned | {name: jnp.broadcast_to(planned[name], B) for name in lengths}
    visible = planned.get("query_seq_lengths")
    if visible is not None:  # cuDNN does not document a row without queries
        planned["query_seq_lengths"] = jnp.maximum(visible, 1)
    if S % 2 and not planned:  # otherwise causality or a length hides the padded key
        planned = {"key_value_seq_lengths": jnp.full(B, S, jnp.int32)}
    if bias is not None:
        bias = padded(padded(jnp.broadcast_to(bias, (*bias.shape[:2], T, S)), 2, 2), 3, 2)
    # jax 0.10.2 has cuDNN's backward pass for even lengths alone
    query, key, value = (padded(x, 1, 2) for x in (query, key, value))
    options: Any = dict(scale=scale, implementation=implementation, **planned)
    out = jax.nn.dot_product_attention(query, key, value, bias, **options)[:, :T]
    if visible is None:
        return out
    sees_a_key = jnp.arange(T)[None] < visible[:, None]
    return jnp.where(sees_a_key[:, :, None, None], out, 0)


def is_deterministic() -> bool:
    """Whether XLA_FLAGS asks for operations that give the same bits at every call."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    names = "--xla_gpu_exclude_nondeterministic_ops", "--xla_gpu_deterministic_ops"
    return any(flag in (name, f"{name}=true", f"{name}=1") for flag in flags for name in names)


_calls = itertools.count(1)


def distinct_scale(scale: Any) -> Any:
    """A scale that differs between calls in its last bits of 64, and is the same in 32 bits.

    Layers without a scan have equal backward passes in a program. With deterministic operations XLA
    (jaxlib 0.11.2) loses the second of them, and the first step fails: "IndexError:
    absl::container_internal::raw_hash_map<>::at". Different scales make the passes differ. The
    kernel reads the scale in 32 bits.
    """
    if not isinstance(scale, float):
        return scale
    for _ in range(next(_calls) % 1024):
        scale = math.nextafter(scale, math.inf)
    return scale


def _widest() -> int:
    """The largest head width on the GPUs of the mesh, or of this process.

    It is 256 from Hopper (compute capability 9) on, else 128.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.platform != jax.default_backend():  # a GPU that is not here
        hopper_or_later = "H100", "H200", "GH200", "B200", "B300"
        return 256 if any(name in device.device_kind for name in hopper_or_later) else 128
    return 256 if float(getattr(jax.local_devices()[0], "compute_capability", 0)) >= 9 else 128
