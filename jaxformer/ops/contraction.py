"""The one door for every matrix product of a model."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float


def einsum(spec: str, x: Float[Array, "..."], w: Float[Array, "..."], dtype=None) -> Float[Array, "..."]:
    """Product of x and w over the shared axes of `spec`, in x's precision, summed in float32; result in `dtype` (x's own).

    w is cast to x's dtype on the way in, and its gradient comes back in w's: a bfloat16 activation times a float32
    parameter is a bfloat16 product with a float32 gradient. `spec` names every axis (no ellipsis), each in at least two
    of the three.

    Low-precision products carry a custom VJP, because autodiff would multiply a float32 cotangent by a bfloat16 operand
    and leave the fast path (and on CPU, fall off it by 5x). At float32 and above this is `jnp.einsum`, differentiable
    to any order.
    """
    dtype = dtype or x.dtype
    if x.dtype.itemsize >= 4:
        return jnp.einsum(spec, x, w.astype(x.dtype)).astype(dtype)
    return _low_precision(spec, dtype, w.dtype, x, w)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _low_precision(spec, dtype, w_dtype, x, w):
    return _dot(spec, x, w.astype(x.dtype)).astype(dtype)


def _dot(spec, a, b):
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _forward(spec, dtype, w_dtype, x, w):
    w = w.astype(x.dtype)
    return _dot(spec, x, w).astype(dtype), (x, w)


def _backward(spec, dtype, w_dtype, residuals, g):
    x, w = residuals
    inputs, out = spec.replace(" ", "").split("->")
    x_axes, w_axes = inputs.split(",")
    g = g.astype(x.dtype)
    dx = _dot(f"{out},{w_axes}->{x_axes}", g, w)
    dw = _dot(f"{x_axes},{out}->{w_axes}", x, g)
    return dx.astype(x.dtype), dw.astype(w_dtype)


_low_precision.defvjp(_forward, _backward)
