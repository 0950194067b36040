"""Tokens meet in hash buckets, and a query is its own key: Kitaev et al. 2020, arXiv:2001.04451.

For the reversible residuals of the same paper see `reversible.py`, for the local layers of the
published model `local_chunks.py`.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jaxtyping import Float

from jaxformer.errors import ConfigError
from jaxformer.masks import Mask, as_mask, causal, chunked, rules
from jaxformer.models.config import Axial, LanguageModel, ModelConfig, require_numbers
from jaxformer.models.layer import Mixer
from jaxformer.models.mixers.attention import attention_spec
from jaxformer.ops.attention.call import check_shapes, mask_refusal
from jaxformer.ops.attention.reference import softmax, softmax_and_log_sum_exp
from jaxformer.ops.dropout import dropout
from jaxformer.ops.einsum import einsum, in_float32
from jaxformer.zoo.frame import approximation, by_layer, options
from jaxformer.zoo.hash_buckets import Rotations, lsh_buckets, random_rotations
from jaxformer.zoo.reversible import Reversible


@jax.named_scope("lsh_attention")
def attention(
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
    eps: float = 1e-6,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    multiple: int | None = None,
) -> Float[Array, "B T N Hv"]:
    """softmax(scale x_i . x_j / |x_j|) value over the keys j that hashing puts near the query i.

    Each round of hashing sorts the tokens by (bucket, position), padding last, and cuts them into
    chunks. A query sees its own chunk, `chunks_before` chunks before it and `chunks_after` after
    it, in one circle of all rounds, as in trax. It sees itself only where it sees nothing else. A
    key that is met several times counts once (appendix A), or with `duplicates` as often as it is
    met (trax, Hugging Face).

    T is padded to a multiple of `multiple` (None: `chunk`), which is a multiple of `chunk`. `eps`
    is added to a key's mean square. The cost grows with rounds * T * chunk. A query that sees no
    key yields zeros. Raises NotImplementedError for a mask by head or with an offset.
    """
    check_shapes("lsh_attention", query_key, query_key, value)
    B, T, N, _ = query_key.shape
    if value.size == 0:
        return value
    mask = as_mask(mask, "lsh_attention").sized(T)
    labels = _labels(jax.lax.stop_gradient(query_key), rotations, mask, -T % (multiple or chunk))
    order = jnp.argsort(labels, axis=-1, stable=True)
    total = order.shape[2] * order.shape[3] // chunk
    shifts = _shifts(chunks_before, chunks_after, total, duplicates)
    circle = _Circle(order, jnp.argsort(order, axis=-1), chunk, shifts)
    wide = jnp.promote_types(query_key.dtype, jnp.float32)
    keys = circle.look(circle.cut(_unit(query_key, eps).swapaxes(1, 2)))
    queries = circle.cut(query_key.swapaxes(1, 2))
    scores = einsum("bncqh,bnckh->bncqk", queries, keys, dtype=wide) * scale
    q = order.reshape(B, N, total, chunk)
    kv = circle.look(q)
    # with itself: below every other score, so that it counts only where nothing else is visible
    scores = jnp.where(q[..., None] == kv[..., None, :], -1e5, scores)
    if not duplicates:
        scores = scores - jnp.log(_meetings(circle))
    scores = jnp.where(_visible(mask, q, kv, T), scores, -jnp.inf)
    weights, log_total = softmax_and_log_sum_exp(scores)
    weights = dropout(weights, dropout_rate, dropout_key).astype(value.dtype)
    values = circle.look(circle.cut(value.swapaxes(1, 2)))
    out = einsum("bncqk,bnckh->bncqh", weights, values, dtype=wide)
    # back to the order of the tokens; each round counts by its share of the whole softmax
    out = out.reshape(*labels.shape, -1)
    log_total = log_total.reshape(labels.shape)
    place = circle.place[..., :T]
    by_round = jnp.take_along_axis(out, place[..., None], axis=3)
    shares = softmax(jnp.take_along_axis(log_total, place, axis=3).swapaxes(2, 3))
    return einsum("bntr,bnrth->btnh", shares, by_round, dtype=value.dtype)


def _shifts(chunks_before: int, chunks_after: int, total: int, duplicates: bool):
    """Distances from a chunk back to the chunks that it sees, in a circle of `total` chunks.

    Without `duplicates` each chunk is seen once. With them, chunks are seen as in the slices of
    Hugging Face's model: as often as they go round the circle, and the chunk itself beyond a turn.
    """
    if duplicates:
        return [
            shift if abs(shift) <= total else 0
            for shift in range(chunks_before, -chunks_after - 1, -1)
        ]
    chunks_before = min(chunks_before, total - 1)
    chunks_after = min(chunks_after, total - 1 - chunks_before)
    return range(chunks_before, -chunks_after - 1, -1)


class _Circle(NamedTuple):
    """The sorted tokens of all rounds, cut into chunks that form a circle."""

    order: Any  # [B, N, rounds, length]: the token at each place
    place: Any  # [B, N, rounds, length]: the place of each token
    chunk: int
    shifts: range | list[int]  # distances from a chunk back to the chunks that it sees

    def cut(self, x):
        """[B, N, T, ...] -> [B, N, chunks, chunk, ...]: sorted, one round after another.

        Padding is zeros.
        """
        B, N = self.order.shape[:2]
        index = self.order.reshape(B, N, -1, *[1] * (x.ndim - 3))
        x = jnp.take_along_axis(x, index, axis=2, mode="fill", fill_value=0)
        return x.reshape(B, N, -1, self.chunk, *x.shape[3:])

    def look(self, x):
        """[B, N, chunks, chunk, ...] -> [B, N, chunks, keys, ...]: what each chunk sees."""
        return jnp.concatenate([jnp.roll(x, shift, axis=2) for shift in self.shifts], axis=3)


def _meetings(circle: _Circle):
    """How often a query and a key of one chunk meet in all rounds, at least 1."""
    rounds, length = circle.order.shape[2:]
    home = (
        circle.place // circle.chunk
        + length // circle.chunk * jnp.arange(rounds)[None, None, :, None]
    )
    total = rounds * length // circle.chunk
    chunks_before, chunks_after = circle.shifts[0], -circle.shifts[-1]
    # [..., queries, rounds]: the chunk of each query in each round
    q = circle.cut(home.swapaxes(2, 3))
    kv = circle.look(q)
    distance = q[..., :, None, :, None] - kv[..., None, :, None, :]
    meets = (distance + chunks_after) % total <= chunks_before + chunks_after
    return jnp.maximum(jnp.sum(meets, axis=(-2, -1)), 1)


def _labels(x, rotations, mask, padding):
    """(round, bucket) of each token as one number, so that rounds stay apart when sorted.

    Padding has the last bucket of each round.
    """
    t = jnp.arange(x.shape[1])[None, None, :, None]
    is_token = jnp.ones((1, x.shape[1]), bool)
    for conjunct in mask.conjuncts():
        if conjunct.rule in (rules.segments, rules.lengths):  # padding does not see itself
            is_token = is_token & conjunct.rule(conjunct, t, t)[:, 0, :, 0]
    buckets = math.prod(2 * R.shape[-1] for R in jax.tree.leaves(rotations))
    labels = jnp.where(is_token[:, None, None], lsh_buckets(x, rotations), buckets)
    labels = jnp.pad(labels, [(0, 0)] * 3 + [(0, padding)], constant_values=buckets)
    return labels + (buckets + 1) * jnp.arange(labels.shape[2])[None, None, :, None]


def _unit(x, eps):
    """x / |x|, with `eps` added to the mean square."""
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


@dataclass(frozen=True)
class Reformer:
    """Queries that are their own keys meet in hash buckets: Kitaev et al. 2020, arXiv:2001.04451.

    Any mask that all heads share. `apply(..., constants=rotations)` replaces those drawn from
    `seed`. For reversible residuals see `zoo.reversible`.
    """

    chunk: int = 64  # tokens of a chunk
    rounds: int = 2  # rounds of hashing
    # buckets of one round; None: 2^floor(log2(2 context_length / chunk)) for batches of any length
    buckets: int | tuple[int, ...] | None = None
    chunks_before: int = 1  # chunks before its own that a query sees
    chunks_after: int = 0  # chunks after its own that a query sees
    seed: int = 0  # of the rotations
    # whether training draws new rotations for each step, from the dropout key if there is one
    redraw: bool = True
    # whether a key that is met in several rounds counts each time, as in Hugging Face's model
    duplicates: bool = False
    multiple: int | None = None  # padding fills the length up to a multiple of this; None: of chunk

    def __post_init__(self):
        require_numbers(
            chunk=1, rounds=1, buckets=2, chunks_before=0, chunks_after=0, seed=0, multiple=1
        )(self)
        if self.multiple is not None and self.multiple % self.chunk:
            raise ConfigError(
                f"Reformer.multiple={self.multiple}: "
                f"expected a multiple of chunk={self.chunk}, or None"
            )
        if any(size < 2 or size % 2 for size in np.ravel(self.buckets or 2)):
            raise ConfigError(
                f"Reformer.buckets={self.buckets}: expected even numbers of at least 2, or None"
            )

    def evaluation(self) -> "Reformer":
        """The same mixer with fixed rotations."""
        return replace(self, redraw=False)

    def __call__(self, config: ModelConfig) -> Mixer:
        N = config.num_heads
        if config.kv_heads != N:
            raise ConfigError(
                f"model.num_kv_heads={config.kv_heads}: "
                f"Reformer has a value head for each of {N} heads"
            )
        spec = attention_spec(config)
        del spec["key"]
        ratio = max(2 * config.context_length / self.chunk, 1)
        buckets = self.buckets or 2 ** max(1, int(math.log2(ratio)))
        draw = partial(
            random_rotations,
            heads=N,
            head_size=config.head_size,
            rounds=self.rounds,
            buckets=buckets,
        )

        def mix(params, context, query, value):
            rotations = context.constants
            if self.redraw and context.dropout_key is not None:
                rotations = draw(random.fold_in(context.dropout_key, 1))
            return attention(
                query,
                value,
                rotations,
                chunk=self.chunk,
                chunks_before=self.chunks_before,
                chunks_after=self.chunks_after,
                duplicates=self.duplicates,
                multiple=self.multiple,
                **options(config, context),
            )

        return approximation(
            self,
            config,
            mix,
            spec,
            constants=lambda T: by_layer(self.seed, config.num_layers, draw),
        )


_local = causal() & chunked(128, 1)
_lsh = Reformer(chunk=256, rounds=4, buckets=512, duplicates=True)
reformer_enwik8 = ModelConfig(
    258,
    12,
    1024,
    8,
    context_length=65536,
    d_ff=4096,
    feedforward="relu",
    norm_eps=1e-12,
    positions=Axial((128, 512), (256, 768)),
    masks=(_local, _local, causal(), _local),
    mixer=(None, None, _lsh, None),
    stack=Reversible(streams=2),
    use_bias="up|down|norm",
    heads=(LanguageModel(bias=True),),
    tie_embeddings=False,
)
