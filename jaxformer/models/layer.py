"""The parts of a layer: mixer, feed-forward and block, the `Context` that they read, and the outputs that they return."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from flax import struct
from jax import Array
from jax.nn.initializers import normal
from jaxtyping import Float

from jaxformer import ops, params
from jaxformer.masks import Mask
from jaxformer.models.config import ModelConfig
from jaxformer.models.intermediates import NOTHING, Tap
from jaxformer.ops.einsum import add_bias, in_float32
from jaxformer.params import Tree


@struct.dataclass
class Source:
    """The encoder's output, as the layers of a decoder read it."""

    hidden: Any  # [B, S, D]
    mask: Mask  # which of its positions each query sees
    heads: Any = None  # in decoding, its keys and values {"key", "value"}, [B, S, K, H]: of all layers a tuple
    key_positions: Any = (
        None  # added to the inputs of keys: the encoder's positions [B or 1, S, D], where these are `AttentionPositions`
    )


@struct.dataclass
class Context:
    """What a mixer or a feed-forward may read besides its input."""

    mask: Mask  # which keys each query sees
    positions: Any  # of the tokens, [B or 1, T]
    slot_positions: Any = None  # of all keys, [B or 1, S]; None: the position of a key is its index
    # True: the caller of `apply` passed positions, so two tokens may be nearer or farther apart than their indices
    explicit_positions: bool = struct.field(pytree_node=False, default=False)
    dropout_key: Any = None
    state: Tree = None  # in decoding, what this mixer keeps (attention: keys and values [B, K, S, H])
    lengths: Any = None  # in decoding, the number of tokens in the state, [B]; None: the state is empty
    # in decoding, the number of tokens of a batch row that the cache holds at most
    cache_length: int = struct.field(pytree_node=False, default=0)
    # in decoding, the length of each text, [B], where rotations depend on it; None: `positions` show it
    text_lengths: Any = None
    layer: Any = 0  # counted from 0
    shared: Tree = None  # parameters that all layers have in common
    constants: Tree = None  # what the mixer drew for this layer
    inputs: Tree = None  # what the caller of `apply` passed for mixers
    carry: Tree = None  # value passed from the previous layer
    padding_mask: Any = None  # [B, T], False for padding; None: there is none
    source: Source | None = None
    # tap(name, value) -> value: what a caller of `apply` may read or replace
    tap: Tap = struct.field(pytree_node=False, default=NOTHING)

    # earlier names, which files of users read
    real = property(lambda self: self.padding_mask)
    room = property(lambda self: self.cache_length)
    memo = property(lambda self: self.carry)
    gaps = property(lambda self: self.explicit_positions)


class MixerOutput(NamedTuple):
    """What a mixer returns."""

    out: Any  # [B, T, D]
    state: Tree = None  # the state with these tokens
    carry: Tree = None  # value for the next layer
    updates: Tree = None  # new values of its parameters of `Spec(trained=False)`: a part of their tree


class FeedForwardOutput(NamedTuple):
    """What a feed-forward returns."""

    out: Any  # [B, T, D]
    loss: Any = None  # an auxiliary loss, already weighted
    stats: Tree = None  # figures for reports
    updates: Tree = None  # new values of its parameters of `Spec(trained=False)`: a part of their tree


class LayerOutput(NamedTuple):
    """What a layer returns; of a stack, each leaf is `[L, ...]`."""

    hidden: Any = None  # [B, T, D]; of a stack None
    state: Tree = None  # of a stack: one for each layer
    carry: Tree = None  # of a stack None
    loss: Any = None
    stats: Tree = None
    intermediates: Tree = None  # `Tap.found`
    updates: Tree = None  # of a stack: a part of the tree of its parameters


