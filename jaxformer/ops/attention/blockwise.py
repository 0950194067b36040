"""Exact attention without an n x n array, in plain JAX, on any platform.

Hidden blocks are never visited.

A loop over the query blocks visits their FULL keys (`Mask.blocks`) without the mask and their
PARTIAL keys with it, and keeps a running maximum and sum (Rabe & Staats 2021, arXiv:2112.05682).
The backward pass makes the same visits and computes the weights again from the log-sum-exp (Dao et
al. 2022, arXiv:2205.14135, algorithm 4). Gradients of the backward pass, which second derivatives
need, are those of `reference`, with its array of all scores.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from jaxformer.masks import PARTIAL
from jaxformer.ops.attention import blocks
from jaxformer.ops.attention.blocks import Grid, Visits, head_blocks, join_heads
from jaxformer.ops.attention.call import Call
from jaxformer.ops.attention.reference import second_gradients
from jaxformer.ops.dropout import keep_mask, rescaled
from jaxformer.ops.einsum import einsum
from jaxformer.sharding import alike


def attention(
    query: Array,
    key: Array,
    value: Array,
    call: Call,
    block: tuple[int, int, int] | None = None,
) -> Array:
    """The output of `reference`, without an array of all scores.

    `block`: queries of a block, keys of a block, and the step between key blocks.
    """
    (B, T, N, _), S = query.shape, key.shape[1]
    grid = Grid(T, S, *block) if block else blocks.choose_grid(call.mask, T, S, B * N)
    call = replace(call, bias=blocks.differentiable(grid, call.bias))
    return _attend(grid, *alike(query, key, value), call)[0]


def is_cheaper(query: Array, key: Array) -> bool:
    """Whether this is faster than a kernel that keeps the weights: for long sequences it is.

    Measured by experiments/bench/attention.py.
    """
    longest = 512 if query.dtype.itemsize >= 4 else 1024  # the longest for which it is slower
    return query.shape[1] * key.shape[1] > longest**2


# Arrays are transposed before the loops: inside, XLA:CPU would convert the operands of 16-bit
# products to float32.
class Tiles(NamedTuple):
    """Pairs of a query block and a key block, and the arrays from which scores are computed."""

    grid: Grid
    call: Call
    bias: Any  # a BiasArray, a BiasRule or None
    visits: Visits
    keys: Any  # [B, K, S, H], padded for the last visits
    values: Any  # [B, K, S, Hv]
    index_in_keys: Any = None  # [nk]: where key block j is in `keys`, if these are one shard

    def start(self, j):
        """The index in `keys` of the first key of block j."""
        return (j if self.index_in_keys is None else self.index_in_keys[j]) * self.grid.step

    def block(self, x, j):
        """The keys or values of block j: `[B, K, bk, H]`."""
        start, size = self.start(j), self.grid.bk
        return lax.dynamic_slice_in_dim(x, start, size, axis=2, allow_negative_indices=False)

    def positions(self, i, j):
        """The positions of the queries of block i and of the keys of block j."""
        grid = self.grid
        first = self.call.mask.first(grid.T, grid.S)
        q_positions = first + i * grid.bq + jnp.arange(grid.bq)
        return q_positions, j * grid.step + jnp.arange(grid.bk)

    def dropout(self, x, i, j):
        if self.call.dropout_seed is None:
            return x
        B, K, G = x.shape[:3]
        rate = self.call.dropout_rate
        keep = keep_mask(self.call.dropout_seed, rate, (B, K * G), *self.positions(i, j))
        return rescaled(x, keep.reshape(x.shape), rate)


# Scores are [B, K, G, bq, bk]: query head n is group member n % G of key head n // G.
def _scores(tiles: Tiles, kind: int, q, k, i, j):
    """Masked scores of block (i, j), and the derivative of the softcap."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    grid, call = tiles.grid, tiles.call
    slope = 1.0
    scores = einsum("bkrh,bksh->bkrs", _flat(q), k, dtype=wide) * call.scale
    scores = scores.reshape(*q.shape[:-1], grid.bk)
    if tiles.bias is not None:
        scores = scores + _like_scores(tiles.bias.block(i, j), scores).astype(wide)
    if call.softcap is not None:
        capped = jnp.tanh(scores / call.softcap)
        scores = jnp.where(scores == -jnp.inf, scores, call.softcap * capped)
        slope = 1 - capped**2
    if kind == PARTIAL:
        q_positions, kv_positions = tiles.positions(i, j)
        visible = call.mask(q_positions, kv_positions)
        if tiles.index_in_keys is None and tiles.keys.shape[2] > grid.S:  # padding
            visible = visible & (kv_positions < grid.S)[None, None, None, :]
        scores = jnp.where(_like_scores(visible, scores), scores, -jnp.inf)
    return scores, slope


