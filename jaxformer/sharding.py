"""Logical axes to mesh axes: one table for parameters, one for activations."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxformer.errors import ConfigError
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
    "batch": ("data", "fsdp", "expert", "stage"),
    "length": ("context",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "expert": ("expert",),
}


def partition_specs(spec: Tree, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, rules: Rules = PARAMETERS) -> Tree:
    """A PartitionSpec for each `Spec` of a tree.

    Raises ConfigError for a dimension that does not divide among its devices, with the nearest sizes that do, and for a
    leaf two of whose axes would be split over the same devices.
    """
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _leaf(name(path), leaf, mesh, rules), spec)


def _entry(mesh_axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    """Mesh axes as a PartitionSpec has them."""
    return mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes or None


def _leaf(path: str, leaf: Spec, mesh, rules: Rules) -> P:
    entries, used = [], {}
    for size, axis in zip(leaf.shape, leaf.axes, strict=True):
        mesh_axes = tuple(name for name in rules.get(axis or "", ()) if mesh.shape.get(name, 1) > 1)
        for name in mesh_axes:
            if name in used:
                raise ConfigError(
                    f"{path}: its axes {used[name]} and {axis} would both be split over mesh.{name}; give one of them "
                    "another rule"
                )
            used[name] = axis
        parts = math.prod(mesh.shape[name] for name in mesh_axes)
        if size % parts:
            below, above = size // parts * parts, -(-size // parts) * parts
            near = f"{below} or {above}" if below else str(above)
            raise ConfigError(
                f"{path}: {axis}={size} does not divide among {' x '.join(f'mesh.{n}={mesh.shape[n]}' for n in mesh_axes)}; "
                f"sizes that do: {near}; or a mesh axis that divides {size}"
            )
        entries.append(_entry(mesh_axes))
    return P(*entries)


def shardings(spec: Tree, mesh: jax.sharding.Mesh, rules: Rules = PARAMETERS) -> Tree:
    """`partition_specs` as NamedShardings."""
    return jax.tree.map(
        lambda one: NamedSharding(mesh, one), partition_specs(spec, mesh, rules), is_leaf=lambda x: isinstance(x, P)
    )


def batch_sharding(mesh: jax.sharding.Mesh, batch: dict[str, Any]) -> dict[str, NamedSharding]:
    """Where a batch `[B, T, ...]` lies: examples over the axes of `batch`, positions over context, what comes after whole."""

    def place(leaf):
        named = zip(leaf.shape, ("batch", "length"), strict=False)
        return NamedSharding(mesh, P(*(_entry(mesh_axes(name, size, mesh)) for size, name in named)))

    return {key: place(leaf) for key, leaf in batch.items()}


def mesh_axes(
    name: str | None, size: int, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None
) -> tuple[str, ...]:
    """The mesh axes that split an activation's axis of that name and size: the first of its rule, as long as they divide it.

    On the mesh of `jax.set_mesh` by default; () without one. Axes that `jax.shard_map` has made manual are left out.
    """
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if mesh.empty:
        return ()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    parts, found = 1, []
    for axis in ACTIVATIONS.get(name or "", ()):
        if mesh.shape.get(axis, 1) == 1 or kinds[axis] == AxisType.Manual:  # a mesh may be somebody else's
            continue
        parts *= mesh.shape[axis]
        if size % parts:
            break
        found.append(axis)
    return tuple(found)


def with_logical_constraint(x: Array, *names: str | None) -> Array:
    """x, laid out by the rules of activations on the mesh of `jax.set_mesh`; unchanged without one.

    `names` are the logical axes of x. Under Explicit axes a reshard, under Auto ones a constraint for the compiler; mesh
    axes that `jax.shard_map` has made manual are left alone.
    """
    if not is_split():
        return x
    return with_sharding(x, P(*(_entry(mesh_axes(name, size)) for size, name in zip(x.shape, names, strict=True))))


def is_split() -> bool:
    """Whether there is a mesh (`jax.set_mesh`) with an axis of several devices that `jax.shard_map` has not made manual."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = () if mesh.empty else zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return any(size > 1 and kind != AxisType.Manual for size, kind in axes)