class Layers(NamedTuple):
    """What a stack runs: `ModelConfig.stack` is a function (config, Layers, x, Context) -> (x, LayerOutput)."""

    params: Tree  # of `stacks.layout.spec`; in decoding also a tuple: a tree for each layer
    masks: tuple[Mask, ...]  # one a layer, repeated
    state: tuple | None = None  # in decoding, one for each layer
    constants: Tree = None  # [L, ...]; None: the mixers draw them


class FeedForward(NamedTuple):
    """A feed-forward of your own: `ModelConfig.feedforward` may be any function `config -> FeedForward`."""

    spec: Tree  # of `Spec`
    apply: Callable  # (params, x [B, T, D], Context) -> FeedForwardOutput
    shared: Tree = None  # the spec of parameters that all layers have in common


class Mixer(NamedTuple):
    """A way for positions to exchange information: `ModelConfig.mixer` is any function `config -> Mixer`."""

    spec: Tree  # of `Spec`
    apply: Callable  # (params, x [B, T, D], Context) -> MixerOutput
    # for decoding: (batch, length, dtype) -> any tree of zeros [batch, ...]; None: it cannot decode
    state: Callable | None = None
    shared: Tree = None  # the spec of parameters that all layers have in common
    constants: Callable = lambda *_: None  # T -> arrays [L, ...] that are drawn, not trained
    carry: Callable = lambda *_: None  # x -> the `Context.carry` of the first layer: the shapes that each layer passes on
    rolls: bool = False  # whether the cache may be a ring buffer as long as the mask's window: a new token replaces the oldest


def same_stream(params: Tree, x: Float[Array, "B T D"], context: Context) -> Float[Array, "B T D"]:
    """x: the stream begins with the embedding, or ends as the last layer leaves it."""
    return x


class Block(NamedTuple):
    """How sub-layers meet the residual stream: `ModelConfig.block` is any function `(config, names) -> Block`.

    `names` are the sub-layers of a layer in their order: attention, cross_attention where there is an encoder, feedforward.
    `sublayers` has a function `y [B, T, D] -> [B, T, D]` for each name, to be called once; its output is dropped out already.
    A block that drops something itself takes `context.dropout_key`, and has a method `evaluation()` that returns the block
    without it.
    """

    spec: Tree  # of one layer's own parameters, besides those of the sub-layers: norms, scales
    apply: Callable  # (params, stream, sublayers, Context) -> the stream after the layer
    stack_spec: Tree = None  # of parameters that stand once in the model, at the top of its tree: {"final_norm": ...}
    begin: Callable = same_stream  # (params of `stack_spec`, x [B, T, D], Context) -> the stream [B, T, ...]
    end: Callable = same_stream  # (params of `stack_spec`, the stream, Context) -> [B, T, hidden_width]
    shared: Tree = None  # the spec of parameters that all layers have in common


def linear_spec(config: ModelConfig, name: str, shape, axes, contracts, std: float) -> Tree:
    """A linear map, with a bias if the config gives one to that name."""
    return params.linear(shape, axes, contracts, normal(std), config.has_bias(name))


def residual_std(config: ModelConfig) -> float:
    """Depth-scaled init of the maps whose output is added to the residual stream. Radford et al. 2019, section 2.3."""
    return config.std / math.sqrt(2 * config.num_layers)


def linear(spec: str, x: Float[Array, "..."], params: Tree, dtype=None, operand_dtype=None) -> Float[Array, "..."]:
    """The product with the kernel, and the bias if there is one. The dtypes are those of `ops.einsum`."""
    y = ops.einsum(spec, x, params["kernel"], dtype, operand_dtype=operand_dtype)
    return add_bias(y, params.get("bias"))


def linear_maps(spec: str, x: Float[Array, "..."], maps: dict[str, Tree]) -> dict[str, Float[Array, "..."]]:
    """`linear` with several parameters of one x, whose gradient is added up in float32 (`in_float32`)."""
    wide = in_float32(x)
    return {name: linear(spec, wide, params, x.dtype, x.dtype) for name, params in maps.items()}
