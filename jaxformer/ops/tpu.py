"""Operations in forms that XLA:TPU computes with less traffic.

Their numbers are those of the plain forms, up to one rounding. Other platforms gain nothing from
them. Only `ops` reads this file. Measurements stand in experiments/bench/LOG.md.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from jaxformer.ops.einsum import reverse_mode_alone


def rotated(
    x: Float[Array, "B T N H"],
    cos: Float[Array, "#B T 1 R"],
    sin: Float[Array, "#B T 1 R"],
    layout: str,
) -> Float[Array, "B T N H"]:
    """`positions.rotated_pairs`, as x cos + (x S) sin over whole heads.

    A row of a TPU's registers holds 128 numbers. XLA writes a head of 128 that is split into halves
    as arrays of 64, each of which takes the room of 128, and copies them together again. S puts
    the other feature of each pair, with its sign, in the place of a feature: a product, which keeps
    the head whole. The gradient is the rotation by the negative angle; cos and sin have none.
    Raises NotImplementedError in forward mode.
    """
    rest = x.shape[-1] - 2 * cos.shape[-1]

    def of_features(of_pairs: Array, of_rest: float) -> Array:
        """Numbers of pairs as numbers of all features of a head."""
        if layout == "half":
            each = jnp.concatenate([of_pairs, of_pairs], axis=-1)
        else:
            each = jnp.repeat(of_pairs, 2, axis=-1)
        return jnp.pad(each, [(0, 0)] * 3 + [(0, rest)], constant_values=of_rest)

    pairs = cos.shape[-1]
    with reverse_mode_alone("rope on TPU"):
        return _rotated(layout, pairs, x, of_features(cos, 1.0), of_features(sin, 0.0))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rotated(layout: str, pairs: int, x: Array, cos: Array, sin: Array) -> Array:
    """x cos + (x S) sin, in float32 or better."""
    other = signed_swap(layout, pairs, x.shape[-1])
    # Each sum has one term that is not 0. A TPU multiplies in bfloat16; other numbers need several
    # passes to keep all their bits.
    precision = None if x.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    swapped = jnp.matmul(
        x, jnp.asarray(other, x.dtype), precision=precision, preferred_element_type=cos.dtype
    )
    return (x.astype(cos.dtype) * cos + swapped * sin).astype(x.dtype)


def _forward(layout: str, pairs: int, x: Array, cos: Array, sin: Array) -> tuple[Array, tuple]:
    return _rotated(layout, pairs, x, cos, sin), (cos, sin)


def _backward(layout: str, pairs: int, angles: tuple[Array, Array], gradient: Array) -> tuple:
    cos, sin = angles
    return _rotated(layout, pairs, gradient, cos, -sin), None, None


_rotated.defvjp(_forward, _backward)


def signed_swap(layout: str, pairs: int, width: int) -> np.ndarray:
    """S, `[width, width]`: x S has -b for a and a for b of each pair (a, b), and 0 for the rest."""
    i = np.arange(pairs)
    a, b = (i, i + pairs) if layout == "half" else (2 * i, 2 * i + 1)
    matrix = np.zeros((width, width), np.float32)
    matrix[b, a] = -1
    matrix[a, b] = 1
    return matrix
