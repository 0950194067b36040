"""Preferences: of two answers to a prompt, one is chosen.

`Preference` is the objective. Its loss is a value: `DPO`, `IPO`, `SimPO`, or your own function
`(policy, reference) -> Losses`. The batch has, for B pairs (0: chosen, 1: rejected),

    tokens, labels  int32 [B, 2, T]     the two texts and their next tokens
    answers         float32 [B, 2, T]   1 where a label is a part of an answer, else 0
    weights         float32 [B]         of each pair
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxformer import models
from jaxformer.errors import ConfigError, check_numbers
from jaxformer.models.reports import with_own
from jaxformer.objectives.logits import of_logits
from jaxformer.objectives.objective import (
    Batch,
    StepContext,
    check_smoothing,
    frozen_model,
    in_both_forms,
)
from jaxformer.ops.losses import LossSums, log_probabilities


class Answers(NamedTuple):
    """The answers to B prompts as a model sees them; the first of two is chosen."""

    log_probabilities: Float[Array, "B 2"]  # of the whole answer, in nats
    lengths: Float[Array, "B 2"]  # in tokens

    @property
    def mean(self) -> Float[Array, "B 2"]:
        """The log-probability of a token, in nats."""
        return self.log_probabilities / jnp.maximum(self.lengths, 1)


class Losses(NamedTuple):
    """What a preference's loss returns."""

    losses: Float[Array, " B"]
    rewards: Float[Array, "B 2"]  # implicit rewards of the two answers


@dataclass(frozen=True)
class DPO:
    """-log sigmoid(beta (m - m_ref)), where m = log p(chosen) - log p(rejected).

    With `label_smoothing` e, a preference is wrong with probability e: (1 - e) L(gain) +
    e L(-gain). Rafailov et al. 2023, arXiv:2305.18290, equation 7; Mitchell 2023 (smoothing).
    """

    beta: float = 0.1  # strength of the pull towards the reference
    label_smoothing: float = 0.0  # e; not used in evaluation

    def __post_init__(self):
        check_numbers("objective.loss.", self, beta=0)
        check_smoothing(self.label_smoothing)

    def evaluation(self) -> "DPO":
        return replace(self, label_smoothing=0.0)

    def __call__(self, policy: Answers, reference: Answers | None) -> Losses:
        before = required(reference, "DPO").log_probabilities
        rewards = self.beta * (policy.log_probabilities - before)
        return Losses(smoothed(rewards[:, 0] - rewards[:, 1], self.label_smoothing), rewards)


@dataclass(frozen=True)
class IPO:
    """((m - m_ref) - 1 / (2 beta))^2, where m is of log-probabilities a token.

    Azar et al. 2023, arXiv:2310.12036, equation 17; the mean over tokens as in its published code.
    """

    beta: float = 0.1  # the margin that is aimed at is 1 / (2 beta)

    def __post_init__(self):
        check_numbers("objective.loss.", self, beta=1e-6)

    def __call__(self, policy: Answers, reference: Answers | None) -> Losses:
        gain = policy.mean - required(reference, "IPO").mean
        margin = gain[:, 0] - gain[:, 1]
        return Losses(jnp.square(margin - 1 / (2 * self.beta)), self.beta * gain)


@dataclass(frozen=True)
class SimPO:
    """-log sigmoid(beta m - gamma), where m is of log-probabilities a token; without a reference.

    Meng et al. 2024, arXiv:2405.14734, equation 6.
    """

    beta: float = 2.0  # scale of the rewards
    gamma: float = 1.0  # the margin that is aimed at
    label_smoothing: float = 0.0  # as in `DPO`

    def __post_init__(self):
        check_numbers("objective.loss.", self, beta=0)
        check_smoothing(self.label_smoothing)

    def evaluation(self) -> "SimPO":
        return replace(self, label_smoothing=0.0)

    def __call__(self, policy: Answers, reference: Answers | None) -> Losses:
        rewards = self.beta * policy.mean
        margin = rewards[:, 0] - rewards[:, 1] - self.gamma
        return Losses(smoothed(margin, self.label_smoothing), rewards)


