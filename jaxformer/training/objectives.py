"""What a model is trained to do: `objective(model, params, batch, key, dtype) -> LossSums`.

Any function of that form is an objective. `key` is always given, and is a function of (seed, step): for dropout, for
random masks. An objective that is scored by another one has a method `evaluation()` that returns it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxformer import models
from jaxformer.errors import ConfigError
from jaxformer.models import heads
from jaxformer.ops.losses import LossSums, TokenSums, cross_entropy, projected_cross_entropy
from jaxformer.training.augment import augmented

Batch = dict[str, Array]
# the fields of a batch that are arguments of `models.apply`
INPUTS = ("positions", "segment_ids", "token_types", "inputs", "source", "source_segment_ids", "source_positions")


@dataclass(frozen=True)
class TokenCrossEntropy:
    """Cross entropy of `labels` given `tokens`, summed with `weights`, all `[B, T]`.

    The data say what a label is: for text the next token, for aligned tasks the answer at that place. Other fields of a
    batch go to the model by name: `segment_ids`, `positions`; `source` and `source_segment_ids` for an encoder-decoder.
    """

    label_smoothing: float = 0.0  # share of the target spread over all classes; not in what is scored
    z_loss: float = 0.0  # weight of (log sum exp of the logits)^2; not in what is scored

    def __post_init__(self):
        if not (0 <= self.label_smoothing < 1 and self.z_loss >= 0):
            problem = f"label_smoothing={self.label_smoothing} must be in [0, 1), z_loss={self.z_loss} at least 0"
            raise ConfigError(f"objective: {problem}")

    def evaluation(self) -> "TokenCrossEntropy":
        return TokenCrossEntropy()

    def __call__(self, model: Any, params: Any, batch: Batch, key: Array, dtype: Any) -> LossSums:
        inputs = {name: batch[name] for name in INPUTS if name in batch}
        options = dict(label_smoothing=self.label_smoothing, z_loss=self.z_loss)
        labels, weights = batch["labels"], batch["weights"]
        if not models.is_config(model):
            output = models.apply(model, params, batch["tokens"], dropout_key=key, dtype=dtype, **inputs)
            return with_reports(cross_entropy(output.logits, labels, weights, **options), output)
        output = models.encode(model, params, batch["tokens"], dropout_key=key, dtype=dtype, **inputs)
        config, tree = models.last_stack(model), params if isinstance(model, models.ModelConfig) else params["decoder"]
        head = heads.language_model(config)
        if head is None:
            raise ConfigError(f"model.heads={config.heads}: this objective needs a LanguageModel among them")
        head_params, table = tree.get("heads", {}).get(head.name, {}), tree["embedding"].get("tokens")
        hidden, kernel, bias = heads.unembedding(config, head, head_params, output.hidden, table)
        sums = projected_cross_entropy(hidden, kernel, labels, weights, bias=bias, softcap=config.logit_softcap, **options)
        return with_reports(sums, output)


@dataclass(frozen=True)
class ClassCrossEntropy:
    """Cross entropy of `labels` given `images` or `tokens`, summed with `weights`; the model's first head classifies.

    Labels and weights are `[B]`, of whole rows (a Classification), or `[B, T]`, of positions (a TokenClassification).
    """

    label_smoothing: float = 0.0  # share of the target spread over all classes; not in what is scored
    # functions (key, image [H, W, C]) -> image, such as those of training.augment; not in what is scored
    augment: tuple[Callable, ...] = ()

    def evaluation(self) -> "ClassCrossEntropy":
        return ClassCrossEntropy()

    def __call__(self, model: Any, params: Any, batch: Batch, key: Array, dtype: Any) -> LossSums:
        inputs = {name: batch[name] for name in INPUTS if name in batch}
        x, labels, weights = batch["images" if "images" in batch else "tokens"], batch["labels"], batch["weights"]
        if self.augment:
            key, augment_key = jax.random.split(key)
            x = augmented(self.augment, augment_key, x)
        output = models.apply(model, params, x, dropout_key=key, dtype=dtype, **inputs)
        if output.logits is None or not output.logits.shape[:-1] == labels.shape == weights.shape:
            shapes = [None if array is None else list(array.shape) for array in (output.logits, labels, weights)]
            found = "logits {}, labels {}, weights {}".format(*shapes)
            heads = "a Classification head first, for labels [B, T] a TokenClassification"
            raise ConfigError(f"ClassCrossEntropy: {found}; for labels and weights [B] give the model {heads}")
        sums = cross_entropy(output.logits, labels, weights, label_smoothing=self.label_smoothing)
        return with_reports(sums, output)


def with_reports(sums: TokenSums, output: models.Output) -> LossSums:
    """The sums with what the model reports of itself: a loss that changes the gradient alone, and its figures by layer."""
    loss = sums.loss
    if output.loss is not None:
        # the routing loss changes the gradient but not the reported loss
        loss = loss + ((output.loss - jax.lax.stop_gradient(output.loss)) * sums.weight).astype(loss.dtype)
    figures = {name: value for name, value in (output.stats or {}).items() if value.ndim == 1}  # one a layer
    means = {name: (jnp.mean(value).astype(loss.dtype) * sums.weight, sums.weight) for name, value in figures.items()}
    return LossSums(loss, sums.weight, {"accuracy": (sums.correct, sums.weight), **means})
