"""Logical axes to mesh axes: one table for parameters, one for activations."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial, wraps
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jaxformer.errors import ConfigError, did_you_mean
from jaxformer.params import Spec, Tree, map_with_name, paths

Function = TypeVar("Function", bound=Callable)
AnyMesh = jax.sharding.Mesh | jax.sharding.AbstractMesh
Rules = dict[str, tuple[str, ...]]

_TENSOR: Rules = dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), ("tensor",))
PARAMETERS: Rules = {"embed": ("fsdp",), **_TENSOR, "expert": ("expert",), "layers": ("stage",)}
ACTIVATIONS: Rules = {
    "batch": ("data", "fsdp", "expert", "stage"),
    "length": ("context",),
    **_TENSOR,
    "expert": ("expert",),
}
UNSPLIT = ("head", "class", "channel", "line", "column", "rank")  # axes that no rule splits
# every logical name that an axis of a `Spec` may have
AXES = tuple(dict.fromkeys((*PARAMETERS, *ACTIVATIONS, *UNSPLIT)))


def unknown_axis(spec: Tree) -> str | None:
    """One line on the first leaf with an axis that is not in `AXES`, or None.

    No rule would split such an axis.
    """
    for path, leaf in paths(spec).items():
        for axis in leaf.axes:
            if axis is not None and axis not in AXES:
                advice = f"expected one of {', '.join(AXES)}, or None for an axis that is not split"
                return (
                    f"parameter {path}: unknown axis {axis!r} in its axes {leaf.axes}; "
                    f"{advice}{did_you_mean(axis, AXES)}"
                )
    return None


def partition_specs(spec: Tree, mesh: AnyMesh, rules: Rules = PARAMETERS) -> Tree:
    """A PartitionSpec for each `Spec` of a tree.

    Raises ConfigError for a dimension that does not divide among its devices, with the nearest
    sizes that do, and for a leaf with two axes that would be split over the same devices.
    """

    def partition_spec(path: str, leaf: Spec) -> P:
        entries = []
        used: dict[str, str | None] = {}  # mesh axis: the axis of the leaf that it splits
        for size, axis in zip(leaf.shape, leaf.axes, strict=True):
            names = tuple(name for name in rules.get(axis or "", ()) if mesh.shape.get(name, 1) > 1)
            for name in names:
                if name in used:
                    both = f"its axes {used[name]} and {axis} would both be split over mesh.{name}"
                    raise ConfigError(f"{path}: {both}; give one of them another rule")
                used[name] = axis
            parts = math.prod(mesh.shape[name] for name in names)
            if rest := size % parts:
                near = f"{size - rest} or {size - rest + parts}" if size > rest else str(parts)
                devices = " x ".join(f"mesh.{name}={mesh.shape[name]}" for name in names)
                advice = f"sizes that do: {near}; or a mesh axis that divides {size}"
                raise ConfigError(
                    f"{path}: {axis}={size} does not divide among {devices}; {advice}"
                )
            entries.append(_entry(names))
        return P(*entries)

    return map_with_name(partition_spec, spec)


def _entry(names: tuple[str, ...]) -> str | tuple[str, ...] | None:
    """Mesh axes as an entry of a PartitionSpec."""
    return names[0] if len(names) == 1 else names or None


def shardings(spec: Tree, mesh: jax.sharding.Mesh) -> Tree:
    """`partition_specs` as NamedShardings."""
    return jax.tree.map(partial(NamedSharding, mesh), partition_specs(spec, mesh))


def batch_sharding(mesh: jax.sharding.Mesh, batch: dict[str, Any]) -> dict[str, NamedSharding]:
    """The sharding of a batch `[B, T, ...]`: examples and positions by the rules of activations."""
    return {
        key: NamedSharding(mesh, _activation_spec(x.shape, ("batch", "length"), mesh))
        for key, x in batch.items()
    }


def _activation_spec(
    shape: tuple[int, ...], names: tuple[str | None, ...], mesh: AnyMesh | None = None
) -> P:
    """How the rules split an activation whose first axes have these names."""
    return P(
        *(_entry(mesh_axes(name, size, mesh)) for size, name in zip(shape, names, strict=False))
    )


def mesh_axes(name: str | None, size: int, mesh: AnyMesh | None = None) -> tuple[str, ...]:
    """The mesh axes that split an activation's axis of that name and size.

    They are the first mesh axes of the name's rule, up to the first that does not divide the size.
    The mesh is that of `jax.set_mesh` by default; without a mesh the result is (). Axes that
    `jax.shard_map` made manual are left out.
    """
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    axes: tuple[str, ...] = ()
    for axis in ACTIVATIONS.get(name or "", ()):
        # a user's mesh may lack our axes
        if mesh.shape.get(axis, 1) == 1 or kinds[axis] == AxisType.Manual:
            continue
        if size % mesh.shape[axis]:
            break
        size //= mesh.shape[axis]
        axes = *axes, axis
    return axes


def with_logical_constraint(x: Array, *names: str | None) -> Array:
    """x with its logical axes `names` split by the rules of activations.

    Returns x itself without a mesh (`jax.set_mesh`).
    """
    if len(names) != x.ndim:
        raise ValueError(
            f"with_logical_constraint: {len(names)} names {names} for an array of shape {x.shape}"
        )
    return with_sharding(x, _activation_spec(x.shape, names)) if is_split() else x


def is_split() -> bool:
    """Whether the mesh (`jax.set_mesh`) has an axis of several devices that is not manual.

    `jax.shard_map` makes axes manual.
    """
    return any(jax.sharding.get_abstract_mesh().shape[axis] > 1 for axis in auto_axis_names())


def auto_axis_names() -> list[str]:
    """The axes of the mesh (`jax.set_mesh`) that `jax.shard_map` has not made manual."""
    mesh = jax.sharding.get_abstract_mesh()
    return [
        axis
        for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind != AxisType.Manual
    ]


def with_sharding(x: Array, spec: P) -> Array:
    """x split by `spec`: a reshard under Explicit axes, a compiler constraint under Auto axes."""
    return (jax.sharding.reshard if is_explicit() else jax.lax.with_sharding_constraint)(x, spec)


def with_spec_sharding(tree: Tree, spec: Tree, rules: Rules) -> Tree:
    """Arrays with the axes that `spec` declares, split by the rules.

    Returns the arrays unchanged without a mesh (`jax.set_mesh`).
    """
    if not is_split():
        return tree
    return jax.tree.map(
        with_sharding, tree, partition_specs(spec, jax.sharding.get_abstract_mesh(), rules)
    )


def all_gather_weights(params: Tree, spec: Callable[[], Tree], dtype) -> Tree:
    """Parameters of a layer, gathered over `fsdp` for its products.

    Returns the parameters unchanged without a mesh (`jax.set_mesh`). Each weight has one all-gather
    in each pass. A matrix is gathered in `dtype`, because products round it to `dtype` anyway. Its
    gradient has one reduce-scatter, in its own precision. `spec()` declares the same tree.
    `ops.mixture` gathers routed experts itself.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.shape.get("fsdp", 1) == 1:
        return params
    declared = spec()
    gathered = partition_specs(declared, mesh, PARAMETERS | {"embed": ()})

    def gather(spec, leaf, gathered, split):
        if "expert" in spec.axes:
            return leaf
        if hasattr(leaf, "map_values"):  # for products in 8-bit floats
            return leaf.map_values(partial(all_gather_weight, dtype, gathered, split))
        if not isinstance(leaf, Array):  # the weights of decoding in 8 bits stay split
            return leaf
        return all_gather_weight(dtype if spec.contracts else leaf.dtype, gathered, split, leaf)

    return jax.tree.map(gather, declared, params, gathered, partition_specs(declared, mesh))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def all_gather_weight(dtype, gathered: P, split: P, leaf: Array) -> Array:
    """One parameter, split as `gathered`, rounded to `dtype` but stored in its own dtype.

    Its gradient is split as `split`.
    """
    # Without a constraint before and after the cast, the compiler gathers earlier: in the
    # parameter's own precision, and outside of the layer, which keeps the gathered weight alive
    # until the backward pass.
    narrow = with_sharding(with_sharding(leaf, split).astype(dtype), split)
    return with_sharding(narrow, gathered).astype(leaf.dtype)


