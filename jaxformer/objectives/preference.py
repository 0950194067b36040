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
from jaxtyping import Float, Int

from jaxformer import models
from jaxformer.errors import ConfigError, check_numbers
from jaxformer.objectives.objective import Batch, StepContext, check_smoothing, in_both_forms
from jaxformer.ops.losses import LossSums


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
    e L(-gain). `anchor` a adds -a log p(chosen), a mean over its tokens: without it, the chosen
    answer may become less probable, too, as long as the rejected one loses more. Rafailov et al.
    2023, arXiv:2305.18290, equation 7; Mitchell 2023 (smoothing); Pang et al. 2024,
    arXiv:2404.19733, equation 1 (anchor).
    """

    beta: float = 0.1  # strength of the pull towards the reference
    label_smoothing: float = 0.0  # e; not used in evaluation
    anchor: float = 0.0  # weight of the chosen answer's cross entropy; not used in evaluation

    def __post_init__(self):
        check_numbers("objective.loss.", self, beta=0, anchor=0)
        check_smoothing(self.label_smoothing)

    def evaluation(self) -> "DPO":
        return replace(self, label_smoothing=0.0, anchor=0.0)

    def __call__(self, policy: Answers, reference: Answers | None) -> Losses:
        before = required(reference, "DPO").log_probabilities
        rewards = self.beta * (policy.log_probabilities - before)
        losses = smoothed(rewards[:, 0] - rewards[:, 1], self.label_smoothing)
        return Losses(losses - self.anchor * policy.mean[:, 0], rewards)


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
    """A loss of the log-probabilities that the model, and a reference, give to two answers.

    `reference` names one of `Experiment.references`; a loss that needs none gets None. Neither
    model has dropout: the difference of the two models is what the loss is of. Reported are the
    share of pairs whose chosen answer has the larger reward (`preferred`), the mean rewards and
    their difference (`margin`), and the log-probability of the chosen answer.
    """

    # DPO, IPO, SimPO or your own: what both models give to the answers -> Losses
    loss: Callable[[Answers, Answers | None], Losses] = DPO()
    reference: str | None = "reference"  # name in Experiment.references; None: there is none

    def evaluation(self) -> "Preference":
        without = getattr(self.loss, "evaluation", None)
        return self if without is None else replace(self, loss=without())

    @in_both_forms
    def __call__(self, model: Any, params: Any, batch: Batch, context: StepContext) -> LossSums:
        policy = answers(model, params, batch, context.dtype)
        reference = None
        if self.reference is not None:
            frozen = frozen_model(context, self.reference)
            reference = answers(model, frozen, batch, context.dtype)
        losses, rewards = self.loss(policy, reference)
        weights = batch["weights"]
        total = weights.sum()
        margins = rewards[:, 0] - rewards[:, 1]
        reports = {
            "preferred": margins > 0,
            "margin": margins,
            "chosen_reward": rewards[:, 0],
            "rejected_reward": rewards[:, 1],
            "chosen_log_probability": policy.log_probabilities[:, 0],
        }
        metrics = {name: (jnp.sum(value * weights), total) for name, value in reports.items()}
        return LossSums(jnp.sum(losses * weights), total, metrics, unit="pairs")


def answers(model: Any, params: Any, batch: Batch, dtype: Any) -> Answers:
    """The log-probabilities that a model gives to the answers of a batch. Without dropout."""
    B, two, T = batch["tokens"].shape
    tokens, labels, flags = (
        batch[name].reshape(B * two, T) for name in ("tokens", "labels", "answers")
    )
    # padding follows a text, and a causal mask hides it
    output = models.apply(models.evaluation(model), params, tokens, dtype=dtype)
    found = log_probabilities(output.logits, labels)
    flags = flags.astype(found.dtype)
    found = found * flags
    return Answers(found.sum(axis=1).reshape(B, two), flags.sum(axis=1).reshape(B, two))


def log_probabilities(
    logits: Float[Array, "*batch V"], labels: Int[Array, "*batch"]
) -> Float[Array, "*batch"]:
    """log softmax(logits)[label] of each position, in float32 or wider."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return picked - jax.nn.logsumexp(logits, axis=-1)


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


def frozen_model(context: StepContext, name: str) -> Any:
    """The parameters of a reference. Raises ConfigError for an unknown name."""
    if name not in context.references:
        known = ", ".join(context.references) or "none"
        raise ConfigError(
            f"objective.reference={name!r}: there is no such model in Experiment.references "
            f"({known}); add one: references={{{name!r}: RUN}}"
        )
    return context.references[name]
