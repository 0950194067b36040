"""Reformer's attention: tokens meet in hash buckets, and a query is its own key. Kitaev et al. 2020, arXiv:2001.04451."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jaxformer.masks import Mask, as_mask, rules
from jaxformer.ops.attention.reference import softmax
from jaxformer.ops.dropout import dropout
from jaxformer.ops.einsum import einsum

# The score of a token with itself: under every other score, so that it counts only where nothing else is visible.
_SELF = -1e5

Rotations = Float[Array, "#N H rounds _"] | tuple[Float[Array, "#N H rounds _"], ...]


def random_rotations(
    key: Array, heads: int, head_size: int, rounds: int, buckets: int | tuple[int, ...], dtype=jnp.float32
) -> Rotations:
    """Normal directions for `lsh_attention`, `[N, H, rounds, buckets / 2]`: a new key, new buckets.

    A tuple of sizes gives a tuple of arrays, whose hashes are digits of one bucket number: (64, 64) makes 4,096 buckets
    from 64 directions. Raises ValueError for an odd number of buckets (each direction has two ends).
    """
    sizes = buckets if isinstance(buckets, tuple) else (buckets,)
    if any(size < 2 or size % 2 for size in sizes):
        raise ValueError(f"random_rotations: numbers of buckets are even and at least 2; got {buckets}")
    keys = jax.random.split(key, len(sizes))
    drawn = [jax.random.normal(k, (heads, head_size, rounds, n // 2), dtype) for k, n in zip(keys, sizes, strict=True)]
    return tuple(drawn) if isinstance(buckets, tuple) else drawn[0]


def lsh_buckets(x: Float[Array, "B T N H"], rotations: Rotations) -> Int[Array, "B N rounds T"]:
    """argmax([x R, -x R]) of each round; of several factors, the digits of one number, the first counting least."""
    base, bucket = 1, jnp.zeros((), int)
    for R in _factors(rotations):
        R = jnp.broadcast_to(R, (x.shape[2], *R.shape[1:]))
        sides = einsum("btnh,nhrk->bnrtk", x, R, dtype=jnp.promote_types(x.dtype, jnp.float32))
        bucket = bucket + base * jnp.argmax(jnp.concatenate([sides, -sides], axis=-1), axis=-1)
        base = base * 2 * R.shape[-1]
    return bucket


def lsh_attention(
    query_key: Float[Array, "B T N H"],
    value: Float[Array, "B T N Hv"],
    rotations: Rotations,
    *,
    chunk: int,
    mask: Mask | None = None,
    chunks_before: int = 1,
    chunks_after: int = 0,
    scale: float = 1.0,
    duplicates: bool = False,
    within_buckets: bool = False,
    eps: float = 1e-6,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    multiple: int | None = None,
) -> Float[Array, "B T N Hv"]:
    """softmax(scale x_i . x_j / |x_j|) value over those keys j that some round of hashing puts near the query i.

    Each round sorts the tokens by (bucket, position) and cuts them into chunks; a query sees its own chunk and
    `chunks_before` and `chunks_after` it. The rounds stand in one circle, as in trax: the first chunk of a round looks
    back at the last of the round before. Rounds are merged by the softmax of their log-sum-exp. A token sees itself
    only where it sees nothing else. Time and memory grow with rounds * T * chunk; any T will do: padding fills it up to a
    multiple of `multiple`, which chunks divide (None: of `chunk`).

    A key met in several rounds, or twice in a short circle, counts once (appendix A), or with `duplicates` as often as it
    is met (trax, Hugging Face). `within_buckets` hides what shares a chunk but no bucket. `scale` is 1 in trax and
    Hugging Face, H^-0.5 in lucidrains' package; `eps` is added to a key's mean square. Rotations are data, from
    `random_rotations`: one set for all heads or one a head. Tokens that are padding to `segments` or `lengths` share a
    bucket behind all others, so that they come between no two real tokens. A query that sees no key yields zeros.

    Raises ValueError for shapes that do not fit, NotImplementedError for a mask that differs by head or has an offset.
    """
    _check(query_key, value, rotations, chunk, chunks_before, chunks_after, multiple or chunk)
    B, T, N, _ = query_key.shape
    mask = as_mask(mask, "lsh_attention").sized(T)
    labels = _labels(jax.lax.stop_gradient(query_key), rotations, _real(mask, T), -T % (multiple or chunk))
    rounds, length = labels.shape[2:]
    order = jnp.argsort(labels, axis=-1, stable=True)  # order[s]: the token at place s; place[t]: where token t went
    place = jnp.argsort(order, axis=-1)
    total = rounds * length // chunk
    before = min(chunks_before, total - 1)
    after = min(chunks_after, total - 1 - before)  # a circle of few chunks shows each of them once
    shifts = range(before, -after - 1, -1)
    if duplicates:
        # Hugging Face's slices meet a chunk as often as they go round, and beyond a full turn the chunk itself
        shifts = [shift if abs(shift) <= total else 0 for shift in range(chunks_before, -chunks_after - 1, -1)]
    cut, look = partial(_cut, order, chunk), partial(_look, shifts)

    query, keys = cut(query_key.swapaxes(1, 2)), look(cut(_unit(query_key, eps).swapaxes(1, 2)))
    values = look(cut(value.swapaxes(1, 2)))
    q = order.reshape(B, N, total, chunk)
    kv = look(q)
    visible = _visible(mask, q, kv, T)
    scores = einsum("bncqh,bnckh->bncqk", query, keys, dtype=jnp.promote_types(query.dtype, jnp.float32)) * scale
    scores = jnp.where(q[..., None] == kv[..., None, :], _SELF, scores)
    if within_buckets:
        here = jnp.take_along_axis(labels, order, axis=-1).reshape(q.shape)
        visible = visible & (here[..., None] == look(here)[..., None, :])
    if not duplicates:
        home = place // chunk + length // chunk * jnp.arange(rounds)[None, None, :, None]  # a token's chunk by round
        traces = [cut(x.swapaxes(2, 3)) for x in ((home, labels) if within_buckets else (home,))]
        scores = scores - jnp.log(_meetings(traces, [look(x) for x in traces], before, after, total))
    weights, log_total = _softmax(jnp.where(visible, scores, -jnp.inf))
    weights = dropout(weights, dropout_rate, dropout_key).astype(value.dtype)
    out = einsum("bncqk,bnckh->bncqh", weights, values, dtype=scores.dtype)

    place = place[..., :T]
    out = jnp.take_along_axis(out.reshape(B, N, rounds, length, -1), place[..., None], axis=3)
    log_total = jnp.take_along_axis(log_total.reshape(labels.shape), place, axis=3)
    return einsum("bntr,bnrth->btnh", softmax(log_total.swapaxes(2, 3)), out, dtype=value.dtype)


def _factors(rotations):
    return rotations if isinstance(rotations, tuple) else (rotations,)


def _labels(x, rotations, real, padding):
    """(round, bucket) as one number for each token, rounds apart; padding has the last bucket of each round."""
    buckets = math.prod(2 * R.shape[-1] for R in _factors(rotations))
    labels = jnp.where(real[:, None, None], lsh_buckets(x, rotations), buckets)
    labels = jnp.pad(labels, [(0, 0)] * 3 + [(0, padding)], constant_values=buckets)
    return labels + (buckets + 1) * jnp.arange(labels.shape[2])[None, None, :, None]


def _real(mask: Mask, T: int):
    """[B or 1, T]: tokens that their own row's `segments` and `lengths` let see themselves."""
    real = jnp.ones((1, T), bool)
    for part in mask.conjuncts():
        if part.rule in (rules.segments, rules.lengths):
            seen = jax.vmap(lambda t, part=part: part(t[None], t[None]))(jnp.arange(T))
            real = real & seen[:, :, 0, 0, 0].T
    return real


