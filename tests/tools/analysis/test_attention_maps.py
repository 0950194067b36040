"""Numbers of heads by loops in float64, and for heads whose kind is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.tools.analysis import attention_maps as maps


def random_weights(*shape, seed=0):
    """Rows that sum to 1."""
    return jax.nn.softmax(3 * jax.random.normal(jax.random.key(seed), shape), axis=-1)


@pytest.mark.thorough
def test_numbers_are_those_of_loops():
    L, B, N, T = 2, 3, 4, 6
    weights, wide = random_weights(L, B, N, T, T), None
    wide = np.asarray(weights, np.float64)
    found = [np.zeros((L, B, N, T)), np.zeros((L, B, N, T)), np.zeros((L, N, B, N, T))]
    for i, b, n, t in np.ndindex(L, B, N, T):
        row = wide[i, b, n, t]
        found[0][i, b, n, t] = -sum(a * np.log(a) for a in row)
        found[1][i, b, n, t] = sum(a * abs(t - s) for s, a in enumerate(row))
        for m in range(N):
            found[2][i, m, b, n, t] = sum(
                min(a, c) for a, c in zip(wide[i, b, m, t], row, strict=True)
            )
    for values, function in zip(found, (maps.entropy, maps.distance, maps.overlap), strict=True):
        np.testing.assert_allclose(function(weights), values, rtol=1e-5, atol=1e-6)  # float32 sums
    product = np.eye(T)
    for i in range(L):
        product = (wide[i, 0].mean(axis=0) + np.eye(T)) / 2 @ product
    np.testing.assert_allclose(maps.rollout(weights)[0], product, rtol=1e-5)
    np.testing.assert_allclose(maps.rollout(weights).sum(axis=-1), 1, rtol=1e-5)


@pytest.mark.thorough
def test_bounds_are_reached():
    one, even = jnp.eye(5)[None, None], jnp.full((1, 1, 5, 5), 0.2)
    np.testing.assert_allclose(maps.entropy(one), 0)
    np.testing.assert_allclose(maps.entropy(even), np.log(5), rtol=1e-6)
    np.testing.assert_allclose(maps.distance(one), 0)
    np.testing.assert_allclose(
        maps.overlap(jnp.concatenate([one, jnp.roll(one, 1, -1)], axis=1))[0, 0, 1], 0
    )


@pytest.mark.thorough
def test_padding_is_in_no_mean():
    weights, real = (
        random_weights(2, 3, 4, 6, 6),
        jnp.arange(6)[None] < jnp.array([6, 2, 4])[:, None],
    )
    spoiled = jnp.where(real[None, :, None, :, None], weights, 1 / 6)
    means = [maps.head_means(maps.entropy(each), real) for each in (weights, spoiled)]
    np.testing.assert_array_equal(*means)
    np.testing.assert_allclose(
        maps.head_means(maps.entropy(weights[:, :1])),
        maps.entropy(weights[:, 0]).mean(axis=-1),
        rtol=1e-6,
    )


@pytest.mark.parametrize("seed", range(3))
def test_targets_of_induction(seed):
    tokens = np.random.default_rng(seed).integers(0, 5, (2, 20))
    found = np.asarray(maps.induction_targets(jnp.asarray(tokens)))
    for b, t in np.ndindex(2, 20):
        before = [s for s in range(t) if tokens[b, s] == tokens[b, t]]
        assert found[b, t] == (before[-1] + 1 if before else -1)


@pytest.mark.thorough
def test_a_head_of_a_kind_has_its_score():
    tokens = jnp.array([[3, 1, 4, 1, 3, 1, 2, 4]])
    for targets in (maps.previous_tokens(tokens), maps.induction_targets(tokens)):
        perfect = jax.nn.one_hot(jnp.maximum(targets, 0), 8)[:, None]
        assert float(maps.head_means(maps.weight_at(perfect, targets), targets >= 0)[0]) == 1
        assert (
            float(
                maps.head_means(
                    maps.weight_at(jnp.full((1, 1, 8, 8), 1 / 8), targets), targets >= 0
                )[0]
            )
            == 1 / 8
        )
