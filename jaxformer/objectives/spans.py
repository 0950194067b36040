"""Extractive question answering: the first and the last token of an answer in a passage."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxformer import models
from jaxformer.errors import ConfigError
from jaxformer.objectives.objective import (
    Batch,
    StepContext,
    batch_of_row,
    in_both_forms,
    model_inputs,
    with_reports,
)
from jaxformer.ops.losses import LossSums, cross_entropy


@dataclass(frozen=True)
class SpanCrossEntropy:
    """Mean cross entropy of the first and the last token of an answer, over a passage's tokens.

    The batch has `tokens` `[B, T]`, `passage` `[B, T]` (1 where an answer may be), `labels`
    `[B, 2]` (positions of the first and the last token) and `weights` `[B]`. The model's first head
    is a `TokenClassification(2)`. `exact_match` is the share of rows whose likeliest span with
    first <= last is the answer. Devlin et al. 2018, arXiv:1810.04805, section 4.2.

    A row whose labels are outside the passage, such as an answer that the window cut off, counts
    neither in the loss nor in `exact_match`; `left_out` is the share of such rows. For questions
    without an answer, make [CLS] a part of the passage, and label it.
    """

    example = batch_of_row

    @in_both_forms
    def __call__(self, model: Any, params: Any, batch: Batch, context: StepContext) -> LossSums:
        inputs = dict(dropout_key=context.key, dtype=context.dtype, **model_inputs(batch))
        output = models.apply(model, params, batch["tokens"], **inputs)
        if output.logits is None or output.logits.ndim != 3 or output.logits.shape[-1] != 2:
            raise ConfigError(
                "SpanCrossEntropy needs logits [B, T, 2]; "
                "give the model a TokenClassification(2) head first"
            )
        passage = batch["passage"] > 0
        labels = batch["labels"]
        logits = jnp.where(passage[:, None], output.logits.swapaxes(1, 2), -jnp.inf)  # [B, 2, T]
        inside = is_in_passage(passage, labels)
        weights = jnp.where(inside, batch["weights"], 0)
        # half of a row's weight for each end
        end_weights = jnp.broadcast_to(weights[:, None] / 2, labels.shape)
        sums = with_reports(cross_entropy(logits, labels, end_weights), output, unit="answers")
        exact = jnp.all(best_spans(logits) == labels, axis=1)
        left_out = jnp.sum(batch["weights"]) - sums.weight
        figures = {
            "exact_match": (jnp.sum(exact * weights), sums.weight),
            "left_out": (left_out, sums.weight + left_out),
        }
        return replace(sums, metrics=sums.metrics | figures)


def is_in_passage(passage: Array, labels: Array) -> Array:
    """Whether both labels `[B, 2]` are positions in their passage `[B, T]`, with first <= last."""
    T = passage.shape[1]
    clipped = jnp.clip(labels, 0, T - 1)
    inside = jnp.take_along_axis(passage, clipped, axis=1) & (labels == clipped)
    return inside.all(axis=1) & (labels[:, 0] <= labels[:, 1])


def best_spans(logits: Array) -> Array:
    """argmax over first <= last of the sum of both logits `[B, 2, T]`: positions `[B, 2]`."""
    firsts = logits[:, 0]
    lasts = logits[:, 1]
    last = jnp.argmax(jax.lax.cummax(firsts, axis=1) + lasts, axis=1)
    is_candidate = jnp.arange(firsts.shape[1])[None] <= last[:, None]
    return jnp.stack([jnp.argmax(jnp.where(is_candidate, firsts, -jnp.inf), axis=1), last], axis=1)
