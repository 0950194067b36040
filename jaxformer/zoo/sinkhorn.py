"""Answers that use all directions alike, by the iteration of Sinkhorn and Knopp.

SwAV: Caron et al. 2020, arXiv:2006.09882. For the teacher of `zoo.dino` since DINOv2.
"""

import jax.numpy as jnp
from jax import Array
from jax.scipy.special import logsumexp
from jaxtyping import Float

ITERATIONS = 3


def balanced(
    scores: Float[Array, "W B K"],
    centre: Float[Array, " K"],
    weights: Float[Array, " B"],
    temperature: float,
) -> Float[Array, "W B K"]:
    """exp(s / T), scaled until the images of a batch use all directions alike.

    Sinkhorn and Knopp: three times in turn, each direction is divided by its sum over images and
    views, and each answer by its sum over directions. The centre has no effect; images of weight 0
    have none and may be NaN. Caron et al. 2020, arXiv:2006.09882, section 3.2; for a teacher Oquab
    et al. 2023, arXiv:2304.07193, section 4.
    """
    tiny = jnp.finfo(scores.dtype).tiny
    is_image = weights[None, :, None] > 0
    logs = jnp.where(is_image, scores / temperature, 0)
    counted = jnp.where(is_image, weights[None, :, None], tiny)
    for _ in range(ITERATIONS):
        logs -= logsumexp(logs, axis=(0, 1), b=counted, keepdims=True)
        logs -= logsumexp(logs, axis=2, keepdims=True)
    return jnp.exp(logs)
