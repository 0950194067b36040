"""Distillation: a student learns the distribution that a frozen teacher gives to the next token.

`Distillation` is the objective. Its divergence is a value: one of `divergences`, or your own
function `(teacher, student) -> [B, T]` of log-probabilities `[B, T, V]`. The batch is that of
`TokenCrossEntropy`; both models read the same inputs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import normal
from jaxtyping import Float

from jaxformer import models, params as parameters
from jaxformer.errors import ConfigError, check_numbers
from jaxformer.models import heads
from jaxformer.models.layer import linear
from jaxformer.objectives.divergences import forward_kl
from jaxformer.objectives.objective import (
    Batch,
    StepContext,
    batch_of_row,
    frozen_model,
    in_both_forms,
    model_inputs,
    with_reports,
)
from jaxformer.ops.einsum import in_float32
from jaxformer.ops.losses import LossSums, TokenSums, cross_entropy
from jaxformer.params import Tree


@dataclass(frozen=True)
class HiddenStates:
    """|h W - h_teacher|^2 / D_teacher, by a matrix W of the objective's own (`objective/hidden`).

    The states are named as for `models.apply(intermediates=...)`. They have the width of the
    residual stream. Jiao et al. 2019 (TinyBERT), arXiv:1909.10351, equation 8.
    """

    student: str  # such as "layers/1/residual"; "decoder/layers/1/residual" of an encoder-decoder
    teacher: str  # the same for the teacher
    weight: float = 1.0  # of this term in the loss

    def __post_init__(self):
        check_numbers("objective.hidden.", self, weight=0)
        for field in ("student", "teacher"):
            name = getattr(self, field)
            if "*" in name or name.startswith("encoder/"):
                raise ConfigError(
                    f"objective.hidden.{field}={name!r}: expected the name of one state of each "
                    "token, such as 'layers/1/residual'"
                )


@dataclass(frozen=True)
class Distillation:
    """(1 - share) CE(labels) + share T^2 D(p_T, q_T), where p_T = softmax(logits / T).

    p is the teacher's, q the student's. T^2 undoes the factor 1 / T^2 that the temperature gives to
    the gradient of D. Hinton et al. 2015, arXiv:1503.02531, section 2. The teacher has no dropout
    and no gradient. Reported are both terms (`label_loss`; `divergence`, at T and without T^2), the
    teacher's own cross entropy (`teacher_loss`), and how often both have the same first choice
    (`agreement`). Evaluation scores the cross entropy of the labels, and reports the same.

    The logits of both models are in memory at once. Raises ConfigError for a teacher with other
    sizes than `teacher`, or with another vocabulary.
    """

    # log-probabilities [B, T, V] of the teacher and of the student -> [B, T]
    divergence: Callable = forward_kl
    temperature: float = 2.0  # T
    share: float = 0.5  # of the divergence in the loss; the rest is the labels'
    hidden: HiddenStates | None = None  # a further term: one hidden state of the teacher
    reference: str = "teacher"  # name in Experiment.references
    # the teacher's model, which its training.Reference names too; None: the experiment's own
    teacher: Any = None

    def __post_init__(self):
        if not self.temperature > 0:
            raise ConfigError(f"objective.temperature={self.temperature}: must be above 0")
        if not 0 <= self.share <= 1:
            raise ConfigError(f"objective.share={self.share}: must be in [0, 1]")

    def spec(self, model: Any) -> Tree:
        """The projection of hidden states."""
        if self.hidden is None:
            return {}
        widths = stream_width(model), stream_width(self.teacher_model(model))
        start = normal(widths[0] ** -0.5)
        return {"hidden": parameters.linear(widths, ("embed", None), ("embed",), start, bias=False)}

    def evaluation(self) -> "Distillation":
        return replace(self, share=0.0, hidden=None)

    def teacher_model(self, model: Any) -> Any:
        """The teacher's architecture."""
        return model if self.teacher is None else self.teacher

    example = batch_of_row

    @in_both_forms
    def __call__(self, model: Any, params: Any, batch: Batch, context: StepContext) -> LossSums:
        labels, weights = batch["labels"], batch["weights"]
        names = () if self.hidden is None else (self.hidden.student,)
        inputs = dict(dtype=context.dtype, **model_inputs(batch))
        with_dropout = dict(dropout_key=context.key, intermediates=names, **inputs)
        output = models.apply(model, params, batch["tokens"], **with_dropout)
        known = self.read_teacher(model, batch, context)
        logits, known_logits = language_logits(model, output), known.logits
        if logits.shape != known_logits.shape:
            raise ConfigError(
                f"objective.reference={self.reference!r}: logits {list(known_logits.shape)}, the "
                f"student's are {list(logits.shape)}; expected one vocabulary; give both "
                "models the same vocab_size"
            )
        sums = cross_entropy(logits, labels, weights)
        divergence = self.divergence_sum(known_logits, logits, weights)
        loss = sums.loss
        if self.share:
            loss = (1 - self.share) * loss + self.share * self.temperature**2 * divergence
        same = jnp.argmax(logits, axis=-1) == jnp.argmax(known_logits, axis=-1)
        metrics = {
            "label_loss": sums.loss,
            "divergence": divergence,
            "teacher_loss": cross_entropy(known_logits, labels, weights).loss,
            "agreement": jnp.sum(same * weights),
        }
        if self.hidden is not None:
            metrics["hidden_error"] = error = self.hidden_sum(output, known, weights, context)
            loss = loss + self.hidden.weight * error
        is_plain = not self.share and self.hidden is None
        totals = TokenSums(loss, sums.weight, sums.correct)
        report = with_reports(totals, output, unit="tokens", perplexity=is_plain)
        pairs = {name: (value, sums.weight) for name, value in metrics.items()}
        return replace(report, metrics={**report.metrics, **pairs})

    def read_teacher(self, model: Any, batch: Batch, context: StepContext) -> models.Output:
        """The teacher's output, whose `logits` are those of its language model."""
        teacher = models.evaluation(self.teacher_model(model))
        frozen = frozen_model(context, self.reference)
        if problem := parameters.mismatch(models.spec(teacher), frozen):
            raise ConfigError(
                f"objective.teacher: parameter {problem}; give it the model of "
                f"references[{self.reference!r}], as in Reference(RUN, model=LARGE)"
            )
        inputs = dict(dtype=context.dtype, **model_inputs(batch))
        names = () if self.hidden is None else (self.hidden.teacher,)
        output = models.apply(teacher, frozen, batch["tokens"], intermediates=names, **inputs)
        return jax.lax.stop_gradient(replace(output, logits=language_logits(teacher, output)))

    def divergence_sum(self, teacher: Array, student: Array, weights: Array) -> Array:
        """The weighted sum of the divergence at the temperature, over tokens."""

        def log_probabilities(logits):
            # a token of weight 0 may have any logits, also NaN
            logits = jnp.where(weights[..., None] == 0, 0, in_float32(logits))
            return jax.nn.log_softmax(logits / self.temperature)

        values = self.divergence(log_probabilities(teacher), log_probabilities(student))
        if values.shape != weights.shape:
            raise ConfigError(
                f"objective.divergence: returned {list(values.shape)}; expected a number for each "
                f"token, {list(weights.shape)}"
            )
        return jnp.sum(values * weights)

    def hidden_sum(self, output: Any, known: Any, weights: Array, context: StepContext) -> Array:
        """The weighted sum over tokens of the mean squared error of the projected states."""
        assert self.hidden is not None
        student = output.intermediates[self.hidden.student]
        teacher = known.intermediates[self.hidden.teacher]
        kernel = context.params["hidden"]["kernel"]
        for name, state, width in (
            (self.hidden.student, student, kernel.shape[0]),
            (self.hidden.teacher, teacher, kernel.shape[1]),
        ):
            if state.shape != (*weights.shape, width):
                raise ConfigError(
                    f"objective.hidden: {name} is {list(state.shape)}; expected "
                    f"{[*weights.shape, width]}, such as layers/1/residual"
                )
        student, teacher = (
            jnp.where(weights[..., None] == 0, 0, state) for state in (student, teacher)
        )
        projected = linear("btd,dc->btc", student, context.params["hidden"], jnp.float32)
        squares = jnp.square(projected - in_float32(teacher))
        return jnp.sum(jnp.mean(squares, axis=-1) * weights)


def language_logits(model: Any, output: models.Output) -> Float[Array, "B T V"]:
    """The logits of a model's language model. Raises ConfigError for a config without one."""
    if not models.is_config(model):
        return output.logits
    config = models.last_stack(model)
    head = heads.language_model(config)
    if head is None:
        raise ConfigError(f"model.heads={config.heads}: distillation needs a LanguageModel in them")
    return output.heads[head.name]


def stream_width(model: Any) -> int:
    """The width of the residual stream. Raises ConfigError for a model that is no config."""
    if not models.is_config(model):
        raise ConfigError(
            f"objective.hidden: {type(model).__name__} is no config of this library, so its hidden "
            "states have no names; leave hidden out"
        )
    return models.last_stack(model).hidden_width
