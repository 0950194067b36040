"""The parts of a layer (mixer, feed-forward, block), what they read (`Context`) and return."""

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
    mask: Mask  # which source positions each query sees
    # in decoding: {"key", "value"} of the source, [B, K, S, H]; for all layers a tuple of these
    heads: Any = None
    # of an encoder with `AttentionPositions`: its vectors [B or 1, S, D], added to inputs of keys
    key_positions: Any = None


@struct.dataclass
class Context:
    """What a mixer, a feed-forward or an embedding of your own may read besides its input."""

    mask: Mask  # which keys each query sees
    positions: Any  # of the tokens, [B or 1, T]
    key_positions: Any = None  # [B or 1, S]; None: the position of a key is its index
    # True: the caller of `apply` passed positions, so distances of positions may differ from those
    # of indices
    explicit_positions: bool = struct.field(pytree_node=False, default=False)
    dropout_key: Any = None
    # in decoding: the cache of this mixer (attention: keys and values [B, K, S, H])
    state: Tree = None
    # in decoding: the number of tokens in the state, [B]; None: the state is empty
    lengths: Any = None
    # in decoding: the largest number of tokens that the cache holds for a batch row
    cache_length: int = struct.field(pytree_node=False, default=0)
    # in decoding: the length of each text, [B], if rotations depend on it; None: see `positions`
    text_lengths: Any = None
    layer: Any = 0  # counted from 0
    shared: Tree = None  # parameters that all layers have in common
    constants: Tree = None  # arrays that the mixer drew for this layer
    inputs: Tree = None  # inputs for mixers, passed by the caller of `apply`
    carry: Tree = None  # value passed from the previous layer
    padding_mask: Any = None  # [B, T], False for padding; None: there is none
    token_types: Any = None  # [B, T]; None: all 0
    # of activations; None: that of the parameters
    dtype: Any = struct.field(pytree_node=False, default=None)
    source: Source | None = None
    # tap(name, value) -> value: lets a caller of `apply` read or replace the value
    tap: Tap = struct.field(pytree_node=False, default=NOTHING)

    # earlier names of fields: users' files read them
    real = property(lambda self: self.padding_mask)
    room = property(lambda self: self.cache_length)
    memo = property(lambda self: self.carry)
    slot_positions = property(lambda self: self.key_positions)
    gaps = property(lambda self: self.explicit_positions)


class MixerOutput(NamedTuple):
    """What a mixer returns."""

    out: Any  # [B, T, D]
    state: Tree = None  # the state with these tokens
    carry: Tree = None  # value for the next layer
    # new values of its `Spec(trained=False)` parameters: a part of its params tree
    updates: Tree = None


class FeedForwardOutput(NamedTuple):
    """What a feed-forward returns."""

    out: Any  # [B, T, D]
    loss: Any = None  # an auxiliary loss, already weighted
    stats: Tree = None  # figures for reports
    # new values of its `Spec(trained=False)` parameters: a part of its params tree
    updates: Tree = None


class LayerOutput(NamedTuple):
    """What a layer returns. For a stack, each leaf is `[L, ...]`."""

    hidden: Any = None  # [B, T, D]; None for a stack
    state: Tree = None  # for a stack: a tuple, one for each layer
    carry: Tree = None  # None for a stack
    loss: Any = None
    stats: Tree = None
    intermediates: Tree = None  # `Tap.found`
    updates: Tree = None  # for a stack: a part of the tree of its parameters


class Layers(NamedTuple):
    """What a stack runs.

    `ModelConfig.stack` is a function (config, Layers, x, Context) -> (x, LayerOutput), or an object
    that is called so and has a method `spec(config)`: the parameters of its own.
    """

    params: Tree  # of `stacks.layout.spec`; in decoding also a tuple: a tree for each layer
    masks: tuple[Mask, ...]  # one for each layer, repeated over the depth
    state: tuple | None = None  # in decoding: one for each layer
    constants: Tree = None  # [L, ...]; None: the mixers draw them
    stack_params: Tree = None  # the stack's own parameters, if it has a method `spec(config)`


class FeedForward(NamedTuple):
    """A feed-forward. `ModelConfig.feedforward` may be any function `config -> FeedForward`."""

    spec: Tree  # of `Spec`
    apply: Callable  # (params, x [B, T, D], Context) -> FeedForwardOutput
    shared: Tree = None  # the spec of parameters that all layers have in common
    # experts that a token visits, of those along the axis "expert" of `spec`; None: all
    visited: int | None = None