@dataclass(frozen=True)
class Preference:
    """loss(model, reference) - anchor log p(chosen): of the log-probabilities of two answers.

    The second term is a mean over the chosen answer's tokens. Without it that answer may become
    less probable, too, as long as the rejected one loses more (Pang et al. 2024, arXiv:2404.19733,
    equation 1). `reference` names one of `Experiment.references`; a loss that needs none gets None.
    Neither model has dropout: the loss is of the difference of the two models. Reported are the
    share of pairs whose chosen answer has the larger reward (`preferred`), the mean rewards and
    their difference (`margin`), and the log-probability of the chosen answer.
    """

    # DPO, IPO, SimPO or your own: what both models give to the answers -> Losses
    loss: Callable[[Answers, Answers | None], Losses] = DPO()
    reference: str | None = "reference"  # name in Experiment.references; None: there is none
    anchor: float = 0.0  # weight of the chosen answer's cross entropy; not used in evaluation

    def __post_init__(self):
        check_numbers("objective.", self, anchor=0)

    def evaluation(self) -> "Preference":
        without = getattr(self.loss, "evaluation", None)
        return replace(self, loss=self.loss if without is None else without(), anchor=0.0)

    @in_both_forms
    def __call__(self, model: Any, params: Any, batch: Batch, context: StepContext) -> LossSums:
        policy, output = answers(model, params, batch, context.dtype)
        reference = None
        if self.reference is not None:
            frozen = frozen_model(context, self.reference)
            reference, _ = answers(model, frozen, batch, context.dtype)
        losses, rewards = self.loss(policy, reference)
        losses = losses - self.anchor * policy.mean[:, 0]
        reports = {"chosen_log_probability": policy.log_probabilities[:, 0]}
        return with_own(pair_sums(losses, rewards, batch["weights"], reports), output)


def pair_sums(
    losses: Float[Array, " B"],
    rewards: Float[Array, "B 2"],
    weights: Float[Array, " B"],
    reports: dict[str, Float[Array, " B"]],
) -> LossSums:
    """The sums over pairs of losses and `reports`, and of what the rewards (0: chosen) say.

    `preferred` is 1 where the chosen answer has the larger reward; `margin` is their difference.
    """
    margins = rewards[:, 0] - rewards[:, 1]
    reports = {
        "preferred": margins > 0,
        "margin": margins,
        "chosen_reward": rewards[:, 0],
        "rejected_reward": rewards[:, 1],
        **reports,
    }
    total = weights.sum()
    metrics = {name: (jnp.sum(value * weights), total) for name, value in reports.items()}
    return LossSums(jnp.sum(losses * weights), total, metrics, unit="pairs")


def answers(model: Any, params: Any, batch: Batch, dtype: Any) -> tuple[Answers, Any]:
    """(the log-probabilities that a model gives to the answers of a batch, its output).

    Without dropout.
    """
    B, two, T = batch["tokens"].shape
    tokens, labels, flags = (
        batch[name].reshape(B * two, T) for name in ("tokens", "labels", "answers")
    )
    # padding follows a text, and a causal mask hides it
    without = models.evaluation(model)
    found, output = of_logits(log_probabilities, without, params, tokens, labels, dtype=dtype)
    flags = flags.astype(found.dtype)
    found = found * flags
    sums = (each.sum(axis=1).reshape(B, two) for each in (found, flags))
    return Answers(*sums), output


def smoothed(margin: Float[Array, " B"], share: float) -> Float[Array, " B"]:
    """(1 - share) L(margin) + share L(-margin), L = -log sigmoid."""
    right = -jax.nn.log_sigmoid(margin)
    return (1 - share) * right - share * jax.nn.log_sigmoid(-margin) if share else right


def required(reference: Answers | None, loss: str) -> Answers:
    if reference is None:
        raise ConfigError(
            f"objective.loss={loss}: it compares with a reference; give objective.reference a name "
            "of Experiment.references"
        )
    return reference
