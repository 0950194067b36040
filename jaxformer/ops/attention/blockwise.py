"""Exact attention without an n x n array, in plain JAX, on any platform: what the mask hides is never visited.

Queries and keys are cut into blocks. `Mask.blocks` says at trace time which pairs of blocks are EMPTY, PARTIAL or FULL;
a loop over the query blocks visits their FULL keys without and their PARTIAL keys with the mask, and keeps a running
maximum and sum (Milakov & Gimelshein 2018, arXiv:1805.02867; Rabe & Staats 2021, arXiv:2112.05682). The backward pass
makes the same visits and computes the weights again from the log-sum-exp (Dao et al. 2022, arXiv:2205.14135, algorithm 4).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from jaxformer.masks import PARTIAL, Mask
from jaxformer.ops.attention.blocks import (
    Call,
    Seen,
    add_bias_gradient,
    as_bias,
    as_rows,
    bias_block,
    bias_gradient,
    bias_parts,
    choose_block,
    find_visits,
    from_rows,
    grouped_rows,
    ungrouped_rows,
    visit_all,
    zeros,
)  # fmt: skip
from jaxformer.ops.dropout import kept, rescaled, seed
from jaxformer.ops.einsum import einsum


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
    arrays, rest = mask.split()
    dropping = dropout_rate > 0 and dropout_key is not None
    bq, bk = block or choose_block(mask, T, S, B * N)
    call = Call(T, S, bq, bk, scale, softcap, dropout_rate if dropping else 0.0, rest)
    drop_seed = seed(dropout_key) if dropping else None
    return _attend(call, query, key, value, arrays, as_bias(call, bias), sinks, drop_seed)


# Forward and backward. Inside, scores are [B, K, G, bq, bk]: query head n is group member n % G of key head n // G.


def _scores(call: Call, kind: int, mask: Mask, bias, q, k, i, j):
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


def _positions(call: Call, mask: Mask, i, j):
    return mask.first(call.T, call.S) + i * call.bq + jnp.arange(call.bq), j * call.bk + jnp.arange(call.bk)


def _dropped(call: Call, seen: Seen, x, i, j):
    if not call.dropout_rate:
        return x
    B, K, G = x.shape[:3]
    keep = kept(seen.drop_seed, call.dropout_rate, (B, K * G), *_positions(call, seen.mask, i, j))
    return rescaled(x, keep.reshape(x.shape), call.dropout_rate)


# A row of blocks in the forward pass: its running maximum, sum and output, `[B, K, G, bq]` and `[..., Hv]`.


def begin_row(q, sinks, K: int, Hv: int):
    """The state of queries q `[B, bq, N, H]` that have seen nothing yet."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    none = jnp.zeros_like(grouped_rows(q, K)[..., 0], wide)  # of q, for it is sharded as q is
    top = none - jnp.inf if sinks is None else none + _sinks(sinks, wide).reshape(1, K, -1, 1)
    return top, none + (sinks is not None), jnp.broadcast_to(none[..., None], (*none.shape, Hv))


def extend_row(call: Call, seen: Seen, q, rows, i, at, state):
    """`state` of the queries q `[B, bq, N, H]` of block i after the visits that stand at `at`."""
    wide, q = jnp.promote_types(q.dtype, jnp.float32), _flat(grouped_rows(q, seen.keys.shape[2]))

    def visit(kind, j, state):
        top, total, out = state
        place = seen.place(j)
        block = None if seen.bias is None else bias_block(call, seen, rows, i, j)
        scores, _ = _scores(call, kind, seen.mask, block, q, _at(call, seen.keys, place), i, j)
        above = jnp.maximum(top, jnp.max(scores, axis=-1))
        finite = jnp.where(above == -jnp.inf, 0, above)
        weights, shrink = jnp.exp(scores - finite[..., None]), jnp.exp(top - finite)
        total = total * shrink + jnp.sum(weights, axis=-1)
        weights = _flat(_dropped(call, seen, weights, i, j).astype(seen.values.dtype))
        new = einsum("bkrs,bksh->bkrh", weights, _at(call, seen.values, place), dtype=wide)
        return above, total, out * shrink[..., None] + new.reshape(out.shape)

    return visit_all(seen.visits, at, visit, state)


