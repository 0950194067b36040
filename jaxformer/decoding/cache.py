"""What decoding keeps of a text: the state of each layer, and how many tokens it has."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxformer.errors import ConfigError
from jaxformer.models import last_stack
from jaxformer.models.config import EncoderDecoder, ModelConfig
from jaxformer.models.stacks.scan import init_state


@struct.dataclass
class Cache:
    """What came before the next tokens of each row. Every array has the rows first, so rows may be taken, copied or replaced.

    Row b's token at position p is in slot p. More tokens than `room` cannot be refused under jit: hidden states are NaN then.
    """

    layers: tuple  # the state of each layer's mixer
    lengths: Any = None  # tokens of each row, [B]; None: the cache is new
    source: Any = None  # of an encoder-decoder: what its layers read of the encoder
    room: int = struct.field(pytree_node=False, default=0)  # most tokens of a row

    def extend(self, rows: int, T: int, lengths=None) -> "Cache":
        """The cache with T more tokens in each row, or `lengths` [B]; the layers write them themselves."""
        found = len(jax.tree.leaves(self.layers)[0])
        if rows != found or self.room < T:
            raise ConfigError(f"apply: {rows} rows of {T} tokens do not fit a cache of {found} rows of {self.room} slots")
        new = jnp.full(rows, T, jnp.int32) if lengths is None else lengths.astype(jnp.int32)
        return replace(self, lengths=new if self.lengths is None else self.lengths + new)


def init_cache(
    config: ModelConfig | EncoderDecoder, batch: int, length: int, dtype: Any = jnp.float32, ahead: int = 0
) -> Cache:
    """A new cache for `length` tokens a row, keys and values in `dtype` (int8: with a scale for each token and head).

    Layers with a window keep what it spans and `ahead` tokens more, so many as a lower number in `lengths` may take back.
    """
    return Cache(init_state(last_stack(config), batch, length, dtype, ahead), room=length)
