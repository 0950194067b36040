"""Visible pairs counted block by block, in NumPy at trace time, without an array of all pairs: `Mask.blocks`.

`q` and `kv` are the edges of the blocks: block (i, j) holds the queries q[i] <= position < q[i + 1] and the keys
kv[j] <= position < kv[j + 1]. Bounds are the least and the most visible pairs that a block can have: with at most 0 it is
EMPTY, with at least all of them FULL, else PARTIAL.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.masks import rules

EMPTY, PARTIAL, FULL = 0, 1, 2

Edges = np.ndarray  # one more than there are blocks along an axis
Counts = np.ndarray  # [N|1, rows, columns]
Bounds = tuple[Counts, ...]  # (least, most)

SAMPLES = 12  # positions along each side of an undecided block that are evaluated before all are
BUDGET = 1 << 25  # pairs that one classification may evaluate: a tenth of a second
CHUNK = 1 << 21  # pairs evaluated at a time: what fits the cache

OF_DISTANCE = (rules.full, rules.causal, rules.window, rules.strided)  # rules of q - kv
OF_KEYS = (rules.full, rules.prefix, rules.columns)  # rules of kv alone, which an offset of the queries does not change


def blocks(mask, q_length: int, kv_length: int, q_block: int, kv_block: int) -> np.ndarray:
    """`Mask.blocks`: EMPTY or FULL where that is certain for every head, PARTIAL elsewhere."""
    first = mask.first(q_length, kv_length)
    is_offset_known = isinstance(first, int | np.integer)
    q, kv = edges(int(first) if is_offset_known else 0, q_length, q_block), edges(0, kv_length, kv_block)
    low, high = _bounds(replace(mask, offset=None), q, kv, known_offset=is_offset_known)
    empty, full = (high == 0).all(0), (low == totals(q, kv)).all(0)
    return np.where(empty, EMPTY, np.where(full, FULL, PARTIAL)).astype(np.int8)


def density(mask, q_length: int, kv_length: int) -> float:
    """`Mask.density`: from counts of blocks where they are exact, else from all pairs."""
    first = mask.first(q_length, kv_length)
    if q_length == 0 or kv_length == 0:
        return 0.0
    if not isinstance(first, int | np.integer):
        raise ValueError("density: the mask's offset is an array; call .at(offset) with an int")
    if not mask.static:
        keys, step, visible = np.arange(kv_length)[None], max(1, CHUNK // kv_length), 0.0
        for start in range(0, q_length, step):
            values = evaluate(mask, first + np.arange(start, min(start + step, q_length))[None], keys)
            visible += values.mean() * values.shape[2]
        return float(visible / q_length)
    block = -(-max(q_length, kv_length) // 256)
    q, kv, offsets = edges(int(first), q_length, block), edges(0, kv_length, block), np.arange(block)
    low, high = _counts(mask, q, kv)
    count, (i, j) = low.mean(0), np.nonzero((low != high).any(0))
    if len(i):
        count[i, j] = count_visible(mask, q, kv, offsets, offsets, i, j, len(low))[0].mean(0)
    return float(count.sum() / (q_length * kv_length))


# Bounds of a mask, from its structure
def made_of(mask, allowed) -> bool:
    """Whether a mask holds no arrays and combines these rules alone."""
    if mask.rule in _OPERATIONS:
        return all(made_of(part, allowed) for part in mask.parts)
    return mask.rule in allowed and not mask.arrays


def _bounds(mask, q, kv, known_offset: bool) -> Bounds:
    """Least and most visible pairs of each block. Without a known offset the queries may be anywhere."""
    # the operands that are known at trace time are counted together; the others may show anything
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
    return _OPERATIONS[mask.rule]([_bounds(part, q, kv, known_offset) for part in _grouped(mask, known)], total)


def _counts(mask, q, kv) -> Bounds:
    """Bounds of a static mask from its structure alone: exact for one rule and for any function of q - kv."""
    total = totals(q, kv)

    def of_distance(part):
        return made_of(part, OF_DISTANCE)

    if of_distance(mask):
        distances = np.arange(q[0] - kv[-1] + 1, q[-1] - kv[0])
        visible = mask._evaluate(distances.reshape(1, 1, -1, 1), np.zeros((1, 1, 1, 1), distances.dtype))
        exact = by_distance(visible[0, :, :, 0], q, kv)
    elif mask.rule in _OPERATIONS:
        return _OPERATIONS[mask.rule]([_counts(part, q, kv) for part in _grouped(mask, of_distance)], total)
    elif mask.rule in _COUNTS:
        exact = _COUNTS[mask.rule](mask, q, kv)
    else:
        return np.zeros_like(total), total
    return exact, exact


def _grouped(mask, kind: Callable):
    """The operands. Of `&` and `|`, those of a kind are joined to one."""
    if mask.rule not in (rules.and_, rules.or_):
        return mask.parts
    same, others = [p for p in mask.parts if kind(p)], [p for p in mask.parts if not kind(p)]
    return [replace(mask, parts=tuple(same), offset=None), *others] if same else others


def complement(bounds: Bounds, total: Counts) -> Bounds:
    return total - bounds[1], total - bounds[0]


def intersection(bounds: Iterable[Bounds], total: Counts) -> Bounds:
    """Bounds of an `&`: at most the pairs of its least operand; hidden at most the hidden pairs of all operands together."""
    low, high = zip(*bounds, strict=True)
    return np.maximum(total - sum(total - each for each in low), 0), np.minimum.reduce(np.broadcast_arrays(*high))


def union(bounds: Iterable[Bounds], total: Counts) -> Bounds:
    return complement(intersection([complement(each, total) for each in bounds], total), total)


# Bounds narrowed by evaluating pairs
def narrow_bounds(mask, bounds: Bounds, q: Edges, kv: Edges) -> Bounds:
    """Evaluates a few pairs of each undecided block, then all of its pairs while the budget lasts."""
    total = totals(q, kv)
    for limit in (SAMPLES, None):
        q_offsets, kv_offsets = sample_grid(np.diff(q), limit), sample_grid(np.diff(kv), limit)
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
    """Offsets within a block: `limit` of them, evenly spread, or all."""
    largest = max(sizes, default=1)
    return np.arange(largest) if limit is None else np.unique(np.linspace(0, largest - 1, limit).astype(np.int64))


def undecided(bounds: Bounds, total: Counts) -> np.ndarray:
    """Blocks whose class the bounds leave open."""
    low, high = bounds
    partial = (low > 0).any(0) & (high < total).any(0)
    return ~(partial | (high == 0).all(0) | (low == total).all(0))


def count_visible(mask, q, kv, q_offsets, kv_offsets, i, j, heads: int):
    """(visible, hidden) pairs `[N, M]` at the offsets `[a]`, `[b]` within M blocks (i, j)."""
    counts, step = [], max(1, CHUNK // (q_offsets.size * kv_offsets.size * heads))
    for start in range(0, len(i), step):
        selection = slice(start, start + step)
        q_positions, kv_positions = q[i[selection]][:, None] + q_offsets[None], kv[j[selection]][:, None] + kv_offsets[None]
        last_q, last_kv = q[i[selection] + 1][:, None] - 1, kv[j[selection] + 1][:, None] - 1
        visible = evaluate(mask, np.minimum(q_positions, last_q), np.minimum(kv_positions, last_kv))
        inside = ((q_positions <= last_q)[:, :, None] & (kv_positions <= last_kv)[:, None, :])[:, None]
        counts.append([np.count_nonzero(pairs, axis=(2, 3)).T for pairs in (visible & inside, ~visible & inside)])
    visible, hidden = (np.concatenate(each, axis=1) for each in zip(*counts, strict=True))
    return visible, hidden


class TracedRule(ValueError):
    """The mask depends on a traced value."""


def evaluate(mask, q, kv):
    """The mask `[M, N|1, T, S]` at positions [M, T], [M, S] in NumPy, at trace time too. Raises TracedRule."""
    q, kv = q.astype(np.int32)[:, None, :, None], kv.astype(np.int32)[:, None, None, :]
    if mask.static and made_of(mask, (*OF_DISTANCE, *_COUNTS)):
        return mask._evaluate(q, kv)
    with jax.ensure_compile_time_eval():  # a user's rule may call jax.numpy
        visible = mask._evaluate(jnp.asarray(q), jnp.asarray(kv))
    if isinstance(visible, jax.core.Tracer):
        raise TracedRule("density: the mask depends on a traced value; ask outside of jit")
    return np.broadcast_to(np.asarray(visible, bool), np.broadcast_shapes(np.shape(visible), q.shape, kv.shape))


def edges(first: int, length: int, block: int) -> Edges:
    """The first position of each block of `length` positions from `first` on, and the end of the last block."""
    return first + np.append(np.arange(0, length, block), length)


def totals(q: Edges, kv: Edges) -> Counts:
    """All pairs of a block."""
    return np.diff(q)[None, :, None] * np.diff(kv)[None, None, :]


def by_distance(visible: np.ndarray, q: Edges, kv: Edges) -> Counts:
    """Counts of a function of q - kv, given as `[N|1, T + S - 1]` from the first query minus the last key on."""
    # with E the double prefix sum of `visible`, a block's count is a second difference of E over its four corners
    for _ in range(2):
        visible = np.pad(np.cumsum(visible, axis=1, dtype=np.int64), ((0, 0), (1, 0)))
    return _between(-visible[:, q[:, None] - kv[None] - (q[0] - kv[-1])])


def by_intervals(cuts: Edges, start: np.ndarray, end: np.ndarray, q: Edges, kv: Edges) -> Counts:
    """Counts where the queries from cuts[r] up to cuts[r + 1] see the keys start[r, n] <= position < end[r, n] for each n."""
    # sums of very large bounds would wrap around
    start, end = np.clip(start, kv[0], kv[-1]), np.clip(end, kv[0], kv[-1])
    visible = np.zeros((len(cuts), len(kv)), np.int64)  # before each cut and each key edge
    for column, edge in enumerate(kv):
        each = (np.minimum(end, edge) - np.minimum(start, edge)).sum(1)
        visible[1:, column] = np.cumsum(each * np.diff(cuts))
    return _between(visible[None, np.searchsorted(cuts, q)])


def _between(integral):
    """Counts of each block from the number of visible pairs before each query edge and key edge."""
    return np.diff(np.diff(integral, axis=1), axis=2)


def _count_layout(mask, q, kv):
    """Of a mask that is constant on its own blocks from position 0 on, and hidden beyond."""
    layout, block = rules.layout_of(*mask.args[1:]), mask.args[0]

    def shared(edges, n):
        return np.diff(np.clip(edges[:, None] - block * np.arange(n)[None], 0, block), axis=0).astype(float)

    return (shared(q, layout.shape[1]) @ layout @ shared(kv, layout.shape[2]).T).astype(np.int64)


def _count_chunked(mask, q, kv):
    size, before, after = mask.args
    cuts, chunk = _cuts(q, size)
    return by_intervals(cuts, (chunk - before) * size, (chunk + after + 1) * size, q, kv)


def _count_random(mask, q, kv):
    key_blocks, size = rules.choice_of(mask), mask.args[1]
    cuts, chunk = _cuts(q, size)
    start = size * key_blocks[chunk[:, 0] % len(key_blocks)].astype(np.int64)
    return by_intervals(cuts, start, start + size, q, kv)


def _cuts(q, size: int):
    """The edges of the blocks and of chunks of `size` positions together, and between two of them the chunk's number."""
    cuts = np.union1d(q, np.arange(-(-q[0] // size) * size, q[-1], size))
    return cuts, (cuts[:-1] // size)[:, None]


def _count_keys(mask, q, kv):
    """Of a rule of kv alone."""
    positions = np.arange(kv[0], kv[-1])
    visible = np.append(0, np.cumsum(mask._evaluate(np.zeros((1, 1, 1, 1), int), positions.reshape(1, 1, 1, -1))))
    return (np.diff(q)[:, None] * np.diff(visible[kv - kv[0]]))[None]


def _count_global(mask, q, kv):
    (tokens,) = mask.args

    def tokens_before(edges):
        return np.clip(edges, 0, tokens) if isinstance(tokens, int) else np.searchsorted(tokens, edges)

    def others(edges):
        return np.diff(edges - tokens_before(edges))  # positions of each block that are no global tokens

    return totals(q, kv) - (others(q)[:, None] * others(kv))[None]


_COUNTS = {
    rules.prefix: _count_keys, rules.columns: _count_keys, rules.chunked: _count_chunked,
    rules.global_tokens: _count_global, rules.block_sparse: _count_layout, rules.random_blocks: _count_random,
}  # fmt: skip
_OPERATIONS = {
    rules.and_: intersection, rules.or_: union, rules.not_: lambda bounds, total: complement(bounds[0], total),
    rules.by_head: lambda bounds, total: tuple(np.concatenate(each) for each in zip(*bounds, strict=True)),
}  # fmt: skip
