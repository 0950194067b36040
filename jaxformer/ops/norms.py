"""Normalisations over the model axis, in float32 with the two-pass variance."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from jaxformer.ops.einsum import in_float32
from jaxformer.sharding import platform


def layer_norm(
    x: Float[Array, "*rest D"],
    scale: Float[Array, " D"] | None,
    bias: Float[Array, " D"] | None = None,
    eps: float = 1e-5,
) -> Float[Array, "*rest D"]:
    """(x - mean) / sqrt(var + eps) * scale + bias, with the biased variance.

    Without a scale it is 1. Statistics are float32 or wider. The variance takes two passes: the
    one-pass form E[x^2] - E[x]^2 would lose all digits if the mean is large. Ba et al. 2016,
    arXiv:1607.06450, eq. 4.
    """
    return _computed_again(_layer_norm)(x, scale, bias, eps)


def rms_norm(
    x: Float[Array, "*rest D"], scale: Float[Array, " D"] | None, eps: float = 1e-6
) -> Float[Array, "*rest D"]:
    """x / sqrt(mean(x^2) + eps) * scale.

    Without a scale it is 1. Statistics are float32 or wider. Zhang & Sennrich 2019,
    arXiv:1910.07467, eq. 4.
    """
    return _computed_again(_rms_norm)(x, scale, eps)


def _layer_norm(x, scale, bias, eps):
    ones = _unit_axes(x)
    y = jnp.squeeze(in_float32(x), ones)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
    if scale is not None:
        y = y * _as_vector(scale, y)
    if bias is not None:
        y = y + _as_vector(bias, y)
    return jnp.expand_dims(y.astype(x.dtype), ones)


def _rms_norm(x, scale, eps):
    ones = _unit_axes(x)
    y = jnp.squeeze(in_float32(x), ones)
    y = y * lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
    if scale is not None:
        y = y * _as_vector(scale, y)
    return jnp.expand_dims(y.astype(x.dtype), ones)


def _computed_again(norm: Callable) -> Callable:
    """The norm. On an accelerator its backward pass computes it again from x, which is kept anyway.

    Autodiff would keep float32 arrays as large as x, which a scan writes to memory. A CPU takes
    longer to compute them again than to read them.
    """
    return norm if platform() == "cpu" else jax.checkpoint(norm, prevent_cse=False)


def _as_vector(vector, like):
    return vector.astype(like.dtype).reshape((1,) * (like.ndim - 1) + vector.shape)


def _unit_axes(x) -> tuple[int, ...]:
    """The leading axes of size 1, such as a batch of one.

    With such axes XLA:CPU takes ten times as long for the gradient of a scale.
    """
    return tuple(i for i, n in enumerate(x.shape[:-1]) if n == 1)
