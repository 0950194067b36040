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
    """Softmax attention to the chunks near a query: the local layers of Reformer in transformers.

    Any mask. The chunks form a circle; a chunk that a short circle meets twice counts twice. For a
    causal stack with `before` up to 1, the mask `causal() & chunked(chunk, before)` is the same and
    faster.
    """

    chunk: int = 64  # tokens of a chunk
    before: int = 1  # chunks before its own that a query sees
    after: int = 0  # chunks after its own that a query sees
    multiple: int = 1  # padding fills the length up to a multiple of this

    __post_init__ = require_numbers(chunk=1, before=0, after=0, multiple=1)

    def __call__(self, config: ModelConfig) -> Mixer:
        def attend(params, context, query, key, value, **options):
            chunks = -(-(key.shape[1] + -key.shape[1] % self.multiple) // self.chunk)
            chunk_ids = np.arange(chunks)
            counts = np.zeros((chunks, chunks), int)  # how often chunk i meets chunk j
            for shift in range(-self.before, self.after + 1):
                shift = shift if abs(shift) <= chunks else 0  # as in transformers
                counts[chunk_ids, (chunk_ids + shift) % chunks] += 1
            bias = Bias(_log_meetings, (self.chunk, tuple(map(tuple, counts.tolist()))))
            return ops.attention(query, key, value, **options | {"bias": bias})

        return attention(config, attend=attend)._replace(state=None)


def _log_meetings(bias: Bias, q_positions, kv_positions) -> Array:
    """The score bias log(meetings) of a query and a key.

    For chunks that never meet, it is so low that the weight is 0.
    """
    chunk, counts = bias.args
    log_counts = np.log(np.maximum(counts, 1e-30)) + np.where(np.array(counts) == 0, -1e9, 0)
    table = jnp.asarray(log_counts, jnp.float32)
    return table[q_positions[:, None] // chunk, kv_positions[None, :] // chunk][None]
