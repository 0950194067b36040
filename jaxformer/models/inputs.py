"""What a model reads besides its parameters, and what it returns."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxformer.models.layer import Source
from jaxformer.params import Tree


@struct.dataclass
class Inputs:
    """What a model reads besides its parameters.

    A batch row may hold several sequences (`segment_ids`). Each gets the logits that it gets alone.
    """

    tokens: Any  # [B, T], or images [B, height, width, C]
    # [B or 1, T]: for embeddings, rotations and biases; masks count the tokens of a segment instead
    positions: Any = None
    # [B, T]; 0: padding. A token attends only within its own segment, and positions restart there.
    # Padding stands before or behind a segment, never inside it: there, windows and biases of
    # distance would count the padding, and positions would not
    segment_ids: Any = None
    token_types: Any = None  # [B, T]
    cache: Any = None  # of `jaxformer.decoding`: earlier tokens; `Output.cache` adds these tokens
    dropout_key: Any = None  # None: nothing is dropped
    constants: Tree = None  # [L, ...], in place of the arrays that the mixers draw
    # what mixers read: {"global_tokens": flags [B, T]} for Longformer,
    # {"masked": flags [B, patches]} for Patches, or the inputs of your own mixer
    inputs: Tree = None
    # [B], with a cache: the number of text tokens in each row; padding follows them
    lengths: Any = None
    # of an encoder-decoder: tokens [B, S] or images; with a cache only in the first call
    source: Any = None
    # [B, S]; without `segment_ids`, tokens attend to the whole source except padding
    source_segment_ids: Any = None
    source_positions: Any = None  # [B or 1, S]; None: positions restart with each segment
    encoded: Source | None = None  # of a decoder: the output of the encoder
    # dtype of activations; None: that of the parameters
    dtype: Any = struct.field(pytree_node=False, default=None)
    # names of values for `Output.intermediates`, such as "layers/*/attention/weights",
    # or {name: function}: the function's result is kept in place of the value
    intermediates: Any = struct.field(pytree_node=False, default=())
    # {name: function (value, layer) -> value}: the result replaces the value
    edits: Any = struct.field(pytree_node=False, default=None)

    @property
    def padding_mask(self) -> jax.Array | None:
        """`[B, T]`, False for padding; None where there is none."""
        if self.lengths is not None:
            return jnp.arange(self.tokens.shape[1])[None] < self.lengths[:, None]
        return None if self.segment_ids is None else self.segment_ids != 0


@struct.dataclass
class Output:
    """What `apply` returns. Under jit, fields that you do not use are not computed."""

    # of the first head: [B, T, V] of a language model, float32 or wider; None without heads
    logits: Any
    hidden: Any  # [B, T, D], after the final norm
    cache: Any = None
    intermediates: Any = None  # {name: value} of `Inputs.intermediates`; [L, ...] if the name has *
    heads: Any = None  # {name: output} of all heads
    loss: Any = None  # auxiliary loss of feed-forwards: the mean over the layers that have one
    stats: Any = None  # figures of feed-forwards, [L, ...] over the layers that report them
    updates: Any = None  # new values of `Spec(trained=False)` parameters: a part of the params tree
    source: Any = None  # of an encoder-decoder: hidden states of the encoder [B, S, D]
