"""Visible pairs counted block by block, in NumPy at trace time, without an array of all pairs: `Mask.blocks`.

Block (i, j) holds the queries q[i] <= position < q[i + 1] and the keys kv[j] <= position < kv[j + 1]: `q` and `kv` are
the edges of the blocks. Counts have the shape `[N|1, len(q) - 1, len(kv) - 1]`. A mask whose count is not known has a
lower and an upper bound: 0 visible pairs at most is EMPTY, all of them at least is FULL, everything else is PARTIAL.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.masks import rules

EMPTY, PARTIAL, FULL = 0, 1, 2

Edges = np.ndarray  # one more than there are blocks along an axis
Counts = np.ndarray  # [N|1, rows, columns]
Bounds = tuple[Counts, Counts]

SAMPLES = 12  # positions along each side of an undecided block that are looked at before all are
BUDGET = 1 << 25  # pairs that one classification may look at one by one: a tenth of a second
LOOKS = 1 << 26  # pairs that one density may look at
CHUNK = 1 << 21  # pairs looked at in one go: what fits the cache

OF_DISTANCE = (rules.full, rules.causal, rules.window, rules.strided)  # rules of q - kv
OF_KEYS = (rules.full, rules.prefix, rules.columns)  # rules of kv alone, which no offset moves


def blocks(mask, q_length: int, kv_length: int, rows: int, columns: int) -> np.ndarray:
    """`Mask.blocks`: EMPTY or FULL where every head is for certain, PARTIAL elsewhere."""
    first = first_query(mask, q_length, kv_length)
    q, kv = edges(first or 0, q_length, rows), edges(0, kv_length, columns)
    mask, total = replace(mask.sized(kv_length), offset=None), totals(q, kv)
    low, high = _bounds(mask, q, kv, fixed=first is not None)
    empty, full = (high == 0).all(0), (low == total).all(0)
    return np.where(empty, EMPTY, np.where(full, FULL, PARTIAL)).astype(np.int8)


def first_query(mask, q_length: int, kv_length: int) -> int | None:
    """The position of the first query; None where only an array knows it."""
    first = mask.first(q_length, kv_length)
    return int(first) if isinstance(first, int | np.integer) else None


def density(mask, q_length: int, kv_length: int) -> float:
    """`Mask.density`: by counting where that is exact, by looking at pairs where it is not."""
    mask, first = mask.sized(kv_length), first_query(mask, q_length, kv_length)
    if q_length == 0 or kv_length == 0:
        return 0.0
    if first is None:
        raise ValueError("density: the mask's offset is an array; call .at(offset) with an int")
    if mask.static:
        return _static_density(mask, first, q_length, kv_length)
    rows = first + _strata(1, q_length, LOOKS // kv_length)[0]
    keys, step, visible = np.arange(kv_length)[None], max(1, CHUNK // kv_length), 0.0
    for start in range(0, len(rows), step):
        some = _now(mask, rows[None, start : start + step], keys)
        if some is None:
            raise ValueError("density: the mask's arrays are traced; ask outside of jit")
        visible += some.mean() * some.shape[2]
    return float(visible / len(rows))


def _static_density(mask, first, q_length, kv_length) -> float:
    """Counts block by block; where the bounds differ, as many rows of a block are looked at as the budget allows."""
    block = -(-max(q_length, kv_length) // 256)
    q, kv = edges(first, q_length, block), edges(0, kv_length, block)
    (low, high), total = _counts(mask, q, kv), totals(q, kv)
    count = low.mean(0)
    i, j = np.nonzero((low != high).any(0))
    rows = _strata(len(i), block, LOOKS // max(1, len(i) * block * len(low)))
    step = max(1, CHUNK // (rows.shape[1] * block * len(low)))
    for start in range(0, len(i), step):
        a, b = i[start : start + step], j[start : start + step]
        found = _look(partial(_now, mask), q, kv, rows[start : start + step], np.arange(block)[None], a, b)
        if found is None:
            raise ValueError("density: the mask's rule waits for a traced value; ask outside of jit")
        visible, hidden = found
        guess = visible / np.maximum(visible + hidden, 1) * total[:, a, b]
        count[a, b] = np.clip(guess, low[:, a, b], high[:, a, b]).mean(0)
    return float(count.sum() / (q_length * kv_length))


def _strata(times, length, most):
    """`times` over, all of `length` places or one at random in each of `most` equal parts: a fixed grid meets strides."""
    most = min(length, max(1, most))
    return ((np.arange(most) + np.random.default_rng(0).random((times, most))) * length / most).astype(np.int64)


def made_of(mask, some) -> bool:
    """Whether a mask holds no arrays and no rules but these, combined."""
    if mask.rule in _OPERATIONS:
        return all(made_of(part, some) for part in mask.parts)
    return mask.rule in some and not mask.arrays


def _bounds(mask, q, kv, fixed) -> Bounds:
    """Least and most visible pairs a block, as tight as time allows; without a `fixed` offset the queries may be any.

    What is known while tracing is settled first, together; the rest is anything.
    """
    total = totals(q, kv)
    if _known(mask, fixed):
        return refine(partial(_now, mask), _counts(mask, q, kv), q, kv)
    if mask.rule not in _OPERATIONS:
        return np.zeros_like(total), total
    parts = _grouped(mask, lambda part: _known(part, fixed))
    return _OPERATIONS[mask.rule]([_bounds(part, q, kv, fixed) for part in parts], total)


def _known(mask, fixed) -> bool:
    return mask.static and (fixed or made_of(mask, OF_KEYS))


def _counts(mask, q, kv) -> Bounds:
    """Bounds of a static mask from its structure alone: exact for one rule and for whatever depends on q - kv."""
    total = totals(q, kv)
    if made_of(mask, OF_DISTANCE):
        distances = np.arange(q[0] - kv[-1] + 1, q[-1] - kv[0])
        visible = mask._evaluate(distances.reshape(1, 1, -1, 1), np.zeros((1, 1, 1, 1), distances.dtype))
        exact = by_distance(visible[0, :, :, 0], q, kv)
    elif mask.rule in _OPERATIONS:
        parts = _grouped(mask, lambda part: made_of(part, OF_DISTANCE))
        return _OPERATIONS[mask.rule]([_counts(part, q, kv) for part in parts], total)
    elif mask.rule in _COUNTS:
        exact = _COUNTS[mask.rule](mask, q, kv)
    else:
        return np.zeros_like(total), total
    return exact, exact


def _grouped(mask, kind):
    """The operands, where the order does not matter those of a kind put together as one."""
    if mask.rule not in (rules.and_, rules.or_):
        return mask.parts
    same, others = [p for p in mask.parts if kind(p)], [p for p in mask.parts if not kind(p)]
    return [replace(mask, parts=tuple(same), offset=None), *others] if same else others


def _count_chunked(mask, q, kv):
    size, before, after = mask.args
    chunk = np.arange(q[0], q[-1]) // size
    return by_interval((chunk - before) * size, (chunk + after + 1) * size, q, kv)


def _count_keys(mask, q, kv):
    """Of a rule of kv alone."""
    here = np.arange(kv[0], kv[-1])
    visible = np.append(0, np.cumsum(mask._evaluate(np.zeros((1, 1, 1, 1), int), here.reshape(1, 1, 1, -1))))
    return by_union(0 * np.diff(q), np.diff(visible[kv - kv[0]]), q, kv)


def _count_global(mask, q, kv):
    (tokens,) = mask.args
    before = lambda edges: np.clip(edges, 0, tokens) if isinstance(tokens, int) else np.searchsorted(tokens, edges)
    return by_union(np.diff(before(q)), np.diff(before(kv)), q, kv)


def _now(mask, q, kv):
    """The mask at positions [M, T], [M, S] as a NumPy array, also while tracing; None where a rule waits for a tracer."""
    q, kv = q[:, None, :, None], kv[:, None, None, :]
    if mask.static and made_of(mask, (*OF_DISTANCE, *_COUNTS)):
        return mask._evaluate(q, kv)
    with jax.ensure_compile_time_eval():  # a rule of somebody else's may use jax.numpy
        visible = mask._evaluate(jnp.asarray(q), jnp.asarray(kv))
    if isinstance(visible, jax.core.Tracer):
        return None
    return np.broadcast_to(np.asarray(visible, bool), np.broadcast_shapes(np.shape(visible), q.shape, kv.shape))


def edges(first: int, length: int, block: int) -> Edges:
    """Where the blocks of `length` positions from `first` on begin, and where the last, perhaps shorter, one ends."""
    return first + np.append(np.arange(0, length, block), length)


def totals(q: Edges, kv: Edges) -> Counts:
    """All pairs of a block."""
    return np.diff(q)[None, :, None] * np.diff(kv)[None, None, :]


def by_distance(visible: np.ndarray, q: Edges, kv: Edges) -> Counts:
    """Counts of a mask of q - kv alone, given `[N|1, T + S - 1]` at the distances from the first query minus the last key on.

    With E the double prefix sum of `visible`, a block's count is a second difference of E over its four corners.
    """
    for _ in range(2):
        visible = np.pad(np.cumsum(visible, axis=1, dtype=np.int64), ((0, 0), (1, 0)))
    return _blocks(-visible[:, q[:, None] - kv[None] - (q[0] - kv[-1])])


def by_interval(low: np.ndarray, high: np.ndarray, q: Edges, kv: Edges) -> Counts:
    """Counts where query t sees keys low[t] <= position < high[t], neither of them ever falling with t."""
    rows = (q - q[0])[:, None]

    def below(bound):
        bound = np.clip(bound, kv[0], kv[-1])  # far away, a sum of bounds would wrap around
        # sum over the rows so far of min(bound, edge): rows before the cut are below the edge, later ones count as it
        cut = np.minimum(rows, np.searchsorted(bound, kv)[None])
        return np.append(0, np.cumsum(bound))[cut] + kv[None] * (rows - cut)

    return _blocks((below(high) - below(low))[None])


def by_layout(layout: np.ndarray, block: int, q: Edges, kv: Edges) -> Counts:
    """Counts of a mask that is constant on blocks of its own, `layout` [N, nq, nk] from position 0 on, empty beyond."""
    columns = _integral(layout.swapaxes(1, 2), block, kv).swapaxes(1, 2)
    return _blocks(_integral(columns, block, q))


def by_choice(chosen: np.ndarray, block: int, q: Edges, kv: Edges) -> Counts:
    """Counts where the queries of block r (of the mask's own blocks) see the key blocks `chosen` [n, count] has at r mod n."""
    cuts = np.union1d(q, np.arange(-(-q[0] // block) * block, q[-1], block))  # both kinds of blocks are whole between
    rows = np.searchsorted(q, cuts[:-1], "right")[:, None] - 1
    start = block * chosen[cuts[:-1] // block % len(chosen)].astype(np.int64)
    first = np.searchsorted(kv, start, "right") - 1
    shape = (len(q) - 1, len(kv) - 1)
    counts = np.zeros(shape[0] * shape[1])
    most = np.max(np.searchsorted(kv, start + block) - first, initial=0)  # blocks of `kv` that one of the mask's meets
    for step in range(min(most, shape[1])):
        column = np.minimum(first + step, shape[1] - 1)
        overlap = np.minimum(kv[column + 1], start + block) - np.maximum(kv[column], start)
        pairs = np.where(first + step < shape[1], np.maximum(overlap, 0), 0) * np.diff(cuts)[:, None]
        counts += np.bincount((rows * shape[1] + column).ravel(), pairs.ravel(), len(counts))  # exact below 2^53
    return counts.astype(np.int64).reshape(1, *shape)


def by_union(marked_q: np.ndarray, marked_kv: np.ndarray, q: Edges, kv: Edges) -> Counts:
    """Counts where a pair is visible if its query or its key is marked, as so many of a row, of a column of blocks are."""
    hidden = (np.diff(q) - marked_q)[:, None] * (np.diff(kv) - marked_kv)[None]
    return totals(q, kv) - hidden[None]


def _integral(values, block, edges):
    """Sum up to each edge along axis 1, of a function that is values[:, i] on positions [i * block, (i + 1) * block)."""
    edges = np.clip(edges, 0, block * values.shape[1])
    padded = np.pad(values, ((0, 0), (0, 1), (0, 0))).astype(np.int64)
    before = np.cumsum(padded, axis=1) - padded
    whole, rest = np.divmod(edges, block)
    return block * before[:, whole] + rest[None, :, None] * padded[:, whole]


def _blocks(integral):
    """Counts a block from the number of visible pairs before each query edge and key edge."""
    return np.diff(np.diff(integral, axis=1), axis=2)


def complement(bounds: Bounds, total: Counts) -> Bounds:
    return total - bounds[1], total - bounds[0]


def intersection(bounds: Iterable[Bounds], total: Counts) -> Bounds:
    """Bounds of an `&`: no more pairs than the least operand has, no more hidden ones than all operands have together."""
    low, high = zip(*bounds, strict=True)
    return np.maximum(total - sum(total - each for each in low), 0), np.minimum.reduce(np.broadcast_arrays(*high))


def union(bounds: Iterable[Bounds], total: Counts) -> Bounds:
    return complement(intersection([complement(each, total) for each in bounds], total), total)


def side_by_side(bounds: Iterable[Bounds]) -> Bounds:
    """The heads of several masks in a row."""
    low, high = zip(*bounds, strict=True)
    return np.concatenate(low), np.concatenate(high)


def refine(evaluate: Callable, bounds: Bounds, q: Edges, kv: Edges) -> Bounds:
    """Tighter bounds where a block's class is open: looks at a few of its pairs, then at all while the budget lasts.

    `evaluate(q [M, a], kv [M, b])` gives the mask `[M, N|1, a, b]` of M blocks, or None where it cannot tell now.
    """
    total = totals(q, kv)
    for most in (SAMPLES, None):
        within_q, within_kv = _spread(np.diff(q), most), _spread(np.diff(kv), most)
        pairs = len(within_q) * len(within_kv) * len(bounds[0])
        i, j = np.nonzero(_open(bounds, total))
        if most is None:
            i, j = i[: BUDGET // pairs], j[: BUDGET // pairs]
        step = max(1, CHUNK // pairs)
        for start in range(0, len(i), step):
            some = i[start : start + step], j[start : start + step]
            found = _look(evaluate, q, kv, within_q[None], within_kv[None], *some)
            if found is None:
                return bounds
            bounds = _tighten(bounds, found, total, *some)
    return bounds


def _spread(sizes, most):
    largest = max(sizes, default=1)
    return np.arange(largest) if most is None else np.unique(np.linspace(0, largest - 1, most).astype(np.int64))


def _open(bounds, total):
    """Blocks that no bound decides: neither one visible and one hidden pair are known, nor all of one kind."""
    low, high = bounds
    partial = (low > 0).any(0) & (high < total).any(0)
    return ~(partial | (high == 0).all(0) | (low == total).all(0))


def _look(evaluate, q, kv, within_q, within_kv, i, j):
    """How many pairs at the places `[M|1, a]`, `[M|1, b]` of the M blocks (i, j) are visible and hidden, `[N, M]` each."""
    rows, columns = q[i][:, None] + within_q, kv[j][:, None] + within_kv
    last_row, last_column = q[i + 1][:, None] - 1, kv[j + 1][:, None] - 1
    visible = evaluate(np.minimum(rows, last_row).astype(np.int32), np.minimum(columns, last_column).astype(np.int32))
    if visible is None:
        return None
    inside = ((rows <= last_row)[:, :, None] & (columns <= last_column)[:, None, :])[:, None]
    count = lambda x: np.count_nonzero(x, axis=(2, 3)).T
    return count(visible & inside), count(~visible & inside)


def _tighten(bounds, found, total, i, j):
    heads = max(len(bounds[0]), len(found[0]))
    low, high = (np.array(np.broadcast_to(each, (heads, *total.shape[1:]))) for each in bounds)
    low[:, i, j] = np.maximum(low[:, i, j], found[0])
    high[:, i, j] = np.minimum(high[:, i, j], total[:, i, j] - found[1])
    return low, high


_COUNTS = {
    rules.prefix: _count_keys,
    rules.columns: _count_keys,
    rules.chunked: _count_chunked,
    rules.global_tokens: _count_global,
    rules.block_sparse: lambda mask, q, kv: by_layout(rules.layout_of(*mask.args[1:]), mask.args[0], q, kv),
    rules.random_blocks: lambda mask, q, kv: by_choice(rules.choice_of(mask), mask.args[1], q, kv),
}
_OPERATIONS = {
    rules.and_: intersection,
    rules.or_: union,
    rules.not_: lambda bounds, total: complement(bounds[0], total),
    rules.by_head: lambda bounds, total: side_by_side(bounds),
}
