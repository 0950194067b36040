"""The one door for every matrix product of a model."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int, Int8

from jaxformer.sharding import alike, auto_axes, mesh_axes, psum, reduce_scatter

_LOGICAL = {"b": "batch", "t": "length", "n": "heads", "f": "mlp", "v": "vocab"}  # of the letters that a mesh may split
PRODUCT = "product"  # the name, for `jax.checkpoint_policies`, of a product with a weight
FEW_ROWS = 128  # up to here XLA:CPU is faster with int8 operands than with a weight that it first makes float32


@struct.dataclass
class StoredWeight:
    """A weight as decoding reads it: its `transpose(order)`, whose last axes are those that products sum over.

    Of int8 `values` the weight is values * scale, with a scale for each output channel (the axes that are not summed over).
    """

    values: Any
    order: tuple[int, ...] = struct.field(pytree_node=False)
    scale: Any = None

    ndim = property(lambda self: len(self.order))

    def rows(self, index: Int[Array, "..."], dtype) -> Float[Array, "... D"]:
        """Rows of a table [V, D], which a look-up reads; NaN outside it."""
        index = jnp.where(index < 0, len(self.values), index)  # jnp.take would count negative ones from the end
        rows = jnp.take(self.values, index, axis=0).astype(dtype)
        return rows if self.scale is None else rows * jnp.take(self.scale, index)[..., None].astype(dtype)


def to_int8(x: Float[Array, "..."], axes: tuple[int, ...]) -> tuple[Int8[Array, "..."], Float[Array, "..."]]:
    """x as values * scale: values in 8 bits, and max |x| / 127 over these axes, which stay with size 1, in float32."""
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=axes, keepdims=True).astype(jnp.float32), 1e-30) / 127
    return jnp.round(x / scale).astype(jnp.int8), scale


def int8_weight(w: Float[Array, "..."], order: tuple[int, ...], summed: int) -> StoredWeight:
    """w in 8 bits, with a scale max |w| / 127 for each output channel; the last `summed` axes of `order` are summed over."""
    axes = tuple(range(w.ndim - summed, w.ndim))
    values, scale = to_int8(w.transpose(order), axes)
    return StoredWeight(values, order, scale.squeeze(axes))


Weight = Float[Array, "..."] | StoredWeight


def _result_spec(_, spec: str, x: Array, w: Array, *args, **kwargs) -> P:
    """The result's axes are split as x's are, else as w's, each mesh axis once."""
    x_axes, w_axes, out = _axes(spec)
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
        return _stored_product(spec, x.astype(narrow), w).astype(dtype)
    if narrow.itemsize > 4 and not _scattered(spec, x, w):
        y = jnp.einsum(spec, x.astype(narrow), w.astype(narrow)).astype(dtype)
    else:
        with reverse_mode_alone("einsum"):
            y = _product(spec, narrow, dtype, (x.dtype, w.dtype), *alike(x, w))
    x_axes, w_axes, out = _axes(spec)
    has_batch = any(axis in x_axes and axis in w_axes for axis in out)
    # a policy of remat that keeps the product by this name keeps it in `dtype`, not the float32 sums that are rounded to it
    return y if has_batch else checkpoint_name(y, PRODUCT)


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


def _stored_product(spec: str, x: Array, w: StoredWeight) -> Array:
    """x times a weight of decoding. Where x has few rows, the time is that of reading the weight."""
    x_axes, w_axes, out = _axes(spec)
    summed = [axis for axis in w_axes if axis not in out]
    rows, columns = (
        tuple(n for n, axis in zip(shape, axes, strict=True) if axis not in summed)
        for shape, axes in ((x.shape, x_axes), (w.values.shape, [w_axes[i] for i in w.order]))
    )
    values = w.values.reshape(math.prod(columns), -1)
    x = x.reshape(math.prod(rows), values.shape[1])
    if w.scale is None:
        y = _lines_product(x, values.astype(x.dtype))
    else:

        def wide(x, values):
            return _lines_product(x, cpu_barrier(values.astype(x.dtype)))  # XLA:CPU would convert in a slow loop

        on_cpu = _int8_product if len(x) <= FEW_ROWS else wide
        y = jax.lax.platform_dependent(x, values, cpu=on_cpu, default=wide) * w.scale.reshape(1, -1)
    return y.reshape(*rows, *columns)


def _lines_product(x: Array, values: Array) -> Array:
    # XLA:CPU has no kernel for one row of 16 bits, and a fast one for two
    lines = jnp.resize(x, (2, x.shape[1])) if len(x) == 1 and x.dtype.itemsize < 4 else x
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.einsum("mk,nk->mn", lines, values, preferred_element_type=wide)[: len(x)]


