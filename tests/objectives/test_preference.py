"""Losses of preferences, beside their equations in float64, and as objectives of a model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import models, params as P
from jaxformer.errors import ConfigError
from jaxformer.models import ModelConfig
from jaxformer.objectives import DPO, IPO, Preference, SimPO, StepContext
from jaxformer.objectives.preference import Answers, answers

rng = np.random.default_rng(0)
B, T, V = 5, 6, 11
MODEL = ModelConfig(
    vocab_size=V, num_layers=1, d_model=8, num_heads=2, context_length=T, dropout_rate=0.5
)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def dpo(policy, reference, lengths, beta, smoothing):
    margin = beta * ((policy - reference)[:, 0] - (policy - reference)[:, 1])
    right, wrong = -np.log(sigmoid(margin)), -np.log(sigmoid(-margin))
    return (1 - smoothing) * right + smoothing * wrong


def ipo(policy, reference, lengths, beta, smoothing):
    gain = policy / lengths - reference / lengths
    return (gain[:, 0] - gain[:, 1] - 0.5 / beta) ** 2


def simpo(policy, reference, lengths, beta, smoothing, gamma=0.7):
    mean = policy / lengths
    margin = beta * mean[:, 0] - beta * mean[:, 1] - gamma
    return -(1 - smoothing) * np.log(sigmoid(margin)) - smoothing * np.log(sigmoid(-margin))


CASES = {
    "dpo": (DPO(0.3), dpo, 0.3, 0.0),
    "dpo, smoothed": (DPO(0.3, label_smoothing=0.2), dpo, 0.3, 0.2),
    "ipo": (IPO(0.2), ipo, 0.2, 0.0),
    "simpo": (SimPO(2.0, gamma=0.7), simpo, 2.0, 0.0),
    "simpo, smoothed": (SimPO(2.0, gamma=0.7, label_smoothing=0.1), simpo, 2.0, 0.1),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_losses_and_their_gradients(name):
    """As the papers write them, in float64; gradients by central differences."""
    loss, expected, beta, smoothing = CASES[name]
    policy, reference = rng.normal(-9, 3, (2, B, 2))
    lengths = rng.integers(1, 7, (B, 2)).astype(float)

    def ours(policy):
        answers = [Answers(jnp.float32(each), jnp.float32(lengths)) for each in (policy, reference)]
        return loss(*answers).losses

    def theirs(policy):
        return expected(policy, reference, lengths, beta, smoothing)

    # float32: some 1e-7 of log-probabilities of size 20
    np.testing.assert_allclose(ours(policy), theirs(policy), rtol=1e-4, atol=1e-5)
    gradient = jax.grad(lambda policy: ours(policy).sum())(jnp.float32(policy))
    step = 1e-6
    for index in np.ndindex(B, 2):
        change = np.zeros((B, 2))
        change[index] = step
        slope = (theirs(policy + change) - theirs(policy - change)).sum() / (2 * step)
        np.testing.assert_allclose(gradient[index], slope, rtol=1e-3, atol=1e-5)
    with_far = loss(*[Answers(jnp.full((1, 2), v), jnp.ones((1, 2))) for v in (-1e4, -1.0)])
    assert np.isfinite(with_far.losses).all()


def batch():
    lengths = rng.integers(2, T + 1, (B, 2, 1))
    places = np.arange(T)
    return {
        "tokens": jnp.asarray(rng.integers(0, V, (B, 2, T)), jnp.int32),
        "labels": jnp.asarray(rng.integers(0, V, (B, 2, T)), jnp.int32),
        "answers": jnp.float32((places >= 1) & (places < lengths)),
        "weights": jnp.asarray([1, 1, 0, 1, 1], jnp.float32),
    }


@pytest.mark.thorough
def test_the_objective_of_a_model():
    """The sums are those of the model's log-probabilities, one text at a time, without dropout."""
    first, second = (P.init(models.spec(MODEL), jax.random.key(i)) for i in range(2))
    data = batch()
    context = StepContext(jax.random.key(3), references={"reference": second})
    sums = Preference(DPO(0.5))(MODEL, first, data, context)

    def log_probability(tree, b, side):
        logits = models.apply(MODEL, tree, data["tokens"][b, side][None]).logits[0]
        logs = np.asarray(jax.nn.log_softmax(logits), float)
        picked = logs[np.arange(T), np.asarray(data["labels"][b, side])]
        return float(picked @ np.asarray(data["answers"][b, side]))

    def table(tree):
        return np.array([[log_probability(tree, b, side) for side in (0, 1)] for b in range(B)])

    policy, reference = table(first), table(second)
    weights = np.asarray(data["weights"])
    losses = dpo(policy, reference, None, 0.5, 0.0)
    np.testing.assert_allclose(sums.loss, losses @ weights, rtol=1e-4)
    margins = 0.5 * ((policy - reference)[:, 0] - (policy - reference)[:, 1])
    for name, value in {
        "preferred": margins > 0,
        "margin": margins,
        "chosen_reward": 0.5 * (policy - reference)[:, 0],
        "rejected_reward": 0.5 * (policy - reference)[:, 1],
        "chosen_log_probability": policy[:, 0],
    }.items():
        total, weight = sums.metrics[name]
        np.testing.assert_allclose(total, value @ weights, rtol=1e-3, atol=1e-5)
        assert weight == 4
    assert sums.unit == "pairs" and sums.weight == 4