def _unit(x, eps):
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt((mean_square + eps) * x.shape[-1])).astype(x.dtype)


def _cut(order, chunk, x):
    """[B, N, T, ...] -> [B, N, chunks, chunk, ...]: sorted, the rounds one after another; zeros at places beyond T."""
    B, N = order.shape[:2]
    index = order.reshape(B, N, -1, *[1] * (x.ndim - 3))
    return jnp.take_along_axis(x, index, axis=2, mode="fill", fill_value=0).reshape(B, N, -1, chunk, *x.shape[3:])


def _look(shifts, x):
    """[B, N, chunks, chunk, ...] -> [B, N, chunks, shifts * chunk, ...], in a circle."""
    return jnp.concatenate([jnp.roll(x, shift, axis=2) for shift in shifts], axis=3)


def _visible(mask, q, kv, T):
    """The mask at the positions of each chunk: [B or 1, N, chunks, queries, keys]."""
    (B, N, total, chunk), width = q.shape, kv.shape[-1]
    seen = jax.vmap(mask, (1, 1), 1)(q.reshape(B, -1, chunk), kv.reshape(B, -1, width))
    if seen.shape[2] != 1 or not (mask.offset is None or (isinstance(mask.offset, int) and mask.offset == 0)):
        raise NotImplementedError(
            f"lsh_attention(mask={mask}): a mask by head or with an offset; attention() takes both"
        )
    seen = jnp.broadcast_to(seen, (seen.shape[0], N * total, 1, chunk, width)).reshape(-1, N, total, chunk, width)
    return seen & (q < T)[..., None] & (kv < T)[..., None, :]


