"""Biases of attention scores: ALiBi, T5 and Shaw.

A `Bias` is a value: a function of the positions of a query and a key, and the arrays that it reads.
"""

import math
import operator
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jaxtyping import Float, Int

from jaxformer.errors import ConfigError, check_whole
from jaxformer.ops.einsum import einsum


@struct.dataclass
class Bias:
    """A score bias as a rule of positions.

    It is evaluated only where it is needed, and differentiable in its arrays. The rule is
    `rule(bias, q_positions [T], kv_positions [S]) -> [B or 1, N, T, S]`. With `by_distance` it is
    `rule(bias, distances [R]) -> [N, R]` of the distances key - query. `arrays` are its parameters
    (floating point). Each of `query_arrays`, `[B, T, ...]`, has an entry for every query; the rule
    gets only the entries of its queries.
    """

    rule: Callable = struct.field(pytree_node=False)
    args: tuple = struct.field(pytree_node=False, default=())
    by_distance: bool = struct.field(pytree_node=False, default=False)
    arrays: tuple = ()
    query_arrays: tuple = ()

    def block(self, q_start, q_length: int, kv_start, kv_length: int) -> Float[Array, "#B N T S"]:
        """The bias of q_length queries from position `q_start` on, and of kv_length keys likewise.

        Positions are absolute.
        """
        if self.by_distance:
            distances = kv_start - q_start + jnp.arange(1 - q_length, kv_length)
            return _toeplitz(self.rule(self, distances), q_length)[None]
        bias = self.rule(self, q_start + jnp.arange(q_length), kv_start + jnp.arange(kv_length))
        return bias if bias.ndim == 4 else bias[None]


def bias_between(
    bias: Bias | Callable, q: Int[Array, "#B T"], kv: Int[Array, "#B S"]
) -> Float[Array, "#B N T S"]:
    """The bias at the positions of each batch row.

    Raises ConfigError for a bias that itself differs by batch row.
    """
    B = max(len(q), len(kv))
    q, kv = (jnp.broadcast_to(x, (B, x.shape[1])) for x in (q, kv))
    return jax.vmap(partial(_bias_of_row, bias))(q, kv)


def _bias_of_row(bias: Bias | Callable, q: Int[Array, " T"], kv: Int[Array, " S"]) -> Array:
    """The bias `[N, T, S]` at the positions of one batch row."""
    if isinstance(bias, Bias) and bias.by_distance:
        distances = (kv[None] - q[:, None]).reshape(-1)
        return bias.rule(bias, distances).reshape(-1, q.shape[0], kv.shape[0])
    scores = bias.rule(bias, q, kv) if isinstance(bias, Bias) else bias(q, kv)
    if (scores.ndim == 4 and scores.shape[0] > 1) or getattr(bias, "query_arrays", ()):
        raise ConfigError(
            f"positions: a bias {scores.shape} by row; return [N, T, S], the same for all rows"
        )
    return scores.reshape(scores.shape[-3:])


def _toeplitz(diagonals: Float[Array, "N R"], T: int) -> Float[Array, "N T S"]:
    """out[n, i, j] = diagonals[n, j - i + T - 1] for R = T + S - 1, without a gather.

    The diagonals are copied T times, with one zero after each copy. Read as lines that are one
    entry shorter, each line begins one entry earlier than the line before.
    """
    N, R = diagonals.shape
    with_zero = jnp.pad(diagonals, ((0, 0), (0, 1)))
    copies = jnp.broadcast_to(with_zero[:, None], (N, T, R + 1)).reshape(N, -1)
    return copies[:, T - 1 : -1].reshape(N, T, R)[:, :, : R - T + 1]


def alibi(num_heads: int) -> Bias:
    """-m_n |i - j|: linear in the distance, with a slope m_n for each head.

    m_n = 2^(-8 n / N) if N is a power of two. Otherwise the first slopes are those of the power of
    two below N, and the others are every second slope of the power above. Press et al. 2022,
    arXiv:2108.12409, section 3.
    """
    check_whole("alibi: num_heads", num_heads)
    num_heads = operator.index(num_heads)  # an integer of NumPy has no `bit_length`
    below = 1 << (num_heads.bit_length() - 1)
    slopes = [2 ** (-8 * n / below) for n in range(1, below + 1)]
    slopes += [2 ** (-4 * n / below) for n in range(1, 2 * (num_heads - below), 2)]
    return Bias(_alibi, (tuple(slopes),), by_distance=True)


