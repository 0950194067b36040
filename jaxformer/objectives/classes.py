"""The class of an image, a text, or each of its positions."""

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
    """Cross entropy of `labels` given `images` or `tokens`, summed with `weights`; the model's first head classifies.

    Labels and weights are `[B]`, of whole rows (a Classification), or `[B, T]`, of positions (a TokenClassification).
    """

    label_smoothing: float = 0.0  # share of the target spread over all classes; not in what is scored
    # functions (key, image [H, W, C]) -> image, such as those of data.augment; not in what is scored
    augment: tuple[Callable, ...] = ()

    def __post_init__(self):
        check_smoothing(self.label_smoothing)

    def evaluation(self) -> "ClassCrossEntropy":
        return replace(self, label_smoothing=0.0, augment=())

    example = batch_of_row

    @in_both_forms
    def __call__(self, model: Any, params: Any, batch: Batch, context: StepContext) -> LossSums:
        field = "images" if "images" in batch else "tokens"
        x, labels, weights = batch[field], batch["labels"], batch["weights"]
        key = context.key
        if self.augment:
            key, augment_key = jax.random.split(key)
            x = augmented(self.augment, augment_key, x)
        output = models.apply(model, params, x, dropout_key=key, dtype=context.dtype, **model_inputs(batch))
        if output.logits is None or not output.logits.shape[:-1] == labels.shape == weights.shape:
            shapes = [None if array is None else list(array.shape) for array in (output.logits, labels, weights)]
            problem = "ClassCrossEntropy: logits {}, labels {}, weights {}".format(*shapes)
            heads = "a Classification head first, for labels [B, T] a TokenClassification"
            raise ConfigError(f"{problem}; for labels and weights [B] give the model {heads}")
        sums = cross_entropy(output.logits, labels, weights, label_smoothing=self.label_smoothing)
        of_rows = "images" if field == "images" else "examples"
        return with_reports(sums, output, unit=of_rows if labels.ndim == 1 else "tokens")
