"""Hashes that put near vectors into one bucket: the random direction closest to a vector.

Andoni et al. 2015, arXiv:1509.02897. In `reformer.py` each round of hashing has its own directions.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jaxformer.ops.einsum import einsum

Rotations = Float[Array, "#N H rounds _"] | tuple[Float[Array, "#N H rounds _"], ...]


def random_rotations(
    key: Array, heads: int, head_size: int, rounds: int, buckets: int | tuple[int, ...]
) -> Rotations:
    """Normal directions for `reformer.attention`, `[N, H, rounds, buckets / 2]`.

    Each direction has two ends, which are two buckets. A tuple of sizes gives a tuple of arrays.
    Their hashes are the digits of one bucket number: (64, 64) makes 4,096 buckets. Raises
    ValueError for an odd size.
    """
    sizes = buckets if isinstance(buckets, tuple) else (buckets,)
    if any(size < 2 or size % 2 for size in sizes):
        raise ValueError(
            f"random_rotations: numbers of buckets are even and at least 2; got {buckets}"
        )
    keys = jax.random.split(key, len(sizes))
    drawn = [
        jax.random.normal(key, (heads, head_size, rounds, size // 2), jnp.float32)
        for key, size in zip(keys, sizes, strict=True)
    ]
    return tuple(drawn) if isinstance(buckets, tuple) else drawn[0]


def lsh_buckets(x: Float[Array, "B T N H"], rotations: Rotations) -> Int[Array, "B N rounds T"]:
    """argmax([x R, -x R]) for each round.

    With several factors R, the results are the digits of one number, the lowest digit first.
    """
    base = 1
    bucket = jnp.zeros((), int)
    for R in jax.tree.leaves(rotations):
        R = jnp.broadcast_to(R, (x.shape[2], *R.shape[1:]))
        sides = einsum("btnh,nhrk->bnrtk", x, R, dtype=jnp.promote_types(x.dtype, jnp.float32))
        bucket = bucket + base * jnp.argmax(jnp.concatenate([sides, -sides], axis=-1), axis=-1)
        base = base * 2 * R.shape[-1]
    return bucket
