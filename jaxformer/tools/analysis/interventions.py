"""What a part of a model is for: gradients with respect to intermediates, and the loss without each head.

To patch or to steer is an edit of `apply` alone: edits={"layers/3/residual": lambda x, layer: x + direction}.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxformer import models

Loss = Callable[[models.Output], Array]


def gradients(config: Any, params: Any, tokens: Array, loss: Loss, names: Sequence[str], **options) -> dict[str, Array]:
    """d loss(apply(...)) / d value for each name of `models.intermediates`; `options` are those of `apply`.

    A gradient has the shape of its value; of a name with *, those of all layers, `[L, ...]`.
    """

    def run(**more):
        return models.apply(config, params, tokens, **options, **more)

    shapes = jax.eval_shape(lambda: run(intermediates=tuple(names)).intermediates)

    def shifted(shifts: dict[str, Array]) -> Array:
        def add(name):
            return lambda value, layer: value + (shifts[name][layer] if "*" in name else shifts[name])

        return loss(run(edits={name: add(name) for name in shifts}))

    return jax.grad(shifted)({name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in shapes.items()})


def head_ablation(
    config: Any, params: Any, tokens: Array, loss: Loss, name: str = "layers/*/attention/heads", **options
) -> Float[Array, "L N"]:
    """The loss without a head minus the loss with all, for each head. Michel et al. 2019, arXiv:1905.10650, section 3."""

    def run(**more):
        return models.apply(config, params, tokens, **options, **more)

    L, N = jax.eval_shape(lambda: run(intermediates=(name,)).intermediates)[name].shape[0::3]

    def without(number: Array) -> Array:
        def silence(heads, layer):
            return heads.at[:, :, number % N].multiply(jnp.where(layer == number // N, 0, 1).astype(heads.dtype))

        return loss(run(edits={name: silence}))

    return jax.lax.map(without, jnp.arange(L * N)).reshape(L, N) - loss(run())
