"""Exact attention without an n x n array, in plain JAX, on any platform: what the mask hides is never visited.

Queries and keys are cut into blocks. `Mask.blocks` says at trace time which pairs of blocks are EMPTY, PARTIAL or FULL;
a loop over the query blocks visits their FULL keys without and their PARTIAL keys with the mask, and keeps a running
maximum and sum (Milakov & Gimelshein 2018, arXiv:1805.02867; Rabe & Staats 2021, arXiv:2112.05682). The backward pass
makes the same visits and computes the weights again from the log-sum-exp (Dao et al. 2022, arXiv:2205.14135, algorithm 4).
"""

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from jaxformer.masks import EMPTY, FULL, PARTIAL, Mask
from jaxformer.ops.contraction import einsum
from jaxformer.ops.dropout import kept, rescaled, seed
from jaxformer.ops.positions import Bias


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    *,
    mask: Mask,
    bias: Any = None,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    block: tuple[int, int] | None = None,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """`ops.attention` and, beside it, the log-sum-exp of each query's scores (its sink included; -inf: sees no key).

    `block` is (queries, keys) a block; by default what a cost model of the mask finds cheapest. Both results are
    differentiable, in query, key, value, sinks and whatever floating-point arrays `bias` holds.
    """
    (B, T, N, _), S = query.shape, key.shape[1]
    mask = mask.sized(S)
    dropping = dropout_rate > 0 and dropout_key is not None
    bq, bk = block or choose_block(mask, T, S, B * N)
    call = _Call(T, S, bq, bk, scale, softcap, dropout_rate if dropping else 0.0)
    drop_seed = seed(dropout_key) if dropping else None
    return _attend(call, query, key, value, mask, _as_bias(call, bias), sinks, drop_seed)


