"""Attention on NVIDIA GPUs by tokamax, for masks that cuDNN lacks: packed rows, prefixes, layouts.

It needs the extra `kernels`, see `ops.tokamax`. Its kernels skip blocks that causality or a window
hides. They read any other mask from an array of one byte a pair, but make no array of scores.
"""

from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxformer.masks import Mask
from jaxformer.ops.attention.call import Call, device_count, refuse, share
from jaxformer.ops.attention.kernel import Kernel
from jaxformer.ops.attention.splash import band
from jaxformer.ops.tokamax import declines, lacks_package
from jaxformer.sharding import platform

# Their kernels, in the order of preference. "mosaic" is written for Hopper and Blackwell, "triton"
# runs on older GPUs too. On a CPU their definition of the result is all that runs: tests use it.
IMPLEMENTATIONS = {"gpu": ("mosaic", "triton"), "cpu": ("xla",)}
MOST_BYTES = 2**31  # of a mask that is an array


class Plan(NamedTuple):
    """A mask as tokamax takes it."""

    options: dict[str, Any]  # of `tokamax.dot_product_attention`: causality, a window
    rest: Mask | None  # what these do not say; it becomes an array


def plan(mask: Mask, T: int, S: int) -> Plan:
    """A mask cut in two: what tokamax knows by its name, and the rest."""
    conjuncts = mask.conjuncts()
    named = [conjunct for conjunct in conjuncts if band(conjunct) is not None]
    others = [conjunct for conjunct in conjuncts if band(conjunct) is None]
    left, right = band(*named) or (None, None)
    starts_in_the_corner = T == S and isinstance(mask.offset, int | None) and mask.first(T, S) == 0
    if left is None and right is None:
        options: dict[str, Any] = {}
    elif starts_in_the_corner and right == 0:
        options = {"is_causal": True} if left is None else {"local_window_size": (left, 0)}
    else:
        options = {}
        others += named
    return Plan(options, reduce(Mask.__and__, others) if others else None)


def attention(query: Array, key: Array, value: Array, call: Call) -> Array:
    """softmax(mask(softcap(query key^T * scale + bias))) value by a kernel of tokamax.

    Raises NotImplementedError for what `refuses` names.
    """
    refuse("tokamax", refuses(query, key, value, call))
    return _attend(query, key, value, call)


def _attend(query: Array, key: Array, value: Array, call: Call) -> Array:
    (B, T), (S, K) = query.shape[:2], key.shape[1:3]
    planned = plan(call.mask, T, S)
    visible = None if planned.rest is None else planned.rest.dense(T, S)
    bias = call.bias
    if bias is not None:  # where it is -inf, it is a mask
        is_finite = jnp.broadcast_to(bias > -jnp.inf, (*bias.shape[:2], T, S))
        visible = is_finite if visible is None else visible & is_finite
        bias = jnp.where(bias > -jnp.inf, bias, 0)
    split = share(B, T, K)

    def spec(array):
        shape = (1, 1) if array is None else array.shape[:2]
        entries = zip(shape, (split.batch, split.heads), strict=True)
        return P(*(entry if size > 1 else None for size, entry in entries))

    def run_on_device(query, key, value, bias, visible):
        return run(query, key, value, bias, visible, planned.options, call.scale, call.softcap)

    in_specs = *[split.spec] * 3, spec(bias), spec(visible)
    return split.run(run_on_device, in_specs, split.spec, query, key, value, bias, visible)


def run(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    visible: Array | None,
    options: dict[str, Any],
    scale: float,
    softcap: float | None,
) -> Array:
    """The planned call on one device. A query that sees no key yields zeros and no gradient."""
    from tokamax import dot_product_attention  # pyrefly: ignore[missing-import]

    sees_a_key = None
    if visible is not None:
        reached = visible & _named(options, *visible.shape[2:])
        sees_a_key = jnp.any(reached, axis=-1)
        # such a query looks at all keys, so that its softmax is finite; its result is replaced
        visible = visible | ~sees_a_key[..., None]
    with jax.numpy_rank_promotion("allow"):  # theirs adds axes, whatever the user allows
        out = dot_product_attention(
            query,
            key,
            value,
            bias,
            visible,
            scale=scale,
            logits_soft_cap=softcap,
            implementation=IMPLEMENTATIONS[platform()],
            **options,
        )
    if sees_a_key is None:
        return out
    return jnp.where(sees_a_key.swapaxes(1, 2)[..., None], out, 0)


def _named(options: dict[str, Any], T: int, S: int) -> Array:
    """The pairs `[1, 1, T, S]` that the named part of a mask shows."""
    distance = (jnp.arange(T)[:, None] - jnp.arange(S)[None])[None, None]
    if not options:
        return jnp.ones((1, 1, T, S), bool)
    left, _ = options.get("local_window_size", (T, 0))
    return (distance >= 0) & (distance <= left)


def refuses(query: Array, key: Array, value: Array, call: Call) -> str | None:
    """The part of a call that tokamax cannot compute, in a few words; None: it can."""
    T, S = query.shape[1], key.shape[1]
    if call.dropout_seed is not None:
        return "dropout of ours"
    if call.sinks is not None:
        return "sinks"
    if call.bias is not None and not hasattr(call.bias, "dtype"):
        return "bias that is a function"
    if not query.dtype == key.dtype == value.dtype:
        return f"query, key, value of different types: {query.dtype}, {key.dtype}, {value.dtype}"
    if query.dtype.itemsize > 4:
        return str(query.dtype)
    if T == 0 or S == 0:
        return "empty queries or keys"
    if mask_bytes(call, T, S) > MOST_BYTES:
        return f"mask {call.mask} of {T} x {S} pairs, which would be an array"
    return refuses_here(query, key) or declines(partial(_attend, call=call), query, key, value)


def mask_bytes(call: Call, T: int, S: int) -> int:
    """The bytes of the array that a mask and a bias become; 0 for what tokamax has by name."""
    rest = plan(call.mask, T, S).rest
    shapes = [] if rest is None else [jax.eval_shape(lambda: rest.dense(T, S)).shape[:2]]
    if call.bias is not None:
        shapes.append(call.bias.shape[:2])
    if not shapes:
        return 0
    batch, heads = (max(sizes) for sizes in zip(*shapes, strict=True))
    return batch * heads * T * S


def refuses_here(query: Array, key: Array) -> str | None:
    """What the machine or the mesh lacks; None: nothing."""
    B, T = query.shape[:2]
    if device_count(share(B, T, key.shape[2]).length) > 1:
        return "queries split over mesh.context"
    return lacks_package()


TOKAMAX = Kernel("tokamax", attention, refuses, platforms=("gpu",))
