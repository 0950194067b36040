"""Policy gradients: the model's own answers to prompts, each with a reward.

`PolicyGradient` is the objective; `data.rollouts.Rollouts` makes its batches. With its defaults it
is GRPO. Its three choices are functions: how rewards become advantages (`group_relative`,
`leave_one_out`, `group_centred`), the loss of a token (`Clipped`), and how losses are averaged
(`over_answers`, `over_tokens`, `OverLength`). The batch has, for B prompts with G answers each,

    tokens, labels    int32 [B, G, T]     a prompt with an answer, and the next tokens
    answers           float32 [B, G, T]   1 where the policy drew the label, else 0
    rewards           float32 [B, G]
    weights           float32 [B]         of each prompt
    temperature       float32 [B]         at which the answers were drawn
    fresh             float32 [B]         only where several steps use one batch of samples: 1 in
                                          the first step of them, 0 in the others
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import zeros
from jaxtyping import Float, Integer

from jaxformer import models
from jaxformer.errors import ConfigError, check_numbers, check_whole
from jaxformer.models.reports import with_own
from jaxformer.objectives.advantages import group_relative
from jaxformer.objectives.logits import Numbers, OfLogits, of_logits
from jaxformer.objectives.objective import Batch, StepContext, frozen_model
from jaxformer.objectives.tokens import TokenCrossEntropy
from jaxformer.ops.losses import LossSums, log_probabilities
from jaxformer.params import Spec, Tree

LARGEST_LOG_RATIO = 20.0  # e^20 = 4.9e8; e^89 has no float32
SAMPLES = "samples"  # the objective's variables: samples that later steps use again


@dataclass(frozen=True)
class Clipped:
    """-min(w A, clip(w, 1 - low, 1 + high) A), where w = p(token) / p(token) when it was drawn.

    Schulman et al. 2017, arXiv:1707.06347, equation 7; two bounds: Yu et al. 2025,
    arXiv:2503.14476, section 3.1.
    """

    low: float = 0.2  # a ratio may fall to 1 - low
    high: float = 0.2  # and rise to 1 + high

    def __post_init__(self):
        check_numbers("objective.surrogate.", self, low=0, high=0)

    def __call__(
        self,
        log_ratios: Float[Array, "B G T"],
        advantages: Float[Array, "B G 1"],
        answers: Float[Array, "B G T"],
    ) -> Float[Array, "B G T"]:
        ratios = jnp.exp(log_ratios)
        bounded = jnp.clip(ratios, 1 - self.low, 1 + self.high)
        return -jnp.minimum(ratios * advantages, bounded * advantages)


class Average(NamedTuple):
    """A loss as a sum, and the number of units that it is a sum over."""

    loss: Float[Array, ""]
    weight: Float[Array, ""]
    unit: str  # in the plural


def over_answers(
    losses: Float[Array, "B G T"], answers: Float[Array, "B G T"], weights: Float[Array, " B"]
) -> Average:
    """The mean over the tokens of an answer, then over answers: GRPO."""
    lengths = jnp.maximum(answers.sum(axis=2), 1)
    means = (losses * answers).sum(axis=2) / lengths
    total = weights.sum() * losses.shape[1]
    return Average(jnp.sum(means * weights[:, None]), total, "answers")


def over_tokens(
    losses: Float[Array, "B G T"], answers: Float[Array, "B G T"], weights: Float[Array, " B"]
) -> Average:
    """The mean over all tokens of all answers: DAPO. A long answer has more weight."""
    counted = answers * weights[:, None, None]
    return Average(jnp.sum(losses * counted), counted.sum(), "tokens")


@dataclass(frozen=True)
class OverLength:
    """The sum over tokens, divided by the number of answers times a constant length: Dr. GRPO.

    So the length of an answer changes no token's weight. Liu et al. 2025, arXiv:2503.20783.
    """

    length: int  # tokens, such as Rollouts.max_tokens

    def __post_init__(self):
        check_whole("objective.average: OverLength.length", self.length)

    def __call__(
        self,
        losses: Float[Array, "B G T"],
        answers: Float[Array, "B G T"],
        weights: Float[Array, " B"],
    ) -> Average:
        total = weights.sum() * losses.shape[1]
        counted = losses * answers * weights[:, None, None] / self.length
        return Average(jnp.sum(counted), total, "answers")


@dataclass(frozen=True)
class PolicyGradient:
    """surrogate(w, A) + kl * (r - log r - 1) for each drawn token; r = p_reference / p.

    The second term estimates the KL divergence from the reference (Schulman 2020). Answers are
    compared under the temperature that they were drawn at, without dropout. Where several steps use
    one batch of samples, the samples and the probabilities of their tokens are variables of the
    objective, so a killed run goes on with them. Evaluation is the cross entropy of the data's own
    answers.
    """

    # rewards [B, G] -> advantages [B, G]
    advantages: Callable[[Array], Array] = group_relative
    # (log ratios [B, G, T], advantages [B, G, 1], answers [B, G, T]) -> losses [B, G, T]
    surrogate: Callable[[Array, Array, Array], Array] = Clipped()
    # (losses [B, G, T], answers [B, G, T], weights [B]) -> Average
    average: Callable[[Array, Array, Array], Average] = over_answers
    kl: float = 0.0  # weight of the KL divergence from the reference
    reference: str | None = None  # name in Experiment.references; None: there is none
    # (B, G, T), if several steps use one batch of samples; None: each step has new ones
    sample_shape: tuple[int, int, int] | None = None

    def __post_init__(self):
        check_numbers("objective.", self, kl=0)
        if self.kl and self.reference is None:
            raise ConfigError(
                f"objective.kl={self.kl}: it needs a reference; give objective.reference a name of "
                "Experiment.references, or kl=0"
            )

    # the mean of two micro-batches' samples would be none
    whole_batch = property(lambda self: self.sample_shape is not None)

    def evaluation(self) -> TokenCrossEntropy:
        return TokenCrossEntropy()

    def spec(self, model: Any) -> Tree:
        """The variables: samples of an earlier step. {} if each step has new ones."""
        if self.sample_shape is None:
            return {}
        B, G, T = self.sample_shape
        shapes = dict.fromkeys(("tokens", "labels", "answers", "log_probabilities"), (B, G, T))
        shapes |= {"rewards": (B, G), "weights": (B,), "temperature": (B,)}
        return {
            SAMPLES: {
                name: Spec(shape, (None,) * len(shape), zeros, trained=False)
                for name, shape in shapes.items()
            }
        }

    def __call__(self, model: Any, params: Any, batch: Batch, context: StepContext) -> LossSums:
        samples = self.samples(batch, context)
        (current, spread), output = of_answers(
            log_probability_and_entropy, model, params, samples, context.dtype
        )
        # in the step after sampling, the policy that drew the tokens is the present one
        old = jax.lax.stop_gradient(current)
        if self.sample_shape is not None:
            old = jnp.where(is_fresh(batch), old, samples["log_probabilities"])

        answers = samples["answers"]
        weights = samples["weights"]
        advantages = self.advantages(samples["rewards"])
        log_ratios = jnp.where(answers > 0, current - old, 0.0)
        losses = self.surrogate(log_ratios, advantages[:, :, None], answers)
        reports = {"ratio_change": jnp.abs(jnp.expm1(log_ratios))}
        if self.reference is not None:
            frozen = frozen_model(context, self.reference)
            others, _ = of_answers(log_probabilities, model, frozen, samples, context.dtype)
            divergence = divergence_estimate(jnp.where(answers > 0, others - current, 0.0))
            losses = losses + self.kl * divergence
            reports["kl"] = divergence
        loss, weight, unit = self.average(losses, answers, weights)

        reports["entropy"] = spread
        tokens = answers * weights[:, None, None]
        metrics = {name: (jnp.sum(value * tokens), tokens.sum()) for name, value in reports.items()}
        metrics |= metrics_of_answers(samples)
        updates = None
        if self.sample_shape is not None:
            # variables are float32: it holds each token's number exactly, up to 2^24
            variables = {
                name: value.astype(jnp.float32)
                for name, value in {**samples, "log_probabilities": old}.items()
            }
            updates = {"objective": {SAMPLES: variables}}
        return with_own(LossSums(loss, weight, metrics, updates, unit=unit), output)

    def samples(self, batch: Batch, context: StepContext) -> Batch:
        """The batch, or the samples of an earlier step.

        Raises ConfigError where the data and `sample_shape` do not fit each other.
        """
        if self.sample_shape is None:
            if "fresh" in batch:
                raise ConfigError(
                    "objective.sample_shape=None: the data use samples in several steps; give "
                    f"objective.sample_shape={tuple(batch['tokens'].shape)}, or data.updates=1"
                )
            return batch
        shape = tuple(batch["tokens"].shape)
        if "fresh" not in batch or shape != tuple(self.sample_shape):
            problem = "the data have new samples in each step" if "fresh" not in batch else shape
            raise ConfigError(
                f"objective.sample_shape={self.sample_shape}: the samples are {problem}; expected "
                "their shape, for data that use them in several steps (data.updates)"
            )
        earlier = context.params[SAMPLES]
        samples = {
            name: jnp.where(is_fresh(batch), batch[name], earlier[name].astype(batch[name].dtype))
            for name in batch
            if name != "fresh"
        }
        return samples | {"log_probabilities": earlier["log_probabilities"]}


def is_fresh(batch: Batch) -> Array:
    """Whether the batch has new samples."""
    return batch["fresh"].max() > 0


def of_answers(function: OfLogits, model: Any, params: Any, samples: Batch, dtype: Any) -> Numbers:
    """`function(logits, labels)` for each token: arrays [B, G, T].

    The logits are divided by the temperature that answers were drawn at.
    """
    B, G, T = samples["tokens"].shape
    # padding follows a text, and a causal mask hides it
    tokens, labels = (samples[name].reshape(B * G, T) for name in ("tokens", "labels"))
    temperature = jnp.repeat(samples["temperature"], G)[:, None, None]

    def at_temperature(logits, labels):
        return function(logits / temperature, labels)

    without = models.evaluation(model)
    found, output = of_logits(at_temperature, without, params, tokens, labels, dtype=dtype)
    return Numbers(jax.tree.map(lambda x: x.reshape(B, G, T), found), output)


def divergence_estimate(log_ratios: Float[Array, "..."]) -> Float[Array, "..."]:
    """r - log r - 1 of log r = log p_reference - log p: an unbiased estimate of KL(p, reference).

    It is never negative. Schulman 2020, "Approximating KL divergence", k3. Above log r = 20 it goes
    on as a line, so that a policy far from its reference has a finite loss.
    """
    bounded = jnp.minimum(log_ratios, LARGEST_LOG_RATIO)
    beyond = log_ratios - bounded
    return jnp.expm1(bounded) + jnp.exp(bounded) * beyond - log_ratios


def log_probability_and_entropy(
    logits: Float[Array, "B T V"], labels: Integer[Array, "B T"]
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """(log p(label), -sum p log p), in nats. The second has no gradient."""
    logs = jax.nn.log_softmax(jax.lax.stop_gradient(logits))
    entropy = -jnp.sum(jnp.exp(logs) * logs, axis=-1)
    return log_probabilities(logits, labels), entropy


def metrics_of_answers(samples: Batch) -> dict[str, tuple[Array, Array]]:
    """{name: (sum, weight)} of rewards and lengths.

    `groups_that_differ` is the share of prompts whose answers have different rewards: the others
    have no gradient.
    """
    rewards = samples["rewards"]
    weights = samples["weights"]
    lengths = samples["answers"].sum(axis=2)
    total = weights.sum()
    differs = (rewards.max(axis=1) > rewards.min(axis=1)).astype(weights.dtype)
    return {
        "reward": (jnp.sum(rewards.mean(axis=1) * weights), total),
        "answer_length": (jnp.sum(lengths.mean(axis=1) * weights), total),
        "groups_that_differ": (jnp.sum(differs * weights), total),
    }
