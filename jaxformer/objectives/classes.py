"""Classification of an image, a text, or each position of a text."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxformer import models
from jaxformer.data.augment import augmented
from jaxformer.errors import ConfigError
from jaxformer.objectives.objective import (
    Batch,
    StepContext,
    batch_of_row,
    check_smoothing,
    in_both_forms,
    model_inputs,
    with_reports,
)
from jaxformer.ops.losses import LossSums, cross_entropy


@dataclass(frozen=True)
class ClassCrossEntropy:
    """Weighted sum of the cross entropy of `labels` given `images` or `tokens`.

    The model's first head classifies. Labels and weights are `[B]`, one for each row
    (Classification), or `[B, T]`, one for each position (TokenClassification).
    """

    # share of the target spread over all classes; not used in evaluation
    label_smoothing: float = 0.0
    # functions (key, image [H, W, C]) -> image, such as those of data.augment; not used in
    # evaluation
    augment: tuple[Callable, ...] = ()

    def __post_init__(self):
        check_smoothing(self.label_smoothing)

    def evaluation(self) -> "ClassCrossEntropy":
        return replace(self, label_smoothing=0.0, augment=())

    example = batch_of_row

    @in_both_forms
    def __call__(self, model: Any, params: Any, batch: Batch, context: StepContext) -> LossSums:
        field = "images" if "images" in batch else "tokens"
        x = batch[field]
        labels = batch["labels"]
        weights = batch["weights"]
        key = context.key
        if self.augment:
            key, augment_key = jax.random.split(key)
            x = augmented(self.augment, augment_key, x)
        output = models.apply(
            model, params, x, dropout_key=key, dtype=context.dtype, **model_inputs(batch)
        )
        _check_shapes(output.logits, labels, weights)
        sums = cross_entropy(output.logits, labels, weights, label_smoothing=self.label_smoothing)
        row_unit = "images" if field == "images" else "examples"
        return with_reports(sums, output, unit=row_unit if labels.ndim == 1 else "tokens")


def _check_shapes(logits: Any, labels: Any, weights: Any) -> None:
    """Raises ConfigError unless logits are [..., classes], and labels and weights are [...]."""
    if logits is None or not logits.shape[:-1] == labels.shape == weights.shape:
        shapes = [
            None if array is None else list(array.shape) for array in (logits, labels, weights)
        ]
        problem = "ClassCrossEntropy: logits {}, labels {}, weights {}".format(*shapes)
        heads = "a Classification head first, for labels [B, T] a TokenClassification"
        raise ConfigError(f"{problem}; for labels and weights [B] give the model {heads}")