@pytest.mark.thorough
def test_a_model_beside_itself():
    """Before the first step the policy is the reference: a loss of log 2, and no reward."""
    tree = P.init(models.spec(MODEL), jax.random.key(0))
    context = StepContext(jax.random.key(3), references={"reference": tree})
    sums = Preference()(MODEL, tree, batch(), context)
    np.testing.assert_allclose(sums.loss / sums.weight, np.log(2), rtol=1e-6)
    assert sums.metrics["margin"][0] == 0 and sums.metrics["preferred"][0] == 0


def test_evaluation_has_no_smoothing():
    assert Preference(DPO(label_smoothing=0.1), anchor=1.0).evaluation() == Preference(DPO())
    assert Preference(IPO()).evaluation() == Preference(IPO())


@pytest.mark.thorough
def test_what_does_not_fit_is_refused():
    tree = P.init(models.spec(MODEL), jax.random.key(0))
    context = StepContext(jax.random.key(3), references={"teacher": tree})
    with pytest.raises(ConfigError, match=r"'reference'.*\(teacher\).*references="):
        Preference()(MODEL, tree, batch(), context)
    with pytest.raises(ConfigError, match=r"objective\.loss=IPO: it compares with a reference"):
        Preference(IPO(), reference=None)(MODEL, tree, batch(), context)
    sums = Preference(SimPO(), reference=None)(MODEL, tree, batch(), context)
    assert np.isfinite(sums.loss)
    for make in (lambda: DPO(-1.0), lambda: IPO(0.0), lambda: SimPO(label_smoothing=1.0)):
        with pytest.raises(ConfigError):
            make()


@pytest.mark.thorough
@pytest.mark.parametrize("loss", [DPO(), IPO(), SimPO()])
def test_the_anchor_of_any_loss(loss):
    """It adds the chosen answer's cross entropy, a mean over its tokens."""
    tree = P.init(models.spec(MODEL), jax.random.key(0))
    data = batch()
    context = StepContext(jax.random.key(3), references={"reference": tree})
    plain = Preference(loss)(MODEL, tree, data, context)
    anchored = Preference(loss, anchor=0.4)(MODEL, tree, data, context)
    found, _ = answers(models.evaluation(MODEL), tree, data, jnp.float32)
    means = np.asarray(found.log_probabilities / found.lengths, float)[:, 0]
    expected = -0.4 * means @ np.asarray(data["weights"])
    np.testing.assert_allclose(anchored.loss - plain.loss, expected, rtol=1e-4)
    with pytest.raises(ConfigError, match=r"objective\.anchor"):
        Preference(loss, anchor=-1.0)


@pytest.mark.thorough
def test_a_loss_of_ones_own():
    """Any function of what the models give."""
    from jaxformer.objectives.preference import Losses

    def hinge(policy, reference):
        rewards = policy.mean
        return Losses(jnp.maximum(0.0, 1 - rewards[:, 0] + rewards[:, 1]), rewards)

    tree = P.init(models.spec(MODEL), jax.random.key(0))
    sums = Preference(hinge, reference=None)(MODEL, tree, batch(), StepContext(jax.random.key(3)))
    assert sums.loss > 0
