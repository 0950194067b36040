"""Products in an order of operands that XLA:CPU computes fast, and barriers against its rewrites.

Other platforms compute any order equally fast. `ops.einsum` is the function to call; only `ops`
reads this file. Measurements stand in experiments/bench/LOG.md.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

FEW_LINES = 4  # so many lines or fewer are multiplied one after another,
MOST_AGAIN = 2**22  # if the lines after the first one read at most so many bytes of b again


def axes_of(spec: str) -> tuple[str, str, str]:
    """The letters of the first operand, of the second operand, and of the result."""
    inputs, out = spec.replace(" ", "").split("->")
    a, b = inputs.split(",")
    return a, b, out


def barrier(x: Array) -> Array:
    """x, on CPU behind an optimization barrier.

    XLA:CPU would fold a transpose of x into the product that made x or that reads x.
    """
    return jax.lax.platform_dependent(x, cpu=jax.lax.optimization_barrier, default=lambda x: x)


def dot(spec, a, b):
    """The product, summed in float32 or better.

    The operand that has the first free axis of the result goes first. In the other order XLA:CPU
    has no kernel for some products ("Unsupported element type for DotThunk"). It also has none for
    a result where an axis of one operand lies between two axes of the other: then the axes of each
    operand stay together until a transpose at the end.
    """
    a_axes, b_axes, out = axes_of(spec)
    has_batch = any(axis in a_axes and axis in b_axes for axis in out)
    if has_batch:
        on_cpu = partial(batched_dot, a_axes, b_axes, out)
        default = partial(contraction, a_axes, b_axes, out)
        return jax.lax.platform_dependent(a, b, cpu=on_cpu, default=default)
    for axes in (a_axes, b_axes):
        free = [axis for axis in axes if axis in out]
        if len(free) > 1 and "".join(free) not in out:
            order = "".join(sorted(out, key=lambda axis: axis not in a_axes))
            y = barrier(dot(f"{a_axes},{b_axes}->{order}", a, b))
            return jnp.transpose(y, [order.index(axis) for axis in out])
    if out and out[0] in b_axes:
        a_axes, b_axes, a, b = b_axes, a_axes, b, a
    default = partial(contraction, a_axes, b_axes, out)
    lines = few_lines(a_axes, b_axes, out, a, b)
    if lines is None:
        return default(a, b)
    on_cpu = partial(line_by_line, lines, a_axes, b_axes, out)
    return jax.lax.platform_dependent(a, b, cpu=on_cpu, default=default)


def contraction(a_axes: str, b_axes: str, out: str, a: Array, b: Array) -> Array:
    """The product of a and b, in this order, summed in float32 or better.

    The summed axes keep the order that they have in a. jnp.einsum would sort them by letter, "h"
    before "n", and XLA:CPU would then copy both operands into that order.
    """
    batch = [axis for axis in a_axes if axis in b_axes and axis in out]
    summed = [axis for axis in a_axes if axis in b_axes and axis not in out]

    def axis_numbers(axes):
        return ([a_axes.index(axis) for axis in axes], [b_axes.index(axis) for axis in axes])

    dimensions = axis_numbers(summed), axis_numbers(batch)
    wide = jnp.promote_types(a.dtype, jnp.float32)
    with jax.named_scope(f"{a_axes},{b_axes}->{out}"):
        y = jax.lax.dot_general(a, b, dimensions, preferred_element_type=wide)
        order = batch + [axis for axis in a_axes + b_axes if axis not in batch + summed]
        return jnp.transpose(y, [order.index(axis) for axis in out])


def batched_dot(a_axes: str, b_axes: str, out: str, a: Array, b: Array) -> Array:
    """A product with batch axes, as a product of stacks of matrices.

    The kernels of XLA:CPU take `[batch, m, k]` times `[batch, k, n]` or `[batch, n, k]`. In this
    order the products of attention on `[B, T, N, H]` take half to four fifths of the time of XLA's
    own choice.
    """
    batch = "".join(axis for axis in out if axis in a_axes and axis in b_axes)
    summed = "".join(axis for axis in a_axes if axis not in out)

    def matrix(axes):
        return "".join(axis for axis in axes if axis not in batch)

    def free(axes):
        return "".join(axis for axis in matrix(axes) if axis in out)

    def free_first(axes):
        return free(axes) + summed

    def is_free_first(axes):
        return matrix(axes) == free_first(axes)

    if is_free_first(b_axes) and not is_free_first(a_axes):
        a_axes, b_axes, a, b = b_axes, a_axes, b, a

    def kernel_axes(axes, takes_summed_first):
        summed_first = takes_summed_first and matrix(axes) == summed + free(axes)
        return batch + (matrix(axes) if summed_first else free_first(axes))

    # A first operand [batch, k, m] costs nothing in float32. In 16 bits it is eight times slower
    # than a copy in the order [batch, m, k].
    left = kernel_axes(a_axes, a.dtype.itemsize >= 4)
    right = kernel_axes(b_axes, True)
    order = batch + free(a_axes) + free(b_axes)
    a = in_order_of(a, a_axes, left)
    b = in_order_of(b, b_axes, right)
    if jax.sharding.get_abstract_mesh().size > 1:  # a mesh may split several batch axes
        y = contraction(left, right, order, a, b)
    else:
        y = _contraction_of_joined(len(batch), left, right, order, a, b)
    if order == out:
        return y
    return jnp.transpose(jax.lax.optimization_barrier(y), [order.index(axis) for axis in out])


def _contraction_of_joined(batch_axes: int, a_axes: str, b_axes: str, out: str, a, b) -> Array:
    """`contraction` with the leading batch axes joined to one.

    XLA:CPU folds a transpose of several batch axes into the product, and has no 16-bit kernel for
    that.
    """
    batch_shape = a.shape[:batch_axes]
    batch_size = math.prod(batch_shape)

    def one(axes):
        return axes[0] + axes[batch_axes:]

    a = a.reshape(batch_size, *a.shape[batch_axes:])
    b = b.reshape(batch_size, *b.shape[batch_axes:])
    axes = one(a_axes), one(b_axes), one(out)
    lines = few_lines(*axes, a, b)
    y = contraction(*axes, a, b) if lines is None else line_by_line(lines, *axes, a, b)
    return y.reshape(*batch_shape, *y.shape[1:])


def few_lines(a_axes: str, b_axes: str, out: str, a: Array, b: Array) -> str | None:
    """The axis of a that counts its lines, if a has two to `FEW_LINES` lines of 32 bits or more.

    The lines of b lie in memory one after another: the summed axes are the last ones of b. b is
    small enough to be read for each line. None otherwise, on a mesh, which may split the lines, and
    for a size that `jax.export` leaves open.
    """
    if jax.sharding.get_abstract_mesh().size > 1:
        return None
    if not all(isinstance(n, int) for n in (*a.shape, *b.shape)):
        return None
    summed = [axis for axis in a_axes if axis not in out]
    lines = [axis for axis in a_axes if axis in out and axis not in b_axes]
    long = [axis for axis in lines if a.shape[a_axes.index(axis)] > 1]
    if len(long) != 1 or not summed or not b_axes.endswith("".join(summed)):
        return None
    count = a.shape[a_axes.index(long[0])]
    sizes = zip(b_axes, b.shape, strict=True)
    matrix = math.prod(n for axis, n in sizes if axis in summed or axis not in a_axes)
    bytes_again = (count - 1) * matrix * b.dtype.itemsize
    is_few = count <= FEW_LINES and a.dtype.itemsize >= 4 and bytes_again <= MOST_AGAIN
    return long[0] if is_few else None


def line_by_line(lines: str, a_axes: str, b_axes: str, out: str, a: Array, b: Array) -> Array:
    """`contraction`, one line of a along the axis `lines` after another.

    XLA:CPU hands a product of several lines to threads, and waits for them. A single line it
    multiplies at once: two lines of decoding take half of the time, four of them two thirds.
    """
    place = a_axes.index(lines)
    each = [jax.lax.slice_in_dim(a, i, i + 1, axis=place) for i in range(a.shape[place])]
    products = [contraction(a_axes, b_axes, out, line, b) for line in each]
    return jnp.concatenate(products, axis=out.index(lines))


def in_order_of(x, axes: str, order: str):
    """x with its axes in this order.

    A barrier keeps the compiler from folding the transpose into the product.
    """
    if axes == order:
        return x
    return jax.lax.optimization_barrier(jnp.transpose(x, [axes.index(axis) for axis in order]))


def weight_gradient(spec, x, g):
    """The gradient of a weight, x^T g.

    XLA:CPU transposes the operand that has the leading axes of the result, on one thread. So
    without batch axes the smaller of x and g has them. The result is small and is transposed
    afterwards.
    """
    x_axes, g_axes, out = axes_of(spec)
    if any(axis in x_axes and axis in g_axes for axis in out):
        return barrier(dot(spec, x, g))
    (small, b), (large, a) = sorted([(x_axes, x), (g_axes, g)], key=lambda operand: operand[1].size)
    # the axes of the small operand first; `sorted` is stable
    order = "".join(sorted(out, key=lambda axis: axis not in small))
    y = barrier(contraction(small, large, order, b, a))
    return y if order == out else jnp.transpose(y, [order.index(axis) for axis in out])


def lines_product(x: Array, values: Array) -> Array:
    """x `[M, K]` times values `[N, K]`, summed in float32 or better."""
    # XLA:CPU has no kernel for one line of 16 bits, and a fast one for two
    lines = jnp.resize(x, (2, x.shape[1])) if len(x) == 1 and x.dtype.itemsize < 4 else x
    return dot("mk,nk->mn", lines, values)[: len(x)]


def int8_product(x: Array, values: Array) -> Array:
    """x times int8 values, as products of int8.

    Each line of x is unit * (high + low / 254), with int8 `high` and `low`: x to 16 bits.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    unit = jnp.maximum(jnp.max(jnp.abs(x.astype(wide)), axis=1, keepdims=True), 1e-30) / 127
    x = x.astype(wide) / unit
    high = jnp.round(x)
    lines = jnp.concatenate([high, jnp.round((x - high) * 254)]).astype(jnp.int8)
    y = jnp.einsum("mk,nk->mn", lines, values, preferred_element_type=jnp.int32).astype(wide)
    return (y[: len(x)] + y[len(x) :] / 254) * unit