def _alibi(bias, distances):
    wide = jnp.result_type(float)
    return -jnp.asarray(bias.args[0], wide)[:, None] * jnp.abs(distances).astype(wide)[None]


def t5(table: Float[Array, "R N"], bidirectional: bool, max_distance: int = 128) -> Bias:
    """table[bucket(j - i), n]: a bucket for each near distance, wider buckets for far ones.

    The bucket of a far distance depends on its logarithm. If `bidirectional`, half of the R
    buckets are for keys after the query; otherwise these keys share bucket 0. Raffel et al. 2020,
    arXiv:1910.10683, section 2.1.
    """
    return Bias(_t5, (bidirectional, max_distance), by_distance=True, arrays=(table,))


def _t5(bias, distances):
    (table,) = bias.arrays
    return table[t5_bucket(distances, *bias.args, table.shape[0])].T


def check_t5(buckets: int, max_distance: int, bidirectional: bool, name: str = "t5: ") -> None:
    """Raises ConfigError unless at least one bucket has a single distance.

    Such distances must be below `max_distance`.
    """
    check_whole(f"{name}buckets", buckets)
    check_whole(f"{name}max_distance", max_distance)
    exact = (buckets // 2 if bidirectional else buckets) // 2
    if not 0 < exact < max_distance:
        expected = f"which must be in (0, {max_distance})"
        raise ConfigError(f"{name}buckets={buckets} has {exact} exact distances, {expected}")


def t5_bucket(
    distances: Int[Array, "..."], bidirectional: bool, max_distance: int, buckets: int
) -> Int[Array, "..."]:
    """The bucket of each distance key - query.

    Boundaries are computed on the host, so that all devices have the same ones.
    """
    check_t5(buckets, max_distance, bidirectional)
    half = buckets // 2 if bidirectional else buckets
    exact = half // 2
    far = np.arange(exact, max_distance + 1)
    logs = np.log(far.astype(np.float32) / np.float32(exact))
    logs = logs / np.float32(math.log(max_distance / exact))
    far_buckets = exact + (logs * np.float32(half - exact)).astype(np.int64)
    far_buckets = np.minimum(far_buckets, half - 1)
    least_distances = far[np.searchsorted(far_buckets, np.arange(exact + 1, half))]
    length = jnp.abs(distances) if bidirectional else jnp.maximum(-distances, 0)
    bucket = jnp.minimum(length, exact)
    for least in least_distances.tolist():
        bucket = bucket + (length >= least)
    return bucket + jnp.where(distances > 0, half, 0) if bidirectional else bucket


def shaw(
    query: Float[Array, "B T N H"], table: Float[Array, "R H"], scale: float | None = None
) -> Bias:
    """scale q_i . a[clip(j - i, -k, k) + k], for a table a of R = 2 k + 1 relative keys.

    q_i (k_j + a_ij) / sqrt(H) is the score of the key plus this bias. `scale` (1/sqrt(H) by
    default) must be that of `attention`. Shaw et al. 2018, arXiv:1803.02155, eq. 5.
    """
    if table.shape[0] % 2 != 1 or table.shape[1] != query.shape[-1]:
        raise ValueError(
            f"shaw: a table [2 k + 1, H] of relative keys; got {table.shape} "
            f"for queries {query.shape}"
        )
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = einsum("btnh,rh->btnr", query, table, dtype=wide) * scale
    return Bias(_shaw, query_arrays=(scores,))


def _shaw(bias, q_positions, kv_positions):
    (scores,) = bias.query_arrays
    k = scores.shape[-1] // 2
    distances = jnp.clip(kv_positions[None, :] - q_positions[:, None], -k, k) + k
    return jnp.take_along_axis(scores.transpose(0, 2, 1, 3), distances[None, None], axis=-1)
