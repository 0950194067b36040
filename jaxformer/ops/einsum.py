"""The one door for every matrix product of a model.

Operands in a low precision, their product summed in float32, and gradients that keep both. What XLA:CPU wants of such a
product stands in `cpu.py`, what a mesh wants of its gradient in `scattered_gradient.py`, weights of decoding in
`stored_weight.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

from jaxformer.ops import cpu
from jaxformer.ops.scattered_gradient import scattered_axes, scattered_gradient
from jaxformer.ops.stored_weight import StoredWeight, stored_product
from jaxformer.sharding import alike, auto_axes

PRODUCT = "product"  # the name, for `jax.checkpoint_policies`, of a product with a weight
Weight = Float[Array, "..."] | StoredWeight


def _result_spec(_, spec: str, x: Array, w: Array, *args, **kwargs) -> P:
    """The result's axes are split as x's are, else as w's, each mesh axis once."""
    x_axes, w_axes, out = cpu.axes_of(spec)
    split = dict(zip(w_axes, jax.typeof(w).sharding.spec, strict=True))
    split |= {axis: entry for axis, entry in zip(x_axes, jax.typeof(x).sharding.spec, strict=True) if entry}
    entries, used = [], set()
    for entry in map(split.get, out):
        names = {entry} if isinstance(entry, str) else set(entry or ())
        entries.append(None if names & used else entry)
        used |= names
    return P(*entries)


@auto_axes(_result_spec)
def einsum(spec: str, x: Float[Array, "..."], w: Weight, dtype=None, *, operand_dtype=None) -> Float[Array, "..."]:
    """Product of x and w over the shared axes of `spec`, in x's precision, summed in float32; result in `dtype` (x's).

    x and w are first cast to `operand_dtype` (x's own). Each gradient has the dtype of its operand: a bfloat16 activation
    times a float32 parameter is a bfloat16 product with a float32 gradient. `spec` names every axis (no ellipsis), each in
    at least two of the three. Under Explicit axes the result is split as the operands are. Products of 16 and 32 bits have
    gradients of any order in reverse mode (jax.grad, jax.vjp, jax.jacrev). Forward mode (jax.jvp, jax.jacfwd, jax.hessian)
    raises NotImplementedError: it needs float64.
    """
    dtype, narrow = dtype or x.dtype, jnp.dtype(operand_dtype or x.dtype)
    if isinstance(w, StoredWeight):
        return stored_product(spec, x.astype(narrow), w).astype(dtype)
    if narrow.itemsize > 4 and not scattered_axes(spec, x, w):
        y = jnp.einsum(spec, x.astype(narrow), w.astype(narrow)).astype(dtype)
    else:
        with reverse_mode_alone("einsum"):
            y = _product(spec, narrow, dtype, (x.dtype, w.dtype), *alike(x, w))
    x_axes, w_axes, out = cpu.axes_of(spec)
    has_batch = any(axis in x_axes and axis in w_axes for axis in out)
    # a policy of remat that keeps the product by this name keeps it in `dtype`, not the float32 sums that are rounded to it
    return y if has_batch else checkpoint_name(y, PRODUCT)


# Autodiff would multiply a float32 cotangent by a bfloat16 operand, which on CPU is five times slower; leave the gradient of
# a float32 weight in an order that XLA:CPU transposes on one thread, which costs a step a third; and on a mesh sum a whole
# gradient everywhere.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _product(spec, narrow, dtype, dtypes, x, w):
    return cpu.dot(spec, x.astype(narrow), w.astype(narrow)).astype(dtype)


def _forward(spec, narrow, dtype, dtypes, x, w):
    x, w = x.astype(narrow), w.astype(narrow)
    return cpu.dot(spec, x, w).astype(dtype), (x, w)


def _backward(spec, narrow, dtype, dtypes, residuals, g):
    x, w = residuals
    return einsum_gradients(spec, x, w, g, dtypes)


def einsum_gradients(
    spec: str, x: Float[Array, "..."], w: Float[Array, "..."], g: Float[Array, "..."], dtypes: tuple[Any, Any]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """The gradients of x and w, in these two dtypes, from the cotangent g of `einsum(spec, x, w)`; x and w have one dtype."""
    x_axes, w_axes, out = cpu.axes_of(spec)
    g = g.astype(x.dtype)
    batch = "".join(axis for axis in out if axis in x_axes and axis in w_axes)
    # g may be the transpose of a product that was made batch first; folded together, they have no kernel on CPU
    dx = cpu.dot(f"{out},{w_axes}->{x_axes}", g if out.startswith(batch) else cpu.barrier(g), w)
    axes = scattered_axes(spec, x, w)
    dw = scattered_gradient(spec, axes, dtypes[1], x, g) if axes else cpu.weight_gradient(f"{x_axes},{out}->{w_axes}", x, g)
    return dx.astype(dtypes[0]), dw.astype(dtypes[1])


_product.defvjp(_forward, _backward)


def in_float32(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x in float32 or better.

    Several products may round it back to x's precision: then the gradients of x are added in float32, before they are
    rounded. On a mesh that splits the weights their sum needs one all-reduce; rounded first, each needs its own.
    """
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def add_bias(x: Float[Array, "..."], bias: Float[Array, "..."] | None) -> Float[Array, "..."]:
    """x + bias over x's last axes, in x's precision (None: x); the bias's gradient is summed in float32 or better."""
    if bias is None:
        return x
    # Broadcast before it is rounded: the other way round, autodiff would sum the cotangents of all tokens in bfloat16, which
    # stops growing after some thousand of them.
    wide = jnp.broadcast_to(bias.astype(jnp.promote_types(x.dtype, jnp.float32)), x.shape)
    return x + wide.astype(x.dtype)


@contextmanager
def reverse_mode_alone(function: str) -> Iterator[None]:
    """Says what to do where JAX refuses the forward mode of a function that has a backward pass of its own."""
    try:
        yield
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        instead = "take jax.grad, jax.vjp or jax.jacrev, twice for a second derivative"
        wide = "float64 has it, with implementation='reference' for attention"
        raise NotImplementedError(f"{function}: no forward mode (jax.jvp, jacfwd, hessian): {instead}; {wide}") from None
