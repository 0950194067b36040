"""From filtered logits to tokens."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.decoding import Sampling, sampling
from jaxformer.decoding.filters import MinP, Temperature, TopK, TopP, Typical
from jaxformer.errors import ConfigError

N = 40_000


def distance(drawn, probabilities):
    """Chi-square of drawn tokens over its degrees of freedom: 1 +- sqrt(2 / freedom) if they have
    these probabilities."""
    likely = probabilities * len(drawn) > 5
    counts = np.bincount(drawn, minlength=len(probabilities))
    expected = np.append(probabilities[likely], probabilities[~likely].sum()) * len(drawn)
    observed = np.append(counts[likely], counts[~likely].sum())
    freedom = likely.sum() - (expected[-1] == 0)
    return (
        (observed - expected)[expected > 0] ** 2 / expected[expected > 0]
    ).sum() / freedom, np.sqrt(2 / freedom)


@pytest.mark.thorough
@pytest.mark.parametrize("width", [3, 256, 300, 5000])
@pytest.mark.parametrize("scale", [0.0, 2.0])
def test_draws_have_the_probabilities_of_the_logits(width, scale):
    logits = scale * np.random.default_rng(0).normal(size=width).astype(np.float32)
    logits[::3] = -np.inf
    logits[-1] = 0.0
    keys = jax.random.split(jax.random.key(1), N)
    draw = jax.jit(
        lambda keys: jax.vmap(
            lambda key: sampling.draw(jnp.asarray(logits)[None], key[None], 1.0)[0]
        )(keys)
    )
    drawn = np.concatenate([draw(keys[i : i + 4000]) for i in range(0, N, 4000)])
    assert np.isfinite(logits[drawn]).all()
    exponentials = np.exp(logits.astype(np.float64))
    ratio, spread = distance(drawn, exponentials / exponentials.sum())
    assert abs(ratio - 1) < 5 * spread


@pytest.mark.thorough
def test_a_draw_follows_temperature_and_filters():
    logits = jnp.tile(jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]])), (N, 1))
    keys = jax.random.split(jax.random.key(0), N)

    @partial(jax.jit, static_argnums=2)
    def draw(logits, keys, how):
        for function in how.filters():
            logits = function(logits, None)
        return sampling.draw(logits, keys, how.temperature)

    drawn = np.asarray(draw(logits, keys, Sampling(temperature=0.5, top_k=3)))
    ratio, spread = distance(drawn, np.array([0.25, 0.09, 0.0225, 0]) / 0.3625)
    assert ratio < 1 + 5 * spread
    assert (np.asarray(draw(logits, keys, Sampling(temperature=0.0))) == 0).all()


@pytest.mark.thorough
def test_nothing_that_was_removed_is_drawn_whatever_the_random_number(monkeypatch):
    """Between tokens of weight 0 and at both ends of the random numbers, with sums that round."""
    rng = np.random.default_rng(3)
    logits = np.where(
        rng.random((64, 5000)) < 0.01, 10 * rng.normal(size=(64, 5000)), -np.inf
    ).astype(np.float32)
    for u in (0.0, 1e-45, 1e-7, 0.3, 0.999999, 1 - 2**-23, 1.0):
        monkeypatch.setattr(jax.random, "uniform", lambda key, u=u: jnp.float32(u))
        drawn = np.asarray(
            sampling.draw(jnp.asarray(logits), jax.random.split(jax.random.key(0), 64), 1.0)
        )
        assert np.isfinite(logits[np.arange(64), drawn]).all(), u
        share = np.exp(logits - logits.max(axis=1, keepdims=True)).astype(np.float64)
        sums = np.cumsum(share / share.sum(axis=1, keepdims=True), axis=1)[np.arange(64), drawn]
        assert (sums > u - 1e-6).all() and (
            sums - (share / share.sum(axis=1, keepdims=True))[np.arange(64), drawn] < u + 1e-6
        ).all()


@pytest.mark.thorough
def test_rows_of_temperature_0_are_greedy_and_each_row_is_what_it_is_alone():
    logits = (
        jnp.asarray(np.random.default_rng(0).normal(size=(6, 1000)).astype(np.float32))
        .at[3, 7]
        .set(9.0)
        .at[3, 500]
        .set(9.0)
    )
    keys, temperatures = (
        jax.random.split(jax.random.key(2), 6),
        jnp.array([1.0, 0.0, 0.5, 0.0, 1.0, 1.0]),
    )
    draw = jax.jit(chex.assert_max_traces(sampling.draw, n=2))
    together = np.asarray(draw(logits, keys, temperatures))
    assert together.dtype == np.int32
    for row in range(6):
        assert together[row] == draw(logits[row, None], keys[row, None], temperatures[row, None])[0]
    assert together[1] == np.argmax(logits[1]) and together[3] == 7  # of equals the first
    np.testing.assert_array_equal(draw(logits, keys, jnp.zeros(6)), np.argmax(logits, axis=1))


def test_filters_come_in_the_order_of_transformers():
    how = Sampling(0.7, top_k=40, top_p=0.9, min_p=0.05, typical=0.8)
    expected = (Temperature(0.7), TopK(40), TopP(0.9), MinP(0.05), Typical(0.8))
    assert jax.tree.structure(how.filters()) == jax.tree.structure(expected)
    chex.assert_trees_all_equal(how.filters(), expected)
    assert len(Sampling(0.0, top_k=40, typical=0.2).filters()) == 1  # greedy


@pytest.mark.parametrize(
    "bad",
    [
        dict(temperature=-1.0),
        dict(top_k=0),
        dict(top_p=0.0),
        dict(min_p=1.5),
        dict(typical=0.0),
        dict(temperature=float("nan")),
        dict(temperature=1e-40),
        dict(temperature=0.0, top_k=0),
    ],
)
def test_bad_settings_are_refused(bad):
    with pytest.raises(ConfigError, match="must be"):
        Sampling(**bad)