def finish_row(state, dtype):
    """(output `[B, bq, N, Hv]`, log-sum-exp `[B, K, G, bq]`)"""
    top, total, out = state
    total = jnp.where(total == 0, 1, total)
    return ungrouped_rows((out / total[..., None]).astype(dtype)), top + jnp.log(total)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call, query, key, value, arrays, bias, sinks, drop_seed):
    return _forward(call, query, key, value, arrays, bias, sinks, drop_seed)[0]


def _seen(call: Call, key, value, arrays, bias, drop_seed) -> tuple[Seen, Any]:
    mask = call.mask.join(arrays)
    whole, bias_rows = bias_parts(call, bias)
    keys, values = (jnp.pad(x, ((0, 0), (0, call.nk * call.bk - call.S), (0, 0), (0, 0))) for x in (key, value))
    return Seen(mask, bias, whole, drop_seed, find_visits(mask, call), keys, values), bias_rows


def _forward(call, query, key, value, arrays, bias, sinks, drop_seed):
    seen, bias_rows = _seen(call, key, value, arrays, bias, drop_seed)

    def row(_, inputs):
        i, q, rows = inputs
        state = begin_row(q, sinks, *value.shape[2:])
        return None, finish_row(extend_row(call, seen, q, rows, i, i, state), value.dtype)

    _, (out, lse) = lax.scan(row, None, (jnp.arange(call.nq), as_rows(call, query), bias_rows))
    out, public = from_rows(out, call.T), from_rows(jax.vmap(ungrouped_rows)(lse), call.T)
    # named for policies that keep them (`stacks.scan.remat`)
    out, public, lse = checkpoint_name((out, public, lse), "attention")
    return (out, public), (query, key, value, arrays, bias, sinks, drop_seed, out, lse)


def back_row(call: Call, seen: Seen, q, g, delta, lse, rows, i, at, state):
    """((dq `[B, K, G * bq, H]`, of bias rows), (dk, dv, of the whole bias)) with what the visits at `at` add.

    The gradient of a row's scores is weights * (d_out . value - delta): Dao et al. 2022, appendix B.2.
    """
    wide, K, dtype = jnp.promote_types(q.dtype, jnp.float32), seen.keys.shape[2], q.dtype
    q, g = _flat(grouped_rows(q, K)), _flat(grouped_rows(g.astype(seen.values.dtype), K))
    finite, delta = jnp.where(lse == -jnp.inf, 0, lse)[..., None], grouped_rows(delta, K)[..., None]

    def visit(kind, j, state):
        (dq, d_rows), (dk, dv, d_whole) = state
        place = seen.place(j)
        block = None if seen.bias is None else bias_block(call, seen, rows, i, j)
        scores, slope = _scores(call, kind, seen.mask, block, q, _at(call, seen.keys, place), i, j)
        weights = jnp.exp(scores - finite)
        used = _flat(_dropped(call, seen, weights, i, j).astype(seen.values.dtype))
        d_weights = einsum("bkrh,bksh->bkrs", g, _at(call, seen.values, place), dtype=wide).reshape(weights.shape)
        d_weights = _dropped(call, seen, d_weights, i, j)
        d_scores = weights * (d_weights - delta) * slope
        if seen.bias is not None:
            d_whole, d_rows = add_bias_gradient(call, seen, rows, i, j, d_scores, d_whole, d_rows)
        d_scores = _flat((d_scores * call.scale).astype(dtype))
        dq = dq + einsum("bkrs,bksh->bkrh", d_scores, _at(call, seen.keys, place), dtype=wide)
        # transposed, dk and dv come out of products that XLA:CPU runs a third faster
        dk = _add_at(call, dk, einsum("bkrh,bkrs->bkhs", q, d_scores, dtype=wide), place)
        dv = _add_at(call, dv, einsum("bkrh,bkrs->bkhs", g, used, dtype=wide), place)
        return (dq, d_rows), (dk, dv, d_whole)

    return visit_all(seen.visits, at, visit, state)


