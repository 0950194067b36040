"""The parts of a blockwise attention: its call, blocks of queries, keys and bias, and which pairs of them are visited."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxformer.masks import EMPTY, FULL, PARTIAL, Mask, Split, full
from jaxformer.ops.positions import Bias


@dataclass(frozen=True)
class Call:
    """What is static of one call: lengths, block sizes, scalars, and of the mask all but its arrays."""

    T: int
    S: int
    bq: int
    bk: int
    scale: float
    softcap: float | None
    dropout_rate: float
    mask: Split = full().split()[1]

    @property
    def nq(self) -> int:
        return -(-self.T // self.bq)

    @property
    def nk(self) -> int:
        return -(-self.S // self.bk)


def remembered(f):
    """f(mask, ...), answered once for each static mask: forward, backward and every layer ask again."""
    cached: Any = lru_cache(maxsize=256)(f)
    return lambda mask, *rest: (cached if mask.static else f)(mask, *rest)


@remembered
def choose_block(mask: Mask, T: int, S: int, heads: int) -> tuple[int, int]:
    """The (queries, keys) a block for which visited pairs plus a fixed price a visit are cheapest."""
    if T * S == 0:
        return 1, 1
    bq, bk = (min(n, 64 << (n // 32_768).bit_length()) for n in (T, S))  # the finest: at most some 500 a side
    kinds = mask.blocks(T, S, (bq, bk))
    best = (np.inf, 0, 0)
    for q in (1, 2, 4, 8):
        for k in (1, 2, 4):
            if (q > 1 and q // 2 * bq >= T) or (k > 1 and k // 2 * bk >= S):
                continue
            visits = np.count_nonzero(_any_of(_any_of(kinds != EMPTY, q, 0), k, 1))
            best = min(best, (visits * (q * bq * k * bk + _VISIT / heads), q * bq, k * bk))
    return best[1:]


_VISIT = 2_500.0  # a visit's fixed price, in pairs of one head: measured on XLA:CPU


def _any_of(blocks, count: int, axis: int):
    """Whether any of `count` neighbours is set."""
    return np.logical_or.reduceat(blocks, np.arange(0, blocks.shape[axis], count), axis=axis)


# Layouts. Queries that share a key head stand together: row r of G * bq is query r % bq of head r // bq in its group.


def as_rows(call: Call, x):
    """[B, T, N, ...] -> [nq, B, bq, N, ...], zeros behind: without a batch, nothing moves."""
    x = jnp.pad(x, ((0, 0), (0, call.nq * call.bq - call.T), *((0, 0),) * (x.ndim - 2)))
    return jnp.moveaxis(x.reshape(x.shape[0], call.nq, call.bq, *x.shape[2:]), 1, 0)


def from_rows(x, length: int):
    """The inverse of `as_rows`; the padding is dropped."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def grouped_rows(x, K: int):
    """[B, bq, N, ...] -> [B, K, G, bq, ...]."""
    x = x.reshape(*x.shape[:2], K, -1, *x.shape[3:])
    return jnp.moveaxis(x, 1, 3)


def ungrouped_rows(x):
    """[B, K, G, bq, ...] -> [B, bq, N, ...]."""
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


# Bias. An array is cut into blocks; a rule of positions is evaluated a block at a time.


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Table:
    """A bias array `[B or 1, N or 1, T or 1, S or 1]`, padded to whole blocks."""

    array: Any

    def at(self, call: Call, i, j):
        """Where block (i, j) begins, and its shape."""
        # what is broadcast is known by the array's length: a block may have length 1 as well
        axes = zip(self.array.shape[2:], (i, j), (call.bq, call.bk), strict=True)
        first, sizes = zip(*((n * size, size) if length > 1 else (0, 1) for length, n, size in axes), strict=True)
        at = tuple(jnp.asarray(index, jnp.int32) for index in (0, 0, *first))
        return at, (*self.array.shape[:2], *sizes)


def as_bias(call: Call, bias):
    if bias is None or isinstance(bias, Bias):
        return bias
    if callable(bias):  # whatever the function closes over becomes an argument, or it could not be differentiated
        q, kv = jnp.zeros(call.bq, jnp.int32), jnp.zeros(call.bk, jnp.int32)
        function, closed_over = jax.closure_convert(bias, q, kv)
        return Bias(lambda b, q, kv: function(q, kv, *b.arrays), arrays=tuple(closed_over))
    whole = call.nq * call.bq, call.nk * call.bk
    more = [(0, size - n if n > 1 else 0) for n, size in zip(bias.shape[2:], whole, strict=True)]
    return _Table(jnp.pad(bias, ((0, 0), (0, 0), *more)))


