"""Biases of position: ALiBi, T5 and Shaw against their definitions, and as values that kernels
evaluate by the block."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import masks, ops
from jaxformer.ops.attention import attention
from jaxformer.ops.bias import t5_bucket

FLOAT32 = dict(rtol=2e-6, atol=2e-6)  # a product or two of numbers of order one


def bucket(distance: int, bidirectional: bool, buckets: int, max_distance: int) -> int:
    """Raffel et al. 2020 as mesh-tensorflow computes it: a float32 logarithm, cut off to an
    integer."""
    half, first = (
        (buckets // 2, buckets // 2 if distance > 0 else 0) if bidirectional else (buckets, 0)
    )
    length = abs(distance) if bidirectional else max(-distance, 0)
    exact = half // 2
    if length < exact:
        return first + length
    ratio = np.log(np.float32(length) / np.float32(exact)) / np.float32(
        math.log(max_distance / exact)
    )
    return first + min(exact + int(ratio * np.float32(half - exact)), half - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 16), (16, 20), (32, 1000)])
def test_t5_buckets(bidirectional, buckets, max_distance):
    distances = np.arange(-1500, 1501)
    ours = t5_bucket(jnp.asarray(distances), bidirectional, max_distance, buckets)
    np.testing.assert_array_equal(
        ours, [bucket(int(d), bidirectional, buckets, max_distance) for d in distances]
    )


def test_t5_refuses_a_table_without_far_buckets():
    with pytest.raises(ValueError, match="exact"):
        t5_bucket(jnp.arange(3), False, 8, 32)


@pytest.mark.parametrize(
    ("heads", "first", "last"),
    [(8, 2**-1, 2**-8), (16, 2**-0.5, 2**-8), (1, 2**-8, 2**-8), (12, 2**-1, 2**-3.5)],
)
def test_alibi_slopes(heads, first, last):
    """The paper's for powers of two; for 12 heads the eight of 8, then 2^-0.5, 2^-1.5, 2^-2.5,
    2^-3.5 of 16."""
    slopes = -np.asarray(ops.alibi(heads).block(0, 1, 1, 1))[0, :, 0, 0]
    assert (
        len(slopes) == heads and slopes[0] == np.float32(first) and slopes[-1] == np.float32(last)
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("T", "S", "offset"), [(5, 5, 0), (1, 7, 6), (7, 1, -6), (4, 9, 5), (3, 6, 0)]
)
def test_a_block_of_a_bias_by_distance_is_the_bias(T, S, offset):
    table = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)
    block = ops.t5(table, True, 16).block(offset, T, 2, S)
    expected = [
        [[table[bucket(2 + j - offset - i, True, 8, 16), n] for j in range(S)] for i in range(T)]
        for n in range(3)
    ]
    np.testing.assert_array_equal(block[0], np.array(expected))


def test_shaw_is_a_relative_key():
    """q_i (k_j + a_{clip(j - i)}) / sqrt(H), written as loops."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(2, 6, 2, 4)) for _ in range(3))
    table = rng.normal(size=(5, 4))
    with jax.enable_x64(True):
        arrays = tuple(map(jnp.asarray, (query, key, value)))
        run = jax.jit(
            lambda q, k, v, a: attention(q, k, v, bias=ops.shaw(q, a), mask=masks.causal())
        )
        out = run(*arrays, jnp.asarray(table))
    for b, i, n in np.ndindex(2, 6, 2):
        scores = [
            query[b, i, n] @ (key[b, j, n] + table[np.clip(j - i, -2, 2) + 2]) / 2
            for j in range(i + 1)
        ]
        weights = np.exp(scores) / np.exp(scores).sum()
        np.testing.assert_allclose(
            out[b, i, n], weights @ value[b, : i + 1, n], rtol=1e-12, atol=1e-12
        )


def test_shaw_refuses_an_even_table():
    with pytest.raises(ValueError, match="2 k"):
        ops.shaw(jnp.zeros((1, 2, 1, 4)), jnp.zeros((4, 4)))


def test_alibi_is_linear_in_the_distance_whatever_the_offset():
    """A cached step, whose one query stands behind the keys, is the last row of the whole."""
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(1, 6, 4, 8)), jnp.float32) for _ in range(3))
    options = dict(mask=masks.causal(), bias=ops.alibi(4))
    whole = jax.jit(lambda *a: attention(*a, **options))(query, key, value)
    step = jax.jit(lambda *a: attention(*a, **options))(query[:, -1:], key, value)
    np.testing.assert_allclose(step, whole[:, -1:], **FLOAT32)


@pytest.mark.thorough
def test_a_function_of_positions_learns():
    """A user's own bias: what it closes over gets the gradient that an array of the same values
    would pass on."""
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(1, 6, 2, 4)), jnp.float32) for _ in range(3))

    def loss(rate, implementation):
        bias = lambda q, kv: (
            rate[:, None, None] * (q[:, None] * kv[None, :] % 3).astype(jnp.float32)[None]
        )
        return (attention(query, key, value, bias=bias, implementation=implementation) ** 2).sum()

    ours, theirs = (
        jax.jit(jax.grad(lambda r, i=i: loss(r, i)))(jnp.ones(2))
        for i in ("blockwise", "reference")
    )
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
    assert (np.abs(ours) > 1e-3).all()
