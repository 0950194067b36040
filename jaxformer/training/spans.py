"""Questions whose answer is a span of the text."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxformer import models
from jaxformer.errors import ConfigError
from jaxformer.ops.losses import LossSums, cross_entropy
from jaxformer.training.objectives import INPUTS, Batch, with_reports


@dataclass(frozen=True)
class SpanCrossEntropy:
    """Mean cross entropy of the first and the last token of an answer, among the tokens of a passage.

    It reads `tokens` `[B, T]`, `passage` `[B, T]` (1 where an answer may be), `labels` `[B, 2]` (positions of the first and
    the last token) and `weights` `[B]`; the first head is a `TokenClassification(2)`. `exact_match` counts the rows whose
    likeliest span, of all with first <= last, is the answer. Devlin et al. 2018, arXiv:1810.04805, section 4.2.
    """

    def __call__(self, model: Any, params: Any, batch: Batch, key: Array, dtype: Any) -> LossSums:
        inputs = {name: batch[name] for name in INPUTS if name in batch}
        output = models.apply(model, params, batch["tokens"], dropout_key=key, dtype=dtype, **inputs)
        if output.logits is None or output.logits.ndim != 3 or output.logits.shape[-1] != 2:
            raise ConfigError("SpanCrossEntropy needs logits [B, T, 2]; give the model a TokenClassification(2) head first")
        logits = jnp.where(batch["passage"][:, None] > 0, output.logits.swapaxes(1, 2), -jnp.inf)  # [B, 2, T]
        labels, weights = batch["labels"], batch["weights"]
        sums = with_reports(cross_entropy(logits, labels, jnp.broadcast_to(weights[:, None] / 2, labels.shape)), output)
        exact = jnp.all(best_spans(logits) == labels, axis=1)
        return sums._replace(metrics=sums.metrics | {"exact_match": (jnp.sum(exact * weights), sums.weight)})


def best_spans(logits: Array) -> Array:
    """First and last position `[B, 2]`, first <= last, with the largest sum of their logits `[B, 2, T]`."""
    firsts, lasts = logits[:, 0], logits[:, 1]
    last = jnp.argmax(jax.lax.cummax(firsts, axis=1) + lasts, axis=1)
    before = jnp.arange(firsts.shape[1])[None] <= last[:, None]
    return jnp.stack([jnp.argmax(jnp.where(before, firsts, -jnp.inf), axis=1), last], axis=1)
