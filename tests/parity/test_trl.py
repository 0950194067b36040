"""Losses of preferences, rewards and policies, beside TRL's, in float64.

TRL's trainers compute a loss in a method, which is called here on the same log-probabilities.
"""

from collections import defaultdict
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.objectives import DPO, IPO, Clipped, SimPO, policy
from jaxformer.objectives.preference import Answers

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
pytest.importorskip("trl")
rng = np.random.default_rng(0)
B, G, T = 5, 4, 7


class Trainer(mock.MagicMock):
    """A trainer on one device, with the options that a test gives."""

    def __init__(self, **options):
        super().__init__()
        self.configure_mock(
            accelerator=SimpleNamespace(
                device="cpu",
                num_processes=1,
                gather=lambda x: x,
                gather_for_metrics=lambda x: x,
                reduce=lambda x, reduction: x,
            ),
            model=SimpleNamespace(training=True),
            aux_loss_enabled=False,
            _metrics={"train": defaultdict(list)},
            _total_train_tokens=0,
            _tp_size=1,
            **options,
        )


def as_torch(x, gradient=False):
    return torch.tensor(np.asarray(x), dtype=torch.float64, requires_grad=gradient)


def value_and_gradient(ours, x):
    """In float64."""
    with jax.enable_x64(True):
        value, gradient = jax.value_and_grad(ours)(jnp.asarray(x, jnp.float64))
        return value.item(), np.asarray(gradient)


def masks_of(count):
    """Flags of some tokens of each text, at least one."""
    lengths = rng.integers(1, T + 1, (count, 1))
    return (np.arange(T) < lengths).astype(float)


@pytest.mark.parametrize(
    ("loss", "kind", "pairs"),
    [
        (DPO(0.3), "sigmoid", B),
        # TRL has this smoothing where it sorts scores (AOT); one pair has no order
        (DPO(0.3, label_smoothing=0.2), "aot", 1),
        (IPO(0.4), "ipo", B),
    ],
    ids=["DPO", "DPO smoothed", "IPO"],
)
def test_preferences(loss, kind, pairs):
    from trl import DPOTrainer

    mask = masks_of(2 * pairs)  # chosen ones, then rejected ones
    logs = -np.abs(rng.normal(2, 1, (2 * pairs, T))) * mask
    reference = -np.abs(rng.normal(20, 3, (2, pairs)))
    theirs = as_torch(logs, gradient=True)
    flags = as_torch(mask)
    trainer = Trainer(
        beta=loss.beta,
        loss_types=[kind],
        loss_weights=[1.0],
        label_smoothing=getattr(loss, "label_smoothing", 0.0),
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        use_weighting=False,
    )
    output = SimpleNamespace(
        log_probs=theirs,
        entropy=torch.zeros_like(flags),
        mean_logits=torch.zeros_like(flags),
        is_top1=flags > 0,
    )
    inputs = {
        "input_ids": torch.zeros(len(mask), T + 1, dtype=torch.long),
        "attention_mask": torch.ones(len(mask), T + 1),
        "completion_mask": torch.nn.functional.pad(flags, (1, 0)).long(),
        "ref_chosen_logps": as_torch(reference[0]),
        "ref_rejected_logps": as_torch(reference[1]),
    }
    value = DPOTrainer._compute_loss(trainer, lambda **_: output, inputs, False)
    value.backward()

    def ours(logs):
        flags = jnp.asarray(mask)
        found = (logs * flags).sum(axis=1).reshape(2, pairs).T
        lengths = flags.sum(axis=1).reshape(2, pairs).T
        policy_answers = Answers(found, lengths)
        return loss(policy_answers, Answers(jnp.asarray(reference.T), lengths)).losses.mean()

    found, gradient = value_and_gradient(ours, logs)
    np.testing.assert_allclose(found, value.item(), rtol=1e-12)
    np.testing.assert_allclose(gradient * mask, theirs.grad.numpy() * mask, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_simpo(smoothing):
    from trl.experimental.cpo import CPOTrainer

    loss = SimPO(2.0, gamma=0.7, label_smoothing=smoothing)
    means = -np.abs(rng.normal(2, 1, (B, 2)))
    theirs = as_torch(means, gradient=True)
    trainer = Trainer(
        beta=2.0, simpo_gamma=0.7, label_smoothing=smoothing, loss_type="simpo", alpha=0.0
    )
    losses, chosen, rejected = CPOTrainer.cpo_loss(trainer, theirs[:, 0], theirs[:, 1])
    losses.mean().backward()

    def ours(means):
        return loss(Answers(means, jnp.ones((B, 2))), None)

    found, gradient = value_and_gradient(lambda means: ours(means).losses.mean(), means)
    np.testing.assert_allclose(found, losses.mean().item(), rtol=1e-12)
    np.testing.assert_allclose(gradient, theirs.grad.numpy(), rtol=1e-9)
    with jax.enable_x64(True):
        rewards = ours(jnp.asarray(means)).rewards
    np.testing.assert_allclose(rewards[:, 0], chosen.detach().numpy(), rtol=1e-12)
    np.testing.assert_allclose(rewards[:, 1], rejected.detach().numpy(), rtol=1e-12)


AVERAGES = {
    "grpo": policy.over_answers,
    "bnpo": policy.over_tokens,
    "dr_grpo": policy.OverLength(9),
}


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("kl", [0.0, 0.3])
@pytest.mark.parametrize("drawn_before", [False, True])
def test_policy_gradients(average, kl, drawn_before):
    """Clipped ratios, the estimate of the divergence, and three averages."""
    from trl import GRPOTrainer

    mask = masks_of(B * G)
    logs = -np.abs(rng.normal(2, 1, (B * G, T)))
    drawn = logs + rng.normal(0, 0.3, logs.shape) if drawn_before else logs
    others = logs + rng.normal(0, 0.5, logs.shape)
    advantages = rng.normal(size=B * G)
    theirs = as_torch(logs, gradient=True)
    trainer = Trainer(
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False),
        beta=kl,
        loss_type=average,
        epsilon_low=0.2,
        epsilon_high=0.3,
        importance_sampling_level="token",
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=9,
        _entropy_bonus_enabled=False,
    )
    trainer._get_per_token_logps_and_entropies.return_value = (
        theirs, torch.zeros(B * G, T), None,
    )  # fmt: skip
    value = GRPOTrainer._compute_loss(
        trainer,
        None,
        {
            "prompt_ids": torch.zeros(B * G, 1),
            "prompt_mask": torch.ones(B * G, 1),
            "completion_ids": torch.zeros(B * G, T),
            "completion_mask": as_torch(mask),
            "advantages": as_torch(advantages),
            "old_per_token_logps": as_torch(drawn),
            "ref_per_token_logps": as_torch(others),
        },
    )
    value.backward()
    shape = B, G, T

    def ours(logs):
        logs = logs.reshape(shape)
        surrogate = Clipped(0.2, 0.3)
        flags = jnp.asarray(mask).reshape(shape)
        losses = surrogate(
            logs - jnp.asarray(drawn).reshape(shape),
            jnp.asarray(advantages).reshape(B, G, 1),
            flags,
        )
        losses = losses + kl * policy.divergence_estimate(jnp.asarray(others).reshape(shape) - logs)
        loss, weight, _ = AVERAGES[average](losses, flags, jnp.ones(B))
        return loss / weight

    found, gradient = value_and_gradient(ours, logs)
    np.testing.assert_allclose(found, value.item(), rtol=1e-12)
    np.testing.assert_allclose(gradient, theirs.grad.numpy(), rtol=1e-9, atol=1e-14)
