"""Weights as decoding reads them: transposed for the product, in 8 bits, or in blocks of 4 bits.

8-bit weights have a scale for each output channel, blocks have a scale each (`ops.quantised`).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jaxtyping import Float, Int, Int8

from jaxformer.ops import cpu
from jaxformer.ops.quantised import dequantise, quantise

# For at most this many rows of x, XLA:CPU is faster with int8 operands than with a weight that it
# first converts to float32.
FEW_ROWS = 128


@struct.dataclass
class StoredWeight:
    """A weight as decoding reads it: `values` are its `transpose(order)`.

    The last axes of `values` are those that products sum over. For int8 `values` the weight is
    values * scale, with a scale for each output channel (the axes that are not summed over).
    """

    values: Any
    order: tuple[int, ...] = struct.field(pytree_node=False)
    scale: Any = None

    ndim = property(lambda self: len(self.order))

    def look_up(self, index: Int[Array, "..."], dtype) -> Float[Array, "... D"]:
        """table[index], if the weight is a table `[V, D]`; NaN for an index outside of it."""
        # jnp.take would count negative indices from the end
        index = jnp.where(index < 0, len(self.values), index)
        embeddings = jnp.take(self.values, index, axis=0).astype(dtype)
        if self.scale is None:
            return embeddings
        return embeddings * jnp.take(self.scale, index)[..., None].astype(dtype)


@struct.dataclass
class BlockWeight:
    """A weight in blocks of few bits: `codes` and `scales` are its `transpose(order)`, quantised.

    Blocks run along the axes that products sum over, so that each output has blocks of its own.
    """

    codes: Any  # [outputs, blocks, bytes]
    scales: Any  # [outputs, blocks]
    form: Any = struct.field(pytree_node=False)  # such as ops.quantised.NF4()
    order: tuple[int, ...] = struct.field(pytree_node=False)
    stored_shape: tuple[int, ...] = struct.field(pytree_node=False)  # of `transpose(order)`

    ndim = property(lambda self: len(self.order))

    def wide(self, dtype) -> StoredWeight:
        """The same weight in `dtype`."""
        inputs = math.prod(self.stored_shape) // len(self.scales)
        values = dequantise(self.codes, self.scales, self.form, inputs)
        return StoredWeight(values.astype(dtype).reshape(self.stored_shape), self.order)

    def look_up(self, index: Int[Array, "..."], dtype) -> Float[Array, "... D"]:
        """table[index], if the weight is a table `[V, D]`; NaN for an index outside of it."""
        # jnp.take would count negative indices from the end
        index = jnp.where(index < 0, len(self.scales), index)
        codes = jnp.take(self.codes, index, axis=0)
        scales = jnp.take(self.scales, index, axis=0)  # NaN outside
        return dequantise(codes, scales, self.form, self.stored_shape[1]).astype(dtype)


def block_weight(
    w: Float[Array, "..."], order: tuple[int, ...], summed: int, form: Any
) -> BlockWeight:
    """w in blocks of a format of `ops.quantised`.

    Products sum over the last `summed` axes of `order`.
    """
    stored = w.transpose(order)
    outputs = math.prod(stored.shape[: w.ndim - summed])
    codes, scales = quantise(stored.reshape(outputs, -1), form)
    return BlockWeight(codes, scales, form, order, stored.shape)


def to_int8(
    x: Float[Array, "..."], axes: tuple[int, ...]
) -> tuple[Int8[Array, "..."], Float[Array, "..."]]:
    """x as values * scale, with values in 8 bits.

    scale = max |x| / 127 over `axes`, which stay with size 1, in float32.
    """
    largest = jnp.max(jnp.abs(x), axis=axes, keepdims=True).astype(jnp.float32)
    scale = jnp.maximum(largest, 1e-30) / 127
    return jnp.round(x / scale).astype(jnp.int8), scale


def int8_weight(w: Float[Array, "..."], order: tuple[int, ...], summed: int) -> StoredWeight:
    """w in 8 bits, with a scale max |w| / 127 for each output channel.

    Products sum over the last `summed` axes of `order`.
    """
    axes = tuple(range(w.ndim - summed, w.ndim))
    values, scale = to_int8(w.transpose(order), axes)
    return StoredWeight(values, order, scale.squeeze(axes))


def stored_product(spec: str, x: Array, w: StoredWeight | BlockWeight) -> Array:
    """x times a stored weight. If x has few rows, this takes the time of reading the weight."""
    if isinstance(w, BlockWeight):
        w = w.wide(x.dtype)
    x_axes, w_axes, out = cpu.axes_of(spec)
    summed = [axis for axis in w_axes if axis not in out]
    values_axes = [w_axes[i] for i in w.order]
    x_shape = _shape_without(summed, x_axes, x.shape)
    w_shape = _shape_without(summed, values_axes, w.values.shape)
    values = w.values.reshape(math.prod(w_shape), -1)
    x = x.reshape(math.prod(x_shape), values.shape[1])
    if w.scale is None:
        y = cpu.lines_product(x, values.astype(x.dtype))
    else:
        on_cpu = cpu.int8_product if len(x) <= FEW_ROWS else _converted_product
        y = jax.lax.platform_dependent(x, values, cpu=on_cpu, default=_converted_product)
        y = y * w.scale.reshape(1, -1)
    return y.reshape(*x_shape, *w_shape)


def _shape_without(summed, axes, shape: tuple[int, ...]) -> list[int]:
    """The sizes of the axes that are not summed over."""
    return [size for size, axis in zip(shape, axes, strict=True) if axis not in summed]


def _converted_product(x: Array, values: Array) -> Array:
    """x times int8 values that are converted to the dtype of x.

    Without the barrier XLA:CPU would convert them in a slow loop.
    """
    return cpu.lines_product(x, cpu.barrier(values.astype(x.dtype)))


def plain_matrix(w: Array | StoredWeight | BlockWeight, dtype) -> Array:
    """A weight of decoding as an array, for products over another axis than it is stored for."""
    if isinstance(w, BlockWeight):
        w = w.wide(dtype)
    if not isinstance(w, StoredWeight):
        return w
    values = w.values
    if w.scale is not None:
        values = values * w.scale[..., None]
    return values.transpose([w.order.index(axis) for axis in range(values.ndim)])
