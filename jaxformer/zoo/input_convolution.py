"""A convolution beside a layer: DeBERTa, version 2, has one beside its first layer.

It induces features of neighbouring tokens (n-grams). No paper describes it: see "n-gram induced
input encoding" in the README of https://github.com/microsoft/DeBERTa.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import normal
from jaxtyping import Float, Int

from jaxformer import ops
from jaxformer.errors import ConfigError, check_numbers
from jaxformer.models.blocks import Stream, Sublayers, add, post_norm
from jaxformer.models.config import ModelConfig
from jaxformer.models.layer import Block, Context
from jaxformer.models.norm import norm, norm_spec
from jaxformer.models.presets import sized
from jaxformer.ops.einsum import add_bias, einsum
from jaxformer.ops.feedforward import ACTIVATIONS
from jaxformer.params import Tree, linear
from jaxformer.zoo import disentangled
from jaxformer.zoo.visible import hide, visibility


def convolution(
    x: Float[Array, "B T D"], params: Tree, ids: Int[Array, "#B T"], width: int, groups: int
) -> Float[Array, "B T D"]:
    """y_t = sum over j of W_j x_{t + j - (width - 1) / 2}, plus a bias, in each of the `groups`.

    `ids` `[B or 1, T]` are segments: a token reads zeros where its neighbour has another id, or the
    id 0 of padding. The kernel is `[D / groups, width, D]`.
    """
    T = x.shape[1]
    side = width // 2
    padded = jnp.pad(x, ((0, 0), (side, side), (0, 0)))
    padded_ids = jnp.pad(ids, ((0, 0), (side, side)))
    neighbours = []
    for j in range(width):
        is_own = (padded_ids[:, j : j + T] == ids) & (ids != 0)
        neighbours.append(hide(padded[:, j : j + T], jnp.broadcast_to(is_own, x.shape[:2])))
    windows = jnp.stack(neighbours, axis=-1).reshape(*x.shape[:2], groups, -1, width)
    kernel = params["kernel"].reshape(*params["kernel"].shape[:2], groups, -1)
    y = einsum("btgij,ijgo->btgo", windows, kernel)
    return add_bias(y.reshape(x.shape), params["bias"])


@dataclass(frozen=True)
class PostNormConvolution:
    """norm(post_norm(x) + act(conv(x))): a convolution of the layer's input beside the layer.

    `beside_first` gives it to the first layer alone. Raises ConfigError for groups that do not
    divide the width of the model.
    """

    width: int = 3  # tokens that one output reads, an odd number
    groups: int = 1  # of features: each output reads those of its own group
    activation: str = "tanh"  # of the convolution

    def __post_init__(self):
        check_numbers("PostNormConvolution.", self, width=1, groups=1)
        if self.width % 2 == 0:
            raise ConfigError(f"PostNormConvolution.width={self.width}: expected an odd number")
        if self.activation not in ACTIVATIONS:
            raise ConfigError(
                f"PostNormConvolution.activation={self.activation!r}: expected one of "
                f"{', '.join(ACTIVATIONS)}"
            )

    def __call__(self, config: ModelConfig, names: Sequence[str]) -> Block:
        D = config.d_model
        if D % self.groups:
            raise ConfigError(
                f"PostNormConvolution.groups={self.groups} does not divide model.d_model={D}"
            )
        plain = post_norm(config, names)

        def apply(params: Tree, x: Stream, sublayers: Sublayers, context: Context) -> Stream:
            T = x.shape[1]
            ids = visibility(context.mask, T, T, "PostNormConvolution", takes_causal=False).q_ids
            y = convolution(x, params["convolution"], ids, self.width, self.groups)
            y = ops.dropout(y, config.dropout_rate, context.dropout_key)
            y = ACTIVATIONS[self.activation](y)
            after = plain.apply(params, x, sublayers, context)
            return norm(config, params["convolution_norm"], add(after, y))

        axes = "channel", "line", "embed"
        shape = D // self.groups, self.width, D
        own = {
            "convolution": linear(shape, axes, axes[:2], normal(config.std)),
            "convolution_norm": norm_spec(config),
        }
        return plain._replace(spec=plain.spec | own, apply=apply)


def beside_first(num_layers: int, convolution: PostNormConvolution) -> tuple[Callable, ...]:
    """The blocks of a stack whose first layer has the convolution: `ModelConfig.block`."""
    return (convolution, *[post_norm] * (num_layers - 1))


# https://huggingface.co/microsoft/deberta-v2-xlarge and -xxlarge: the encoders, without heads
_GELU = PostNormConvolution(activation="gelu")
deberta_v2_xlarge = sized(disentangled.deberta_v3_base, 24, 1536, 24, block=beside_first(24, _GELU))
deberta_v2_xxlarge = sized(
    disentangled.deberta_v3_base, 48, 1536, 24, block=beside_first(48, _GELU)
)
