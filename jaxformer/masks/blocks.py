"""`Mask.blocks` and `Mask.density`: visible pairs counted block by block, in NumPy at trace time.

No array of all pairs is made. `q` and `kv` are the edges of the blocks: block (i, j) holds the
queries q[i] <= position < q[i + 1] and the keys kv[j] <= position < kv[j + 1]. Bounds are the least
and the most visible pairs that a block can have. If the most is 0, the block is EMPTY. If the least
is all pairs, it is FULL. Otherwise it is PARTIAL.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.masks import rules

EMPTY, PARTIAL, FULL = 0, 1, 2

Edges = np.ndarray  # [blocks + 1]
Counts = np.ndarray  # [N|1, query blocks, key blocks]
Bounds = tuple[Counts, ...]  # (least, most)

# An undecided block is evaluated first at this many positions along each side, then at all.
SAMPLES = 12
BUDGET = 1 << 25  # the pairs that one classification may evaluate: a tenth of a second
CHUNK = 1 << 21  # the pairs that are evaluated at a time: they fit the cache

OF_DISTANCE = (rules.full, rules.causal, rules.window, rules.strided)  # rules of q - kv
# rules of kv alone, which an offset of the queries does not change
OF_KEYS = (rules.full, rules.prefix, rules.columns)


def blocks(mask, q_length: int, kv_length: int, q_block: int, kv_block: int) -> np.ndarray:
    """`Mask.blocks`: EMPTY or FULL if that is certain for every head, otherwise PARTIAL."""
    first = mask.first(q_length, kv_length)
    is_offset_known = isinstance(first, int | np.integer)
    q = edges(int(first) if is_offset_known else 0, q_length, q_block)
    kv = edges(0, kv_length, kv_block)
    low, high = _bounds(replace(mask, offset=None), q, kv, known_offset=is_offset_known)
    empty = (high == 0).all(0)
    full = (low == totals(q, kv)).all(0)
    return np.where(empty, EMPTY, np.where(full, FULL, PARTIAL)).astype(np.int8)


def density(mask, q_length: int, kv_length: int) -> float:
    """`Mask.density`: the share of visible pairs.

    If the bounds of a block differ, its pairs are evaluated. Raises ValueError for an offset that
    is an array.
    """
    first = mask.first(q_length, kv_length)
    if q_length == 0 or kv_length == 0:
        return 0.0
    if not isinstance(first, int | np.integer):
        raise ValueError("density: the mask's offset is an array; call .at(offset) with an int")
    if not mask.static:
        return _density_of_all_pairs(mask, int(first), q_length, kv_length)
    block = -(-max(q_length, kv_length) // 256)
    q = edges(int(first), q_length, block)
    kv = edges(0, kv_length, block)
    low, high = _counts(mask, q, kv)
    count = low.mean(0)
    i, j = np.nonzero((low != high).any(0))
    if len(i):
        offsets = np.arange(block)
        visible, _ = count_visible(mask, q, kv, offsets, offsets, i, j, len(low))
        count[i, j] = visible.mean(0)
    return float(count.sum() / (q_length * kv_length))


def _density_of_all_pairs(mask, first: int, q_length: int, kv_length: int) -> float:
    """The share of visible pairs, with all pairs evaluated, at most `CHUNK` at a time."""
    keys = np.arange(kv_length)[None]
    step = max(1, CHUNK // kv_length)
    visible = 0.0
    for start in range(0, q_length, step):
        queries = np.arange(start, min(start + step, q_length))[None]
        values = evaluate(mask, first + queries, keys)
        visible += values.mean() * values.shape[2]
    return float(visible / q_length)


# Bounds of a mask, from its structure
def made_of(mask, allowed) -> bool:
    """Whether a mask holds no arrays and combines only the rules in `allowed`."""
    if mask.rule in _OPERATIONS:
        return all(made_of(part, allowed) for part in mask.parts)
    return mask.rule in allowed and not mask.arrays


def _bounds(mask, q, kv, known_offset: bool) -> Bounds:
    """The least and the most visible pairs of each block.

    Operands that are known at trace time are counted together. The others may show any pair.
    Without a known offset the queries may be at any position.
    """
    total = totals(q, kv)

    def known(part):
        return part.static and (known_offset or made_of(part, OF_KEYS))

    if known(mask):
        counts = _counts(mask, q, kv)
        try:
            return narrow_bounds(mask, counts, q, kv)
        except TracedRule:
            return counts
    if mask.rule not in _OPERATIONS:
        return np.zeros_like(total), total
    operands = [_bounds(part, q, kv, known_offset) for part in _grouped(mask, known)]
    return _OPERATIONS[mask.rule](operands, total)


def _counts(mask, q, kv) -> Bounds:
    """Bounds of a static mask from its structure alone.

    They are exact for a single rule of ours and for any function of q - kv.
    """
    total = totals(q, kv)
    if _is_of_distance(mask):
        exact = _count_distances(mask, q, kv)
        return exact, exact
    if mask.rule in _OPERATIONS:
        operands = [_counts(part, q, kv) for part in _grouped(mask, _is_of_distance)]
        return _OPERATIONS[mask.rule](operands, total)
    if mask.rule in _COUNTS:
        exact = _COUNTS[mask.rule](mask, q, kv)
        return exact, exact
    return np.zeros_like(total), total


def _is_of_distance(mask) -> bool:
    return made_of(mask, OF_DISTANCE)


def _grouped(mask, kind: Callable):
    """The operands of a mask. Operands of `&` and `|` for which `kind` holds are joined to one."""
    if mask.rule not in (rules.and_, rules.or_):
        return mask.parts
    same = [part for part in mask.parts if kind(part)]
    others = [part for part in mask.parts if not kind(part)]
    return [replace(mask, parts=tuple(same), offset=None), *others] if same else others


def complement(bounds: Bounds, total: Counts) -> Bounds:
    return total - bounds[1], total - bounds[0]


def intersection(bounds: Iterable[Bounds], total: Counts) -> Bounds:
    """Bounds of an `&`.

    Most: the visible pairs of the operand that shows least. Least: all pairs but the hidden pairs
    of all operands together.
    """
    lows, highs = zip(*bounds, strict=True)
    hidden = sum(total - low for low in lows)
    return np.maximum(total - hidden, 0), np.minimum.reduce(np.broadcast_arrays(*highs))


def union(bounds: Iterable[Bounds], total: Counts) -> Bounds:
    return complement(intersection([complement(each, total) for each in bounds], total), total)


def heads_together(bounds: Iterable[Bounds]) -> Bounds:
    """Bounds of a `by_head`."""
    lows, highs = zip(*bounds, strict=True)
    return np.concatenate(lows), np.concatenate(highs)


# Bounds narrowed by evaluating pairs
def narrow_bounds(mask, bounds: Bounds, q: Edges, kv: Edges) -> Bounds:
    """Tighter bounds: evaluates a few pairs of each undecided block, then all within `BUDGET`."""
    total = totals(q, kv)
    for limit in (SAMPLES, None):
        q_offsets = sample_grid(np.diff(q), limit)
        kv_offsets = sample_grid(np.diff(kv), limit)
        i, j = np.nonzero(undecided(bounds, total))
        if limit is None:
            affordable = BUDGET // (len(q_offsets) * len(kv_offsets) * len(bounds[0]))
            i, j = i[:affordable], j[:affordable]
        if len(i) == 0:
            break
        visible, hidden = count_visible(mask, q, kv, q_offsets, kv_offsets, i, j, len(bounds[0]))
        shape = max(len(bounds[0]), len(visible)), *total.shape[1:]
        low, high = bounds = tuple(np.array(np.broadcast_to(each, shape)) for each in bounds)
        low[:, i, j] = np.maximum(low[:, i, j], visible)
        high[:, i, j] = np.minimum(high[:, i, j], total[:, i, j] - hidden)
    return bounds


def sample_grid(sizes, limit: int | None) -> np.ndarray:
    """Offsets within a block: all, or `limit` of them, evenly spread."""
    largest = max(sizes, default=1)
    if limit is None:
        return np.arange(largest)
    return np.unique(np.linspace(0, largest - 1, limit).astype(np.int64))


def undecided(bounds: Bounds, total: Counts) -> np.ndarray:
    """Whether the bounds leave the class of a block open."""
    low, high = bounds
    partial = (low > 0).any(0) & (high < total).any(0)
    return ~(partial | (high == 0).all(0) | (low == total).all(0))


def count_visible(mask, q, kv, q_offsets, kv_offsets, i, j, heads: int):
    """(visible, hidden) pairs `[N, M]` in M blocks (i, j), counted at these offsets in a block."""
    visible_counts = []
    hidden_counts = []
    step = max(1, CHUNK // (q_offsets.size * kv_offsets.size * heads))
    for start in range(0, len(i), step):
        selection = slice(start, start + step)
        q_positions, in_q = _positions_in_blocks(q, i[selection], q_offsets)
        kv_positions, in_kv = _positions_in_blocks(kv, j[selection], kv_offsets)
        visible = evaluate(mask, q_positions, kv_positions)
        inside = (in_q[:, :, None] & in_kv[:, None, :])[:, None]
        visible_counts.append(np.count_nonzero(visible & inside, axis=(2, 3)).T)
        hidden_counts.append(np.count_nonzero(~visible & inside, axis=(2, 3)).T)
    return np.concatenate(visible_counts, axis=1), np.concatenate(hidden_counts, axis=1)


def _positions_in_blocks(edges: Edges, index: np.ndarray, offsets: np.ndarray):
    """(positions, whether each is in its block) `[M, offsets]`, at offsets in M blocks `index`.

    A position beyond its block is replaced by the last one of the block.
    """
    positions = edges[index][:, None] + offsets[None]
    last = edges[index + 1][:, None] - 1
    return np.minimum(positions, last), positions <= last


class TracedRule(ValueError):
    """The mask depends on a traced value."""


def evaluate(mask, q, kv):
    """The mask `[M, N|1, T, S]` at positions `[M, T]`, `[M, S]`, in NumPy, also at trace time.

    Raises TracedRule if the mask depends on a traced value.
    """
    q = q.astype(np.int32)[:, None, :, None]
    kv = kv.astype(np.int32)[:, None, None, :]
    if mask.static and made_of(mask, (*OF_DISTANCE, *_COUNTS)):
        return mask._evaluate(q, kv)
    with jax.ensure_compile_time_eval():  # a user's rule may call jax.numpy
        visible = mask._evaluate(jnp.asarray(q), jnp.asarray(kv))
    if isinstance(visible, jax.core.Tracer):
        raise TracedRule("density: the mask depends on a traced value; ask outside of jit")
    shape = np.broadcast_shapes(np.shape(visible), q.shape, kv.shape)
    return np.broadcast_to(np.asarray(visible, bool), shape)


def edges(first: int, length: int, block: int) -> Edges:
    """The first position of each block and the end of the last; `length` positions from `first`."""
    return first + np.append(np.arange(0, length, block), length)


def totals(q: Edges, kv: Edges) -> Counts:
    """The number of all pairs of each block."""
    return np.diff(q)[None, :, None] * np.diff(kv)[None, None, :]


# Counts of one rule each
def _count_distances(mask, q, kv):
    """Counts of a function of q - kv."""
    distances = np.arange(q[0] - kv[-1] + 1, q[-1] - kv[0])
    origin = np.zeros((1, 1, 1, 1), distances.dtype)
    visible = mask._evaluate(distances.reshape(1, 1, -1, 1), origin)
    return by_distance(visible[0, :, :, 0], q, kv)


def by_distance(visible: np.ndarray, q: Edges, kv: Edges) -> Counts:
    """Counts of a function of q - kv.

    `visible` `[N|1, T + S - 1]` has its value at each distance, from the first query minus the last
    key on. E is the double prefix sum of `visible`. The count of a block is the second difference
    of E over its four corners.
    """
    for _ in range(2):
        visible = np.pad(np.cumsum(visible, axis=1, dtype=np.int64), ((0, 0), (1, 0)))
    return _between(-visible[:, q[:, None] - kv[None] - (q[0] - kv[-1])])


def by_intervals(cuts: Edges, start: np.ndarray, end: np.ndarray, q: Edges, kv: Edges) -> Counts:
    """Counts of a mask whose visible keys are intervals.

    The queries cuts[r] <= position < cuts[r + 1] see the keys start[r, n] <= position < end[r, n],
    for each n.
    """
    # sums of very large bounds would wrap around
    start = np.clip(start, kv[0], kv[-1])
    end = np.clip(end, kv[0], kv[-1])
    visible = np.zeros((len(cuts), len(kv)), np.int64)  # pairs before each cut and each key edge
    for column, edge in enumerate(kv):
        visible_keys = (np.minimum(end, edge) - np.minimum(start, edge)).sum(1)
        visible[1:, column] = np.cumsum(visible_keys * np.diff(cuts))
    return _between(visible[None, np.searchsorted(cuts, q)])


def _between(integral):
    """Counts of the blocks, from the visible pairs before each query edge and each key edge."""
    return np.diff(np.diff(integral, axis=1), axis=2)


def _count_layout(mask, q, kv):
    """Counts of `block_sparse`: constant on its own blocks from position 0 on, hidden beyond."""
    block, shape, packed = mask.args
    layout = rules.layout_of(shape, packed)

    # the number of positions that each of our blocks shares with each of the n blocks of the layout
    def shared(edges, n):
        before_edge = np.clip(edges[:, None] - block * np.arange(n)[None], 0, block)
        return np.diff(before_edge, axis=0).astype(float)

    return (shared(q, layout.shape[1]) @ layout @ shared(kv, layout.shape[2]).T).astype(np.int64)


def _count_chunked(mask, q, kv):
    size, before, after = mask.args
    cuts, chunk = _cuts(q, size)
    return by_intervals(cuts, (chunk - before) * size, (chunk + after + 1) * size, q, kv)


def _count_random(mask, q, kv):
    key_blocks = rules.choice_of(mask)
    size = mask.args[1]
    cuts, chunk = _cuts(q, size)
    start = size * key_blocks[chunk[:, 0] % len(key_blocks)].astype(np.int64)
    return by_intervals(cuts, start, start + size, q, kv)


def _cuts(q, size: int):
    """The edges of blocks and of chunks together, and the number of the chunk after each edge.

    A chunk has `size` positions.
    """
    cuts = np.union1d(q, np.arange(-(-q[0] // size) * size, q[-1], size))
    return cuts, (cuts[:-1] // size)[:, None]


def _count_keys(mask, q, kv):
    """Counts of a rule of kv alone."""
    positions = np.arange(kv[0], kv[-1]).reshape(1, 1, 1, -1)
    visible = mask._evaluate(np.zeros((1, 1, 1, 1), int), positions)
    visible_before = np.append(0, np.cumsum(visible))
    return (np.diff(q)[:, None] * np.diff(visible_before[kv - kv[0]]))[None]


def _count_global(mask, q, kv):
    (tokens,) = mask.args

    def tokens_before(edges):
        if isinstance(tokens, int):
            return np.clip(edges, 0, tokens)
        return np.searchsorted(tokens, edges)

    # the positions of each block that are no global tokens
    def others(edges):
        return np.diff(edges - tokens_before(edges))

    return totals(q, kv) - (others(q)[:, None] * others(kv))[None]


_COUNTS = {
    rules.prefix: _count_keys,
    rules.columns: _count_keys,
    rules.chunked: _count_chunked,
    rules.global_tokens: _count_global,
    rules.block_sparse: _count_layout,
    rules.random_blocks: _count_random,
}
_OPERATIONS = {
    rules.and_: intersection,
    rules.or_: union,
    rules.not_: lambda bounds, total: complement(bounds[0], total),
    rules.by_head: lambda bounds, total: heads_together(bounds),
}
