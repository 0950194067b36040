"""The blocks of blockwise attention: of queries, keys and bias, and which pairs are visited."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxformer.masks import EMPTY, FULL, PARTIAL, Mask
from jaxformer.ops.bias import Bias


@dataclass(frozen=True)
class Grid:
    """T queries in blocks of bq, S keys in blocks of bk. Key block j begins at key j * step."""

    T: int
    S: int
    bq: int
    bk: int
    step: int

    nq = property(lambda self: -(-self.T // self.bq))
    nk = property(lambda self: -(-self.S // self.step))
    width = property(lambda self: self.bk // self.step)  # steps of a block


def cached_by_mask(f: Callable) -> Callable:
    """f(mask, ...), cached for static masks: forward, backward and every layer ask again."""
    cached: Any = lru_cache(maxsize=256)(f)
    return lambda mask, *rest: (cached if mask.static else f)(mask, *rest)


# The cost model of block sizes: numbers of scores, as measured on XLA:CPU with 2 cores
VISIT_COST = 70_000  # what a visit costs besides its scores
# of one head: with fewer scores a product runs on one thread and takes 1.5 times as long
LEAST_PARALLEL = 1 << 17
IN_CACHE = 1 << 21  # of all heads: larger blocks than LEAST_PARALLEL fit the cache
MOST_SCORES = 1 << 24  # of all heads: no block takes more than 64 MiB


@cached_by_mask
def choose_grid(mask: Mask, T: int, S: int, heads: int) -> Grid:
    """The blocks of the least cost: the scores, and `VISIT_COST` for each visit.

    `heads` is B * N.
    """
    heads = max(heads, 1)  # a batch may be empty
    if T * S == 0:
        return Grid(T, S, 1, 1, 1)
    # the finest blocks: about 500 blocks a side at most
    bq, bk = (min(n, 64 << (n // 32_768).bit_length()) for n in (T, S))
    visible = mask.blocks(T, S, (bq, bk)) != EMPTY
    max_scores = max(IN_CACHE, min(LEAST_PARALLEL * heads, MOST_SCORES)) // heads
    best = np.inf, 0, 0
    for q in (1, 2, 4, 8):
        of_queries = np.logical_or.reduceat(visible, np.arange(0, len(visible), q))
        for k in (1, 2, 3, 4, 6, 8):
            scores = q * bq * k * bk
            too_long = (q > 1 and q // 2 * bq >= T) or (k > 1 and (k - 1) * bk >= S)
            if too_long or (q * k > 1 and scores > max_scores):
                continue
            price = (scores if scores >= LEAST_PARALLEL else 1.5 * scores) + VISIT_COST / heads
            visits = len(cover(of_queries, k)[0])
            best = min(best, (visits * price, q * bq, k * bk))
    _, bq, width = best
    return Grid(T, S, bq, width, bk)


def cover(visible: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """(line, first column) of the fewest spans of `width` columns that hold all that is visible.

    `visible` is `[lines, columns]`: of query blocks and key blocks.
    """
    columns = visible.shape[1]
    # the first visible column from each column on
    following = np.where(visible, np.arange(columns), columns)
    following = np.minimum.accumulate(following[:, ::-1], axis=1)[:, ::-1]
    following = np.pad(following, ((0, 0), (0, width)), constant_values=columns)
    line = np.arange(len(visible))
    start = following[:, 0]
    spans = []
    while len(line := line[start < columns]):
        start = start[start < columns]
        spans.append((line, start))
        start = following[line, start + width]
    if not spans:
        return line, line  # both are empty
    lines, starts = (np.concatenate(arrays) for arrays in zip(*spans, strict=True))
    order = np.lexsort((starts, lines))
    return lines[order], starts[order]


# Layouts. Query heads that share a key head are neighbours: of the G * bq lines of a product, line
# r is query r % bq of head r // bq in its group.
def padded(x, axis: int, block: int):
    """x with zeros behind `axis`, up to whole blocks."""
    return padded_to(x, axis, -(-x.shape[axis] // block) * block)


def padded_to(x, axis: int, length: int):
    """x with zeros behind `axis`, up to this length."""
    return jnp.pad(x, [(0, length - size if n == axis else 0) for n, size in enumerate(x.shape)])


def query_blocks(block: int, x):
    """[B, T, ...] -> [blocks, B, block, ...], padded with zeros."""
    x = padded(x, 1, block)
    return jnp.moveaxis(x.reshape(x.shape[0], x.shape[1] // block, block, *x.shape[2:]), 1, 0)


def join_blocks(x, length: int):
    """The inverse of `query_blocks`, without the padding."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])[:, :length]


