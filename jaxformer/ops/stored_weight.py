"""Weights as decoding reads them: in the order of a product, or in 8 bits with a scale for each output channel."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jaxtyping import Float, Int, Int8

from jaxformer.ops import cpu

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

    def look_up(self, index: Int[Array, "..."], dtype) -> Float[Array, "... D"]:
        """Rows of a table [V, D], which a look-up reads; NaN outside it."""
        index = jnp.where(index < 0, len(self.values), index)  # jnp.take would count negative ones from the end
        embeddings = jnp.take(self.values, index, axis=0).astype(dtype)
        return embeddings if self.scale is None else embeddings * jnp.take(self.scale, index)[..., None].astype(dtype)


def to_int8(x: Float[Array, "..."], axes: tuple[int, ...]) -> tuple[Int8[Array, "..."], Float[Array, "..."]]:
    """x as values * scale: values in 8 bits, and max |x| / 127 over these axes, which stay with size 1, in float32."""
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=axes, keepdims=True).astype(jnp.float32), 1e-30) / 127
    return jnp.round(x / scale).astype(jnp.int8), scale


def int8_weight(w: Float[Array, "..."], order: tuple[int, ...], summed: int) -> StoredWeight:
    """w in 8 bits, with a scale max |w| / 127 for each output channel; the last `summed` axes of `order` are summed over."""
    axes = tuple(range(w.ndim - summed, w.ndim))
    values, scale = to_int8(w.transpose(order), axes)
    return StoredWeight(values, order, scale.squeeze(axes))


def stored_product(spec: str, x: Array, w: StoredWeight) -> Array:
    """x times a weight of decoding. Where x has few rows, the time is that of reading the weight."""
    x_axes, w_axes, out = cpu.axes_of(spec)
    summed = [axis for axis in w_axes if axis not in out]
    rows, columns = (
        tuple(n for n, axis in zip(shape, axes, strict=True) if axis not in summed)
        for shape, axes in ((x.shape, x_axes), (w.values.shape, [w_axes[i] for i in w.order]))
    )
    values = w.values.reshape(math.prod(columns), -1)
    x = x.reshape(math.prod(rows), values.shape[1])
    if w.scale is None:
        y = cpu.lines_product(x, values.astype(x.dtype))
    else:

        def wide(x, values):
            return cpu.lines_product(x, cpu.barrier(values.astype(x.dtype)))  # XLA:CPU would convert in a slow loop

        on_cpu = cpu.int8_product if len(x) <= FEW_ROWS else wide
        y = jax.lax.platform_dependent(x, values, cpu=on_cpu, default=wide) * w.scale.reshape(1, -1)
    return y.reshape(*rows, *columns)
