"""The options of a call of exact attention, its split over a mesh, and the errors of refusals."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxformer.masks import Mask
from jaxformer.sharding import auto_axis_names, mesh_axes

CONTEXT = "context"  # the mesh axis over which a sequence is split


@struct.dataclass
class Call:
    """The options of one call of `attention`, checked and complete.

    A pytree, whose numbers are static.
    """

    mask: Any  # a Mask that knows the number of keys
    # an array `[B|1, N|1, T|1, S|1]`, a `ops.bias.Bias`, or a function of positions
    bias: Any = None
    sinks: Any = None  # [N]
    dropout_seed: Any = None  # uint32 [2]; None: no dropout
    positions: Any = None  # of queries [B|1, T] and keys [B|1, S], where keys are in a cache
    scale: float = struct.field(pytree_node=False, default=1.0)
    softcap: float | None = struct.field(pytree_node=False, default=None)
    dropout_rate: float = struct.field(pytree_node=False, default=0.0)
    # The index in the whole batch of the first batch row, for a call on a part of a batch. Dropout
    # hashes it.
    first_row: int = struct.field(pytree_node=False, default=0)

    def extras(self) -> tuple[str, ...]:
        """The names of the options that are present besides mask and scale, such as "bias".

        A kernel that supports none of them refuses a call that has any. So it also refuses an
        option that a later version adds.
        """
        present = {
            "bias": self.bias,
            "sinks": self.sinks,
            "dropout": self.dropout_seed,
            "positions by row": self.positions,
            "softcap": self.softcap,
        }
        return tuple(name for name, value in present.items() if value is not None)

    def gradient(self, bias, sinks) -> "Call":
        """The cotangent of a call for `jax.custom_vjp`: gradients of bias and sinks alone."""
        return replace(self, mask=None, bias=bias, sinks=sinks, dropout_seed=None)


def dropout_seed(rate: float, key: Array | None) -> Array | None:
    """The seed of a call's dropout, 64 random bits; None if nothing is dropped."""
    return None if key is None or rate == 0 else jax.random.bits(key, (2,), jnp.uint32)


def check_shapes(name: str, query: Array, key: Array, value: Array) -> None:
    """Raises ValueError, which names the function, unless query, key and value fit.

    They are `[B, T, N, H]`, `[B, S, K, H]` and `[B, S, K, Hv]`, where K divides N.
    """
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if not (query.ndim == key.ndim == value.ndim == 4):
        raise ValueError(f"{name} takes [B, T, N, H], [B, S, K, H], [B, S, K, Hv]; got {shapes}")
    same_width = query.shape[-1] == key.shape[-1]
    if key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0] or not same_width:
        rule = "B, S, K of key and value, B and H of query and key must agree"
        raise ValueError(f"{name}: {rule}; got {shapes}")
    N, K = query.shape[2], key.shape[2]
    if N % K:
        raise ValueError(f"{name}: {K} key/value heads do not divide {N} query heads")


def refuse(kernel: str, lacks: str | None, other: str = "blockwise") -> None:
    """Raises NotImplementedError if the kernel `lacks` a feature that the call needs."""
    if lacks is not None:
        raise NotImplementedError(f"{kernel}: no {lacks}; implementation={other!r} has it")


def mask_refusal(
    function: str,
    refused: Mask | None,
    unsupported: Any,
    takes: str,
) -> NotImplementedError:
    """The error of an approximation that does not support a mask, for `unsupported` in it."""
    advice = f"it takes {takes}; attention(implementation='blockwise') takes any mask"
    return NotImplementedError(f"{function}(mask={refused}): no {unsupported}; {advice}")


class Share(NamedTuple):
    """How a mesh splits a call `[B, T, N, H]`: entries of a PartitionSpec (None: not split)."""

    batch: Any = None
    length: Any = None
    heads: Any = None
    # the mesh axes that `jax.shard_map` makes manual; empty: one device
    manual: frozenset[str] = frozenset()

    def run(self, function, in_specs, out_specs, *arrays):
        """function(*arrays), computed by each device on its share of them."""
        if not self.manual:
            return function(*arrays)
        options = dict(axis_names=set(self.manual), check_vma=False)
        call = jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, **options)
        return jax.jit(call)(*arrays)

    # of an array `[B, T, N, H]`
    spec = property(lambda self: P(self.batch, self.length, self.heads))


def share(B: int, T: int, heads: int) -> Share:
    """How the mesh of `jax.set_mesh` splits a call.

    An axis whose size the mesh axes do not divide is not split: every device has all of it.
    """
    manual = frozenset(auto_axis_names())
    if jax.sharding.get_abstract_mesh().size == 1 or not manual:
        return Share()

    def entry(name, size):
        return mesh_axes(name, size) or None

    return Share(entry("batch", B), entry("length", T), entry("heads", heads), manual)


def device_count(entry) -> int:
    """The number of devices over which an entry of a PartitionSpec splits an axis."""
    return math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in entry or ())


def context_devices() -> int:
    """Devices along `context` in the mesh of `jax.set_mesh`; 1 without it or where it is manual."""
    if CONTEXT not in auto_axis_names():
        return 1
    return jax.sharding.get_abstract_mesh().shape[CONTEXT]
