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
from jaxformer.ops.positions import Bias


@dataclass(frozen=True)
class Grid:
    """T queries and S keys in blocks of bq and bk."""

    T: int
    S: int
    bq: int
    bk: int

    nq = property(lambda self: -(-self.T // self.bq))
    nk = property(lambda self: -(-self.S // self.bk))


def cached_by_mask(f: Callable) -> Callable:
    """f(mask, ...), cached for static masks: forward, backward and every layer ask again."""
    cached: Any = lru_cache(maxsize=256)(f)
    return lambda mask, *rest: (cached if mask.static else f)(mask, *rest)


@cached_by_mask
def choose_block(mask: Mask, T: int, S: int, heads: int) -> tuple[int, int]:
    """The (queries, keys) of a block for which all visited pairs, plus a fixed price for each visit, are cheapest."""
    if T * S == 0:
        return 1, 1
    bq, bk = (min(n, 64 << (n // 32_768).bit_length()) for n in (T, S))  # the finest: about 500 blocks a side at most
    visited = mask.blocks(T, S, (bq, bk)) != EMPTY
    best, price = (np.inf, 0, 0), 2_500.0 / heads  # of a visit, in pairs: measured on XLA:CPU
    for q in (1, 2, 4, 8):
        for k in (1, 2, 4):
            if (q > 1 and q // 2 * bq >= T) or (k > 1 and k // 2 * bk >= S):
                continue
            rows = np.logical_or.reduceat(visited, np.arange(0, len(visited), q))
            visits = np.count_nonzero(np.logical_or.reduceat(rows, np.arange(0, rows.shape[1], k), axis=1))
            best = min(best, (visits * (q * bq * k * bk + price), q * bq, k * bk))
    return best[1:]


# Layouts. Queries that share a key head are neighbours: row r of G * bq is query r % bq of head r // bq in its group.
def padded(x, axis: int, block: int):
    """x with zeros behind `axis`, up to whole blocks."""
    return jnp.pad(x, [(0, -size % block if n == axis else 0) for n, size in enumerate(x.shape)])


def query_blocks(block: int, x):
    """[B, T, ...] -> [blocks, B, block, ...], padded with zeros."""
    x = padded(x, 1, block)
    return jnp.moveaxis(x.reshape(x.shape[0], x.shape[1] // block, block, *x.shape[2:]), 1, 0)


def join_blocks(x, length: int):
    """The inverse of `query_blocks`, without the padding."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def head_blocks(block: int, K: int, x):
    """[B, T, N, ...] -> [blocks, B, K, G, block, ...], padded with zeros."""
    x = query_blocks(block, x)
    return jnp.moveaxis(x.reshape(*x.shape[:3], K, -1, *x.shape[4:]), 2, 4)


def join_heads(x, length: int):
    """The inverse of `head_blocks`, without the padding."""
    x = jnp.moveaxis(x, 4, 2)
    return join_blocks(x.reshape(*x.shape[:3], -1, *x.shape[5:]), length)


def key_blocks(block: int, x):
    """[B, S, K, H] -> [blocks, B, K, block, H], padded with zeros."""
    return head_blocks(block, x.shape[2], x)[:, :, :, 0]


def join_keys(x, length: int):
    """The inverse of `key_blocks`, without the padding."""
    return join_heads(x[:, :, :, None], length)


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
        axes = zip(self.array.shape[2:], (i, j), (self.grid.bq, self.grid.bk), strict=True)
        first, sizes = zip(*((n * size, size) if length > 1 else (0, 1) for length, n, size in axes), strict=True)
        return tuple(jnp.asarray(index, jnp.int32) for index in (0, 0, *first)), (*self.array.shape[:2], *sizes)


class BiasRule(NamedTuple):
    """A `positions.Bias`, evaluated block by block; its `rows` are padded to whole query blocks."""

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
        return lambda bias: bias.block(self.first + start, grid.bq, j * grid.bk, grid.bk), replace(self.bias, rows=rows)


def _sum_to(gradient, shape):
    """[B, K, G, bq, bk] summed to the shape `[B|1, N|1, bq|1, bk|1]` that was broadcast."""
    gradient = gradient.reshape(gradient.shape[0], -1, *gradient.shape[3:])
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


def bias_blocks(grid: Grid, bias, first) -> BiasArray | BiasRule | None:
    """The bias by blocks; `first` is the position of the first query."""
    if bias is None:
        return None
    if isinstance(bias, Bias):
        return BiasRule(grid, replace(bias, rows=tuple(padded(x, 1, grid.bq) for x in bias.rows)), first)
    for axis, block in ((2, grid.bq), (3, grid.bk)):
        if bias.shape[axis] > 1:
            bias = padded(bias, axis, block)
    return BiasArray(grid, bias)


def bias_gradient(bias, total):
    """The gradient of `bias` from the accumulated one of its blocks, without their padding."""
    return jax.tree.map(lambda d, x: d[tuple(map(slice, x.shape))].astype(x.dtype), total, bias)


Visits = dict[int, tuple[np.ndarray, np.ndarray]]  # by kind: query block i visits columns[starts[i]:starts[i + 1]]


@cached_by_mask
def find_visits(mask: Mask, grid: Grid, owners: tuple[int, ...] | None = None) -> Visits:
    """The key blocks to visit, by kind. owners[j] < P is the part with key block j: visits of i to part p stand at i P + p."""
    kinds = mask.blocks(grid.T, grid.S, (grid.bq, grid.bk))
    if grid.S % grid.bk:  # the last keys of the last block are padding
        kinds[:, -1] = np.minimum(kinds[:, -1], PARTIAL)
    owner = np.asarray(owners or (0,) * grid.nk)
    parts, found = max(owner, default=0) + 1, {}
    for kind in (FULL, PARTIAL):
        rows, columns = np.nonzero(kinds == kind)
        if len(rows):
            at = rows * parts + owner[columns]
            order = np.argsort(at, kind="stable")
            starts = np.searchsorted(at[order], np.arange(grid.nq * parts + 1))
            found[kind] = starts.astype(np.int32), columns[order].astype(np.int32)
    return found


def visit_all(visits: Visits, at, visit: Callable, state):
    """`state` after visit(kind, j, state) for every key block j that stands at `at`, FULL ones first."""
    for kind, (starts, columns) in visits.items():
        starts, columns = jnp.asarray(starts), jnp.asarray(columns)
        step = lambda n, state, kind=kind, columns=columns: visit(kind, columns[n], state)
        state = lax.fori_loop(starts[at], starts[at + 1], step, state)
    return state