all_gather_weight.defvjp(
    lambda dtype, gathered, split, leaf: (all_gather_weight(dtype, gathered, split, leaf), None),
    lambda dtype, gathered, split, _, gradient: (with_sharding(gradient, split),),
)


def reduce_scatter(x: Array, axes: Sequence[str], dimension: int = 0) -> Array:
    """The sum of x over manual mesh axes; each device keeps its part of one dimension of x.

    The sum runs along the rings of a torus.
    """
    for axis in axes:
        for groups in rings(jax.lax.axis_size(axis)):
            x = psum_scatter(
                x, axis, scatter_dimension=dimension, axis_index_groups=groups, tiled=True
            )
    return x


def rings(size: int) -> tuple[list[list[int]] | None, ...]:
    """The groups of devices of each psum_scatter over a mesh axis; None: all of them.

    Over 16 devices or more, libtpu 0.0.42 turns one psum_scatter into an all-reduce. It does not
    change two psum_scatters over groups: first over every 16th device (columns of a 16 x 16 torus),
    then over 16 neighbours (rows).
    """
    inner = 16 if size > 16 else 4
    if size < 16 or size % inner:
        return (None,)
    devices = np.arange(size).reshape(-1, inner)
    return devices.T.tolist(), devices.tolist()


def psum(x: Array, axes, **options) -> Array:
    """`jax.lax.psum` over manual mesh axes."""
    return wide_on_cpu(partial(jax.lax.psum, axis_name=axes, **options), x)


