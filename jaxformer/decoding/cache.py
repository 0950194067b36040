"""What decoding keeps of a text: the state of each layer, and how many tokens it has."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxformer.errors import ConfigError, check_whole
from jaxformer.models import last_stack
from jaxformer.models.config import EncoderDecoder, ModelConfig
from jaxformer.models.stacks.layout import init_state
from jaxformer.ops.positions import rotation_until


@struct.dataclass
class Cache:
    """What came before the next tokens of each row. Every array has the rows first, so rows may be taken, copied or replaced.

    Row b's token at position p is in slot p. More tokens than `capacity` cannot be refused under jit: then hidden states are
    NaN.
    So are those of tokens that `text_lengths` does not suit: the keys in the cache have the rotations of a shorter text.
    """

    layers: tuple  # the state of each layer's mixer
    lengths: Any = None  # tokens of each row, [B]; None: the cache is new
    source: Any = None  # of an encoder-decoder: what its layers read of the encoder
    # how long the whole text of each row is, [B], for rotations that depend on it (LongRoPE, a dynamic NTK)
    text_lengths: Any = None
    capacity: int = struct.field(pytree_node=False, default=0)  # most tokens of a row

    def extend(self, rows: int, T: int, lengths=None) -> "Cache":
        """The cache with T more tokens in each row, or `lengths` [B]; the layers write them themselves."""
        found = len(jax.tree.leaves(self.layers)[0])
        if rows != found or self.capacity < T:
            raise ConfigError(f"apply: {rows} rows of {T} tokens do not fit a cache of {found} rows of {self.capacity} slots")
        new = jnp.full(rows, T, jnp.int32) if lengths is None else lengths.astype(jnp.int32)
        return replace(self, lengths=new if self.lengths is None else self.lengths + new)


def init_cache(
    config: ModelConfig | EncoderDecoder, batch: int, length: int, dtype: Any = jnp.float32, ahead: int = 0,
    text_lengths: Any = None,
) -> Cache:  # fmt: skip
    """A new cache for `length` tokens a row, keys and values in `dtype` (int8: with a scale for each token and head).

    Layers with a window keep what it spans and `ahead` tokens more, so many as a lower number in `lengths` may take back.
    `text_lengths` [B]: how long the texts will be, for LongRoPE and a dynamic NTK, whose rotations depend on it; None: the
    first call reads them whole. Other rotations ignore it.
    """
    check_whole("init_cache: batch", batch)
    check_whole("init_cache: length", length)
    check_whole("init_cache: ahead", ahead, least=0)
    stack = last_stack(config)
    if rotation_until(stack.positions, 1) is None:
        text_lengths = None
    return Cache(init_state(stack, batch, length, dtype, ahead), text_lengths=text_lengths, capacity=length)
