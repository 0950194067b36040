"""Fingerprints of arrays: any flipped bit changes them; mesh, sharding and order of summation do not."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxformer.parallel.mesh import block_if_simulated


def fingerprints(leaves: Iterable[Array]) -> list[str]:
    """16 hex digits for each array. All are dispatched before the first is waited for."""
    return [f"{int(a):08x}{int(b):08x}" for a, b in jax.device_get([block_if_simulated(fingerprint(leaf)) for leaf in leaves])]


@jax.jit
def fingerprint(leaf: Array) -> Array:
    """`[sum_i h_i, sum_i h_i (2i + 1)] mod 2^32` over logical indices i, with `h_i = mix(bits_i ^ hash(i))`.

    The mix is one to one and odd weights are invertible, so one changed value always changes both sums. It also spreads
    every bit over the word, without which two flipped signs would cancel. One pass over the data: on a CPU
    that is 20 times as fast as two separate sums.
    """
    bits = to_bits(jax.device_put(leaf, jax.memory.Space.Device))  # it may lie in host memory
    index = jnp.zeros(bits.shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(bits.ndim)):
        index += lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * jnp.uint32(stride)
        stride = stride * bits.shape[axis] % 2**32
    # The constants are those of MurmurHash3's finaliser; the first is 2^32 / the golden ratio (Fibonacci hashing).
    word = bits ^ (index * jnp.uint32(0x9E3779B1))
    word = (word ^ (word >> 16)) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * jnp.uint32(0xC2B2AE35)
    word = word ^ (word >> 16)
    zero = jnp.uint32(0)
    add = lambda a, b: (a[0] + b[0], a[1] + b[1])
    return jnp.stack(lax.reduce((word, word * (2 * index + 1)), (zero, zero), add, range(bits.ndim)))


def key_data(leaf: Array) -> Array:
    """The numbers of a typed key; any other array as it is."""
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def to_bits(leaf: Array) -> Array:
    """The array as uint32, one to one: typed keys by their data, 64-bit and complex numbers as pairs on a last axis."""
    leaf = key_data(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.stack([leaf.real, leaf.imag], axis=-1)
    if leaf.dtype.itemsize == 8:
        return lax.bitcast_convert_type(leaf, jnp.uint32)
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        leaf = lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}")
    return leaf.astype(jnp.uint32)
