"""The options of a call of exact attention, its share of the arrays on a mesh, and the refusals of all kinds of attention."""

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


@struct.dataclass
class Call:
    """The options of one call of `attention`, checked and complete. A pytree, whose numbers are static."""

    mask: Any  # a Mask that knows the number of keys
    bias: Any = None  # an array `[B|1, N|1, T|1, S|1]`, a `ops.bias.Bias`, or a function of positions
    sinks: Any = None  # [N]
    dropout_seed: Any = None  # uint32 [2]; None: no dropout
    positions: Any = None  # of queries [B|1, T] and keys [B|1, S], where keys are in a cache
    scale: float = struct.field(pytree_node=False, default=1.0)
    softcap: float | None = struct.field(pytree_node=False, default=None)
    dropout_rate: float = struct.field(pytree_node=False, default=0.0)
    first_row: int = struct.field(pytree_node=False, default=0)  # of a part of a batch: its place, which dropout hashes

    def gradient(self, bias, sinks) -> "Call":
        """The cotangent that `jax.custom_vjp` wants."""
        return replace(self, mask=None, bias=bias, sinks=sinks, dropout_seed=None)


def dropout_seed(rate: float, key: Array | None) -> Array | None:
    """The seed of a call's dropout, 64 random bits, or None where nothing is dropped."""
    return None if key is None or rate == 0 else jax.random.bits(key, (2,), jnp.uint32)


def check_shapes(name: str, query: Array, key: Array, value: Array) -> None:
    """Raises ValueError, which names the function, unless query `[B, T, N, H]`, key and value `[B, S, K, H]` fit."""
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if not (query.ndim == key.ndim == value.ndim == 4):
        raise ValueError(f"{name} takes [B, T, N, H], [B, S, K, H], [B, S, K, Hv]; got {shapes}")
    if key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0] or query.shape[-1] != key.shape[-1]:
        raise ValueError(f"{name}: B, S, K of key and value, B and H of query and key must agree; got {shapes}")
    if query.shape[2] % key.shape[2]:
        raise ValueError(f"{name}: {key.shape[2]} key/value heads do not divide {query.shape[2]} query heads")


def refuse(kernel: str, lacks: str | None, other: str = "blockwise") -> None:
    """Raises NotImplementedError where `lacks` says, in a few words, what of a call the kernel cannot compute."""
    if lacks is not None:
        raise NotImplementedError(f"{kernel}: no {lacks}; implementation={other!r} has it")


def mask_refusal(function: str, whole: Mask | None, part: Any, takes: str) -> NotImplementedError:
    """The error for a mask of which a function, another one than exact attention, cannot keep a part."""
    alternative = "attention(implementation='blockwise') takes any mask"
    return NotImplementedError(f"{function}(mask={whole}): no {part}; it takes {takes}; {alternative}")


class Share(NamedTuple):
    """How the mesh splits a kernel's call `[B, T, N, H]`, as entries of a PartitionSpec (None: not split)."""

    batch: Any = None
    length: Any = None
    heads: Any = None
    manual: frozenset[str] = frozenset()  # the mesh axes that `jax.shard_map` makes manual; empty: one device

    def run(self, f, in_specs, out_specs, *arrays):
        """f(*arrays), computed by each device on its share of them."""
        if not self.manual:
            return f(*arrays)
        call = jax.shard_map(f, in_specs=in_specs, out_specs=out_specs, axis_names=set(self.manual), check_vma=False)
        return jax.jit(call)(*arrays)

    spec = property(lambda self: P(self.batch, self.length, self.heads))  # of an array `[B, T, N, H]`


def share(B: int, T: int, heads: int) -> Share:
    """How the mesh of `jax.set_mesh` splits a call. A size that does not divide is not split: every device has all of it."""
    manual = frozenset(auto_axis_names())
    if jax.sharding.get_abstract_mesh().size == 1 or not manual:
        return Share()

    def entry(name, size):
        return mesh_axes(name, size) or None

    return Share(entry("batch", B), entry("length", T), entry("heads", heads), manual)


def parts(entry) -> int:
    """The number of parts that an entry of a PartitionSpec makes."""
    return math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in entry or ())
