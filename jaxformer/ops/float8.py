"""Products in 8-bit floats: each operand is rounded by one scale, and the sum is in float32.

    x ~ sx X,  w ~ sw W,  y = sx sw (X W),   sx = max |x| / 448

X and W are float8_e4m3fn (largest number 448), gradients are float8_e5m2 (57,344): Micikevicius et
al. 2022, arXiv:2209.05433, sections 3 and 4. The scale is that of the present tensor, so nothing is
remembered from earlier steps. Operands are converted to bfloat16 in front of the product. This
changes no number. XLA:GPU takes the conversion as its sign to run the product in 8 bits.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jaxtyping import Float

from jaxformer.errors import ConfigError
from jaxformer.ops import cpu
from jaxformer.ops.einsum_gradients import einsum_gradients
from jaxformer.params import Spec, Tree

OPERAND, GRADIENT = jnp.float8_e4m3fn, jnp.float8_e5m2
KEPT = {"expert", "vocab", "length"}  # a weight with such an axis keeps its precision


class ReadDirectly(ConfigError, AttributeError):
    """A part of a model reads a weight by other means than `ops.einsum`."""


@struct.dataclass
class Float8Weight:
    """A weight whose products `ops.einsum` computes in 8 bits. Its gradient has its own dtype."""

    values: Any

    shape = property(lambda self: self.values.shape)
    ndim = property(lambda self: self.values.ndim)
    dtype = property(lambda self: self.values.dtype)

    def map_values(self, function) -> "Float8Weight":
        """The weight with `function(values)`: a cast, or a gather over devices."""
        return Float8Weight(function(self.values))

    def __getattr__(self, name: str) -> Any:
        raise ReadDirectly(
            f"precision=float8: a part of the model reads .{name} of a weight; expected ops.einsum "
            "or models.layer.linear; precision=bfloat16 has no such limit"
        )

    def __jax_array__(self) -> Array:
        return self.as_an_array


def with_float8_weights(spec: Tree, params: Tree) -> Tree:
    """The parameters, with the matrices of layers as `Float8Weight`.

    Embeddings, heads, routers, routed experts and maps over positions keep their precision.
    """
    return jax.tree.map(_wrapped, spec, params)


def _wrapped(spec: Spec, leaf: Array) -> Array | Float8Weight:
    is_of_layer = "layers" in spec.axes and not set(spec.axes) & KEPT
    return Float8Weight(leaf) if is_of_layer and spec.contracts and spec.trained else leaf


def in_float8(x: Float[Array, "..."], dtype) -> tuple[Float[Array, "..."], Float[Array, ""]]:
    """(X, s) with x ~ s X: X has this dtype of 8 bits, and s = max |x| / its largest number.

    NaN and infinity in x make all of X NaN or 0.
    """
    largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
    scale = largest / float(jnp.finfo(dtype).max)
    scale = jnp.where(scale == 0, 1, scale)  # all values are 0, or too small for their scale
    return (x.astype(jnp.float32) / scale).astype(dtype), scale


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def float8_product(spec, narrow, dtype, dtypes, x, w):
    """einsum(spec, x, w) in `dtype`, of operands that are cast to `narrow` and rounded to 8 bits.

    The gradients have the `dtypes`, those of x and w.
    """
    return _forward(spec, narrow, dtype, dtypes, x, w)[0]


def _forward(spec, narrow, dtype, dtypes, x, w):
    x, x_scale = in_float8(x.astype(narrow), OPERAND)
    w, w_scale = in_float8(w.astype(narrow), OPERAND)
    y = cpu.dot(spec, _wide(x), _wide(w)) * (x_scale * w_scale)
    return y.astype(dtype), (x, x_scale, w, w_scale)


def _backward(spec, narrow, dtype, dtypes, residuals, g):
    x, x_scale, w, w_scale = residuals
    x_dtype, w_dtype = dtypes
    g, g_scale = in_float8(g, GRADIENT)
    dx, dw = einsum_gradients(spec, _wide(x), _wide(w), _wide(g), (jnp.float32, w_dtype))
    dx = dx * (g_scale * w_scale)
    return dx.astype(x_dtype), dw * (g_scale * x_scale).astype(w_dtype)


float8_product.defvjp(_forward, _backward)


def _wide(x: Array) -> Array:
    """The same numbers in bfloat16."""
    return x.astype(jnp.bfloat16)
