"""Attention by its definition, one block of queries at a time, with only the keys between the first and the last that it sees.

Of a causal mask this leaves out nearly half of the pairs. It is made of calls of `reference`, and can do what this can, but for
a bias and positions by row. The array of weights is kept for the backward pass, so it is for short sequences.
"""

from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxformer.masks import EMPTY, Mask
from jaxformer.ops.attention.blocks import cached_by_mask
from jaxformer.ops.attention.call import Call, refuse
from jaxformer.ops.attention.reference import reference, softmax

KEYS = 64  # the first and the last key are found to so many
SHARE = 0.8  # of all pairs: with more, one product of all of them is as fast


def attention(query: Array, key: Array, value: Array, call: Call, weigh: Callable = softmax) -> Array:
    """The output; `weigh` as in `reference`. Raises NotImplementedError where `refuses` says why."""
    refuse("rows", refuses(call), "reference")
    first, outs = call.mask.first(query.shape[1], key.shape[1]), []
    for start, stop, low, high in spans(call.mask, query.shape[1], key.shape[1], block(query)):
        part = replace(call, positions=(first + jnp.arange(start, stop), jnp.arange(low, high)))
        outs.append(reference(query[:, start:stop], key[:, low:high], value[:, low:high], part, weigh)[0])
    return outs[0] if len(outs) == 1 else jnp.concatenate(outs, axis=1)


def refuses(call: Call) -> str | None:
    """What of a call it cannot compute."""
    if call.bias is not None:
        return "bias"
    return None if call.positions is None else "positions by row"


def block(query: Array) -> int:
    """Queries of a block: a quarter of them, but 64 to 128 of 32 bits, 128 to 256 of 16, as was measured on XLA:CPU."""
    least = 256 // query.dtype.itemsize
    return min(2 * least, max(least, query.shape[1] // 4))


def is_cheaper(query: Array, key: Array, call: Call) -> bool:
    """Whether enough pairs are left out."""
    T, S = query.shape[1], key.shape[1]
    found = spans(call.mask, T, S, block(query))
    return len(found) > 1 and sum((stop - start) * (high - low) for start, stop, low, high in found) <= SHARE * T * S


@cached_by_mask
def spans(mask: Mask, T: int, S: int, block: int) -> list[tuple[int, int, int, int]]:
    """(first query, end, first key, end) of each block of queries; the keys are 0 to 0 where none is seen."""
    found = []
    for i, visible in enumerate(mask.blocks(T, S, (block, KEYS)) != EMPTY):
        seen = np.flatnonzero(visible)
        low, high = (KEYS * seen[0], min(S, KEYS * (seen[-1] + 1))) if len(seen) else (0, 0)
        found.append((i * block, min(T, (i + 1) * block), int(low), int(high)))
    return found or [(0, 0, 0, 0)]
