"""Hourglass: the middle layers read a shortened sequence, in which one vector stands for k tokens.

Nawrot et al. 2021, arXiv:2110.13711. A model has `stack=Hourglass(shorten=k, before=1, after=1)`.
With T tokens of width D and S = T / k:

    x = layers before(x)                                    [B, T, D]
    y = middle layers(shortened(x))                         [B, S, D]
    x = layers after(x + lengthened(y))                     [B, T, D]

Attention of a middle layer costs (T / k)^2 instead of T^2, and its other parts 1 / k.
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from jaxformer import params as parameters
from jaxformer.errors import ConfigError, check_numbers
from jaxformer.masks import Mask, causal, full, segments
from jaxformer.models.config import ModelConfig
from jaxformer.models.layer import Context, LayerOutput, Layers, linear
from jaxformer.models.stacks import join_layers, layer_functions, layout
from jaxformer.params import Tree
from jaxformer.zoo.visible import View, hide, visibility


def groups(x: Float[Array, "B T *rest"], k: int, is_causal: bool) -> Float[Array, "B S k *rest"]:
    """k tokens together, S = ceil(T / k); zeros fill the last group.

    If causal, group j has the tokens up to number j k, so that the tokens from j k on may read it:
    the sequence is first shifted by k - 1. Section 2.1.
    """
    T = x.shape[1]
    S = -(-T // k)
    first = k - 1 if is_causal else 0
    ends = [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, ((0, 0), (first, max(S * k - first - T, 0)), *ends))[:, : S * k]
    return x.reshape(x.shape[0], S, k, *x.shape[2:])


def shortened(params: Tree, x: Float[Array, "B T D"], k: int, is_causal: bool) -> Array:
    """[B, S, D]: a linear map of each group of k tokens. Section 2.2, linear pooling."""
    return linear("bskd,kde->bse", groups(x, k, is_causal), params)


def lengthened(params: Tree, y: Float[Array, "B S D"], T: int) -> Float[Array, "B T D"]:
    """k tokens of each vector by a linear map, and the first T of them. Section 2.3."""
    x = linear("bsd,dke->bske", y, params)
    return x.reshape(len(y), -1, y.shape[-1])[:, :T]


def mean_of_groups(key: Array, shape: tuple[int, ...], dtype) -> Float[Array, "k D D"]:
    """The first kernel of `shortened`: the mean of the group."""
    k, D, _ = shape
    return jnp.broadcast_to(jnp.eye(D, dtype=dtype)[None] / k, shape)


def copies(key: Array, shape: tuple[int, ...], dtype) -> Float[Array, "D k D"]:
    """The first kernel of `lengthened`: the vector itself, k times."""
    return jnp.broadcast_to(jnp.eye(shape[0], dtype=dtype)[:, None], shape)


@dataclass(frozen=True)
class Hourglass:
    """A stack: layers `before` of all tokens, middle layers of groups, layers `after` of all.

    Middle layers need the mask full() or causal(); others may have any mask, such as a window.
    Padding is left out. Raises ConfigError for a model with too few layers, and NotImplementedError
    for decoding, intermediates, other masks of middle layers, and mixers that hand a value to the
    next layer. A row of several segments gives NaN, because a group would mix two texts.
    """

    shorten: int = 4  # k, tokens of a group
    before: int = 1  # layers that read all tokens, at the start
    after: int = 1  # and at the end

    def __post_init__(self):
        check_numbers("Hourglass.", self, shorten=1, before=0, after=0)

    def spec(self, config: ModelConfig) -> Tree:
        """The two maps. They start as the mean of a group, and as k copies."""
        if self.before + self.after >= config.num_layers:
            raise ConfigError(
                f"model.stack: Hourglass(before={self.before}, after={self.after}) leaves no "
                f"middle layer of model.num_layers={config.num_layers}"
            )
        k, D = self.shorten, config.d_model
        axes, back = ("length", "embed", None), ("embed", "length", None)
        return {
            "shorten": parameters.linear((k, D, D), axes, axes[:2], mean_of_groups, bias=False),
            "lengthen": parameters.linear((D, k, D), back, back[:1], copies, bias=False),
        }

    def __call__(
        self, config: ModelConfig, layers: Layers, x: Float[Array, "B T D"], context: Context
    ) -> tuple[Float[Array, "B T D"], LayerOutput]:
        has_carry = any(kind.mixer.carry(x) is not None for kind in layout.kinds(config))
        if layers.state is not None or context.tap or has_carry:
            raise NotImplementedError(
                "model.stack: Hourglass: no cache, no intermediates, and no mixer that hands a "
                "value to the next layer"
            )
        T, end = x.shape[1], config.num_layers - self.after
        of_tokens = layer_functions(config, layers, x, context)
        runs = []
        for layer in of_tokens[: self.before]:
            runs.append(layer(x))
            x = runs[-1].hidden

        view = self.view(layers, T, end)
        tokens = hide(x, jnp.broadcast_to(view.keys, x.shape[:2]))
        y = shortened(layers.stack_params["shorten"], tokens, self.shorten, view.causal)
        of_groups, context_of_groups = self.of_groups(layers, context, view)
        for layer in layer_functions(config, of_groups, y, context_of_groups)[self.before : end]:
            runs.append(layer(y))
            y = runs[-1].hidden
        x = x + view.refuse_several(lengthened(layers.stack_params["lengthen"], y, T))

        for layer in of_tokens[end:]:
            runs.append(layer(x))
            x = runs[-1].hidden
        return x, join_layers(runs)

    def view(self, layers: Layers, T: int, end: int) -> View:
        """What the masks of the middle layers show. Raises ConfigError if they differ."""
        masks = [layers.masks[i % len(layers.masks)] for i in range(self.before, end)]
        views = [visibility(mask, T, T, "Hourglass") for mask in masks]
        if len({view.causal for view in views}) > 1:
            raise ConfigError("model.masks: middle layers of an Hourglass: expected one mask")
        return views[0]

    def of_groups(self, layers: Layers, context: Context, view: View) -> tuple[Layers, Context]:
        """The layers with the mask of groups, and the context of groups."""
        k = self.shorten
        mask: Mask = causal() if view.causal else full()
        padding_mask = None
        if view.ids is not None or context.padding_mask is not None:
            padding_mask = has_token(view.keys, k, view.causal)
            mask = mask & segments(padding_mask.astype(jnp.int32))
        positions = context.positions
        if positions is not None:
            positions = positions[:, ::k] // k
        groups_context = replace(
            context, mask=mask, positions=positions, padding_mask=padding_mask, token_types=None
        )
        return layers._replace(masks=(mask,)), groups_context


def has_token(keys: Bool[Array, "#B T"], k: int, is_causal: bool) -> Bool[Array, "#B S"]:
    """False for a group that has padding alone."""
    return groups(keys.astype(jnp.float32), k, is_causal).max(axis=2) > 0