class Mixer(NamedTuple):
    """A way to mix positions. `ModelConfig.mixer` may be any function `config -> Mixer`."""

    spec: Tree  # of `Spec`
    apply: Callable  # (params, x [B, T, D], Context) -> MixerOutput
    # for decoding: (batch, length, dtype) -> any tree of zeros [batch, ...]; None: it cannot decode
    state: Callable | None = None
    shared: Tree = None  # the spec of parameters that all layers have in common
    constants: Callable = lambda *_: None  # T -> arrays [L, ...] that are drawn, not trained
    # x -> the first layer's `Context.carry`, in the shapes that each layer passes on
    carry: Callable = lambda *_: None
    # whether the cache may be a ring buffer as long as the mask's window: then a new token replaces
    # the oldest one
    rolls: bool = False


def same_stream(params: Tree, x: Float[Array, "B T D"], context: Context) -> Float[Array, "B T D"]:
    """x: the stream begins as the embedding, or ends as the last layer's output."""
    return x


class Block(NamedTuple):
    """How sub-layers meet the residual stream.

    `ModelConfig.block` may be any function `(config, names) -> Block`. `names` are the sub-layers
    of a layer in their order: attention, cross_attention (if there is an encoder), feedforward.
    `sublayers` maps each name to a function `y [B, T, D] -> [B, T, D]`. The block calls each
    function once. Dropout is already applied to the function's output. A block with dropout of its
    own takes `context.dropout_key`, and has a method `evaluation()` that returns the block without
    dropout.
    """

    spec: Tree  # of one layer's own parameters, besides those of the sub-layers: norms, scales
    apply: Callable  # (params, stream, sublayers, Context) -> the stream after the layer
    # of parameters that the model has once, at the top of its tree: {"final_norm": ...}
    stack_spec: Tree = None
    # (params of `stack_spec`, x [B, T, D], Context) -> the stream [B, T, ...]
    begin: Callable = same_stream
    # (params of `stack_spec`, the stream, Context) -> [B, T, hidden_width]
    end: Callable = same_stream
    shared: Tree = None  # the spec of parameters that all layers have in common


def token_length(tokens: Array) -> int:
    """T of tokens `[B, T, ...]`."""
    return tokens.shape[1]


def as_it_is(params: Tree, x: Float[Array, "B T D"], context: Context) -> Float[Array, "B T D"]:
    """x: nothing follows the sum of the vectors."""
    return x


class Embedder(NamedTuple):
    """An embedding of your own. `ModelConfig.embedding` may be any function `config -> Embedder`.

    Absolute positions of the config are added to the result of `apply`, then `end` follows. The
    context has the positions, the token types, the padding mask and the dtype of activations. If
    the function has an attribute `source`, decoding passes its `sources` as `inputs[source]` with
    the first tokens of a text. Behind them, `context.lengths` is not None, and there are no inputs.
    """

    spec: Tree  # of `Spec`; with a table `tokens` [V, D], a language model's head may read by it
    # (params, tokens or other arrays of `models.apply`, its `inputs`, Context) -> [B, T, width]
    apply: Callable
    length: Callable = token_length  # the arrays -> T, the number of their positions
    width: int | None = None  # features of the result of `apply` and of the positions; None: D
    end: Callable = as_it_is  # (params, the sum [B, T, width], Context) -> [B, T, D]
    # (the arrays, segment_ids [B, T] or None) -> positions [B or 1, T, ...] for the layers, such as
    # the line and the column of a patch; None: tokens are counted. A cache does not keep them
    positions: Callable | None = None


def linear_spec(config: ModelConfig, name: str, shape, axes, contracts, std: float) -> Tree:
    """A linear map. It has a bias if the config gives one to that name."""
    return params.linear(shape, axes, contracts, normal(std), config.has_bias(name))


def residual_std(config: ModelConfig) -> float:
    """Initial std of maps back into the residual stream: std / sqrt(2 L).

    Radford et al. 2019, section 2.3.
    """
    return config.std / math.sqrt(2 * config.num_layers)


def linear(
    spec: str, x: Float[Array, "..."], params: Tree, dtype=None, operand_dtype=None
) -> Float[Array, "..."]:
    """x kernel + bias, if there is a bias. The dtypes are those of `ops.einsum`."""
    y = ops.einsum(spec, x, params["kernel"], dtype, operand_dtype=operand_dtype)
    return add_bias(y, params.get("bias"))


def linear_maps(
    spec: str, x: Float[Array, "..."], maps: dict[str, Tree]
) -> dict[str, Float[Array, "..."]]:
    """`linear` of one x with several parameters. The gradient of x is summed in float32."""
    wide = in_float32(x)
    return {name: linear(spec, wide, params, x.dtype, x.dtype) for name, params in maps.items()}
