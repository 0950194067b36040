"""Products in the orders of operands that XLA:CPU computes fast, and its barriers. Other platforms take any order.

`ops.einsum` is the door; nothing but `ops` reads this file. What was measured stands in experiments/bench/LOG.md.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array


def axes_of(spec: str) -> tuple[str, str, str]:
    """The letters of both operands and of the result."""
    inputs, out = spec.replace(" ", "").split("->")
    a, b = inputs.split(",")
    return a, b, out


def barrier(x: Array) -> Array:
    """x. On CPU a barrier keeps later transposes from being folded back into the product that made x, or that reads it."""
    return jax.lax.platform_dependent(x, cpu=jax.lax.optimization_barrier, default=lambda x: x)


def dot(spec, a, b):
    """The product, summed in float32 or better. The operand that has the result's first free axis goes first."""
    # In the other order XLA:CPU has no kernel for some products ("Unsupported element type for DotThunk"); nor where an axis of
    # the other operand lies between two free ones: then each operand's axes are together until the end.
    a_axes, b_axes, out = axes_of(spec)
    if any(axis in a_axes and axis in b_axes for axis in out):
        on_cpu, default = (partial(function, a_axes, b_axes, out) for function in (batched_dot, contraction))
        return jax.lax.platform_dependent(a, b, cpu=on_cpu, default=default)
    for axes in (a_axes, b_axes):
        free = [axis for axis in axes if axis in out]
        if len(free) > 1 and "".join(free) not in out:
            order = "".join(sorted(out, key=lambda axis: axis not in a_axes))
            y = barrier(dot(f"{a_axes},{b_axes}->{order}", a, b))
            return jnp.transpose(y, [order.index(axis) for axis in out])
    if out and out[0] in b_axes:
        a_axes, b_axes, a, b = b_axes, a_axes, b, a
    return contraction(a_axes, b_axes, out, a, b)


def contraction(a_axes: str, b_axes: str, out: str, a: Array, b: Array) -> Array:
    """The product of a and b in this order, summed in float32 or better, over axes in the order that they have in a.

    jnp.einsum would sort these axes by letter, "h" before "n", and XLA:CPU would then write both operands in that order.
    """
    batch = [axis for axis in a_axes if axis in b_axes and axis in out]
    summed = [axis for axis in a_axes if axis in b_axes and axis not in out]

    def axis_numbers(axes):
        return ([a_axes.index(axis) for axis in axes], [b_axes.index(axis) for axis in axes])

    with jax.named_scope(f"{a_axes},{b_axes}->{out}"):
        wide = jnp.promote_types(a.dtype, jnp.float32)
        y = jax.lax.dot_general(a, b, (axis_numbers(summed), axis_numbers(batch)), preferred_element_type=wide)
        order = batch + [axis for axis in a_axes + b_axes if axis not in batch + summed]
        return jnp.transpose(y, [order.index(axis) for axis in out])


def batched_dot(a_axes: str, b_axes: str, out: str, a: Array, b: Array) -> Array:
    """A product with batch axes for XLA:CPU, whose kernels take matrices: [batch, m, k] times [batch, k, n] or [batch, n, k].

    In this order attention's products of [B, T, N, H] take half to four fifths of the time of XLA's own choice.
    """
    batch = "".join(axis for axis in out if axis in a_axes and axis in b_axes)
    summed = "".join(axis for axis in a_axes if axis not in out)

    def matrix(axes):
        return "".join(axis for axis in axes if axis not in batch)

    def free(axes):
        return "".join(axis for axis in matrix(axes) if axis in out)

    def in_order(axes):
        return matrix(axes) == free(axes) + summed

    if in_order(b_axes) and not in_order(a_axes):
        a_axes, b_axes, a, b = b_axes, a_axes, b, a

    def kernels(axes, narrow):
        return (free(axes) + summed, *(() if narrow else (summed + free(axes),)))

    # a first operand [batch, k, m] costs nothing in float32, but in 16 bits it is eight times slower than a copy of it
    left, right = (
        batch + (matrix(axes) if matrix(axes) in kernels(axes, narrow) else free(axes) + summed)
        for axes, narrow in ((a_axes, a.dtype.itemsize < 4), (b_axes, False))
    )
    order = batch + free(a_axes) + free(b_axes)
    sizes = dict(zip(a_axes + b_axes, a.shape + b.shape, strict=True))
    a, b = in_order_of(a, a_axes, left), in_order_of(b, b_axes, right)
    if jax.sharding.get_abstract_mesh().size > 1:  # which may split several of the batch axes
        y = contraction(left, right, order, a, b)
    else:  # XLA:CPU folds a transpose of several batch axes into the product, and has no 16-bit kernel for that

        def one(axes):
            return batch[0] + axes[len(batch) :]

        def joined(x):
            return x.reshape(math.prod(x.shape[: len(batch)]), *x.shape[len(batch) :])

        y = contraction(one(left), one(right), one(order), joined(a), joined(b)).reshape([sizes[axis] for axis in order])
    return y if order == out else jnp.transpose(jax.lax.optimization_barrier(y), [order.index(axis) for axis in out])


def in_order_of(x, axes: str, order: str):
    """x with its axes in this order, behind a barrier: the compiler would fold the transpose into the product."""
    return x if axes == order else jax.lax.optimization_barrier(jnp.transpose(x, [axes.index(axis) for axis in order]))


def weight_gradient(spec, x, g):
    """The gradient of a weight, x^T g. Without batch axes, the smaller of x and g has the result's leading axes."""
    # XLA:CPU transposes the operand that has them, on one thread. The result is small: it is transposed afterwards instead.
    x_axes, g_axes, out = axes_of(spec)
    if any(axis in x_axes and axis in g_axes for axis in out):
        return barrier(dot(spec, x, g))
    (small, b), (large, a) = sorted([(x_axes, x), (g_axes, g)], key=lambda operand: operand[1].size)
    order = "".join(sorted(out, key=lambda axis: axis not in small))  # stable: the small operand's axes first
    y = barrier(contraction(small, large, order, b, a))
    return y if order == out else jnp.transpose(y, [order.index(axis) for axis in out])


def lines_product(x: Array, values: Array) -> Array:
    """x [M, K] times values [N, K], summed in float32 or better."""
    # XLA:CPU has no kernel for one row of 16 bits, and a fast one for two
    lines = jnp.resize(x, (2, x.shape[1])) if len(x) == 1 and x.dtype.itemsize < 4 else x
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.einsum("mk,nk->mn", lines, values, preferred_element_type=wide)[: len(x)]


def int8_product(x: Array, values: Array) -> Array:
    """x times int8 values, as products of int8: x is high + low / 254, in units of its rows, which is x to 16 bits."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    unit = jnp.maximum(jnp.max(jnp.abs(x.astype(wide)), axis=1, keepdims=True), 1e-30) / 127
    x = x.astype(wide) / unit
    high = jnp.round(x)
    lines = jnp.concatenate([high, jnp.round((x - high) * 254)]).astype(jnp.int8)
    y = jnp.einsum("mk,nk->mn", lines, values, preferred_element_type=jnp.int32).astype(wide)
    return (y[: len(x)] + y[len(x) :] / 254) * unit
