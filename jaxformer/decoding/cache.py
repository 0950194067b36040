"""The cache of decoding: the state of each layer, and the number of tokens in each row."""

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
    """The state of every layer after the tokens of each row.

    The first axis of every array is that of the rows, so rows may be taken, copied or replaced.
    The token at position p of row b is in slot p of that row. Hidden states are NaN in two cases,
    which cannot be refused under jit: a row has more tokens than `capacity`, or `text_lengths` does
    not suit a token, because the keys in the cache have the rotations of a shorter text.
    """

    layers: tuple  # the state of each layer's mixer
    lengths: Any = None  # tokens of each row, [B]; None: the cache is new
    source: Any = None  # of an encoder-decoder: what its layers read of the encoder
    # length of each row's whole text, [B], for rotations that depend on it (LongRoPE, dynamic NTK)
    text_lengths: Any = None
    capacity: int = struct.field(pytree_node=False, default=0)  # largest number of tokens of a row

    def extend(self, rows: int, T: int, lengths=None) -> "Cache":
        """The cache with T more tokens in each row, or `lengths` [B]. The layers write their state.

        Raises ConfigError for another number of rows, and for more tokens than fit the cache.
        """
        cache_rows = len(jax.tree.leaves(self.layers)[0])
        if rows != cache_rows or self.capacity < T:
            raise ConfigError(
                f"apply: {rows} rows of {T} tokens do not fit a cache of {cache_rows} rows "
                f"of {self.capacity} slots"
            )
        new = jnp.full(rows, T, jnp.int32) if lengths is None else lengths.astype(jnp.int32)
        return replace(self, lengths=new if self.lengths is None else self.lengths + new)


def init_cache(
    config: ModelConfig | EncoderDecoder,
    batch: int,
    length: int,
    dtype: Any = jnp.float32,
    ahead: int = 0,
    text_lengths: Any = None,
) -> Cache:
    """A new cache for `batch` rows of `length` tokens, with keys and values in `dtype`.

    In int8, each token and head has a scale. Layers with a window keep the tokens of the window and
    `ahead` more: a lower number in `lengths` may take back up to `ahead` tokens. `text_lengths` [B]
    is the final length of each text, for LongRoPE and a dynamic NTK, whose rotations depend on it;
    None: the first call reads the whole texts. Other rotations ignore it.
    """
    check_whole("init_cache: batch", batch)
    check_whole("init_cache: length", length)
    check_whole("init_cache: ahead", ahead, least=0)
    stack = last_stack(config)
    if rotation_until(stack.positions, 1) is None:
        text_lengths = None
    layers = init_state(stack, batch, length, dtype, ahead)
    return Cache(layers, text_lengths=text_lengths, capacity=length)