def psum_scatter(x: Array, axes, **options) -> Array:
    """`jax.lax.psum_scatter` over manual mesh axes."""
    return wide_on_cpu(partial(jax.lax.psum_scatter, axis_name=axes, **options), x)


def wide_on_cpu(exchange: Callable[[Array], Array], x: Array) -> Array:
    """exchange(x), where 16-bit floats are 32 bits on CPU.

    The transpose of `exchange`, which may be a sum, is in 32 bits too. XLA:CPU (jax 0.10.2) widens
    sums itself, but aborts if some mesh axes are not manual.
    """
    if x.dtype.itemsize >= 4 or not jnp.issubdtype(x.dtype, jnp.floating):
        return exchange(x)
    return jax.lax.platform_dependent(
        x, cpu=lambda x: exchange(x.astype(jnp.float32)).astype(x.dtype), default=exchange
    )


def varying(x: Array, axes: Iterable[str]) -> Array:
    """x as an array that may differ along these manual mesh axes; the transpose sums over them."""
    axes = tuple(set(axes) - jax.typeof(x).manual_axis_type.varying)
    return wide_on_cpu(lambda x: jax.lax.pcast(x, axes, to="varying"), x) if axes else x


def alike(*arrays: Array) -> list[Array]:
    """The arrays, so that all may differ along the same manual mesh axes.

    A custom VJP and the carry of a loop need this.
    """
    axes = frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in arrays))
    return [varying(a, axes) for a in arrays]


def platform() -> str:
    """The platform of a program: "cpu", "gpu", "tpu".

    It is the platform of the mesh, which may be absent from this machine. Without a mesh it is that
    of `jax.default_device`, or else that of this process.
    """
    device = _device()
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def device_kind() -> str:
    """The kind of chip of a program, such as "TPU v6 lite", by the rule of `platform`."""
    device = _device()
    if device is None or isinstance(device, str):
        device = jax.devices(device)[0]
    return device.device_kind


