"""Reformer's attention: tokens meet in hash buckets, and a query is its own key. Kitaev et al. 2020, arXiv:2001.04451."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jaxformer.masks import Mask, as_mask, rules
from jaxformer.ops.attention.call import check_shapes, mask_refusal
from jaxformer.ops.attention.reference import softmax, softmax_and_log_sum_exp
from jaxformer.ops.dropout import dropout
from jaxformer.ops.einsum import einsum, in_float32

Rotations = Float[Array, "#N H rounds _"] | tuple[Float[Array, "#N H rounds _"], ...]


def random_rotations(key: Array, heads: int, head_size: int, rounds: int, buckets: int | tuple[int, ...]) -> Rotations:
    """Normal directions for `lsh_attention`, `[N, H, rounds, buckets / 2]`: each has two ends.

    A tuple of sizes gives a tuple of arrays, whose hashes are digits of one bucket number: (64, 64) makes 4,096 buckets.
    """
    sizes = buckets if isinstance(buckets, tuple) else (buckets,)
    if any(size < 2 or size % 2 for size in sizes):
        raise ValueError(f"random_rotations: numbers of buckets are even and at least 2; got {buckets}")
    keys = jax.random.split(key, len(sizes))
    drawn = [jax.random.normal(k, (heads, head_size, rounds, n // 2), jnp.float32) for k, n in zip(keys, sizes, strict=True)]
    return tuple(drawn) if isinstance(buckets, tuple) else drawn[0]


def lsh_buckets(x: Float[Array, "B T N H"], rotations: Rotations) -> Int[Array, "B N rounds T"]:
    """argmax([x R, -x R]) of each round; of several factors, the digits of one number, the first counting least."""
    base, bucket = 1, jnp.zeros((), int)
    for R in jax.tree.leaves(rotations):
        R = jnp.broadcast_to(R, (x.shape[2], *R.shape[1:]))
        sides = einsum("btnh,nhrk->bnrtk", x, R, dtype=jnp.promote_types(x.dtype, jnp.float32))
        bucket = bucket + base * jnp.argmax(jnp.concatenate([sides, -sides], axis=-1), axis=-1)
        base = base * 2 * R.shape[-1]
    return bucket


@jax.named_scope("lsh_attention")
def lsh_attention(
    query_key: Float[Array, "B T N H"], value: Float[Array, "B T N Hv"], rotations: Rotations, *, chunk: int,
    mask: Mask | None = None, chunks_before: int = 1, chunks_after: int = 0, scale: float = 1.0, duplicates: bool = False,
    eps: float = 1e-6, dropout_rate: float = 0.0, dropout_key: Array | None = None, multiple: int | None = None,
) -> Float[Array, "B T N Hv"]:  # fmt: skip
    """softmax(scale x_i . x_j / |x_j|) value over those keys j that some round of hashing puts near the query i.

    Each round sorts the tokens by (bucket, position), padding last, and cuts them into chunks. A query sees its own chunk,
    `chunks_before` before it and `chunks_after` after it, in one circle of all rounds, as in trax; itself only where it sees
    nothing else. A key met several times counts once (appendix A), or with `duplicates` as often as it is met (trax, Hugging
    Face). T is padded to a multiple of `multiple` (None: `chunk`), one of `chunk`; `eps` is added to a key's mean square.
    Cost grows with rounds * T * chunk. NotImplementedError for a mask by head or with an offset. No key visible: zeros.
    """
    check_shapes("lsh_attention", query_key, query_key, value)
    B, T, N, _ = query_key.shape
    if value.size == 0:
        return value
    mask = as_mask(mask, "lsh_attention").sized(T)
    labels = _labels(jax.lax.stop_gradient(query_key), rotations, mask, -T % (multiple or chunk))
    order = jnp.argsort(labels, axis=-1, stable=True)
    total = order.shape[2] * order.shape[3] // chunk
    if duplicates:  # Hugging Face's slices meet a chunk as often as they go round, and beyond a full turn the chunk itself
        shifts = [shift if abs(shift) <= total else 0 for shift in range(chunks_before, -chunks_after - 1, -1)]
    else:  # a circle of few chunks shows each of them once
        before = min(chunks_before, total - 1)
        shifts = range(before, -min(chunks_after, total - 1 - before) - 1, -1)
    circle = _Circle(order, jnp.argsort(order, axis=-1), chunk, shifts)
    wide = jnp.promote_types(query_key.dtype, jnp.float32)
    keys = circle.look(circle.cut(_unit(query_key, eps).swapaxes(1, 2)))
    scores = einsum("bncqh,bnckh->bncqk", circle.cut(query_key.swapaxes(1, 2)), keys, dtype=wide) * scale
    q = order.reshape(B, N, total, chunk)
    kv = circle.look(q)
    # with itself: below every other score, so that it counts only where nothing else is visible
    scores = jnp.where(q[..., None] == kv[..., None, :], -1e5, scores)
    if not duplicates:
        scores = scores - jnp.log(_meetings(circle))
    weights, log_total = softmax_and_log_sum_exp(jnp.where(_visible(mask, q, kv, T), scores, -jnp.inf))
    weights = dropout(weights, dropout_rate, dropout_key).astype(value.dtype)
    out = einsum("bncqk,bnckh->bncqh", weights, circle.look(circle.cut(value.swapaxes(1, 2))), dtype=wide)
    out, log_total, place = out.reshape(*labels.shape, -1), log_total.reshape(labels.shape), circle.place[..., :T]
    by_round = jnp.take_along_axis(out, place[..., None], axis=3)
    shares = softmax(jnp.take_along_axis(log_total, place, axis=3).swapaxes(2, 3))
    return einsum("bntr,bnrth->btnh", shares, by_round, dtype=value.dtype)


class _Circle(NamedTuple):
    """The sorted tokens of all rounds, cut into chunks that form a circle."""

    order: Any  # [B, N, rounds, length]: the token at each place
    place: Any  # [B, N, rounds, length]: the place of each token
    chunk: int
    shifts: range | list[int]  # how far before a chunk those that it sees are

    def cut(self, x):
        """[B, N, T, ...] -> [B, N, chunks, chunk, ...]: sorted, the rounds one after another; zeros at padding."""
        B, N = self.order.shape[:2]
        index = self.order.reshape(B, N, -1, *[1] * (x.ndim - 3))
        x = jnp.take_along_axis(x, index, axis=2, mode="fill", fill_value=0)
        return x.reshape(B, N, -1, self.chunk, *x.shape[3:])

    def look(self, x):
        """[B, N, chunks, chunk, ...] -> [B, N, chunks, keys, ...]: what each chunk sees."""
        return jnp.concatenate([jnp.roll(x, shift, axis=2) for shift in self.shifts], axis=3)


def _meetings(circle: _Circle):
    """How often each pair of a chunk meets in all rounds, never below 1."""
    rounds, length = circle.order.shape[2:]
    home = circle.place // circle.chunk + length // circle.chunk * jnp.arange(rounds)[None, None, :, None]
    total, before, after = rounds * length // circle.chunk, circle.shifts[0], -circle.shifts[-1]
    q = circle.cut(home.swapaxes(2, 3))  # [..., queries, rounds]: the chunk of each query in each round
    kv = circle.look(q)
    met = (q[..., :, None, :, None] - kv[..., None, :, None, :] + after) % total <= before + after
    return jnp.maximum(jnp.sum(met, axis=(-2, -1)), 1)


def _labels(x, rotations, mask, padding):
    """(round, bucket) as one number for each token, rounds apart; padding has the last bucket of each round."""
    t = jnp.arange(x.shape[1])[None, None, :, None]
    real = jnp.ones((1, x.shape[1]), bool)
    for part in mask.conjuncts():
        if part.rule in (rules.segments, rules.lengths):  # padding does not see itself
            real = real & part.rule(part, t, t)[:, 0, :, 0]
    buckets = math.prod(2 * R.shape[-1] for R in jax.tree.leaves(rotations))
    labels = jnp.where(real[:, None, None], lsh_buckets(x, rotations), buckets)
    labels = jnp.pad(labels, [(0, 0)] * 3 + [(0, padding)], constant_values=buckets)
    return labels + (buckets + 1) * jnp.arange(labels.shape[2])[None, None, :, None]


def _unit(x, eps):
    wide = in_float32(x)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt((mean_square + eps) * x.shape[-1])).astype(x.dtype)


def _visible(mask, q, kv, T):
    """The mask at the positions of each chunk: [B or 1, N, chunks, queries, keys]."""
    (B, N, total, chunk), width = q.shape, kv.shape[-1]
    visible = jax.vmap(mask, (1, 1), 1)(q.reshape(B, -1, chunk), kv.reshape(B, -1, width))
    if visible.shape[2] != 1 or not isinstance(mask.offset, int | None) or mask.offset:
        raise mask_refusal("lsh_attention", mask, "mask by head or with an offset", "any other")
    shape = visible.shape[0], N * total, 1, chunk, width
    visible = jnp.broadcast_to(visible, shape).reshape(-1, N, total, chunk, width)
    return visible & (q < T)[..., None] & (kv < T)[..., None, :]
