"""The feed-forward of a layer: an activation or a gate between two or three matrices, or what a user gives."""

from functools import partial

from jax import Array
from jaxtyping import Float

from jaxformer import ops
from jaxformer.models.config import ModelConfig
from jaxformer.models.layer import Context, FeedForward, FeedForwardOutput, Tree, linear_spec, residual_std
from jaxformer.ops.feedforward import ACTIVATIONS, GATES


def feedforward_spec(config: ModelConfig, lead=(), lead_axes=()) -> Tree:
    """Matrices of an activation or a gate; the axes of `lead` choose one of several (experts)."""
    D, F = config.d_model, config.ff_width
    into, back = ((D, F), ("embed", "mlp"), config.std), ((F, D), ("mlp", "embed"), residual_std(config))
    matrices = {"up": into, "down": back} | ({"gate": into} if config.feedforward in GATES else {})

    def matrix(name, shape, axes, std):
        return linear_spec(config, name, (*lead, *shape), (*lead_axes, *axes), axes[:1], std)

    return {name: matrix(name, *matrix_spec) for name, matrix_spec in matrices.items()}


def feedforward(name: str, params: Tree, x: Float[Array, "B T D"], **options) -> Float[Array, "B T D"]:
    """The activation or gate of that name between the matrices of `feedforward_spec`; options of `ops.mlp`."""
    kernels = {matrix: leaves["kernel"] for matrix, leaves in params.items()}
    biases = {f"{matrix}_bias": leaves["bias"] for matrix, leaves in params.items() if "bias" in leaves}
    return (ops.glu if name in GATES else ops.mlp)(
        x, **kernels, activation=ACTIVATIONS[GATES.get(name, name)], **biases, **options
    )


def feed(config: ModelConfig) -> FeedForward:
    """The feed-forward of a config in which `feedforward` is that of one layer."""
    if callable(config.feedforward):
        return config.feedforward(config)

    def apply(params: Tree, x: Float[Array, "B T D"], context: Context) -> FeedForwardOutput:
        return FeedForwardOutput(feedforward(str(config.feedforward), params, x, edit=partial(context.tap, "hidden")))

    return FeedForward(feedforward_spec(config), apply)
