"""Chunks in a circle: the local layers of Reformer in transformers."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxformer import ops
from jaxformer.models.config import ModelConfig, require_numbers
from jaxformer.models.layer import Mixer
from jaxformer.models.mixers.attention import attention
from jaxformer.ops.bias import Bias


@dataclass(frozen=True)
class LocalChunks:
    """Softmax attention to the chunks about a query, in a circle: the local layers of Reformer in transformers. Any mask.

    A chunk that a short circle meets twice counts twice. For a causal stack with `before` up to 1, the mask `causal() &
    chunked(chunk, before)` is the same and faster.
    """

    chunk: int = 64  # tokens of a chunk
    before: int = 1  # chunks before its own that a query sees
    after: int = 0  # chunks after its own that a query sees
    multiple: int = 1  # padding fills the length up to a multiple of this

    __post_init__ = require_numbers(chunk=1, before=0, after=0, multiple=1)

    def __call__(self, config: ModelConfig) -> Mixer:
        def attend(params, context, query, key, value, **options):
            chunks = -(-(key.shape[1] + -key.shape[1] % self.multiple) // self.chunk)
            chunk_ids, counts = np.arange(chunks), np.zeros((chunks, chunks), int)  # how often chunks meet
            for shift in range(-self.before, self.after + 1):
                shift = shift if abs(shift) <= chunks else 0  # as their slices have it
                counts[chunk_ids, (chunk_ids + shift) % chunks] += 1
            bias = Bias(_log_meetings, (self.chunk, tuple(map(tuple, counts.tolist()))))
            return ops.attention(query, key, value, **options | {"bias": bias})

        return attention(config, attend=attend)._replace(state=None)


def _log_meetings(bias: Bias, q_positions, kv_positions) -> Array:
    """Score bias log(meetings), and so low a number where there is none that its weight is 0."""
    chunk, counts = bias.args
    table = jnp.asarray(np.log(np.maximum(counts, 1e-30)) + np.where(np.array(counts) == 0, -1e9, 0), jnp.float32)
    return table[q_positions[:, None] // chunk, kv_positions[None, :] // chunk][None]