def _int8_product(x: Array, values: Array) -> Array:
    """x times int8 values, as products of int8: x is high + low / 254, in units of its rows, which is x to 16 bits."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    unit = jnp.maximum(jnp.max(jnp.abs(x.astype(wide)), axis=1, keepdims=True), 1e-30) / 127
    x = x.astype(wide) / unit
    high = jnp.round(x)
    lines = jnp.concatenate([high, jnp.round((x - high) * 254)]).astype(jnp.int8)
    y = jnp.einsum("mk,nk->mn", lines, values, preferred_element_type=jnp.int32).astype(wide)
    return (y[: len(x)] + y[len(x) :] / 254) * unit


# Autodiff would multiply a float32 cotangent by a bfloat16 operand, which on CPU is five times slower; leave the gradient of
# a float32 weight in an order that XLA:CPU transposes on one thread, which costs a step a third; and on a mesh sum a whole
# gradient everywhere.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _product(spec, narrow, dtype, dtypes, x, w):
    return _dot(spec, x.astype(narrow), w.astype(narrow)).astype(dtype)


def _forward(spec, narrow, dtype, dtypes, x, w):
    x, w = x.astype(narrow), w.astype(narrow)
    return _dot(spec, x, w).astype(dtype), (x, w)


def _backward(spec, narrow, dtype, dtypes, residuals, g):
    x, w = residuals
    return einsum_gradients(spec, x, w, g, dtypes)


def einsum_gradients(
    spec: str, x: Float[Array, "..."], w: Float[Array, "..."], g: Float[Array, "..."], dtypes: tuple[Any, Any]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """The gradients of x and w, in these two dtypes, from the cotangent g of `einsum(spec, x, w)`; x and w have one dtype."""
    x_axes, w_axes, out = _axes(spec)
    g = g.astype(x.dtype)
    batch = "".join(axis for axis in out if axis in x_axes and axis in w_axes)
    # g may be the transpose of a product that was made batch first; folded together, they have no kernel on CPU
    dx = _dot(f"{out},{w_axes}->{x_axes}", g if out.startswith(batch) else cpu_barrier(g), w)
    axes = _scattered(spec, x, w)
    dw = _scattered_gradient(spec, axes, dtypes[1], x, g) if axes else _gradient(f"{x_axes},{out}->{w_axes}", x, g)
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


def _axes(spec: str) -> tuple[str, str, str]:
    inputs, out = spec.replace(" ", "").split("->")
    a, b = inputs.split(",")
    return a, b, out


def _in_order(x, axes: str, order: str):
    """x with its axes in this order, behind a barrier: the compiler would fold the transpose into the product."""
    return x if axes == order else jax.lax.optimization_barrier(jnp.transpose(x, [axes.index(axis) for axis in order]))


def _dot(spec, a, b):
    """The product, summed in float32 or better. The operand that has the result's first free axis goes first."""
    # In the other order XLA:CPU has no kernel for some products ("Unsupported element type for DotThunk"); nor where an axis of
    # the other operand lies between two free ones: then each operand's axes are together until the end.
    a_axes, b_axes, out = _axes(spec)
    if any(axis in a_axes and axis in b_axes for axis in out):
        on_cpu, default = (partial(function, a_axes, b_axes, out) for function in (_batched_dot, _contraction))
        return jax.lax.platform_dependent(a, b, cpu=on_cpu, default=default)
    for axes in (a_axes, b_axes):
        free = [axis for axis in axes if axis in out]
        if len(free) > 1 and "".join(free) not in out:
            order = "".join(sorted(out, key=lambda axis: axis not in a_axes))
            y = cpu_barrier(_dot(f"{a_axes},{b_axes}->{order}", a, b))
            return jnp.transpose(y, [order.index(axis) for axis in out])
    if out and out[0] in b_axes:
        a_axes, b_axes, a, b = b_axes, a_axes, b, a
    return _contraction(a_axes, b_axes, out, a, b)


