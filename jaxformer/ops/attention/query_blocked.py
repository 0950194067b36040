"""Attention by its definition, one block of queries after another, each with the keys that it sees.

A block of queries reads the keys between the first and the last that any of its queries sees. Under
a causal mask this leaves out nearly half of the pairs. The batch is cut into a few parts, because
XLA:CPU computes a product with batch axes on one thread, but several such products at once. Each
part of a block is a call of `reference`. The weights are kept for the backward pass, so it is for
short sequences.
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
from jaxformer.ops.attention.kernel import Kernel
from jaxformer.ops.attention.reference import all_gather_length, reference, softmax_of
from jaxformer.sharding import is_one_cpu

# The cost model, as measured on XLA:CPU
KEYS = 64  # key ranges are rounded to multiples of this
LARGEST_SHARE = 0.8  # of all pairs; if blocks have more of them, one product of all is as fast
# XLA:CPU starts another thread where more than eight operations wait; a part has several
BATCH_PARTS = 4
# The least size of a part of the batch. Smaller parts are no faster, and each adds operations to
# compile.
LEAST_BATCH = 2
LEAST_PAIRS = 2**18


def attention(query: Array, key: Array, value: Array, call: Call) -> Array:
    """The output of `reference`, computed one block of queries after another.

    Raises NotImplementedError for a bias and for positions by row (`refuses`), and ValueError for a
    mask of another batch size.
    """
    refuse("query_blocked", refuses(query, key, value, call), "reference")
    key, value = all_gather_length(key, value)
    softmax_fn = softmax_of(value)
    T, S = query.shape[1], key.shape[1]
    first = call.mask.first(T, S)
    batch_sizes = batch_part_sizes(query, key)
    outs = []
    for start, stop, low, high in query_blocks(query, key, call):
        positions = first + jnp.arange(start, stop), jnp.arange(low, high)
        block = query[:, start:stop], key[:, low:high], value[:, low:high]
        of_block = replace(call, positions=positions)
        outs.append(_by_batch_parts(*block, of_block, softmax_fn, batch_sizes))
    return _concatenated(outs, axis=1)


def _by_batch_parts(
    query: Array,
    key: Array,
    value: Array,
    call: Call,
    softmax_fn: Callable,
    batch_sizes: list[int],
) -> Array:
    """Calls `reference` on one part of the batch after another."""
    if len(batch_sizes) == 1:
        return reference(query, key, value, call, softmax_fn)[0]
    outs = []
    first_row = 0
    arrays = (jax.lax.split(x, batch_sizes) for x in (query, key, value))
    for q, k, v, mask in zip(*arrays, _masks_of_batch_parts(call, batch_sizes), strict=True):
        of_part = replace(call, mask=mask, first_row=first_row)
        outs.append(reference(q, k, v, of_part, softmax_fn)[0])
        first_row += len(q)
    return _concatenated(outs, axis=0)


def _masks_of_batch_parts(call: Call, batch_sizes: list[int]) -> list[Mask]:
    """The mask of each part of the batch. Raises ValueError for a mask of another batch size."""
    visible = call.mask(*call.positions)
    # a user's rule may return fewer axes
    count = jnp.shape(visible)[0] if jnp.ndim(visible) == 4 else 1
    if count == 1:
        return [call.mask] * len(batch_sizes)
    if count != sum(batch_sizes):
        sizes = f"the mask has {count} rows, the batch {sum(batch_sizes)}"
        raise ValueError(f"attention: {sizes}: give it one row, or as many")
    return [Mask(_evaluated, arrays=(part,)) for part in jax.lax.split(visible, batch_sizes)]


def _evaluated(mask: Mask, q, kv) -> Array:
    """The rule of a mask that holds its answer: the visible pairs, as an array."""
    return mask.arrays[0]


def _concatenated(arrays: list[Array], axis: int) -> Array:
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis)


def refuses(query: Array, key: Array, value: Array, call: Call) -> str | None:
    """The part of a call that this kernel cannot compute; None: it can compute all."""
    if call.bias is not None:
        return "bias"
    return None if call.positions is None else "positions by row"


QUERY_BLOCKED = Kernel("query_blocked", attention, refuses)


def is_cheaper(query: Array, key: Array, call: Call) -> bool:
    """Whether this is faster than `reference`: it leaves pairs out, or cuts the batch."""
    return len(batch_part_sizes(query, key)) > 1 or leaves_out(query, key, call)


def leaves_out(query: Array, key: Array, call: Call) -> bool:
    """Whether the blocks leave out enough pairs."""
    T, S = query.shape[1], key.shape[1]
    if block_size(query) >= T:  # one block
        return False
    ranges = key_ranges(call.mask, T, S, block_size(query))
    pairs = sum((stop - start) * (high - low) for start, stop, low, high in ranges)
    return pairs <= LARGEST_SHARE * T * S


def query_blocks(query: Array, key: Array, call: Call) -> list[tuple[int, int, int, int]]:
    """(first query, end, first key, end) of each block; one block if few pairs are left out."""
    T, S = query.shape[1], key.shape[1]
    if not leaves_out(query, key, call):
        return [(0, T, 0, S)]
    return key_ranges(call.mask, T, S, block_size(query))


@cached_by_mask
def key_ranges(mask: Mask, T: int, S: int, block: int) -> list[tuple[int, int, int, int]]:
    """(first query, end, first key, end) of each block; keys 0 to 0 for a block that sees none."""
    ranges = []
    for i, visible in enumerate(mask.blocks(T, S, (block, KEYS)) != EMPTY):
        low, high = 0, 0
        visible_blocks = np.flatnonzero(visible)
        if len(visible_blocks):
            low = KEYS * int(visible_blocks[0])
            high = min(S, KEYS * (int(visible_blocks[-1]) + 1))
        ranges.append((i * block, min(T, (i + 1) * block), low, high))
    return ranges or [(0, 0, 0, 0)]


def block_size(query: Array) -> int:
    """Queries of a block: T / 4, but 64 to 128 in 32 bits and 128 to 256 in 16 bits."""
    least = 256 // query.dtype.itemsize
    return min(2 * least, max(least, query.shape[1] // 4))


def batch_part_sizes(query: Array, key: Array) -> list[int]:
    """The batch size of each part of the batch.

    There are several parts only on one CPU. A mesh splits the batch itself.
    """
    B, T, N, _ = query.shape
    count = 1
    if is_one_cpu():
        pairs = B * N * T * key.shape[1]
        count = max(1, min(BATCH_PARTS, B // LEAST_BATCH, pairs // LEAST_PAIRS))
    return [len(part) for part in np.array_split(np.arange(B), count)]
