"""Attention dropout is a function of (key, row, head, query position, key position), and its bits
behave as random ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.ops.attention.call import dropout_seed
from jaxformer.ops.dropout import keep_mask

ROWS = (2, 8)


def bits(key, rate=0.5, q=128, kv=128):
    run = jax.jit(
        lambda key: keep_mask(dropout_seed(rate, key), rate, ROWS, jnp.arange(q), jnp.arange(kv))
    )
    return np.asarray(run(jax.random.key(key)))


@pytest.mark.thorough
def test_any_part_can_be_asked_for_alone():
    whole = bits(0)
    part = keep_mask(
        dropout_seed(0.5, jax.random.key(0)), 0.5, ROWS, jnp.arange(37, 61), jnp.arange(5, 90)
    )
    np.testing.assert_array_equal(part, whole[:, :, 37:61, 5:90])


def test_the_rate_holds_overall_and_along_every_axis():
    """Of n bits, the share kept is within 5 standard deviations, sqrt(rate (1 - rate) / n), of 1 -
    rate."""
    for rate in (0.1, 0.5):
        kept_bits = bits(1, rate)
        for axes in ((0, 1, 2, 3), (0, 1, 2), (0, 1, 3), (2, 3)):
            share, n = kept_bits.mean(axes), kept_bits.size / kept_bits.mean(axes).size
            assert (np.abs(share - (1 - rate)) < 5 * np.sqrt(rate * (1 - rate) / n)).all()


def test_neighbours_and_keys_are_not_correlated():
    """Correlation of 262,144 pairs of independent bits has a standard deviation of 1/512; none of
    these exceeds 5."""
    x, other = 2.0 * bits(2) - 1, 2.0 * bits(3) - 1
    pairs = [
        (x, other),
        (x[0], x[1]),
        (x[:, :-1], x[:, 1:]),
        (x[:, :, :-1], x[:, :, 1:]),
        (x[..., :-1], x[..., 1:]),
    ]
    pairs += [
        (x[..., :-8], x[..., 8:]),
        (x[:, :, :-64], x[:, :, 64:]),
        (x[:, :, :-1, :-1], x[:, :, 1:, 1:]),
    ]
    pairs += [(x, x.swapaxes(2, 3) * (1 - np.eye(128)))]
    for a, b in pairs:
        assert abs((a * b).mean()) < 5 / np.sqrt(a.size), (a * b).mean()


def test_blocks_of_bits_take_all_values_equally():
    """Chi-squared of 8-bit words of neighbours, 255 degrees of freedom: 5 standard deviations are
    255 + 5 sqrt(510)."""
    x = bits(4)
    for words in (
        x.reshape(-1, 8),
        x.swapaxes(2, 3).reshape(-1, 8),
        x.transpose(0, 2, 3, 1).reshape(-1, 8),
    ):
        counts = np.bincount(words @ (1 << np.arange(8)), minlength=256)
        expected = len(words) / 256
        assert ((counts - expected) ** 2 / expected).sum() < 255 + 5 * np.sqrt(510)
