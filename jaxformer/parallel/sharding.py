"""Logical axes to mesh axes: one table for parameters, one for activations."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxformer.config import ConfigError
from jaxformer.params import Spec, paths

Tree = Any
Rules = dict[str, tuple[str, ...]]

PARAMETERS: Rules = {
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "expert": ("expert",),
    "layers": ("stage",),
}
ACTIVATIONS: Rules = {
    "batch": ("data", "fsdp", "expert"),
    "length": ("context",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "expert": ("expert",),
}


def partition(spec: Tree, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, rules: Rules = PARAMETERS) -> Tree:
    """A PartitionSpec for each `Spec` of a tree.

    Raises ConfigError for a dimension that does not divide among its devices, with the nearest sizes that do, and for a
    leaf two of whose axes would be split over the same devices.
    """
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _leaf(name(path), leaf, mesh, rules), spec)


def _entry(over: tuple[str, ...]) -> str | tuple[str, ...] | None:
    """Mesh axes as a PartitionSpec has them."""
    return over[0] if len(over) == 1 else over or None


def _leaf(path: str, leaf: Spec, mesh, rules: Rules) -> P:
    entries, used = [], {}
    for size, axis in zip(leaf.shape, leaf.axes, strict=True):
        over = tuple(name for name in rules.get(axis or "", ()) if mesh.shape[name] > 1)
        for name in over:
            if name in used:
                raise ConfigError(
                    f"{path}: its axes {used[name]} and {axis} would both be split over mesh.{name}; give one of them "
                    "another rule"
                )
            used[name] = axis
        parts = math.prod(mesh.shape[name] for name in over)
        if size % parts:
            below, above = size // parts * parts, -(-size // parts) * parts
            near = f"{below} or {above}" if below else str(above)
            raise ConfigError(
                f"{path}: {axis}={size} does not divide among {' x '.join(f'mesh.{n}={mesh.shape[n]}' for n in over)}; "
                f"sizes that do: {near}; or a mesh axis that divides {size}"
            )
        entries.append(_entry(over))
    return P(*entries)


def shardings(spec: Tree, mesh: jax.sharding.Mesh, rules: Rules = PARAMETERS) -> Tree:
    """`partition` as NamedShardings."""
    return jax.tree.map(
        lambda one: NamedSharding(mesh, one), partition(spec, mesh, rules), is_leaf=lambda x: isinstance(x, P)
    )


def rows(mesh: jax.sharding.Mesh, batch: dict[str, Any]) -> dict[str, NamedSharding]:
    """Where a batch `[B, T]` lies: examples over data, fsdp and expert, positions over context; whole where it is uneven."""

    def place(leaf):
        axes = [ACTIVATIONS[name] for name in ("batch", "length")[: leaf.ndim]]
        pairs = list(zip(leaf.shape, axes, strict=False))  # what comes after B and T is whole
        fit = [size % math.prod(mesh.shape[axis] for axis in over) == 0 for size, over in pairs]
        return NamedSharding(mesh, P(*(_entry(over) if even else None for over, even in zip(axes, fit, strict=True))))

    return {key: place(leaf) for key, leaf in batch.items()}


def parts(name: str) -> int:
    """Among how many devices the mesh of `jax.set_mesh` splits an activation's axis of that name; 1 without one."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.prod(mesh.shape[axis] for axis in ACTIVATIONS.get(name, ()))


def constrain(x: Array, *names: str | None) -> Array:
    """x, laid out by the rules of activations on the mesh of `jax.set_mesh`; unchanged without one.

    `names` are the logical axes of x. Under Explicit axes a reshard, under Auto ones a constraint for the compiler; mesh
    axes that `jax.shard_map` has made manual are left alone.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or math.prod(mesh.shape.values()) == 1:
        return x
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    entries = []
    for size, name in zip(x.shape, names, strict=True):
        over = tuple(
            axis for axis in ACTIVATIONS.get(name or "", ()) if kinds[axis] != AxisType.Manual and mesh.shape[axis] > 1
        )
        if size % math.prod(mesh.shape[axis] for axis in over):
            over = ()  # a batch of one, a length that is not split
        entries.append(_entry(over))
    if _explicit(mesh):
        return jax.sharding.reshard(x, P(*entries))
    return jax.lax.with_sharding_constraint(x, P(*entries))


def gather(params: Tree, spec: Callable[[], Tree]) -> Tree:
    """Parameters of a layer as its products want them: whole over `fsdp`, split over `tensor` and `expert` as they were.

    One all-gather a weight and pass under FSDP, and by its transpose one reduce-scatter of the gradient. `spec()` declares
    the same tree. Identity without a mesh (`jax.set_mesh`).
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.shape["fsdp"] == 1:
        return params
    rules = {name: axes for name, axes in PARAMETERS.items() if name not in ("embed", "layers")}
    whole = partition(spec(), mesh, rules)
    place = jax.sharding.reshard if _explicit(mesh) else jax.lax.with_sharding_constraint
    return jax.tree.map(lambda leaf, one: place(leaf, one), params, whole)


def _explicit(mesh) -> bool:
    return AxisType.Explicit in mesh.axis_types


def describe(spec: Tree, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, itemsize: int = 4) -> str:
    """Every parameter with its shape, how it is split, and its bytes on a device; the sum at the end."""
    leaves, specs = paths(spec), paths(partition(spec, mesh))
    rows, total = [("parameter", "shape", "split", "bytes a device")], 0
    for path, leaf in leaves.items():
        parts = math.prod(mesh.shape[name] for entry in specs[path] for name in _names(entry))
        size = math.prod(leaf.shape) * itemsize // parts
        total += size
        split = " ".join("*".join(_names(entry)) or "-" for entry in specs[path])
        rows.append((path, "x".join(map(str, leaf.shape)), split, f"{size:,}"))
    rows.append(("total", "", "", f"{total:,}"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=False))
        + "  "
        + row[3].rjust(widths[3])
        for row in rows
    )


def _names(entry) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