def no_gradient(q, rows, K: int):
    """The (dq, of bias rows) of `back_row` before any visit."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    return jnp.zeros_like(_flat(grouped_rows(q, K)), wide), zeros(rows, wide)


def end_row(dq, q):
    """dq of `back_row` as the gradient of q `[B, bq, N, H]`."""
    B, K, _, H = dq.shape
    return ungrouped_rows(dq.reshape(B, K, -1, q.shape[1], H)).astype(q.dtype)


def sink_gradient(sinks, lse, delta):
    """Of one row of blocks, `[K, G]`."""
    K, G = lse.shape[1:3]
    on_sink = jnp.exp(_sinks(sinks, lse.dtype).reshape(1, K, G, 1) - jnp.where(lse == -jnp.inf, 0, lse))
    return -jnp.sum(on_sink * grouped_rows(delta, K), axis=(0, 3))


def _sinks(sinks, dtype):
    """Sinks below infinity: one of them takes all, and inf - inf would be NaN."""
    return jnp.minimum(sinks.astype(dtype), jnp.finfo(dtype).max)


def _backward(call, residuals, gradients):
    query, key, value, arrays, bias, sinks, drop_seed, out, lse = residuals
    d_out, d_lse = gradients
    wide = jnp.promote_types(query.dtype, jnp.float32)
    seen, bias_rows = _seen(call, key, value, arrays, bias, drop_seed)

    def row(sums, inputs):
        i, q, g, g_lse, o, row_lse, rows = inputs
        delta = jnp.sum(g.astype(wide) * o.astype(wide), axis=-1) - g_lse.astype(wide)
        state = no_gradient(q, rows, key.shape[2]), sums
        (dq, d_rows), sums = back_row(call, seen, q, g, delta, row_lse, rows, i, i, state)
        return sums, (end_row(dq, q), d_rows, 0 if sinks is None else sink_gradient(sinks, row_lse, delta))

    sums = zeros((seen.keys, seen.values, seen.whole), wide)
    rows = (as_rows(call, x) for x in (query, d_out, d_lse, out))
    (dk, dv, d_whole), (dq, d_rows, d_sinks) = lax.scan(row, sums, (jnp.arange(call.nq), *rows, lse, bias_rows))
    dk, dv = (x[:, : call.S].astype(y.dtype) for x, y in ((dk, key), (dv, value)))
    d_sinks = None if sinks is None else jnp.sum(d_sinks, 0).reshape(-1).astype(sinks.dtype)
    d_rows = tuple(from_rows(d, call.T) for d in d_rows)
    return from_rows(dq, call.T), dk, dv, None, bias_gradient(bias, d_whole, d_rows), d_sinks, None


_attend.defvjp(_forward, _backward)


def _flat(x):
    """[B, K, G, bq, ...] -> [B, K, G * bq, ...], the rows of a product."""
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _at(call: Call, x, j):
    """The keys or values of block j: `[B, K, bk, H]`."""
    x = lax.dynamic_slice_in_dim(x, j * call.bk, call.bk, axis=1, allow_negative_indices=False)
    # a transposition inside a product would take XLA:CPU's slow path, and in bfloat16 none
    return lax.optimization_barrier(x.transpose(0, 2, 1, 3))


def _add_at(call: Call, x, more, j):
    """x `[B, S, K, H]` with `more` `[B, K, H, bk]` added to block j, in place inside a loop."""
    at = j * call.bk
    more = more.transpose(0, 3, 1, 2) + lax.dynamic_slice_in_dim(x, at, call.bk, axis=1, allow_negative_indices=False)
    return lax.dynamic_update_slice_in_dim(x, more, at, axis=1, allow_negative_indices=False)
