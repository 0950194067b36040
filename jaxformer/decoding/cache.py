"""What decoding keeps: the state of each layer's mixer, which slots hold tokens, and how many there are."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import Array, lax
from jaxtyping import Int

from jaxformer.errors import ConfigError
from jaxformer.models import last_stack
from jaxformer.models.config import EncoderDecoder, ModelConfig
from jaxformer.models.stacks.scan import init_state


@struct.dataclass
class Cache:
    """What came before the next tokens, in at most S slots a row.

    Past S slots the last ones are overwritten, which cannot be refused under jit: hidden states are NaN from then on.
    """

    layers: Any  # state of all mixers, as `stacks.scan.init_state` makes it
    segment_ids: Any  # [B, S]; 0 in empty and padded slots
    length: Any  # slots in use
    source: Any = None  # of an encoder-decoder: what its layers read of the encoder

    def extend(self, segment_ids: Int[Array, "B T"]) -> "Cache":
        """The cache with T more slots in use; the layers write their part themselves."""
        (B, T), (rows, S) = segment_ids.shape, self.segment_ids.shape
        if rows != B or T > S:
            raise ConfigError(f"apply: {B} rows of {T} tokens do not fit a cache of {rows} rows of {S} slots")
        ids = lax.dynamic_update_slice_in_dim(self.segment_ids, segment_ids.astype(jnp.int32), self.length, axis=1)
        return replace(self, segment_ids=ids, length=self.length + T)


def init_cache(config: ModelConfig | EncoderDecoder, batch: int, length: int, dtype=jnp.float32) -> Cache:
    """An empty cache of `length` slots a row, keys and values in `dtype`."""
    layers = init_state(last_stack(config), batch, length, dtype)
    return Cache(layers, jnp.zeros((batch, length), jnp.int32), jnp.zeros((), jnp.int32))
