"""What a model is trained to do: `objective(model, params, batch, key, dtype) -> LossSums`.

Any function of that form is an objective. `key` is always given, and is a function of (seed, step): for dropout, for
random masks. An objective that is scored by another one has a method `evaluation()` that returns it.
An objective that compares the rows of a batch, so that its loss is no sum over rows, has an attribute `whole_batch = True`:
accumulation and pmap, which would show it parts of the batch, are then refused.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxformer import models
from jaxformer.errors import ConfigError, check_numbers
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
        check_numbers("objective.", self, z_loss=0)
        check_smoothing(self.label_smoothing)

    def evaluation(self) -> "TokenCrossEntropy":
        return replace(self, label_smoothing=0.0, z_loss=0.0)

    def __call__(self, model: Any, params: Any, batch: Batch, key: Array, dtype: Any) -> LossSums:
        options = dict(label_smoothing=self.label_smoothing, z_loss=self.z_loss)
        labels, weights = batch["labels"], batch["weights"]
        if not models.is_config(model):
            output = models.apply(model, params, batch["tokens"], dropout_key=key, dtype=dtype, **model_inputs(batch))
            return with_reports(cross_entropy(output.logits, labels, weights, **options), output)
        output = models.encode(model, params, batch["tokens"], dropout_key=key, dtype=dtype, **model_inputs(batch))
        config, tree = models.last_stack(model), params if isinstance(model, models.ModelConfig) else params["decoder"]
        head = heads.language_model(config)
        if head is None:
            raise ConfigError(f"model.heads={config.heads}: this objective needs a LanguageModel among them")
        return with_reports(head_cross_entropy(config, head, tree, output.hidden, labels, weights, **options), output)


@dataclass(frozen=True)
class ClassCrossEntropy:
    """Cross entropy of `labels` given `images` or `tokens`, summed with `weights`; the model's first head classifies.

    Labels and weights are `[B]`, of whole rows (a Classification), or `[B, T]`, of positions (a TokenClassification).
    """

    label_smoothing: float = 0.0  # share of the target spread over all classes; not in what is scored
    # functions (key, image [H, W, C]) -> image, such as those of training.augment; not in what is scored
    augment: tuple[Callable, ...] = ()

    def __post_init__(self):
        check_smoothing(self.label_smoothing)

    def evaluation(self) -> "ClassCrossEntropy":
        return replace(self, label_smoothing=0.0, augment=())

    def __call__(self, model: Any, params: Any, batch: Batch, key: Array, dtype: Any) -> LossSums:
        x, labels, weights = batch["images" if "images" in batch else "tokens"], batch["labels"], batch["weights"]
        if self.augment:
            key, augment_key = jax.random.split(key)
            x = augmented(self.augment, augment_key, x)
        output = models.apply(model, params, x, dropout_key=key, dtype=dtype, **model_inputs(batch))
        if output.logits is None or not output.logits.shape[:-1] == labels.shape == weights.shape:
            shapes = [None if array is None else list(array.shape) for array in (output.logits, labels, weights)]
            problem = "ClassCrossEntropy: logits {}, labels {}, weights {}".format(*shapes)
            heads = "a Classification head first, for labels [B, T] a TokenClassification"
            raise ConfigError(f"{problem}; for labels and weights [B] give the model {heads}")
        sums = cross_entropy(output.logits, labels, weights, label_smoothing=self.label_smoothing)
        return with_reports(sums, output)


@dataclass(frozen=True)
class SpanCrossEntropy:
    """Mean cross entropy of the first and the last token of an answer, among the tokens of a passage.

    It reads `tokens` `[B, T]`, `passage` `[B, T]` (1 where an answer may be), `labels` `[B, 2]` (positions of the first and
    the last token) and `weights` `[B]`; the first head is a `TokenClassification(2)`. `exact_match` counts the rows whose
    likeliest span, of all with first <= last, is the answer. Devlin et al. 2018, arXiv:1810.04805, section 4.2.

    A row whose labels are not in the passage, such as an answer that the window cut off, is left out of the loss and of
    `exact_match`; `left_out` is their share. For questions without an answer let [CLS] be a part of the passage, and label it.
    """

    def __call__(self, model: Any, params: Any, batch: Batch, key: Array, dtype: Any) -> LossSums:
        output = models.apply(model, params, batch["tokens"], dropout_key=key, dtype=dtype, **model_inputs(batch))
        if output.logits is None or output.logits.ndim != 3 or output.logits.shape[-1] != 2:
            raise ConfigError("SpanCrossEntropy needs logits [B, T, 2]; give the model a TokenClassification(2) head first")
        passage, labels = batch["passage"] > 0, batch["labels"]
        logits = jnp.where(passage[:, None], output.logits.swapaxes(1, 2), -jnp.inf)  # [B, 2, T]
        inside = is_in_passage(passage, labels)
        weights = jnp.where(inside, batch["weights"], 0)
        sums = with_reports(cross_entropy(logits, labels, jnp.broadcast_to(weights[:, None] / 2, labels.shape)), output)
        exact = jnp.all(best_spans(logits) == labels, axis=1)
        left_out = jnp.sum(batch["weights"]) - sums.weight
        figures = {"exact_match": (jnp.sum(exact * weights), sums.weight), "left_out": (left_out, sums.weight + left_out)}
        return sums._replace(metrics=sums.metrics | figures)


def check_smoothing(share: float) -> None:
    """Raises ConfigError for a label smoothing that is no share of a target."""
    if not 0 <= share < 1:
        raise ConfigError(f"objective: label_smoothing={share} must be in [0, 1)")


def model_inputs(batch: Batch) -> Batch:
    """The fields of a batch that are arguments of `models.apply`."""
    return {name: batch[name] for name in INPUTS if name in batch}


def head_cross_entropy(
    config: models.ModelConfig, head: Any, params: Any, hidden: Array, labels: Array, weights: Array, **options: Any
) -> TokenSums:
    """`projected_cross_entropy` of a language model's head, from its stack's parameters and hidden states."""
    head_params, table = params.get("heads", {}).get(head.name, {}), params["embedding"].get("tokens")
    hidden, kernel, bias = heads.unembedding(config, head, head_params, hidden, table)
    return projected_cross_entropy(hidden, kernel, labels, weights, bias=bias, softcap=config.logit_softcap, **options)


def is_in_passage(passage: Array, labels: Array) -> Array:
    """Whether both labels `[B, 2]` of a row are places of its passage `[B, T]`, the first not behind the last."""
    T = passage.shape[1]
    places = jnp.clip(labels, 0, T - 1)
    inside = jnp.take_along_axis(passage, places, axis=1) & (labels == places)
    return inside.all(axis=1) & (labels[:, 0] <= labels[:, 1])


def best_spans(logits: Array) -> Array:
    """First and last position `[B, 2]`, first <= last, with the largest sum of their logits `[B, 2, T]`."""
    firsts, lasts = logits[:, 0], logits[:, 1]
    last = jnp.argmax(jax.lax.cummax(firsts, axis=1) + lasts, axis=1)
    before = jnp.arange(firsts.shape[1])[None] <= last[:, None]
    return jnp.stack([jnp.argmax(jnp.where(before, firsts, -jnp.inf), axis=1), last], axis=1)


def with_reports(sums: TokenSums, output: models.Output) -> LossSums:
    """The sums with the model's own loss, which changes only the gradient, and its figures, means over layers.

    A figure whose name ends in /layers has a value for each layer.
    """
    loss = sums.loss
    if output.loss is not None:
        # the routing loss changes the gradient but not the reported loss
        loss = loss + ((output.loss - jax.lax.stop_gradient(output.loss)) * sums.weight).astype(loss.dtype)
    figures = {name: value for name, value in (output.stats or {}).items() if value.ndim == 1}  # one a layer
    values = {name: value if name.endswith("/layers") else jnp.mean(value) for name, value in figures.items()}
    means = {name: (value.astype(loss.dtype) * sums.weight, sums.weight) for name, value in values.items()}
    return LossSums(loss, sums.weight, {"accuracy": (sums.correct, sums.weight), **means})