def _meetings(query_traces, key_traces, before, after, total):
    """How often each pair of a chunk meets anywhere, from where both went in each round; never below 1.

    Traces are `[..., tokens, rounds]`: the token's chunk and, where that matters, its label.
    """
    homes, *labels = [
        (q[..., :, None, :, None], k[..., None, :, None, :]) for q, k in zip(query_traces, key_traces, strict=True)
    ]
    met = (homes[0] - homes[1] + after) % total <= before + after
    for q, k in labels:
        met = met & (q == k)
    return jnp.maximum(jnp.sum(met, axis=(-2, -1)), 1)


def _softmax(scores):
    """Weights and their log-sum-exp; zeros and -inf for rows of -inf, without NaN in gradients."""
    top = jnp.max(scores, axis=-1, keepdims=True)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    exponentials = jnp.exp(scores - top)
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    some = total > 0
    total = jnp.where(some, total, 1)
    return exponentials / total, jnp.where(some, top + jnp.log(total), -jnp.inf)[..., 0]


def _check(query_key, value, rotations, chunk, before, after, multiple):
    (_, _, N, H), factors = query_key.shape, _factors(rotations)
    shapes = f"query_key {query_key.shape}, value {value.shape}, rotations {[R.shape for R in factors]}"
    if query_key.shape[:3] != value.shape[:3]:
        raise ValueError(f"lsh_attention: B, T, N of query_key and value must agree; got {shapes}")
    if any(R.ndim != 4 or R.shape[0] not in (1, N) or R.shape[1] != H for R in factors):
        raise ValueError(f"lsh_attention: rotations are [{N} or 1, {H}, rounds, buckets / 2]; got {shapes}")
    if len({R.shape[2] for R in factors}) != 1:
        raise ValueError(f"lsh_attention: factors of the rotations have one number of rounds; got {shapes}")
    if chunk < 1 or before < 0 or after < 0 or multiple % chunk:
        raise ValueError(
            "lsh_attention: chunk >= 1, chunks_before and chunks_after >= 0, multiple a multiple of chunk; got "
            f"{chunk, before, after, multiple}"
        )