def bias_parts(call: Call, bias):
    """(what every visit reads, what only the visits of one query block read, cut into query blocks)."""
    if isinstance(bias, Bias):
        return bias.arrays, tuple(as_rows(call, x) for x in bias.rows)
    return bias, ()


def bias_block(call: Call, seen: "Seen", rows, i, j):
    """Block (i, j) of the bias, `[B or 1, N or 1, bq or 1, bk or 1]`."""
    if isinstance(seen.bias, Bias):
        bias = replace(seen.bias, arrays=seen.whole, rows=rows)
        return bias.block(seen.mask.first(call.T, call.S) + i * call.bq, call.bq, j * call.bk, call.bk)
    return lax.dynamic_slice(seen.whole.array, *seen.whole.at(call, i, j))


def add_bias_gradient(call, seen, rows, i, j, d_scores, d_whole, d_rows):
    """(d_whole, d_rows) with what block (i, j) adds to them."""
    block, pullback = jax.vjp(lambda w, r: bias_block(call, seen._replace(whole=w), r, i, j), seen.whole, rows)
    d_block = d_scores.reshape(d_scores.shape[0], -1, *d_scores.shape[3:])
    d_block = jnp.sum(d_block, [axis for axis in range(4) if block.shape[axis] == 1], keepdims=True)
    if isinstance(seen.bias, _Table):  # the pullback would make a whole array of zeros around the block
        at, shape = seen.whole.at(call, i, j)
        d_block = d_block + lax.dynamic_slice(d_whole.array, at, shape)
        return _Table(lax.dynamic_update_slice(d_whole.array, d_block, at)), d_rows
    more = pullback(d_block.astype(block.dtype))
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), (d_whole, d_rows), more)


def bias_gradient(bias, d_whole, d_rows):
    """The gradient of `bias` from those of its parts."""
    if bias is None:
        return None
    if isinstance(bias, _Table):
        return jax.tree.map(lambda d, x: d.astype(x.dtype), d_whole, bias)
    return jax.tree.map(lambda d, x: d.astype(x.dtype), replace(bias, arrays=d_whole, rows=d_rows), bias)


def zeros(tree, dtype):
    return jax.tree.map(lambda x: jnp.zeros_like(x, dtype), tree)


# What is visited


class Visits(NamedTuple):
    """Of query block i: columns[starts[i]:starts[i + 1]] are the key blocks to visit."""

    starts: np.ndarray
    columns: np.ndarray


@remembered
def find_visits(mask: Mask, call: Call, owners: tuple[int, ...] | None = None) -> dict[int, Visits]:
    """The blocks to visit, by kind. `owners`, numbers below P, say which part of the keys each block belongs to:
    query block i and part e then stand at i * P + e instead of i."""
    kinds = mask.blocks(call.T, call.S, (call.bq, call.bk))
    if call.S % call.bk:  # the last keys of the last block are padding
        kinds[:, -1] = np.minimum(kinds[:, -1], PARTIAL)
    owner = np.asarray(owners or (0,) * call.nk)
    parts, found = max(owner, default=0) + 1, {}
    for kind in (FULL, PARTIAL):
        rows, columns = np.nonzero(kinds == kind)
        if len(rows):
            at = rows * parts + owner[columns]
            order = np.argsort(at, kind="stable")
            starts = np.searchsorted(at[order], np.arange(call.nq * parts + 1))
            found[kind] = Visits(starts.astype(np.int32), columns[order].astype(np.int32))
    return found


def visit_all(visits: dict[int, Visits], at, visit, state):
    """state after visit(kind, j, state) for every key block j that stands at `at`, FULL ones first."""
    for kind, (starts, columns) in visits.items():
        starts, columns = jnp.asarray(starts), jnp.asarray(columns)
        step = lambda n, state, kind=kind, columns=columns: visit(kind, columns[n], state)
        state = lax.fori_loop(starts[at], starts[at + 1], step, state)
    return state


class Seen(NamedTuple):
    """What every row of blocks looks at: keys and values `[B, S, K, H]` and what belongs to their pairs."""

    mask: Mask
    bias: Any
    whole: Any  # of the bias, see `bias_parts`
    drop_seed: Any
    visits: dict[int, Visits]
    keys: Any
    values: Any
    places: Any = None  # [nk]: where block j lies among those of `keys`, if they are a part of all keys

    def place(self, j):
        return j if self.places is None else self.places[j]