@dataclass(frozen=True)
class _Call:
    """What is static of one call: lengths, block sizes and scalars."""

    T: int
    S: int
    bq: int
    bk: int
    scale: float
    softcap: float | None
    dropout_rate: float

    @property
    def nq(self) -> int:
        return -(-self.T // self.bq)

    @property
    def nk(self) -> int:
        return -(-self.S // self.bk)


def _remembered(f):
    """f(mask, ...), answered once for each static mask: forward, backward and every layer ask again."""
    cached: Any = lru_cache(maxsize=256)(f)
    return lambda mask, *rest: (cached if mask.static else f)(mask, *rest)


@_remembered
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


def _rows(call: _Call, x):
    """[B, T, N, ...] -> [nq, B, bq, N, ...], zeros behind: without a batch, nothing moves."""
    x = jnp.pad(x, ((0, 0), (0, call.nq * call.bq - call.T), *((0, 0),) * (x.ndim - 2)))
    return jnp.moveaxis(x.reshape(x.shape[0], call.nq, call.bq, *x.shape[2:]), 1, 0)


def _from_rows(x, length: int):
    """The inverse of `_rows`; the padding is dropped."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def _grouped_rows(x, K: int):
    """[B, bq, N, ...] -> [B, K, G, bq, ...]."""
    x = x.reshape(*x.shape[:2], K, -1, *x.shape[3:])
    return jnp.moveaxis(x, 1, 3)


def _ungrouped_rows(x):
    """[B, K, G, bq, ...] -> [B, bq, N, ...]."""
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _keys(call: _Call, x):
    """[B, S, K, H] with padding behind."""
    return jnp.pad(x, ((0, 0), (0, call.nk * call.bk - call.S), (0, 0), (0, 0)))


# Bias. An array is cut into blocks; a rule of positions is evaluated a block at a time.


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Table:
    """A bias array `[B or 1, N or 1, T or 1, S or 1]`, padded to whole blocks."""

    array: Any

    def at(self, call: _Call, i, j):
        """Where block (i, j) begins, and its shape."""
        sizes = [size if n > 1 else 1 for n, size in zip(self.array.shape[2:], (call.bq, call.bk), strict=True)]
        first = (i * call.bq if sizes[0] > 1 else 0, j * call.bk if sizes[1] > 1 else 0)
        at = tuple(jnp.asarray(index, jnp.int32) for index in (0, 0, *first))
        return at, (*self.array.shape[:2], *sizes)


def _as_bias(call: _Call, bias):
    if bias is None or isinstance(bias, Bias):
        return bias
    if callable(bias):  # whatever the function closes over becomes an argument, or it could not be differentiated
        q, kv = jnp.zeros(call.bq, jnp.int32), jnp.zeros(call.bk, jnp.int32)
        function, closed_over = jax.closure_convert(bias, q, kv)
        return Bias(lambda b, q, kv: function(q, kv, *b.arrays), arrays=tuple(closed_over))
    whole = call.nq * call.bq, call.nk * call.bk
    more = [(0, size - n if n > 1 else 0) for n, size in zip(bias.shape[2:], whole, strict=True)]
    return _Table(jnp.pad(bias, ((0, 0), (0, 0), *more)))


def _bias_parts(call: _Call, bias):
    """(what every visit reads, what only the visits of one query block read, cut into query blocks)."""
    if isinstance(bias, Bias):
        return bias.arrays, tuple(_rows(call, x) for x in bias.rows)
    return bias, ()


def _bias_block(call: _Call, mask: Mask, bias, whole, rows, i, j):
    """Block (i, j) of the bias, `[B or 1, N or 1, bq or 1, bk or 1]`."""
    if isinstance(bias, Bias):
        bias = replace(bias, arrays=whole, rows=rows)
        return bias.block(mask.first(call.T, call.S) + i * call.bq, call.bq, j * call.bk, call.bk)
    return lax.dynamic_slice(whole.array, *whole.at(call, i, j))


# What is visited


class _Visits(NamedTuple):
    """Of query block i: columns[starts[i]:starts[i + 1]] are the key blocks to visit."""

    starts: np.ndarray
    columns: np.ndarray


@_remembered
def _visits(mask: Mask, call: _Call) -> dict[int, _Visits]:
    kinds = mask.blocks(call.T, call.S, (call.bq, call.bk))
    if call.S % call.bk:  # the last keys of the last block are padding
        kinds[:, -1] = np.minimum(kinds[:, -1], PARTIAL)
    found = {}
    for kind in (FULL, PARTIAL):
        rows, columns = np.nonzero(kinds == kind)
        if len(rows):
            starts = np.searchsorted(rows, np.arange(call.nq + 1))
            found[kind] = _Visits(starts.astype(np.int32), columns.astype(np.int32))
    return found


def _visit_all(visits: dict[int, _Visits], i, visit, state):
    """state after visit(kind, j, state) for every key block j of query block i, FULL ones first."""
    for kind, (starts, columns) in visits.items():
        starts, columns = jnp.asarray(starts), jnp.asarray(columns)
        step = lambda at, state, kind=kind, columns=columns: visit(kind, columns[at], state)
        state = lax.fori_loop(starts[i], starts[i + 1], step, state)
    return state


# Forward and backward. Inside, scores are [B, K, G, bq, bk]: query head n is group member n % G of key head n // G.


def _scores(call: _Call, kind: int, mask: Mask, bias, q, k, i, j):
    """Masked scores of block (i, j), and the derivative of the softcap."""
    (B, K, _, _), wide = q.shape, jnp.promote_types(q.dtype, jnp.float32)
    scores = einsum("bkrh,bksh->bkrs", q, k, dtype=wide) * call.scale
    scores = scores.reshape(B, K, -1, call.bq, call.bk)
    slope = 1.0
    if bias is not None:
        scores = scores + _grouped(bias, scores).astype(wide)
    if call.softcap is not None:
        capped = jnp.tanh(scores / call.softcap)
        scores, slope = call.softcap * capped, 1 - capped**2
    if kind == PARTIAL:
        q_positions, kv_positions = _positions(call, mask, i, j)
        visible = mask(q_positions, kv_positions)
        if call.S % call.bk:
            visible = visible & (kv_positions < call.S)[None, None, None, :]
        scores = jnp.where(_grouped(visible, scores), scores, -jnp.inf)
    return scores, slope


def _grouped(x, scores):
    """[B or 1, N or 1, bq, bk] -> [B or 1, K or 1, G or 1, bq, bk], for scores [B, K, G, bq, bk]."""
    heads = scores.shape[1:3] if x.shape[1] > 1 else (1, 1)
    return x.reshape(x.shape[0], *heads, *x.shape[2:])


def _positions(call: _Call, mask: Mask, i, j):
    return mask.first(call.T, call.S) + i * call.bq + jnp.arange(call.bq), j * call.bk + jnp.arange(call.bk)


def _dropped(call: _Call, mask: Mask, drop_seed, x, i, j):
    if not call.dropout_rate:
        return x
    B, K, G = x.shape[:3]
    keep = kept(drop_seed, call.dropout_rate, (B, K * G), *_positions(call, mask, i, j))
    return rescaled(x, keep.reshape(x.shape), call.dropout_rate)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call, query, key, value, mask, bias, sinks, drop_seed):
    return _forward(call, query, key, value, mask, bias, sinks, drop_seed)[0]


def _forward(call, query, key, value, mask, bias, sinks, drop_seed):
    (B, _, N, _), (K, Hv) = query.shape, value.shape[2:]
    wide = jnp.promote_types(query.dtype, jnp.float32)
    keys, values, visits = _keys(call, key), _keys(call, value), _visits(mask, call)
    whole, bias_rows = _bias_parts(call, bias)

    def row(_, inputs):
        i, q, rows = inputs
        q = _flat(_grouped_rows(q, K))

        def visit(kind, j, state):
            top, total, out = state
            block = None if bias is None else _bias_block(call, mask, bias, whole, rows, i, j)
            scores, _ = _scores(call, kind, mask, block, q, _at(call, keys, j), i, j)
            above = jnp.maximum(top, jnp.max(scores, axis=-1))
            finite = jnp.where(above == -jnp.inf, 0, above)
            weights, shrink = jnp.exp(scores - finite[..., None]), jnp.exp(top - finite)
            total = total * shrink + jnp.sum(weights, axis=-1)
            weights = _flat(_dropped(call, mask, drop_seed, weights, i, j).astype(value.dtype))
            new = einsum("bkrs,bksh->bkrh", weights, _at(call, values, j), dtype=wide)
            return above, total, out * shrink[..., None] + new.reshape(out.shape)

        zeros = jnp.zeros_like(q[..., 0], wide).reshape(B, K, N // K, call.bq)  # of q, for it is sharded as q is
        top = zeros - jnp.inf if sinks is None else zeros + sinks.astype(wide).reshape(1, K, N // K, 1)
        state = top, zeros + (sinks is not None), jnp.broadcast_to(zeros[..., None], (*zeros.shape, Hv))
        top, total, out = _visit_all(visits, i, visit, state)
        total = jnp.where(total == 0, 1, total)
        out = (out / total[..., None]).astype(value.dtype)
        return None, (_ungrouped_rows(out), top + jnp.log(total))

    _, (out, lse) = lax.scan(row, None, (jnp.arange(call.nq), _rows(call, query), bias_rows))
    out, public = _from_rows(out, call.T), _from_rows(jax.vmap(_ungrouped_rows)(lse), call.T)
    return (out, public), (query, key, value, mask, bias, sinks, drop_seed, out, lse)


def _backward(call, residuals, gradients):
    query, key, value, mask, bias, sinks, drop_seed, out, lse = residuals
    (d_out, d_lse), K = gradients, key.shape[2]
    wide = jnp.promote_types(query.dtype, jnp.float32)
    keys, values, visits = _keys(call, key), _keys(call, value), _visits(mask, call)
    whole, bias_rows = _bias_parts(call, bias)

    def row(sums, inputs):
        i, q, g, g_lse, o, row_lse, rows = inputs
        # the gradient of a row's scores is weights * (d_out . value - delta): Dao et al. 2022, appendix B.2
        delta = _grouped_rows(jnp.sum(g.astype(wide) * o.astype(wide), axis=-1) - g_lse.astype(wide), K)
        q, g = _flat(_grouped_rows(q, K)), _flat(_grouped_rows(g.astype(value.dtype), K))
        finite = jnp.where(row_lse == -jnp.inf, 0, row_lse)[..., None]
        on_sink = 0 if sinks is None else jnp.exp(sinks.astype(wide).reshape(1, *row_lse.shape[1:3], 1) - row_lse)

        def visit(kind, j, state):
            (dq, d_rows), (dk, dv, d_whole) = state
            block = None if bias is None else _bias_block(call, mask, bias, whole, rows, i, j)
            scores, slope = _scores(call, kind, mask, block, q, _at(call, keys, j), i, j)
            weights = jnp.exp(scores - finite)
            used = _flat(_dropped(call, mask, drop_seed, weights, i, j).astype(value.dtype))
            d_weights = einsum("bkrh,bksh->bkrs", g, _at(call, values, j), dtype=wide).reshape(weights.shape)
            d_weights = _dropped(call, mask, drop_seed, d_weights, i, j)
            d_scores = weights * (d_weights - delta[..., None]) * slope
            if bias is not None:
                d_whole, d_rows = _add_bias_gradient(call, mask, bias, whole, rows, i, j, d_scores, d_whole, d_rows)
            d_scores = _flat((d_scores * call.scale).astype(query.dtype))
            dq = dq + einsum("bkrs,bksh->bkrh", d_scores, _at(call, keys, j), dtype=wide)
            # transposed, dk and dv come out of products that XLA:CPU runs a third faster
            dk = _add_at(call, dk, einsum("bkrh,bkrs->bkhs", q, d_scores, dtype=wide), j)
            dv = _add_at(call, dv, einsum("bkrh,bkrs->bkhs", g, used, dtype=wide), j)
            return (dq, d_rows), (dk, dv, d_whole)

        state = (jnp.zeros_like(q, wide), _zeros(rows, wide)), sums
        (dq, d_rows), sums = _visit_all(visits, i, visit, state)
        dq = _ungrouped_rows(dq.reshape(*row_lse.shape, -1)).astype(query.dtype)
        return sums, (dq, d_rows, -jnp.sum(on_sink * delta, axis=(0, 3)))

    sums = _zeros((keys, values, whole), wide)
    rows = (_rows(call, x) for x in (query, d_out, d_lse, out))
    (dk, dv, d_whole), (dq, d_rows, d_sinks) = lax.scan(row, sums, (jnp.arange(call.nq), *rows, lse, bias_rows))
    dk, dv = (x[:, : call.S].astype(y.dtype) for x, y in ((dk, key), (dv, value)))
    d_sinks = None if sinks is None else d_sinks.sum(0).reshape(-1).astype(sinks.dtype)
    d_bias = _bias_gradient(call, bias, d_whole, d_rows)
    return _from_rows(dq, call.T), dk, dv, None, d_bias, d_sinks, None


_attend.defvjp(_forward, _backward)


def _flat(x):
    """[B, K, G, bq, ...] -> [B, K, G * bq, ...], the rows of a product."""
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _at(call: _Call, x, j):
    """The keys or values of block j: `[B, K, bk, H]`."""
    x = lax.dynamic_slice_in_dim(x, j * call.bk, call.bk, axis=1, allow_negative_indices=False)
    # a transposition inside a product would take XLA:CPU's slow path, and in bfloat16 none
    return lax.optimization_barrier(x.transpose(0, 2, 1, 3))


def _add_at(call: _Call, x, more, j):
    """x `[B, S, K, H]` with `more` `[B, K, H, bk]` added to block j, in place inside a loop."""
    at = j * call.bk
    more = more.transpose(0, 3, 1, 2) + lax.dynamic_slice_in_dim(x, at, call.bk, axis=1, allow_negative_indices=False)
    return lax.dynamic_update_slice_in_dim(x, more, at, axis=1, allow_negative_indices=False)


def _zeros(tree, dtype):
    return jax.tree.map(lambda x: jnp.zeros_like(x, dtype), tree)


def _add_bias_gradient(call, mask, bias, whole, rows, i, j, d_scores, d_whole, d_rows):
    """(d_whole, d_rows) with what block (i, j) adds to them."""
    block, pullback = jax.vjp(lambda w, r: _bias_block(call, mask, bias, w, r, i, j), whole, rows)
    d_block = d_scores.reshape(d_scores.shape[0], -1, *d_scores.shape[3:])
    d_block = jnp.sum(d_block, [axis for axis in range(4) if block.shape[axis] == 1], keepdims=True)
    if isinstance(bias, _Table):  # the pullback would make a whole array of zeros around the block
        at, shape = whole.at(call, i, j)
        d_block = d_block + lax.dynamic_slice(d_whole.array, at, shape)
        return _Table(lax.dynamic_update_slice(d_whole.array, d_block, at)), d_rows
    more = pullback(d_block.astype(block.dtype))
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), (d_whole, d_rows), more)


def _bias_gradient(call, bias, d_whole, d_rows):
    if bias is None:
        return None
    if isinstance(bias, _Table):
        return jax.tree.map(lambda d, x: d.astype(x.dtype), d_whole, bias)
    d_rows = tuple(_from_rows(d, call.T) for d in d_rows)
    return jax.tree.map(lambda d, x: d.astype(x.dtype), replace(bias, arrays=d_whole, rows=d_rows), bias)
