"""What theory/information measures: mutual information of positions, and linear probes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.theory import expressiveness, induction, information, small
from jaxformer import models
from jaxformer.tools.analysis.attention_maps import mutual_information


@pytest.mark.thorough
def test_heads_that_look_at_one_key_each_tell_the_most():
    T = 12
    weights = jnp.stack([jnp.eye(T), jnp.full((T, T), 1 / T), jnp.eye(T)[jnp.zeros(T, int)]])
    found = mutual_information(weights)
    # sums of float32
    np.testing.assert_allclose(found, [np.log(T), 0, 0], atol=1e-5)


def test_the_information_is_that_of_the_joint_distribution():
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.ones(9), size=7)
    joint = weights / 7
    product = joint.sum(axis=1, keepdims=True) * joint.sum(axis=0, keepdims=True)
    exact = (joint * np.log(joint / product)).sum()
    assert mutual_information(jnp.asarray(weights)) == pytest.approx(exact, abs=1e-5)


def test_a_probe_finds_a_linear_map_and_nothing_in_noise():
    rng = np.random.default_rng(0)
    labels = rng.integers(induction.VOCABULARY, size=2000)
    directions = rng.normal(size=(induction.VOCABULARY, 48))
    features = directions[labels] + 0.1 * rng.normal(size=(2000, 48))
    found = information.probe(features[:1500], labels[:1500], features[1500:])
    assert (found == labels[1500:]).mean() > 0.98
    noise = rng.normal(size=(2000, 48))
    found = information.probe(noise[:1500], labels[:1500], noise[1500:])
    assert (found == labels[1500:]).mean() < 0.12  # chance is 0.03


@pytest.mark.thorough
def test_layer_0_fetches_the_token_before_and_layer_1_the_next():
    config = induction.model(layers=2)
    params = models.init(config, jax.random.key(0))

    def forward(params, tokens):
        return models.apply(config, params, tokens).logits

    params, _ = small.train(forward, params, induction.draw, optax.adam(3e-3), 300, 300)
    result = information.measure(config, params)
    embedding, first, second = range(3)
    assert min(result["this token"]) > 0.99
    assert result["one before"][embedding] < 0.1 and result["one before"][first] > 0.7
    assert result["next token"][first] < 0.2 and result["next token"][second] > 0.7
    assert result["information"][0].max() > 2


@pytest.mark.thorough
def test_the_function_is_continuous_and_blind_to_the_order():
    points = expressiveness.draw(jax.random.key(0), 3)
    y = expressiveness.function(points)
    order = jax.random.permutation(jax.random.key(1), expressiveness.LENGTH)
    # other sums of float32
    np.testing.assert_allclose(expressiveness.function(points[:, order]), y[:, order], atol=1e-5)
    moved = expressiveness.function(points + 1e-4)
    assert abs(moved - y).max() < 1e-2
    config = expressiveness.model(8, 2)
    params = models.init(config, jax.random.key(0))
    apply = jax.jit(models.apply, static_argnums=0)
    found, shuffled = (apply(config, params, x).logits for x in (points, points[:, order]))
    np.testing.assert_allclose(shuffled, found[:, order], atol=1e-5)