def head_blocks(block: int, K: int, x):
    """[B, T, N, ...] -> [blocks, B, K, G, block, ...], padded with zeros."""
    x = query_blocks(block, x)
    return jnp.moveaxis(x.reshape(*x.shape[:3], K, x.shape[3] // K, *x.shape[4:]), 2, 4)


def join_heads(x, length: int):
    """The inverse of `head_blocks`, without the padding."""
    x = jnp.moveaxis(x, 4, 2)
    return join_blocks(x.reshape(*x.shape[:3], x.shape[3] * x.shape[4], *x.shape[5:]), length)


# Biases. Each kind gives a block of itself, `block(i, j)`, `[B|1, N|1, bq|1, bk|1]`, and adds the
# gradient of that block to its own, `accumulate(total, i, j, gradient)`, beginning with
# `zeros(dtype)`.


class BiasArray(NamedTuple):
    """A bias array `[B|1, N|1, T|1, S|1]`, padded to whole blocks."""

    grid: Grid
    array: Any

    def block(self, i, j):
        return lax.dynamic_slice(self.array, *self._slice(i, j))

    def zeros(self, dtype):
        return jnp.zeros_like(self.array, dtype)

    def accumulate(self, total, i, j, gradient):
        # a pullback of the slice would make an array of zeros as large as the bias
        start, shape = self._slice(i, j)
        block = lax.dynamic_slice(total, start, shape)
        return lax.dynamic_update_slice(total, block + _sum_to(gradient, shape), start)

    def _slice(self, i, j):
        """Start and shape of block (i, j).

        An axis is broadcast if the array has length 1 there: a block may have it too.
        """
        grid = self.grid
        starts = [0, 0]
        sizes = list(self.array.shape[:2])
        T, S = self.array.shape[2:]
        for length, start, size in ((T, i * grid.bq, grid.bq), (S, j * grid.step, grid.bk)):
            starts.append(start if length > 1 else 0)
            sizes.append(size if length > 1 else 1)
        return tuple(jnp.asarray(start, jnp.int32) for start in starts), tuple(sizes)


class BiasRule(NamedTuple):
    """A `ops.bias.Bias`, evaluated block by block.

    Its `query_arrays` are padded to whole query blocks.
    """

    grid: Grid
    bias: Bias
    first: Any  # the position of the first query

    def block(self, i, j):
        function, bias = self._of_block(i, j)
        return function(bias)

    def zeros(self, dtype):
        return jax.tree.map(lambda x: jnp.zeros_like(x, dtype), self.bias)

    def accumulate(self, total, i, j, gradient):
        block, pullback = jax.vjp(*self._of_block(i, j))
        (more,) = pullback(_sum_to(gradient, block.shape).astype(block.dtype))
        arrays = jax.tree.map(lambda x, y: x + y.astype(x.dtype), total.arrays, more.arrays)
        pairs = zip(total.query_arrays, more.query_arrays, strict=True)
        query_arrays = tuple(add_at(x, y, i * self.grid.bq, axis=1) for x, y in pairs)
        return replace(total, arrays=arrays, query_arrays=query_arrays)

    def _of_block(self, i, j):
        """(a function of a bias: its block (i, j); the bias with the arrays of query block i)."""
        grid = self.grid
        start = i * grid.bq

        def block(bias):
            return bias.block(self.first + start, grid.bq, j * grid.step, grid.bk)

        query_arrays = tuple(
            lax.dynamic_slice_in_dim(x, start, grid.bq, axis=1) for x in self.bias.query_arrays
        )
        return block, replace(self.bias, query_arrays=query_arrays)


def _sum_to(gradient, shape):
    """[B, K, G, bq, bk] summed to the shape `[B|1, N|1, bq|1, bk|1]` that was broadcast."""
    B, K, G, *block = gradient.shape
    gradient = gradient.reshape(B, K * G, *block)
    return jnp.sum(gradient, [axis for axis in range(4) if shape[axis] == 1], keepdims=True)


def add_at(x, more, start, axis: int):
    """x with `more` added from `start` on along an axis, in place inside a loop."""
    size = more.shape[axis]
    old = lax.dynamic_slice_in_dim(x, start, size, axis, allow_negative_indices=False)
    new = old + more.astype(x.dtype)
    return lax.dynamic_update_slice_in_dim(x, new, start, axis, allow_negative_indices=False)


def differentiable(grid: Grid, bias):
    """The bias; a function becomes a `Bias` of its arrays, so that these get gradients."""
    if not callable(bias):
        return bias
    q, kv = jnp.zeros(grid.bq, jnp.int32), jnp.zeros(grid.bk, jnp.int32)
    function, arrays = jax.closure_convert(bias, q, kv)
    return Bias(lambda b, q, kv: function(q, kv, *b.arrays), arrays=tuple(arrays))


def bias_blocks(grid: Grid, bias, first, padded_length: int) -> BiasArray | BiasRule | None:
    """The bias by blocks.

    `first` is the position of the first query. Keys are padded to `padded_length`.
    """
    if bias is None:
        return None
    if isinstance(bias, Bias):
        query_arrays = tuple(padded(x, 1, grid.bq) for x in bias.query_arrays)
        return BiasRule(grid, replace(bias, query_arrays=query_arrays), first)
    for axis, length in ((2, grid.nq * grid.bq), (3, padded_length)):
        if bias.shape[axis] > 1:
            bias = padded_to(bias, axis, length)
    return BiasArray(grid, bias)


def bias_array(grid: Grid, first, bias):
    """The bias as an array; a `Bias` as `[B|1, N|1, T, S]`, evaluated by blocks."""
    if not isinstance(bias, Bias):
        return bias
    rule: Any = bias_blocks(grid, bias, first, grid.S)
    columns = range(0, grid.nk, grid.width)
    lines = [jnp.concatenate([rule.block(i, j) for j in columns], axis=3) for i in range(grid.nq)]
    return jnp.concatenate(lines, axis=2)[:, :, : grid.T, : grid.S]


def bias_gradient(bias, total):
    """The gradient of `bias` from the sum over its blocks `total`, without their padding."""
    return jax.tree.map(lambda d, x: d[tuple(map(slice, x.shape))].astype(x.dtype), total, bias)


# by kind: query block i visits the key blocks columns[starts[i]:starts[i + 1]]
Visits = dict[int, tuple[np.ndarray, np.ndarray]]


@cached_by_mask
def find_visits(mask: Mask, grid: Grid, shard_of: tuple[int, ...] | None = None) -> Visits:
    """The key blocks to visit, by kind: FULL or PARTIAL.

    If keys are split over P devices, `shard_of[j]` < P is the shard that holds key block j. Then
    the visits of query block i to shard p have the index i P + p.
    """
    kinds = mask.blocks(grid.T, grid.S, (grid.bq, grid.step))
    lines, columns = cover(kinds != EMPTY, grid.width)
    kinds = np.pad(kinds, ((0, 0), (0, grid.width)), constant_values=PARTIAL)
    if grid.S % grid.step:  # the last keys of the last block are padding
        kinds[:, grid.nk - 1] = PARTIAL
    full = np.all([kinds[lines, columns + step] == FULL for step in range(grid.width)], axis=0)
    shards = np.asarray(shard_of or (0,) * grid.nk)
    count = max(shards, default=0) + 1
    visits = {}
    for kind in (FULL, PARTIAL):
        is_kind = full == (kind == FULL)
        if is_kind.any():
            index = lines[is_kind] * count + shards[columns[is_kind]]
            order = np.argsort(index, kind="stable")
            starts = np.searchsorted(index[order], np.arange(grid.nq * count + 1))
            visits[kind] = starts.astype(np.int32), columns[is_kind][order].astype(np.int32)
    return visits


def visited_keys(grid: Grid, visits: Visits) -> int:
    """The number of keys, with the padding that the visits need."""
    ends = [grid.step * int(columns.max()) + grid.bk for _, columns in visits.values()]
    return max(grid.S, *ends, 0)


def visit_all(visits: Visits, at, visit: Callable, state):
    """`state` after visit(kind, j, state) of each key block j of index `at`, FULL ones first."""
    for kind, (starts, columns) in visits.items():
        one_each = (np.diff(starts) == 1).all()
        starts, columns = jnp.asarray(starts), jnp.asarray(columns)
        if one_each:  # a loop costs XLA:CPU a tenth of the time of a window's visits
            state = visit(kind, columns[starts[at]], state)
            continue

        def step(n, state, kind=kind, columns=columns):
            return visit(kind, columns[n], state)

        state = lax.fori_loop(starts[at], starts[at + 1], step, state)
    return state
