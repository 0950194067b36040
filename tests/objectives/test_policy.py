"""Policy gradients, beside their equations in float64, and as objectives of a model."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import models, params as P
from jaxformer.errors import ConfigError
from jaxformer.models import ModelConfig
from jaxformer.objectives import (
    Clipped,
    PolicyGradient,
    StepContext,
    TokenCrossEntropy,
    advantages as of_rewards,
    policy,
)

rng = np.random.default_rng(0)
B, G, T, V = 3, 4, 6, 11
MODEL = ModelConfig(
    vocab_size=V, num_layers=1, d_model=8, num_heads=2, context_length=T, dropout_rate=0.5
)


def relative(rewards):
    return (rewards - rewards.mean(1, keepdims=True)) / (
        rewards.std(1, ddof=1, keepdims=True) + 1e-4
    )


def others(rewards):
    """Each reward less the mean of the other ones, one at a time."""
    result = np.zeros_like(rewards)
    for b, g in np.ndindex(*rewards.shape):
        result[b, g] = rewards[b, g] - np.delete(rewards[b], g).mean()
    return result


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (of_rewards.group_relative, relative),
        (of_rewards.leave_one_out, others),
        (of_rewards.group_centred, lambda r: r - r.mean(1, keepdims=True)),
    ],
    ids=["GRPO", "RLOO", "Dr. GRPO"],
)
def test_advantages(ours, theirs):
    rewards = rng.normal(size=(B, G))
    # float32: some 1e-7 of rewards of size 1
    np.testing.assert_allclose(ours(jnp.float32(rewards)), theirs(rewards), rtol=1e-4, atol=1e-5)
    equal = ours(jnp.full((B, G), 0.7))  # a group of equal rewards has nothing to learn from
    np.testing.assert_allclose(equal, 0.0, atol=1e-3)


def clipped(log_ratios, advantages, low, high):
    ratios = np.exp(log_ratios)
    return -np.minimum(ratios * advantages, np.clip(ratios, 1 - low, 1 + high) * advantages)


def test_the_surrogate_and_its_gradient():
    log_ratios = rng.normal(0, 0.4, (B, G, T))
    advantages = rng.normal(size=(B, G, 1))
    loss = Clipped(0.2, 0.3)
    flags = jnp.ones((B, G, T))

    def ours(x):
        return loss(x, jnp.float32(advantages), flags)

    expected = clipped(log_ratios, advantages, 0.2, 0.3)
    np.testing.assert_allclose(ours(jnp.float32(log_ratios)), expected, rtol=1e-4, atol=1e-5)
    gradient = jax.grad(lambda x: ours(x).sum())(jnp.float32(log_ratios))
    step = 1e-6
    slopes = (
        clipped(log_ratios + step, advantages, 0.2, 0.3)
        - clipped(log_ratios - step, advantages, 0.2, 0.3)
    ) / (2 * step)
    np.testing.assert_allclose(gradient, slopes, rtol=1e-3, atol=1e-5)
    # a step that the bound forbids has no gradient; one back has
    assert (slopes == 0).any() and (np.abs(slopes) > 0).any()


def test_averages():
    losses = rng.normal(size=(B, G, T))
    answers = (np.arange(T) < rng.integers(1, T + 1, (B, G, 1))).astype(float)
    weights = np.array([1.0, 0.0, 1.0])
    by_hand = [
        weights[b] * np.mean([losses[b, g, t] for t in range(T) if answers[b, g, t]])
        for b, g in np.ndindex(B, G)
    ]
    arguments = [jnp.float32(each) for each in (losses, answers, weights)]
    loss, weight, unit = policy.over_answers(*arguments)
    np.testing.assert_allclose(loss, sum(by_hand), rtol=1e-4)
    assert (weight, unit) == (2 * G, "answers")
    loss, weight, unit = policy.over_tokens(*arguments)
    counted = answers * weights[:, None, None]
    np.testing.assert_allclose(loss, (losses * counted).sum(), rtol=1e-4)
    assert (weight, unit) == (counted.sum(), "tokens")
    loss, weight, unit = policy.OverLength(5)(*arguments)
    np.testing.assert_allclose(loss / weight, (losses * counted).sum() / (2 * G * 5), rtol=1e-4)
    assert unit == "answers"


def batch(fresh=None, seed=0):
    rng = np.random.default_rng(seed)
    places = np.arange(T)
    lengths = rng.integers(2, T + 1, (B, G, 1))
    result = {
        "tokens": jnp.asarray(rng.integers(0, V, (B, G, T)), jnp.int32),
        "labels": jnp.asarray(rng.integers(0, V, (B, G, T)), jnp.int32),
        "answers": jnp.float32((places >= 1) & (places < lengths)),
        "rewards": jnp.float32(rng.normal(size=(B, G))),
        "weights": jnp.asarray([1, 0, 1], jnp.float32),
        "temperature": jnp.full(B, 0.8, jnp.float32),
    }
    return result if fresh is None else result | {"fresh": jnp.full(B, fresh, jnp.float32)}


def log_probabilities(tree, data):
    """Of each label, one text at a time."""
    result = np.zeros((B, G, T))
    for b, g in np.ndindex(B, G):
        logits = models.apply(MODEL, tree, data["tokens"][b, g][None]).logits[0] / 0.8
        logs = np.asarray(jax.nn.log_softmax(logits), float)
        result[b, g] = logs[np.arange(T), np.asarray(data["labels"][b, g])]
    return result


def trees():
    return [P.init(models.spec(MODEL), jax.random.key(i)) for i in range(2)]


@pytest.mark.thorough
def test_the_objective_of_a_model():
    """Before any update the ratios are 1: the loss is -A, and a multiple of the divergence."""
    first, second = trees()
    data = batch()
    context = StepContext(jax.random.key(3), references={"before": second})
    objective = PolicyGradient(kl=0.3, reference="before")
    sums = objective(MODEL, first, data, context)
    own, other = log_probabilities(first, data), log_probabilities(second, data)
    answers, weights = (np.asarray(data[name], float) for name in ("answers", "weights"))
    r = np.exp(other - own)
    divergence = r - np.log(r) - 1
    losses = -relative(np.asarray(data["rewards"], float))[:, :, None] + 0.3 * divergence
    means = (losses * answers).sum(2) / answers.sum(2)
    np.testing.assert_allclose(sums.loss, weights @ means.sum(1), rtol=1e-3, atol=1e-4)
    assert (sums.weight, sums.unit) == (2 * G, "answers")
    tokens = answers * weights[:, None, None]
    value, weight = sums.metrics["kl"]
    np.testing.assert_allclose(
        value / weight, (divergence * tokens).sum() / tokens.sum(), rtol=1e-3
    )
    assert sums.metrics["ratio_change"][0] == 0
    value, weight = sums.metrics["reward"]
    expected = np.asarray(data["rewards"], float).mean(1) @ weights / 2
    np.testing.assert_allclose(value / weight, expected, rtol=1e-4, atol=1e-6)
    value, weight = sums.metrics["answer_length"]
    np.testing.assert_allclose(value / weight, answers.sum(2).mean(1) @ weights / 2, rtol=1e-5)
    assert sums.metrics["groups_that_differ"][0] == 2


@pytest.mark.thorough
def test_the_gradient_is_that_of_reinforce():
    """sum A grad log p, for a ratio of 1: by the log-probabilities alone."""
    first, _ = trees()
    data = batch()
    context = StepContext(jax.random.key(3))
    objective = PolicyGradient(average=policy.over_tokens, advantages=of_rewards.group_centred)
    advantages = of_rewards.group_centred(data["rewards"])[:, :, None]

    def reinforce(tree):
        rows = data["tokens"].reshape(B * G, T)
        logits = models.apply(models.evaluation(MODEL), tree, rows).logits / 0.8
        logs = jax.nn.log_softmax(logits).reshape(B, G, T, V)
        picked = jnp.take_along_axis(logs, data["labels"][..., None], axis=-1)[..., 0]
        return -jnp.sum(advantages * picked * data["answers"] * data["weights"][:, None, None])

    found = jax.grad(lambda tree: objective(MODEL, tree, data, context).loss)(first)
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(jax.grad(reinforce)(first)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.thorough
def test_samples_are_kept_for_later_steps():
    """The second step's loss is of the first step's samples and probabilities."""
    first, second = trees()
    objective = PolicyGradient(sample_shape=(B, G, T))
    start = P.init(objective.spec(MODEL), jax.random.key(0))
    context = StepContext(jax.random.key(3), params=start)
    fresh = objective(MODEL, first, batch(1.0), context)
    alone = PolicyGradient()(MODEL, first, batch(), StepContext(jax.random.key(3)))
    np.testing.assert_allclose(fresh.loss, alone.loss, rtol=1e-6)

    kept = replace(context, params=fresh.updates["objective"])
    stale = objective(MODEL, second, batch(0.0, seed=5), kept)
    data = batch()
    own, drawn = log_probabilities(second, data), log_probabilities(first, data)
    answers, weights = (np.asarray(data[name], float) for name in ("answers", "weights"))
    losses = clipped(
        own - drawn, relative(np.asarray(data["rewards"], float))[:, :, None], 0.2, 0.2
    )
    means = (losses * answers).sum(2) / answers.sum(2)
    np.testing.assert_allclose(stale.loss, weights @ means.sum(1), rtol=1e-3, atol=1e-4)
    assert stale.metrics["ratio_change"][0] > 0
    for one, other in zip(
        jax.tree.leaves(fresh.updates), jax.tree.leaves(stale.updates), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_evaluation_is_the_cross_entropy_of_the_data():
    assert PolicyGradient().evaluation() == TokenCrossEntropy()


@pytest.mark.thorough
def test_what_does_not_fit_is_refused():
    first, _ = trees()
    context = StepContext(jax.random.key(3))
    with pytest.raises(ConfigError, match=r"objective\.kl=0\.1: it needs a reference"):
        PolicyGradient(kl=0.1)
    with pytest.raises(ConfigError, match=r"Experiment\.references"):
        PolicyGradient(kl=0.1, reference="base")(MODEL, first, batch(), context)
    with pytest.raises(
        ConfigError, match=r"give objective\.sample_shape=\(3, 4, 6\), or data\.updates=1"
    ):
        PolicyGradient()(MODEL, first, batch(1.0), context)
    for wrong in (
        PolicyGradient(sample_shape=(B, G, T)),
        PolicyGradient(sample_shape=(B, G, T + 1)),
    ):
        data = batch() if wrong.sample_shape == (B, G, T) else batch(1.0)
        with pytest.raises(
            ConfigError, match=r"objective\.sample_shape=\(3, 4, .\): the samples are"
        ):
            wrong(MODEL, first, data, context)
    with pytest.raises(ConfigError, match=r"objective\.surrogate\.low"):
        Clipped(low=-0.1)
    assert PolicyGradient(sample_shape=(B, G, T)).whole_batch and not PolicyGradient().whole_batch


@pytest.mark.thorough
def test_a_surrogate_of_ones_own():
    """GSPO: the ratio of a whole answer (Zheng et al. 2025, arXiv:2507.18071)."""

    def of_sequences(log_ratios, advantages, answers):
        sums = (log_ratios * answers).sum(axis=2, keepdims=True)
        means = jnp.broadcast_to(sums / answers.sum(axis=2, keepdims=True), answers.shape)
        return Clipped(0.1, 0.1)(means, advantages, answers)

    first, _ = trees()
    sums = PolicyGradient(surrogate=of_sequences)(
        MODEL, first, batch(), StepContext(jax.random.key(3))
    )
    assert np.isfinite(sums.loss)
