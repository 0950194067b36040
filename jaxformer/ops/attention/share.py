"""A kernel that the compiler cannot split, run by each device of a mesh on its share of the batch, the heads, the queries."""

import logging
import math
from functools import cache
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxformer.sharding import ACTIVATIONS, mesh_axes


class Share(NamedTuple):
    """Over which axes of the mesh a call `[B, T, N, H]` is split, as entries of a PartitionSpec; None: whole."""

    batch: Any = None
    length: Any = None
    heads: Any = None
    free: frozenset[str] = frozenset()  # the axes that `jax.shard_map` takes in hand; none: one device

    def run(self, f, in_specs, out_specs, *arrays):
        """f(*arrays), by each device on its own part of them."""
        if not self.free:
            return f(*arrays)
        call = jax.shard_map(f, in_specs=in_specs, out_specs=out_specs, axis_names=set(self.free), check_vma=False)
        return jax.jit(call)(*arrays)

    @property
    def places(self) -> P:
        """Of `[B, T, N, H]`."""
        return P(self.batch, self.length, self.heads)


def share(B: int, T: int, heads: int) -> Share:
    """How the mesh of `jax.set_mesh` splits a call. An axis that does not divide is done by each of its devices, and said."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    free = frozenset(axis for axis, kind in kinds.items() if kind != AxisType.Manual)
    if mesh.empty or mesh.size == 1 or not free:
        return Share()

    def entry(name: str, size: int):
        split = mesh_axes(name, size)
        for axis in ACTIVATIONS[name]:
            if axis in free and mesh.shape[axis] > 1 and axis not in split:
                _whole(name, size, f"mesh.{axis}={mesh.shape[axis]}")
        return split or None

    return Share(entry("batch", B), entry("length", T), entry("heads", heads), free)


@cache
def _whole(name: str, size: int, axis: str) -> None:
    logging.getLogger("jaxformer").warning(
        "attention: %s=%d does not divide among %s; every device computes all of it", name, size, axis
    )


def size(entry) -> int:
    """Parts that an entry of a PartitionSpec makes."""
    return math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in entry or ())
