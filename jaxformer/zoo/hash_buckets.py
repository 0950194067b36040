"""Hashes that put near vectors into one bucket: the side of random directions that a vector points to most.

Andoni et al. 2015, arXiv:1509.02897; in `reformer.py` each round of hashing has directions of its own.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jaxformer.ops.einsum import einsum

Rotations = Float[Array, "#N H rounds _"] | tuple[Float[Array, "#N H rounds _"], ...]


def random_rotations(key: Array, heads: int, head_size: int, rounds: int, buckets: int | tuple[int, ...]) -> Rotations:
    """Normal directions for `reformer.attention`, `[N, H, rounds, buckets / 2]`: each has two ends.

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