def _like_scores(x, scores):
    """[B|1, N|1, bq, bk] -> [B|1, K|1, G|1, bq, bk], for scores [B, K, G, bq, bk]."""
    heads = scores.shape[1:3] if x.shape[1] > 1 else (1, 1)
    return x.reshape(x.shape[0], *heads, *x.shape[2:])


# Forward: a query block and its running softmax
class Softmax(NamedTuple):
    """The running softmax of a query block."""

    top: Any  # the maximum, [B, K, G, bq]
    total: Any  # the sum, [B, K, G, bq]
    out: Any  # [B, K, G, bq, Hv]


def begin(q, sinks, Hv: int) -> Softmax:
    """The running softmax of queries q `[B, K, G, bq, H]`, before any key."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    zeros = jnp.zeros_like(q[..., 0], wide)  # made from q, so that it is sharded as q is
    if sinks is None:
        top = zeros - jnp.inf
    else:
        top = zeros + _finite(sinks, wide).reshape(1, q.shape[1], -1, 1)
    total = zeros + (sinks is not None)
    return Softmax(top, total, jnp.broadcast_to(zeros[..., None], (*zeros.shape, Hv)))


def extend(tiles: Tiles, softmax: Softmax, q, i, at) -> Softmax:
    """`softmax` of query block i, q `[B, K, G, bq, H]`, after the visits of index `at`."""
    wide = jnp.promote_types(q.dtype, jnp.float32)

    def visit(kind, j, softmax):
        top, total, out = softmax
        scores, _ = _scores(tiles, kind, q, tiles.block(tiles.keys, j), i, j)
        above = jnp.maximum(top, jnp.max(scores, axis=-1))
        finite = jnp.where(above == -jnp.inf, 0, above)
        weights = jnp.exp(scores - finite[..., None])
        shrink = jnp.exp(top - finite)
        total = total * shrink + jnp.sum(weights, axis=-1)
        weights = _flat(tiles.dropout(weights, i, j).astype(tiles.values.dtype))
        new = einsum("bkrs,bksh->bkrh", weights, tiles.block(tiles.values, j), dtype=wide)
        return Softmax(above, total, out * shrink[..., None] + new.reshape(out.shape))

    return blocks.visit_all(tiles.visits, at, visit, softmax)


def finish(softmax: Softmax, dtype):
    """(output `[B, K, G, bq, Hv]`, log-sum-exp `[B, K, G, bq]`)"""
    total = jnp.where(softmax.total == 0, 1, softmax.total)
    out = (softmax.out / total[..., None]).astype(dtype)
    return out, softmax.top + jnp.log(total)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(grid, query, key, value, call):
    """The output, and for the backward pass the log-sum-exp of each query."""
    tiles = _tiles(grid, key, value, call)

    def query_block(_, inputs):
        i, q = inputs
        softmax = begin(q, call.sinks, value.shape[-1])
        return None, finish(extend(tiles, softmax, q, i, i), value.dtype)

    numbered = jnp.arange(grid.nq), head_blocks(grid.bq, value.shape[2], query)
    _, (out, lse) = lax.scan(query_block, None, numbered)
    return join_heads(out, grid.T), lse


def _tiles(grid: Grid, key, value, call) -> Tiles:
    visits = blocks.find_visits(call.mask, grid)
    length = blocks.visited_keys(grid, visits)
    keys, values = (blocks.padded_to(x.swapaxes(1, 2), 2, length) for x in (key, value))
    bias = blocks.bias_blocks(grid, call.bias, call.mask.first(grid.T, grid.S), length)
    return Tiles(grid, call, bias, visits, keys, values)


def _forward(grid, query, key, value, call):
    # named for policies that keep them (`stacks.remat`)
    out, lse = checkpoint_name(_attend(grid, query, key, value, call), "attention")
    return (out, lse), (query, key, value, call, out, lse)


class QueryBlock(NamedTuple):
    """A query block in the backward pass; or all blocks, with one more axis in front."""

    q: Any  # [B, K, G, bq, H]
    g: Any  # the gradient of its output
    delta: Any  # [B, K, G, bq]: the sum of gradient times output
    lse: Any  # [B, K, G, bq]
    q_by_width: Any  # [B, K, H, G * bq]
    g_by_width: Any


def query_blocks(grid: Grid, K: int, query, g, delta, lse) -> QueryBlock:
    """All query blocks from arrays `[B, T, N, ...]`; `lse` is in blocks already."""
    q, g, delta = (head_blocks(grid.bq, K, x) for x in (query, g, delta))

    def by_width(x):
        return jax.vmap(_flat)(x).swapaxes(-1, -2)

    return QueryBlock(q, g, delta, lse, by_width(q), by_width(g))


class Gradients(NamedTuple):
    """Sums that every visit adds to."""

    dk: Any  # [B, K, H, S]
    dv: Any
    bias: Any


def add_gradients(
    tiles: Tiles,
    sums: Gradients,
    block: QueryBlock,
    i,
    at,
) -> tuple[Gradients, Array]:
    """(`sums` with the visits of query block i of index `at`, the gradient of its q).

    The gradient `[B, K, G, bq, H]` is that of these visits alone.
    """
    dtype = block.q.dtype
    wide = jnp.promote_types(dtype, jnp.float32)
    lse = _finite_lse(block.lse)[..., None]
    delta = block.delta[..., None]

    def visit(kind, j, state):
        dq, (dk, dv, d_bias) = state
        keys, values = tiles.block(tiles.keys, j), tiles.block(tiles.values, j)
        scores, slope = _scores(tiles, kind, block.q, keys, i, j)
        weights = jnp.exp(scores - lse)
        dropped = _flat(tiles.dropout(weights, i, j).astype(tiles.values.dtype))
        d_weights = einsum("bkrh,bksh->bkrs", _flat(block.g), values, dtype=wide)
        d_weights = d_weights.reshape(weights.shape)
        # Dao et al. 2022, appendix B.2
        d_scores = weights * (tiles.dropout(d_weights, i, j) - delta) * slope
        if tiles.bias is not None:
            d_bias = tiles.bias.accumulate(d_bias, i, j, d_scores)
        d_scores = _flat((d_scores * tiles.call.scale).astype(dtype))
        dq = dq + einsum("bkrs,bksh->bkrh", d_scores, keys, dtype=wide).reshape(dq.shape)
        # XLA:CPU computes these transposed products a third faster
        more_dk = einsum("bkhr,bkrs->bkhs", block.q_by_width, d_scores, dtype=wide)
        dk = blocks.add_at(dk, more_dk, tiles.start(j), axis=3)
        more_dv = einsum("bkhr,bkrs->bkhs", block.g_by_width, dropped, dtype=wide)
        dv = blocks.add_at(dv, more_dv, tiles.start(j), axis=3)
        return dq, Gradients(dk, dv, d_bias)

    dq, sums = blocks.visit_all(tiles.visits, at, visit, (jnp.zeros_like(block.q, wide), sums))
    return sums, dq


def row_products(x, y, dtype):
    """The sum of x times y `[B, T, N, H]` over the last axis, in `dtype`: `[B, T, N]`."""
    # With B = 1, jnp.sum(x * y) is twenty times slower on XLA:CPU. Without the precision, TPUs
    # would round the operands.
    precision = lax.Precision.HIGHEST
    return jnp.einsum("btnh,btnh->btn", x.astype(dtype), y.astype(dtype), precision=precision)


def sink_gradient(sinks, lse, delta):
    """The gradient of the sinks; None without sinks.

    `lse` is the log-sum-exp `[nq, B, K, G, bq]` of all query blocks, delta `[B, T, N]`.
    """
    if sinks is None:
        return None
    lse = join_heads(lse, delta.shape[1])
    on_sink = jnp.exp(_finite(sinks, lse.dtype)[None, None] - _finite_lse(lse))
    return -jnp.sum(on_sink * delta, axis=(0, 1)).astype(sinks.dtype)


def _backward(grid, residuals, gradients):
    # the log-sum-exp is read by `_gradients` alone, which gives it no gradient
    d_out, _ = gradients
    return _gradients(grid, residuals, d_out)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradients(grid, residuals, d_out):
    """The gradients of query, key, value and call."""
    query, key, value, call, out, lse = residuals
    wide = jnp.promote_types(query.dtype, jnp.float32)
    tiles = _tiles(grid, key, value, call)
    delta = row_products(d_out, out, wide)

    def step(sums, inputs):
        i, block = inputs
        sums, dq = add_gradients(tiles, sums, block, i, i)
        return sums, dq.astype(query.dtype)

    d_bias = None if tiles.bias is None else tiles.bias.zeros(wide)

    def by_width(x):
        return jnp.zeros_like(x, wide).swapaxes(-1, -2)

    sums = Gradients(by_width(tiles.keys), by_width(tiles.values), d_bias)
    d_out = d_out.astype(value.dtype)
    numbers = jnp.arange(grid.nq)
    all_blocks = query_blocks(grid, key.shape[2], query, d_out, delta, lse)
    (dk, dv, d_bias), dq = lax.scan(step, sums, (numbers, all_blocks))
    dk = dk[..., : grid.S].transpose(0, 3, 1, 2).astype(key.dtype)
    dv = dv[..., : grid.S].transpose(0, 3, 1, 2).astype(value.dtype)
    d_bias = blocks.bias_gradient(call.bias, d_bias)
    d_sinks = sink_gradient(call.sinks, lse, delta)
    return join_heads(dq, grid.T), dk, dv, call.gradient(d_bias, d_sinks)


def _gradients_forward(grid, residuals, d_out):
    return _gradients(grid, residuals, d_out), (residuals, d_out)


def _gradients_backward(grid, inputs, cotangents):
    (query, key, value, call, out, lse), d_out = inputs
    dq, dk, dv, d_call = cotangents
    bias_array = partial(blocks.bias_array, grid, call.mask.first(grid.T, grid.S))
    cotangents = dq, dk, dv, d_call.bias, d_call.sinks
    gradients = second_gradients(query, key, value, call, d_out, cotangents, bias_array)
    d_query, d_key, d_value, d_bias, d_sinks, d_out = gradients
    d_call = call.gradient(d_bias, d_sinks)
    residuals = d_query, d_key, d_value, d_call, jnp.zeros_like(out), jnp.zeros_like(lse)
    return residuals, d_out


_gradients.defvjp(_gradients_forward, _gradients_backward)
_attend.defvjp(_forward, _backward)


def _finite(sinks, dtype):
    """Sinks below infinity: an infinite one takes all, and inf - inf would be NaN."""
    return jnp.minimum(sinks.astype(dtype), jnp.finfo(dtype).max)


def _finite_lse(lse):
    return jnp.where(lse == -jnp.inf, 0, lse)


def _flat(x):
    """[B, K, G, bq, ...] -> [B, K, G * bq, ...], the lines of a product."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:])
