"""The gradient of a weight that `fsdp` splits: each device keeps its shard of the sum.

No device has the whole gradient.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxformer.ops import cpu
from jaxformer.ops.windowed_gradient import ring_of, windowed
from jaxformer.sharding import mesh_axes, psum, reduce_scatter

# the logical axis of each letter that a mesh may split
_LOGICAL = {
    "b": "batch",
    "t": "length",
    "n": "heads",
    "f": "mlp",
    "v": "vocab",
}


def scattered_axes(spec: str, x: Array, w: Array) -> dict[str, tuple[str, ...]]:
    """The mesh axes of each letter of a product, if `fsdp` splits the gradient of its weight.

    Otherwise it is empty. Such a weight has an axis d, and the product sums over no other axis of x
    than those of w, b and t.
    """
    x_axes, w_axes, _ = cpu.axes_of(spec)
    sizes = dict(zip(x_axes + w_axes, x.shape + w.shape, strict=True))
    has_batch = "b" in x_axes and "b" not in w_axes
    if "d" not in w_axes or not has_batch or set(x_axes) - {*w_axes, "b", "t"}:
        return {}
    axes = {
        letter: mesh_axes(name, sizes[letter])
        for letter, name in _LOGICAL.items()
        if letter in sizes
    }
    if "fsdp" not in axes["b"] or "stage" in axes["b"]:
        return {}
    mesh = jax.sharding.get_abstract_mesh()
    return axes if sizes["d"] % mesh.shape["fsdp"] == 0 else {}


def scattered_gradient(spec: str, axes: dict[str, tuple[str, ...]], dtype, x, g):
    """The gradient of a weight, summed over devices in `dtype`.

    Each device along `fsdp` keeps its shard of the axis d. The partitioner of XLA would first sum
    the whole gradient on every device, which moves twice as much data.
    """
    x_axes, w_axes, out = cpu.axes_of(spec)
    order = "".join(sorted(w_axes, key=lambda axis: axis != "d"))  # TPUs scatter a leading axis
    others = [name for letter in "bt" for name in axes.get(letter, ()) if name != "fsdp"]

    def product(x, g):
        return cpu.weight_gradient(f"{x_axes},{out}->{order}", x, g).astype(dtype)

    def on_each(x, g):
        ring = ring_of(jax.lax.axis_size("fsdp"))
        if ring is None:
            gradient = reduce_scatter(product(x, g), ("fsdp",))
        elif "d" in x_axes:
            of_piece = partial(product, g=g)
            gradient = windowed(ring, of_piece, x, x_axes.index("d"), "fsdp")
        else:
            of_piece = partial(product, x)
            gradient = windowed(ring, of_piece, g, out.index("d"), "fsdp")
        return psum(gradient, others) if others else gradient

    def split(letters):
        return P(*(axes.get(letter) or None for letter in letters))

    manual = frozenset(name for names in axes.values() for name in names)
    specs = dict(in_specs=(split(x_axes), split(out)), out_specs=P("fsdp", *split(order)[1:]))
    dw = jax.shard_map(on_each, **specs, axis_names=manual, check_vma=False)(x, g)
    return jnp.transpose(dw, [order.index(axis) for axis in w_axes])
