"""Rewards: what users of trl, verl, unsloth, NeMo RL, transformers and others reported, on ours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import models, params as P
from jaxformer.errors import ConfigError
from jaxformer.objectives import (
    Clipped,
    PolicyGradient,
    RewardModel,
    StepContext,
    advantages,
    policy,
)
from tests.data.test_rollouts import MODEL as TALKER, Numbers, Rollouts, digits
from tests.objectives import test_policy as one, test_reward as rewarded
from tests.objectives.test_policy import B, G, T


def sums_of(objective, data, tree=None, **context):
    tree = one.trees()[0] if tree is None else tree
    return objective(one.MODEL, tree, data, StepContext(jax.random.key(3), **context))


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/trl#3021",
    "allenai/open-instruct#1161",
    "huggingface/trl#5828",
    right="micro-batches of unequal lengths add up to the loss of the whole batch",
)
@pytest.mark.parametrize("average", [policy.over_answers, policy.over_tokens])
def test_micro_batches_add_up(average):
    objective = PolicyGradient(average=average)
    data = one.batch()
    whole = sums_of(objective, data)
    parts = [
        sums_of(objective, {name: leaf[b : b + 1] for name, leaf in data.items()}) for b in range(B)
    ]
    np.testing.assert_allclose(sum(p.loss for p in parts), whole.loss, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(sum(p.weight for p in parts), whole.weight)


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/trl#6439",
    right="tokens that do not count are neither in the loss nor in its denominator",
)
def test_what_has_no_weight_is_in_no_denominator():
    data = one.batch()
    sums = sums_of(PolicyGradient(average=policy.over_tokens), data)
    counted = np.asarray(data["answers"]) * np.asarray(data["weights"])[:, None, None]
    assert sums.weight == counted.sum() < np.asarray(data["answers"]).sum()


@pytest.mark.report(
    "verl-project/verl#593",
    "allenai/open-instruct#636",
    right="GRPO's mean is over the tokens of an answer first, then over answers",
)
def test_the_mean_of_an_answer_comes_first():
    losses = jnp.float32([[[2, 2, 2, 2, 2, 6, 5, 3, 2, 4], [10, 3, 4, 5, 2, 3, 4, 1, 1, 3]]])
    answers = jnp.float32([[[1, 1, 1, 1, 1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0, 0, 0]]])
    loss, weight, _ = policy.over_answers(losses, answers, jnp.ones(1))
    np.testing.assert_allclose(loss / weight, 6.0, rtol=1e-6)
    loss, weight, _ = policy.over_tokens(losses, answers, jnp.ones(1))
    np.testing.assert_allclose(loss / weight, 10 / 3, rtol=1e-6)


@pytest.mark.thorough
@pytest.mark.report(
    "unslothai/unsloth-zoo#832",
    right="the drawn token that ends an answer is learned, without dropout in either model",
)
def test_the_end_of_an_answer_is_an_action():
    """With dropout of 0.3 in the model, the ratios of a fresh batch are 1 all the same."""
    tree = P.init(models.spec(TALKER), jax.random.key(0))
    tree["embedding"]["tokens"] = tree["embedding"]["tokens"].at[253].mul(40.0)  # likely to end
    seen = []

    def reward(answers):
        seen.extend(answers)
        return digits(answers)

    rollouts = Rollouts(Numbers(), reward, group=8, max_tokens=24, temperature=1.5)
    batch = rollouts.open(TALKER).train(tree, jax.random.key(1), 0, 2)
    ended = [row for row, answer in enumerate(seen) if answer.is_complete]
    assert ended
    for row in ended:
        labels, flags = batch["labels"].reshape(16, -1)[row], batch["answers"].reshape(16, -1)[row]
        assert labels[np.flatnonzero(flags)[-1]] == seen[row].tokens[-1] in (253, 255)
    arrays = {name: jnp.asarray(leaf) for name, leaf in batch.items()}
    sums = PolicyGradient()(TALKER, tree, arrays, StepContext(jax.random.key(3)))
    assert sums.metrics["ratio_change"][0] == 0


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/open-r1#239",
    "tenstorrent/tt-blacksmith#664",
    right="the first loss of a fresh batch is 0, and its gradient is not",
)
def test_a_loss_of_zero_has_a_gradient():
    data = one.batch() | {"answers": jnp.ones((B, G, T)), "weights": jnp.ones(B)}
    objective = PolicyGradient()
    tree = one.trees()[0]

    def loss(tree):
        return sums_of(objective, data, tree).loss

    np.testing.assert_allclose(loss(tree), 0.0, atol=1e-4)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(jax.grad(loss)(tree))) > 1e-3


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/trl#3294",
    "unslothai/unsloth#4502",
    right="before any update the policy is the one that drew the answers: all ratios are 1",
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ratios_begin_at_one(dtype):
    sums = sums_of(PolicyGradient(), one.batch(), dtype=jnp.dtype(dtype))
    assert sums.metrics["ratio_change"][0] == 0


@pytest.mark.thorough
@pytest.mark.report(
    "tenstorrent/tt-blacksmith#731",
    "huggingface/open-r1#583",
    right="the second step of one batch of samples is of the changed policy: its ratios are not 1",
)
def test_the_second_update_sees_the_first():
    first, second = one.trees()
    objective = PolicyGradient(sample_shape=(B, G, T))
    start = P.init(objective.spec(one.MODEL), jax.random.key(0))
    fresh = sums_of(objective, one.batch(1.0), first, params=start)
    again = sums_of(objective, one.batch(0.0), second, params=fresh.updates["objective"])
    assert fresh.metrics["ratio_change"][0] == 0 < again.metrics["ratio_change"][0]


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/trl#3029",
    right="probabilities are those of the temperature that the answers were drawn at",
)
def test_the_temperature_divides_the_logits():
    data = one.batch()

    def logits_of(data):
        first = lambda logits, labels: logits[:, :, 1]
        return policy.of_answers(first, one.MODEL, one.trees()[0], data, jnp.float32).values

    expected = logits_of(data | {"temperature": jnp.ones(B)}) / 0.8
    np.testing.assert_allclose(logits_of(data), expected, rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/trl#3015",
    right="the divergence of a policy that is far from its reference is finite, with a gradient",
    hit="a draft took e^x of any log-ratio: infinite above 88",
)
def test_a_policy_far_from_its_reference():
    far = jnp.float32([-1000.0, -3.0, 0.0, 3.0, 19.0, 21.0, 100.0, 1000.0])
    found = policy.divergence_estimate(far)
    assert np.isfinite(found).all() and (np.asarray(found) >= 0).all()
    near = np.asarray(far[:5], float)
    np.testing.assert_allclose(found[:5], np.expm1(near) - near, rtol=1e-5)
    slopes = jax.vmap(jax.grad(policy.divergence_estimate))(far)
    assert np.isfinite(slopes).all() and (np.diff(np.asarray(slopes)) >= 0).all()


@pytest.mark.report(
    "XU-YIJIE/grpo-flat#2",
    right="advantages are within the answers to one question, not within the batch",
)
def test_groups_are_apart():
    rewards = jnp.float32([[0, 1, 0, 1], [10, 11, 10, 11]])
    for make in (advantages.group_relative, advantages.leave_one_out, advantages.group_centred):
        found = make(rewards)
        np.testing.assert_allclose(found[0], found[1], rtol=1e-4)


@pytest.mark.report(
    "NVIDIA-NeMo/RL#4161",
    "bojieli/ai-agent-book#498",
    right="equal rewards that float32 does not hold exactly give no advantage",
)
@pytest.mark.parametrize("value", [0.1, 0.3, 0.35, 0.4, 1e4 / 3])
def test_equal_rewards_teach_nothing(value):
    rewards = jnp.full((1, 8), value, jnp.float32)
    for make in (advantages.group_relative, advantages.leave_one_out, advantages.group_centred):
        assert float(jnp.abs(make(rewards)).max()) <= 2e-3 * max(value, 1)


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/trl#5773",
    "huggingface/trl#5775",
    right="a reward of NaN, or of no number, is refused with the function's name",
)
def test_a_reward_of_nan_is_refused():
    def unsure(answers):
        return [float("nan"), *[1.0] * (len(answers) - 1)]

    tree = P.init(models.spec(TALKER), jax.random.key(0))
    split = Rollouts(Numbers(), unsure, group=2, max_tokens=2).open(TALKER).train
    with pytest.raises(ConfigError, match=r"data\.reward=unsure: gave nan for one answer"):
        split(tree, jax.random.key(0), 0, 2)
    with pytest.raises(ConfigError, match=r"each prompt has one answer"):
        advantages.group_relative(jnp.ones((3, 1)))


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#35352",
    "huggingface/trl#6357",
    "pytorch/rl#3887",
    "deepspeedai/DeepSpeedExamples#672",
    right="the reward is that of a text's last token, whatever token pads or ends a text",
)
def test_a_text_that_holds_the_padding_token():
    tree = P.init(models.spec(rewarded.MODEL), jax.random.key(0))
    lengths = np.full((5, 2), 5)
    texts, data = rewarded.batch(lengths)
    texts[..., 2:5] = 0  # the token that pads
    data |= {
        "tokens": jnp.asarray(texts[..., :-1], jnp.int32),
        "labels": jnp.asarray(texts[..., 1:], jnp.int32),
    }
    rewards = models.apply(
        rewarded.MODEL, tree, jnp.asarray(texts[..., :5].reshape(10, 5), jnp.int32)
    ).logits
    margins = np.asarray(rewards).reshape(5, 2) @ [1, -1]
    sums = RewardModel()(rewarded.MODEL, tree, data, StepContext(jax.random.key(1)))
    expected = margins @ np.asarray(data["weights"])
    np.testing.assert_allclose(sums.metrics["margin"][0], expected, rtol=1e-3, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/trl#7068",
    right="a group of equal rewards changes nothing unless a divergence is asked for",
)
def test_a_group_of_equal_rewards():
    data = one.batch() | {"rewards": jnp.ones((B, G))}
    first, second = one.trees()

    def steepest(objective, **context):
        def loss(tree):
            return sums_of(objective, data, tree, **context).loss

        return max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(jax.grad(loss)(first)))

    assert steepest(PolicyGradient(surrogate=Clipped(0.1, 0.1))) < 1e-6
    with_kl = PolicyGradient(kl=0.1, reference="before")
    assert steepest(with_kl, references={"before": second}) > 1e-5
    sums = sums_of(with_kl, data, first, references={"before": second})
    assert sums.metrics["groups_that_differ"][0] == 0
