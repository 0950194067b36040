"""The blocks of a blockwise attention: of queries and keys, of the bias, and which pairs of them are visited."""

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


# Scores of a block, as measured on XLA:CPU with 2 cores
VISIT = 70_000  # what a visit costs besides its scores, as a number of scores
LARGE = 1 << 17  # of a head: with fewer, a product runs on one thread, and all takes a half longer
CACHED, MOST = 1 << 21, 1 << 24  # of all heads: larger blocks than LARGE fit the cache; no block takes more than 64 MiB


@cached_by_mask
def choose_grid(mask: Mask, T: int, S: int, heads: int) -> Grid:
    """The blocks that make the fewest scores, where each visit counts as `VISIT` scores more. `heads` is B * N."""
    heads = max(heads, 1)  # a batch may be empty
    if T * S == 0:
        return Grid(T, S, 1, 1, 1)
    bq, bk = (min(n, 64 << (n // 32_768).bit_length()) for n in (T, S))  # the finest: about 500 blocks a side at most
    visible, best = mask.blocks(T, S, (bq, bk)) != EMPTY, (np.inf, 0, 0)
    most = max(CACHED, min(LARGE * heads, MOST)) // heads
    for q in (1, 2, 4, 8):
        rows = np.logical_or.reduceat(visible, np.arange(0, len(visible), q))
        for k in (1, 2, 3, 4, 6, 8):
            scores = q * bq * k * bk
            if (q > 1 and q // 2 * bq >= T) or (k > 1 and (k - 1) * bk >= S) or (q * k > 1 and scores > most):
                continue
            price = (scores if scores >= LARGE else 1.5 * scores) + VISIT / heads
            best = min(best, (len(cover(rows, k)[0]) * price, q * bq, k * bk))
    return Grid(T, S, *best[1:], bk)


def cover(visible: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, first column) of the fewest spans of `width` columns that hold everything visible `[rows, columns]`."""
    columns = visible.shape[1]
    following = np.where(visible, np.arange(columns), columns)
    following = np.minimum.accumulate(following[:, ::-1], axis=1)[:, ::-1]  # the first visible column from here on
    following = np.pad(following, ((0, 0), (0, width)), constant_values=columns)
    each, start, found = np.arange(len(visible)), following[:, 0], []
    while len(each := each[start < columns]):
        start = start[start < columns]
        found.append((each, start))
        start = following[each, start + width]
    rows, starts = (np.concatenate(parts) for parts in zip(*found, strict=True)) if found else (each, each)
    order = np.lexsort((starts, rows))
    return rows[order], starts[order]


# Layouts. Queries that share a key head are neighbours: row r of G * bq is query r % bq of head r // bq in its group.
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


# Biases. Each kind gives a block of itself, `block(i, j)`, `[B|1, N|1, bq|1, bk|1]`, and adds the gradient of that block
# to its own, `accumulate(total, i, j, gradient)`, beginning with `zeros(dtype)`.


class BiasArray(NamedTuple):
    """A bias array `[B|1, N|1, T|1, S|1]`, padded to whole blocks."""

    grid: Grid
    array: Any

    def block(self, i, j):
        return lax.dynamic_slice(self.array, *self._slice(i, j))

    def zeros(self, dtype):
        return jnp.zeros_like(self.array, dtype)

    def accumulate(self, total, i, j, gradient):
        start, shape = self._slice(i, j)  # a pullback of the slice would make an array of zeros as large as the bias
        block = lax.dynamic_slice(total, start, shape)
        return lax.dynamic_update_slice(total, block + _sum_to(gradient, shape), start)

    def _slice(self, i, j):
        """Start and shape of block (i, j). An axis is broadcast if the array has length 1 there: a block may have it too."""
        grid = self.grid
        axes = zip(self.array.shape[2:], (i * grid.bq, j * grid.step), (grid.bq, grid.bk), strict=True)
        first, sizes = zip(*((start, size) if length > 1 else (0, 1) for length, start, size in axes), strict=True)
        return tuple(jnp.asarray(index, jnp.int32) for index in (0, 0, *first)), (*self.array.shape[:2], *sizes)


class BiasRule(NamedTuple):
    """A `ops.bias.Bias`, evaluated block by block; its `rows` are padded to whole query blocks."""

    grid: Grid
    bias: Bias
    first: Any  # the position of the first query

    def block(self, i, j):
        function, bias = self._part(i, j)
        return function(bias)

    def zeros(self, dtype):
        return jax.tree.map(lambda x: jnp.zeros_like(x, dtype), self.bias)

    def accumulate(self, total, i, j, gradient):
        block, pullback = jax.vjp(*self._part(i, j))
        (more,) = pullback(_sum_to(gradient, block.shape).astype(block.dtype))
        arrays = jax.tree.map(lambda x, y: x + y.astype(x.dtype), total.arrays, more.arrays)
        rows = (add_at(x, y, i * self.grid.bq, axis=1) for x, y in zip(total.rows, more.rows, strict=True))
        return replace(total, arrays=arrays, rows=tuple(rows))

    def _part(self, i, j):
        """Block (i, j) as a function of the bias with the rows of query block i, and this bias."""
        grid, start = self.grid, i * self.grid.bq
        rows = tuple(lax.dynamic_slice_in_dim(x, start, grid.bq, axis=1) for x in self.bias.rows)
        return lambda bias: bias.block(self.first + start, grid.bq, j * grid.step, grid.bk), replace(self.bias, rows=rows)


def _sum_to(gradient, shape):
    """[B, K, G, bq, bk] summed to the shape `[B|1, N|1, bq|1, bk|1]` that was broadcast."""
    B, K, G, *block = gradient.shape
    gradient = gradient.reshape(B, K * G, *block)
    return jnp.sum(gradient, [axis for axis in range(4) if shape[axis] == 1], keepdims=True)


def add_at(x, more, start, axis: int):
    """x with `more` added from `start` on along an axis, in place inside a loop."""
    part = lax.dynamic_slice_in_dim(x, start, more.shape[axis], axis, allow_negative_indices=False)
    return lax.dynamic_update_slice_in_dim(x, part + more.astype(x.dtype), start, axis, allow_negative_indices=False)


def differentiable(grid: Grid, bias):
    """The bias, a function as a `Bias` whose arrays are the function's: otherwise they could not be differentiated."""
    if not callable(bias):
        return bias
    q, kv = jnp.zeros(grid.bq, jnp.int32), jnp.zeros(grid.bk, jnp.int32)
    function, arrays = jax.closure_convert(bias, q, kv)
    return Bias(lambda b, q, kv: function(q, kv, *b.arrays), arrays=tuple(arrays))


def bias_blocks(grid: Grid, bias, first, keys: int) -> BiasArray | BiasRule | None:
    """The bias by blocks; `first` is the position of the first query, `keys` their number with padding."""
    if bias is None:
        return None
    if isinstance(bias, Bias):
        return BiasRule(grid, replace(bias, rows=tuple(padded(x, 1, grid.bq) for x in bias.rows)), first)
    for axis, length in ((2, grid.nq * grid.bq), (3, keys)):
        if bias.shape[axis] > 1:
            bias = padded_to(bias, axis, length)
    return BiasArray(grid, bias)


def whole_bias(grid: Grid, first, bias):
    """The bias as an array, `[B|1, N|1, T, S]` of a `Bias`; of an array, itself. It is evaluated by blocks, as in the loops."""
    if not isinstance(bias, Bias):
        return bias
    rule: Any = bias_blocks(grid, bias, first, grid.S)
    columns = range(0, grid.nk, grid.width)
    lines = [jnp.concatenate([rule.block(i, j) for j in columns], axis=3) for i in range(grid.nq)]
    return jnp.concatenate(lines, axis=2)[:, :, : grid.T, : grid.S]


def bias_gradient(bias, total):
    """The gradient of `bias` from the accumulated one of its blocks, without their padding."""
    return jax.tree.map(lambda d, x: d[tuple(map(slice, x.shape))].astype(x.dtype), total, bias)


Visits = dict[int, tuple[np.ndarray, np.ndarray]]  # by kind: query block i visits columns[starts[i]:starts[i + 1]]


@cached_by_mask
def find_visits(mask: Mask, grid: Grid, owners: tuple[int, ...] | None = None) -> Visits:
    """The key blocks to visit, by kind.

    owners[j] < P is the part with key block j: visits of i to part p stand at i P + p.
    """
    kinds = mask.blocks(grid.T, grid.S, (grid.bq, grid.step))
    rows, columns = cover(kinds != EMPTY, grid.width)
    kinds = np.pad(kinds, ((0, 0), (0, grid.width)), constant_values=PARTIAL)
    if grid.S % grid.step:  # the last keys of the last block are padding
        kinds[:, grid.nk - 1] = PARTIAL
    full = np.all([kinds[rows, columns + step] == FULL for step in range(grid.width)], axis=0)
    owner = np.asarray(owners or (0,) * grid.nk)
    parts, found = max(owner, default=0) + 1, {}
    for kind in (FULL, PARTIAL):
        if (here := full == (kind == FULL)).any():
            at, starts = rows[here] * parts + owner[columns[here]], np.arange(grid.nq * parts + 1)
            order = np.argsort(at, kind="stable")
            found[kind] = np.searchsorted(at[order], starts).astype(np.int32), columns[here][order].astype(np.int32)
    return found


def visited_keys(grid: Grid, visits: Visits) -> int:
    """The keys with as much padding as the visits need."""
    ends = [grid.step * int(columns.max()) + grid.bk for _, columns in visits.values()]
    return max(grid.S, *ends, 0)


def visit_all(visits: Visits, at, visit: Callable, state):
    """`state` after visit(kind, j, state) for every key block j that stands at `at`, FULL ones first."""
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
