"""`einsum`: every matrix product of a model is a call of this one function.

Operands may have a low precision. Their product is summed in float32, and so are its gradients.
What XLA:CPU needs stands in `cpu.py`, what a mesh needs of a gradient in `scattered_gradient.py`,
the weights of decoding in `stored_weight.py`, and products in 8-bit floats in `float8.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

from jaxformer.ops import cpu
from jaxformer.ops.einsum_gradients import einsum_gradients
from jaxformer.ops.float8 import Float8Weight, float8_product
from jaxformer.ops.scattered_gradient import scattered_axes
from jaxformer.ops.stored_weight import BlockWeight, StoredWeight, stored_product
from jaxformer.sharding import alike, auto_axes

PRODUCT = "product"  # the name, for `jax.checkpoint_policies`, of a product with a weight
Weight = Float[Array, "..."] | StoredWeight | BlockWeight | Float8Weight


def _result_spec(_, spec: str, x: Array, w: Array, *args, **kwargs) -> P:
    """An axis of the result is split as it is in x, or else in w; each mesh axis is used once."""
    x_axes, w_axes, out = cpu.axes_of(spec)
    w = w.values if isinstance(w, Float8Weight) else w
    split = dict(zip(w_axes, jax.typeof(w).sharding.spec, strict=True))
    for axis, entry in zip(x_axes, jax.typeof(x).sharding.spec, strict=True):
        if entry:
            split[axis] = entry
    entries = []
    used = set()
    for entry in map(split.get, out):
        names = {entry} if isinstance(entry, str) else set(entry or ())
        entries.append(None if names & used else entry)
        used |= names
    return P(*entries)


@auto_axes(_result_spec)
def einsum(
    spec: str, x: Float[Array, "..."], w: Weight, dtype=None, *, operand_dtype=None
) -> Float[Array, "..."]:
    """jnp.einsum(spec, x, w), summed in float32 or better.

    x and w are first cast to `operand_dtype`; the result is cast to `dtype`. Both are the dtype of
    x by default. Each gradient has the dtype of its operand: a bfloat16 activation times a float32
    parameter is a bfloat16 product with a float32 gradient of the parameter. `spec` names every
    axis (no ellipsis). An axis is in at least two of x, w and the result. Under Explicit axes the
    result is split as the operands are.

    Products of 16 and 32 bits have gradients of any order in reverse mode (jax.grad, jax.vjp,
    jax.jacrev). Forward mode (jax.jvp, jax.jacfwd, jax.hessian) needs float64, and otherwise raises
    NotImplementedError.
    """
    dtype = dtype or x.dtype
    narrow = jnp.dtype(operand_dtype or x.dtype)
    if isinstance(w, StoredWeight | BlockWeight):
        return stored_product(spec, x.astype(narrow), w).astype(dtype)
    multiply = _product
    if isinstance(w, Float8Weight):
        multiply = float8_product
        w = w.values
    if multiply is _product and narrow.itemsize > 4 and not scattered_axes(spec, x, w):
        y = jnp.einsum(spec, x.astype(narrow), w.astype(narrow)).astype(dtype)
    else:
        with reverse_mode_alone("einsum"):
            y = multiply(spec, narrow, dtype, (x.dtype, w.dtype), *alike(x, w))
    x_axes, w_axes, out = cpu.axes_of(spec)
    has_batch = any(axis in x_axes and axis in w_axes for axis in out)
    # A policy of `jax.checkpoint` that keeps the product by this name keeps it in `dtype`, not as
    # float32 sums before rounding.
    return y if has_batch else checkpoint_name(y, PRODUCT)


# The gradients are written by hand for three reasons. Autodiff would multiply a float32 cotangent
# by a bfloat16 operand, which is five times slower on CPU. It would leave the gradient of a float32
# weight in an order that XLA:CPU transposes on one thread, which costs a third of a step. On a mesh
# it would sum the whole gradient on every device.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _product(spec, narrow, dtype, dtypes, x, w):
    return cpu.dot(spec, x.astype(narrow), w.astype(narrow)).astype(dtype)


def _forward(spec, narrow, dtype, dtypes, x, w):
    x, w = x.astype(narrow), w.astype(narrow)
    return cpu.dot(spec, x, w).astype(dtype), (x, w)


def _backward(spec, narrow, dtype, dtypes, residuals, g):
    x, w = residuals
    return einsum_gradients(spec, x, w, g, dtypes)


_product.defvjp(_forward, _backward)


def in_float32(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x in float32 or better.

    Several products may read the result and round it back to the precision of x. Then the gradients
    of x are added in float32 before they are rounded. On a mesh that splits the weights, their sum
    needs one all-reduce. If each gradient were rounded first, each would need its own.
    """
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def add_bias(x: Float[Array, "..."], bias: Float[Array, "..."] | None) -> Float[Array, "..."]:
    """x + bias over the last axes of x, in the precision of x; x for None.

    The gradient of the bias is summed in float32 or better.
    """
    if bias is None:
        return x
    # The bias is broadcast before it is rounded. In the other order autodiff would sum the
    # cotangents of all tokens in bfloat16, and this sum stops growing after some thousand tokens.
    wide = jnp.broadcast_to(bias.astype(jnp.promote_types(x.dtype, jnp.float32)), x.shape)
    return x + wide.astype(x.dtype)


@contextmanager
def reverse_mode_alone(function: str) -> Iterator[None]:
    """Replaces JAX's error for the forward mode of a `custom_vjp` by one that says what to do."""
    try:
        yield
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        instead = "take jax.grad, jax.vjp or jax.jacrev, twice for a second derivative"
        wide = "float64 has it, with implementation='reference' for attention"
        raise NotImplementedError(
            f"{function}: no forward mode (jax.jvp, jacfwd, hessian): {instead}; {wide}"
        ) from None
