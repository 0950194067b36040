"""Gradients with respect to intermediates of a model, and the loss without each attention head.

Patching and steering need no function of this file. They are edits of `models.apply`:
edits={"layers/3/residual": lambda x, layer: x + direction}.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxformer import models
from jaxformer.errors import ConfigError

Loss = Callable[[models.Output], Array]


def gradients(
    config: Any, params: Any, tokens: Array, loss: Loss, names: Sequence[str], **options
) -> dict[str, Array]:
    """d loss(apply(...)) / d value for each intermediate in `names` (see `models.intermediates`).

    A gradient has the shape of its value; for a name with * it holds all layers, `[L, ...]`.
    `options` are passed to `models.apply`, whose `edits` and `intermediates` this function sets.
    """

    def run(**edited):
        return models.apply(config, params, tokens, **options, **edited)

    shapes = jax.eval_shape(lambda: run(intermediates=tuple(names)).intermediates)

    def loss_of(shifts: dict[str, Array]) -> Array:
        edits = {
            name: partial(_add_of_layer if "*" in name else _add, shift)
            for name, shift in shifts.items()
        }
        return loss(run(edits=edits))

    zeros = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in shapes.items()}
    return jax.grad(loss_of)(zeros)


def _add(shift: Array, value: Array, layer: Any) -> Array:
    """The edit value + shift."""
    return value + shift


def _add_of_layer(shifts: Array, value: Array, layer: Any) -> Array:
    """The edit value + shift with a shift for each layer, `[L, ...]`."""
    return value + shifts[layer]


def head_ablation(
    config: Any,
    params: Any,
    tokens: Array,
    loss: Loss,
    name: str = "layers/*/attention/heads",
    **options,
) -> Float[Array, "L N"]:
    """The loss without a head minus the loss with all heads, for each head.

    `options` are passed to `models.apply`, whose `edits` and `intermediates` this function sets.
    Raises ConfigError for a `name` of one layer. Michel et al. 2019, arXiv:1905.10650, section 3.
    """

    def run(**edited):
        return models.apply(config, params, tokens, **options, **edited)

    shapes = jax.eval_shape(lambda: run(intermediates=(name,)).intermediates)
    if len(shapes[name].shape) != 5:
        raise ConfigError(
            f"head_ablation: {name} is {list(shapes[name].shape)}; "
            "expected the heads of all layers [L, B, T, N, H], such as layers/*/attention/heads"
        )
    L, _, _, N, _ = shapes[name].shape

    def loss_without(number: Array) -> Array:
        edit = partial(_silence, number // N, number % N)
        return loss(run(edits={name: edit}))

    return jax.lax.map(loss_without, jnp.arange(L * N)).reshape(L, N) - loss(run())


def _silence(of_layer: Array, head: Array, heads: Float[Array, "B T N H"], layer: Any) -> Array:
    """The edit that sets one head of one layer to zero."""
    factor = jnp.where(layer == of_layer, 0, 1).astype(heads.dtype)
    return heads.at[:, :, head].multiply(factor)
