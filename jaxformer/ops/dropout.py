"""Dropout of activations, and of attention weights by a hash of their positions."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int, UInt32

from jaxformer.ops.einsum import in_float32


def dropout(x: Float[Array, "..."], rate: float, key: Array | None) -> Float[Array, "..."]:
    """x / (1 - rate) with probability 1 - rate, else 0, for each entry of x; x without a key.

    Srivastava et al. 2014.
    """
    if key is None or rate == 0.0:
        return x
    return rescaled(x, jax.random.bernoulli(key, 1.0 - rate, x.shape), rate)


def rescaled(x: Float[Array, "..."], keep: Bool[Array, "..."], rate: float) -> Float[Array, "..."]:
    """x / (1 - rate) where `keep`, else 0."""
    if rate == 1.0:  # its gradient would be 0 / 0
        return jnp.zeros_like(x)
    # in bfloat16 the rounding error of 1 - rate would bias all entries in the same direction
    wide = in_float32(x)
    return jnp.where(keep, wide / (1.0 - rate), 0).astype(x.dtype)


def keep_mask(
    seed: UInt32[Array, "2"],
    rate: float,
    batch_heads: tuple[int, int],
    q_positions: Int[Array, "*#batch T"],
    kv_positions: Int[Array, "*#batch S"],
    first_row: int = 0,
) -> Bool[Array, "B N T S"]:
    """hash(seed, batch row, head, query position, key position) >= rate: the weights to keep.

    `batch_heads` is (B, N). Positions are `[T]` and `[S]`, or `[B|1, T]` and `[B|1, S]`. Any block
    of the mask can be computed alone: `first_row` is the index in the whole batch of the block's
    first batch row. The hash is pcg4d of Jarzynski & Olano 2020 (JCGT 9(3)).
    """
    B, N = batch_heads
    x = jnp.atleast_2d(q_positions).astype(jnp.uint32)[:, None, :, None] + seed[0]
    y = jnp.atleast_2d(kv_positions).astype(jnp.uint32)[:, None, None, :] ^ seed[1]
    z = (first_row * N + jnp.arange(B * N, dtype=jnp.uint32)).reshape(B, N, 1, 1)
    w = seed[0] ^ (seed[1] >> 16) ^ (seed[1] << 16)
    x, y, z, w = _stir(*(v * jnp.uint32(1664525) + jnp.uint32(1013904223) for v in (x, y, z, w)))
    bits = _stir(*(v ^ (v >> 16) for v in (x, y, z, w)))[0]
    return bits >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))


def _stir(x, y, z, w):
    x = x + y * w
    y = y + z * x
    z = z + x * y
    w = w + y * z
    return x, y, z, w
