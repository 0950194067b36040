"""Attention by its definition, one block of queries at a time, with only the keys between the first and the last that it sees.

Of a causal mask this leaves out nearly half of the pairs. A batch is cut into a few parts: XLA:CPU computes a product with
batch axes on one thread, but several of them at once. Each part of a block is a call of `reference`, and can do what this can,
but for a bias and positions by row. The array of weights is kept for the backward pass, so it is for short sequences.
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxformer.masks import EMPTY, Mask
from jaxformer.ops.attention.blocks import cached_by_mask
from jaxformer.ops.attention.call import Call, refuse
from jaxformer.ops.attention.reference import reference, softmax
from jaxformer.sharding import is_one_cpu

KEYS = 64  # the first and the last key are found to so many
SHARE = 0.8  # of all pairs: with more, one product of all of them is as fast
PARTS = 4  # of a batch; XLA:CPU starts another thread where more than eight operations wait, and each part has several
ROWS, PAIRS = 2, 2**18  # of a part, at least: smaller ones are no faster, and each has operations to compile


def attention(query: Array, key: Array, value: Array, call: Call, weigh: Callable = softmax) -> Array:
    """The output; `weigh` as in `reference`. Raises NotImplementedError where `refuses` says why."""
    refuse("rows", refuses(call), "reference")
    T, S, outs = query.shape[1], key.shape[1], []
    first, sizes = call.mask.first(T, S), part_sizes(query, key)
    for start, stop, low, high in spans(call.mask, T, S, block(query)) if leaves_out(query, key, call) else [(0, T, 0, S)]:
        of_block = replace(call, positions=(first + jnp.arange(start, stop), jnp.arange(low, high)))
        outs.append(_by_parts(query[:, start:stop], key[:, low:high], value[:, low:high], of_block, weigh, sizes))
    return _joined(outs, axis=1)


def _by_parts(query: Array, key: Array, value: Array, call: Call, weigh: Callable, sizes: list[int]) -> Array:
    """The output of `reference`, computed for so many rows of the batch at a time."""
    if len(sizes) == 1:
        return reference(query, key, value, call, weigh)[0]
    outs, row = [], 0
    arrays = (jax.lax.split(x, sizes) for x in (query, key, value))
    for q, k, v, mask in zip(*arrays, _masks_of_parts(call, sizes), strict=True):
        outs.append(reference(q, k, v, replace(call, mask=mask, first_row=row), weigh)[0])
        row += len(q)
    return _joined(outs, axis=0)


def _masks_of_parts(call: Call, sizes: list[int]) -> list[Mask]:
    """The mask of each part of the batch. Raises ValueError for a mask that has other rows than the batch."""
    visible = call.mask(*call.positions)
    count = jnp.shape(visible)[0] if jnp.ndim(visible) == 4 else 1  # a user's rule may return fewer axes
    if count == 1:
        return [call.mask] * len(sizes)
    if count != sum(sizes):
        raise ValueError(f"attention: the mask has {count} rows, the batch {sum(sizes)}: give it one row, or as many")
    return [Mask(_visible, arrays=(part,)) for part in jax.lax.split(visible, sizes)]


def _visible(mask: Mask, q, kv) -> Array:
    """The rule of a mask that was evaluated before."""
    return mask.arrays[0]


def _joined(arrays: list[Array], axis: int) -> Array:
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis)


def refuses(call: Call) -> str | None:
    """What of a call it cannot compute."""
    if call.bias is not None:
        return "bias"
    return None if call.positions is None else "positions by row"


def block(query: Array) -> int:
    """Queries of a block: a quarter of them, but 64 to 128 of 32 bits, 128 to 256 of 16, as was measured on XLA:CPU."""
    least = 256 // query.dtype.itemsize
    return min(2 * least, max(least, query.shape[1] // 4))


def part_sizes(query: Array, key: Array) -> list[int]:
    """The rows of each part of the batch. Only on one CPU there are several: a mesh splits the batch itself."""
    (B, T, N, _), S = query.shape, key.shape[1]
    count = max(1, min(PARTS, B // ROWS, B * N * T * S // PAIRS)) if is_one_cpu() else 1
    return [len(part) for part in np.array_split(np.arange(B), count)]


def is_cheaper(query: Array, key: Array, call: Call) -> bool:
    """Whether it is faster than one call of `reference`: it leaves pairs out, or cuts the batch."""
    return len(part_sizes(query, key)) > 1 or leaves_out(query, key, call)


def leaves_out(query: Array, key: Array, call: Call) -> bool:
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
