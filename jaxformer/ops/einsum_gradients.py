"""The gradients of a product of two arrays, which are two more products."""

from typing import Any

from jax import Array
from jaxtyping import Float

from jaxformer.ops import cpu
from jaxformer.ops.scattered_gradient import scattered_axes, scattered_gradient


def einsum_gradients(
    spec: str,
    x: Float[Array, "..."],
    w: Float[Array, "..."],
    g: Float[Array, "..."],
    dtypes: tuple[Any, Any],
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """The gradients of x and w from the cotangent g of `einsum(spec, x, w)`, in these `dtypes`.

    x and w have the same dtype.
    """
    x_axes, w_axes, out = cpu.axes_of(spec)
    g = g.astype(x.dtype)
    batch = "".join(axis for axis in out if axis in x_axes and axis in w_axes)
    # g may be the transpose of a product whose batch axes came first. Folded together, they have no
    # kernel on XLA:CPU.
    unfolded_g = g if out.startswith(batch) else cpu.barrier(g)
    dx = cpu.dot(f"{out},{w_axes}->{x_axes}", unfolded_g, w)
    x_dtype, w_dtype = dtypes
    axes = scattered_axes(spec, x, w)
    if axes:
        dw = scattered_gradient(spec, axes, w_dtype, x, g)
    else:
        dw = cpu.weight_gradient(f"{x_axes},{out}->{w_axes}", x, g)
    return dx.astype(x_dtype), dw.astype(w_dtype)
