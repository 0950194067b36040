"""Runs a kernel that the compiler cannot split: each device of a mesh computes its share of batch, heads and queries."""

import logging
import math
from functools import cache
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, PartitionSpec as P

from jaxformer.sharding import ACTIVATIONS, mesh_axes

log = logging.getLogger("jaxformer")


class Share(NamedTuple):
    """How the mesh splits a call `[B, T, N, H]`: mesh axes as entries of a PartitionSpec; None: not split."""

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

    @property
    def spec(self) -> P:
        """Of an array `[B, T, N, H]`."""
        return P(self.batch, self.length, self.heads)


def share(B: int, T: int, heads: int) -> Share:
    """How the mesh of `jax.set_mesh` splits a call. A size that does not divide is not split, and a warning says so."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    manual = frozenset(axis for axis, kind in kinds.items() if kind != AxisType.Manual)
    if mesh.empty or mesh.size == 1 or not manual:
        return Share()

    def entry(name: str, size: int):
        split = mesh_axes(name, size)
        for axis in ACTIVATIONS[name]:
            if axis in manual and mesh.shape[axis] > 1 and axis not in split:
                _warn_once(name, size, f"mesh.{axis}={mesh.shape[axis]}")
        return split or None

    return Share(entry("batch", B), entry("length", T), entry("heads", heads), manual)


@cache
def _warn_once(name: str, size: int, axis: str) -> None:
    log.warning("attention: %s=%d does not divide among %s; every device computes all of it", name, size, axis)


def parts(entry) -> int:
    """The number of parts that an entry of a PartitionSpec makes."""
    return math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in entry or ())
