"""The feed-forward of a layer: an activation or a gate between matrices, or a user's function."""

from functools import partial

from jax import Array
from jaxtyping import Float

from jaxformer import ops
from jaxformer.models.config import ModelConfig
from jaxformer.models.layer import (
    Context,
    FeedForward,
    FeedForwardOutput,
    Tree,
    linear_spec,
    residual_std,
)
from jaxformer.ops.feedforward import ACTIVATIONS, GATES


def feedforward_spec(config: ModelConfig, lead=(), lead_axes=()) -> Tree:
    """Matrices of an activation or a gate. Axes of `lead` come first: they choose an expert."""
    D, F = config.d_model, config.ff_width

    def matrix(name, shape, axes, std):
        return linear_spec(config, name, (*lead, *shape), (*lead_axes, *axes), axes[:1], std)

    tree = {
        "up": matrix("up", (D, F), ("embed", "mlp"), config.std),
        "down": matrix("down", (F, D), ("mlp", "embed"), residual_std(config)),
    }
    if config.feedforward in GATES:
        tree["gate"] = matrix("gate", (D, F), ("embed", "mlp"), config.std)
    return tree


def feedforward(
    name: str, params: Tree, x: Float[Array, "B T D"], **options
) -> Float[Array, "B T D"]:
    """The activation or gate `name` between the matrices of `feedforward_spec`.

    The options are those of `ops.mlp`.
    """
    kernels = {matrix: leaves["kernel"] for matrix, leaves in params.items()}
    biases = {
        f"{matrix}_bias": leaves["bias"] for matrix, leaves in params.items() if "bias" in leaves
    }
    function = ops.glu if name in GATES else ops.mlp
    activation = ACTIVATIONS[GATES.get(name, name)]
    return function(x, **kernels, activation=activation, **biases, **options)


def feed(config: ModelConfig) -> FeedForward:
    """The feed-forward of a layer; `config.feedforward` is that of this layer."""
    if callable(config.feedforward):
        return config.feedforward(config)

    def apply(params: Tree, x: Float[Array, "B T D"], context: Context) -> FeedForwardOutput:
        tap = partial(context.tap, "hidden")
        return FeedForwardOutput(feedforward(str(config.feedforward), params, x, edit=tap))

    return FeedForward(feedforward_spec(config), apply)