def _contraction(a_axes: str, b_axes: str, out: str, a: Array, b: Array) -> Array:
    """The product of a and b in this order, summed in float32 or better, over axes in the order that they have in a.

    jnp.einsum would sort these axes by letter, "h" before "n", and XLA:CPU would then write both operands in that order.
    """
    batch = [axis for axis in a_axes if axis in b_axes and axis in out]
    summed = [axis for axis in a_axes if axis in b_axes and axis not in out]

    def places(axes):
        return ([a_axes.index(axis) for axis in axes], [b_axes.index(axis) for axis in axes])

    with jax.named_scope(f"{a_axes},{b_axes}->{out}"):
        wide = jnp.promote_types(a.dtype, jnp.float32)
        y = jax.lax.dot_general(a, b, (places(summed), places(batch)), preferred_element_type=wide)
        order = batch + [axis for axis in a_axes + b_axes if axis not in batch + summed]
        return jnp.transpose(y, [order.index(axis) for axis in out])


def _batched_dot(a_axes: str, b_axes: str, out: str, a: Array, b: Array) -> Array:
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
    a, b = _in_order(a, a_axes, left), _in_order(b, b_axes, right)
    if jax.sharding.get_abstract_mesh().size > 1:  # which may split several of the batch axes
        y = _contraction(left, right, order, a, b)
    else:  # XLA:CPU folds a transpose of several batch axes into the product, and has no 16-bit kernel for that

        def one(axes):
            return batch[0] + axes[len(batch) :]

        def joined(x):
            return x.reshape(math.prod(x.shape[: len(batch)]), *x.shape[len(batch) :])

        y = _contraction(one(left), one(right), one(order), joined(a), joined(b)).reshape([sizes[axis] for axis in order])
    return y if order == out else jnp.transpose(jax.lax.optimization_barrier(y), [order.index(axis) for axis in out])


def _gradient(spec, x, g):
    """The gradient of a weight, x^T g. Without batch axes, the smaller of x and g has the result's leading axes."""
    # XLA:CPU transposes the operand that has them, on one thread. The result is small: it is transposed afterwards instead.
    x_axes, g_axes, out = _axes(spec)
    if any(axis in x_axes and axis in g_axes for axis in out):
        return cpu_barrier(_dot(spec, x, g))
    (small, b), (large, a) = sorted([(x_axes, x), (g_axes, g)], key=lambda operand: operand[1].size)
    order = "".join(sorted(out, key=lambda axis: axis not in small))  # stable: the small operand's axes first
    y = cpu_barrier(_contraction(small, large, order, b, a))
    return y if order == out else jnp.transpose(y, [order.index(axis) for axis in out])


def _scattered(spec: str, x: Array, w: Array) -> dict[str, tuple[str, ...]]:
    """The mesh axes of each axis of a product whose weight `[D, ...]` has a gradient that `fsdp` splits; else none."""
    x_axes, w_axes, _ = _axes(spec)
    sizes = dict(zip(x_axes + w_axes, x.shape + w.shape, strict=True))
    if "d" not in w_axes or "b" not in set(x_axes) - set(w_axes) or set(x_axes) - {*w_axes, "b", "t"}:
        return {}
    axes = {letter: mesh_axes(name, sizes[letter]) for letter, name in _LOGICAL.items() if letter in sizes}
    mesh = jax.sharding.get_abstract_mesh()
    divides = "fsdp" in axes["b"] and "stage" not in axes["b"] and sizes["d"] % mesh.shape["fsdp"] == 0
    return axes if divides else {}


def _scattered_gradient(spec: str, axes: dict[str, tuple[str, ...]], dtype, x, g):
    """The gradient of a weight, summed over devices in `dtype`, of which each device of `fsdp` keeps its rows of `d`.

    Left to itself, the partitioner sums the whole gradient on every device first, which moves twice as much.
    """
    x_axes, w_axes, out = _axes(spec)
    order = "".join(sorted(w_axes, key=lambda axis: axis != "d"))  # TPUs scatter a leading axis
    others = [name for letter in "bt" for name in axes.get(letter, ()) if name != "fsdp"]

    def on_each(x, g):
        part = reduce_scatter(_gradient(f"{x_axes},{out}->{order}", x, g).astype(dtype), "fsdp")
        return psum(part, others) if others else part

    def split(letters):
        return P(*(axes.get(letter) or None for letter in letters))

    manual = frozenset(name for names in axes.values() for name in names)
    specs = dict(in_specs=(split(x_axes), split(out)), out_specs=P("fsdp", *split(order)[1:]))
    dw = jax.shard_map(on_each, **specs, axis_names=manual, check_vma=False)(x, g)
    return jnp.transpose(dw, [order.index(axis) for axis in w_axes])


def cpu_barrier(x: Array) -> Array:
    """x. On CPU a barrier keeps later transposes from being folded back into the product that made x, or that reads it."""
    return jax.lax.platform_dependent(x, cpu=jax.lax.optimization_barrier, default=lambda x: x)
