"""The gradient of a weight that `fsdp` splits: each device keeps its rows of the sum, and none sees the whole."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxformer.ops import cpu
from jaxformer.sharding import mesh_axes, psum, reduce_scatter

_LOGICAL = {"b": "batch", "t": "length", "n": "heads", "f": "mlp", "v": "vocab"}  # of the letters that a mesh may split


def scattered_axes(spec: str, x: Array, w: Array) -> dict[str, tuple[str, ...]]:
    """The mesh axes of each axis of a product whose weight `[D, ...]` has a gradient that `fsdp` splits; else none."""
    x_axes, w_axes, _ = cpu.axes_of(spec)
    sizes = dict(zip(x_axes + w_axes, x.shape + w.shape, strict=True))
    if "d" not in w_axes or "b" not in set(x_axes) - set(w_axes) or set(x_axes) - {*w_axes, "b", "t"}:
        return {}
    axes = {letter: mesh_axes(name, sizes[letter]) for letter, name in _LOGICAL.items() if letter in sizes}
    mesh = jax.sharding.get_abstract_mesh()
    divides = "fsdp" in axes["b"] and "stage" not in axes["b"] and sizes["d"] % mesh.shape["fsdp"] == 0
    return axes if divides else {}


def scattered_gradient(spec: str, axes: dict[str, tuple[str, ...]], dtype, x, g):
    """The gradient of a weight, summed over devices in `dtype`. Each device of `fsdp` keeps its part of the axis `d`.

    Left to itself, the partitioner sums the whole gradient on every device first, which moves twice as much.
    """
    x_axes, w_axes, out = cpu.axes_of(spec)
    order = "".join(sorted(w_axes, key=lambda axis: axis != "d"))  # TPUs scatter a leading axis
    others = [name for letter in "bt" for name in axes.get(letter, ()) if name != "fsdp"]

    def on_each(x, g):
        gradient = reduce_scatter(cpu.weight_gradient(f"{x_axes},{out}->{order}", x, g).astype(dtype), "fsdp")
        return psum(gradient, others) if others else gradient

    def split(letters):
        return P(*(axes.get(letter) or None for letter in letters))

    manual = frozenset(name for names in axes.values() for name in names)
    specs = dict(in_specs=(split(x_axes), split(out)), out_specs=P("fsdp", *split(order)[1:]))
    dw = jax.shard_map(on_each, **specs, axis_names=manual, check_vma=False)(x, g)
    return jnp.transpose(dw, [order.index(axis) for axis in w_axes])