def all_gather_weights(params: Tree, spec: Callable[[], Tree], dtype) -> Tree:
    """Parameters of a layer as its products want them: whole over `fsdp`, split over `tensor` and `expert` as they were.

    One all-gather a weight and pass under FSDP, of matrices in `dtype`, to which products round them anyway; and one
    reduce-scatter of the gradient, in its own precision. `spec()` declares the same tree. Routed experts stay as they are:
    `ops.mixture` gathers its own. Identity without a mesh (`jax.set_mesh`).
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.shape.get("fsdp", 1) == 1:
        return params
    declared = spec()
    whole = partition_specs(declared, mesh, {name: axes for name, axes in PARAMETERS.items() if name != "embed"})

    def one(leaf, spec, whole, parts):
        if "expert" in spec.axes:
            return leaf
        return all_gather_weight(dtype if spec.contracts else leaf.dtype, whole, parts, leaf)

    return jax.tree.map(one, params, declared, whole, partition_specs(declared, mesh))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def all_gather_weight(dtype, whole: P, parts: P, leaf: Array) -> Array:
    """One parameter, laid out as `whole` in `dtype`, and back in its own; its gradient laid out as `parts`, as it was."""
    # Said to be split before and after the cast, or the compiler would gather it earlier: in its own precision, and outside
    # of the layer, where the backward pass would keep it from.
    narrow = with_sharding(with_sharding(leaf, parts).astype(dtype), parts)
    return with_sharding(narrow, whole).astype(leaf.dtype)


def _gathered_forward(dtype, whole, parts, leaf):
    return all_gather_weight(dtype, whole, parts, leaf), None


def _gathered_backward(dtype, whole, parts, _, g):
    return (with_sharding(g, parts),)


all_gather_weight.defvjp(_gathered_forward, _gathered_backward)


def with_spec_sharding(tree: Tree, spec: Tree, rules: Rules) -> Tree:
    """Arrays with the axes that `spec` declares, laid out by the rules; unchanged without a mesh (`jax.set_mesh`)."""
    return (
        jax.tree.map(with_sharding, tree, partition_specs(spec, jax.sharding.get_abstract_mesh(), rules))
        if is_split()
        else tree
    )


def with_sharding(x: Array, where: P) -> Array:
    """x, split so: under Explicit axes a reshard, under Auto ones a constraint for the compiler."""
    place = jax.sharding.reshard if _explicit() else jax.lax.with_sharding_constraint
    return place(x, where)


def _explicit() -> bool:
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def in_auto_axes(f: Callable, places: Callable[[Tree], Tree]) -> Callable:
    """f; under Explicit axes with its inside left to the compiler and its results typed by `places(shapes of them)`.

    Explicit axes make a sharding part of an array's type, and JAX refuses whatever does not determine its result's: a
    product summed over a split axis, a look-up in a split table. What a whole model returns is known, so the types are
    kept at its door (`jax.sharding.auto_axes`).
    """

    def run(*args):
        if not is_split() or not _explicit():
            return f(*args)
        shapes = jax.eval_shape(jax.sharding.auto_axes(f, out_sharding=P()), *args)
        return jax.sharding.auto_axes(f, out_sharding=places(shapes))(*args)

    return run


def activation_specs(names: Callable[[str, Any], tuple[str | None, ...]]) -> Callable[[Tree], Tree]:
    """For `in_auto_axes`: a tree of arrays whose first logical axes are `names(path, leaf)`, as the rules split them."""

    def place(path, leaf):
        axes = names(jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        return P(*(_entry(mesh_axes(name, size)) for size, name in zip(leaf.shape, axes, strict=False)))

    return partial(jax.tree_util.tree_map_with_path, place)


def describe(spec: Tree, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, itemsize: int = 4) -> str:
    """Every parameter with its shape, how it is split, and its bytes on a device; the sum at the end."""
    leaves, specs = paths(spec), paths(partition_specs(spec, mesh))
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