def _device() -> Any:
    """A device of the program, or the name of its platform; None: those of this process."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.config.jax_default_device


def is_one_cpu() -> bool:
    """Whether a program is for one CPU device.

    A mesh of several CPU devices stands for a pod of TPUs, and gets the program of a pod.
    """
    return platform() == "cpu" and jax.sharding.get_abstract_mesh().size <= 1


def is_explicit() -> bool:
    """Whether the mesh has Explicit axes."""
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def auto_axes(specs: P | Callable[..., Tree]) -> Callable[[Function], Function]:
    """Decorator of a public function: its inside is left to the compiler even under Explicit axes.

    Under Explicit axes, JAX refuses operations whose sharding does not follow from the operands: a
    product summed over a split axis, a look-up in a split table. `specs` are those of the results:
    a PartitionSpec, or a function (shapes of the results, *args, **kwargs) -> a tree of them.
    """
    return lambda function: wraps(function)(  # type: ignore
        lambda *args, **kwargs: _run(function, specs, args, kwargs)
    )


def _run(function: Callable, specs: P | Callable[..., Tree], args: tuple, kwargs: dict) -> Tree:
    """`function(*args, **kwargs)`; under Explicit axes, inside of `jax.sharding.auto_axes`.

    `jax.sharding.auto_axes` takes only arrays, so the other arguments are put aside.
    """
    if not (is_split() and is_explicit()):
        return function(*args, **kwargs)
    leaves, tree = jax.tree.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]
    arrays = [leaves[i] for i in places]

    def call(*arrays):
        merged = dict(enumerate(leaves)) | dict(zip(places, arrays, strict=True))
        args, kwargs = jax.tree.unflatten(tree, merged.values())
        return function(*args, **kwargs)

    if callable(specs):
        shapes = jax.eval_shape(jax.sharding.auto_axes(call, out_sharding=P()), *arrays)
        specs = specs(shapes, *args, **kwargs)
    return jax.sharding.auto_axes(call, out_sharding=specs)(*arrays)


def activation_specs(names: Callable[[str, Any], tuple[str | None, ...]]) -> Callable[..., Tree]:
    """The `specs` of `auto_axes` for results whose first logical axes are `names(path, leaf)`.

    The rules split them.
    """
    return lambda shapes, *_, **__: map_with_name(
        lambda path, x: _activation_spec(x.shape, names(path, x)), shapes
    )


def on_host(tree: Tree) -> Tree:
    """The arrays as NumPy arrays.

    An array that is split over processes is gathered, so all processes must call this.
    """

    def gathered(leaf: Any) -> Any:
        if not isinstance(leaf, Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
            return leaf
        return _gathering(leaf.sharding.mesh)(leaf)  # type: ignore

    return jax.device_get(jax.tree.map(gathered, tree))


@lru_cache
def _gathering(mesh: jax.sharding.Mesh) -> Callable[[Array], Array]:
    """The program that gives each device of a mesh the whole array."""
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))


def shard_bytes(spec: Tree, mesh: AnyMesh) -> dict[str, int]:
    """Bytes of each parameter on one device, in float32."""
    specs = paths(partition_specs(spec, mesh))
    sizes = {}
    for path, leaf in paths(spec).items():
        shape = NamedSharding(mesh, specs[path]).shard_shape(leaf.shape)
        sizes[path] = math.prod(shape) * 4
    return sizes


def describe(spec: Tree, mesh: AnyMesh) -> str:
    """Each parameter with its shape, its split, and its bytes on a device; the sum at the end."""
    specs = paths(partition_specs(spec, mesh))
    sizes = shard_bytes(spec, mesh)
    table = [("parameter", "shape", "split", "bytes a device")]
    for path, leaf in paths(spec).items():
        split = " ".join(
            "*".join((entry,) if isinstance(entry, str) else entry or "-") for entry in specs[path]
        )
        table.append((path, "x".join(map(str, leaf.shape)), split, f"{sizes[path]:,}"))
    table.append(("total", "", "", f"{sum(sizes.values()):,}"))
    path, shape, split, size = (max(map(len, column)) for column in zip(*table, strict=True))
    return "\n".join(
        f"{row[0]:<{path}}  {row[1]:<{shape}}  {row[2]:<{split}}  {row[3]:>{size}}" for row in table
    )
