"""The label of each token: the next token of a text, an answer, or what follows a prefix."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxformer import models
from jaxformer.errors import ConfigError, check_numbers
from jaxformer.masks import FULL, prefix
from jaxformer.models import heads
from jaxformer.objectives.objective import (
    Batch,
    StepContext,
    batch_of_row,
    check_smoothing,
    in_both_forms,
    model_inputs,
    with_reports,
)
from jaxformer.ops.losses import LossSums, TokenSums, cross_entropy, projected_cross_entropy
from jaxformer.ops.positions import within_segments


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

    example = batch_of_row

    @in_both_forms
    def __call__(self, model: Any, params: Any, batch: Batch, context: StepContext) -> LossSums:
        options = dict(label_smoothing=self.label_smoothing, z_loss=self.z_loss)
        inputs = dict(dropout_key=context.key, dtype=context.dtype, **model_inputs(batch))
        labels, weights = batch["labels"], batch["weights"]
        # smoothing and the z-loss are terms of their own, so exp of the sum would be no perplexity
        report = partial(with_reports, unit="tokens", perplexity=not (self.label_smoothing or self.z_loss))
        if not models.is_config(model):
            output = models.apply(model, params, batch["tokens"], **inputs)
            return report(cross_entropy(output.logits, labels, weights, **options), output)
        output = models.encode(model, params, batch["tokens"], **inputs)
        config = models.last_stack(model)
        tree = params if isinstance(model, models.ModelConfig) else params["decoder"]
        head = heads.language_model(config)
        if head is None:
            raise ConfigError(f"model.heads={config.heads}: this objective needs a LanguageModel among them")
        return report(head_cross_entropy(config, head, tree, output.hidden, labels, weights, **options), output)


@dataclass(frozen=True)
class PrefixLanguageModel:
    """Cross entropy of the tokens behind a prefix, whose tokens all see each other. Raffel et al. 2020, section 3.2.1.

    It reads next-token data. The model has the mask `causal() | prefix(n)` with the same n. A mask that hides a part of the
    prefix, or shows more of the tokens behind it than `causal()`, is refused.
    """

    prefix: int  # tokens of a text that are given

    def __post_init__(self):
        check_numbers("objective.", self, prefix=1)

    example = batch_of_row

    @in_both_forms
    def __call__(self, model: Any, params: Any, batch: Batch, context: StepContext) -> LossSums:
        tokens, n = batch["tokens"], self.prefix
        T = tokens.shape[1]
        for mask in models.last_stack(model).masks if models.is_config(model) else ():
            shown = n < T and mask.blocks(T, T, (T, n))[0, 0] == FULL
            if not shown or heads.shows_later(mask & ~prefix(n), T):
                raise ConfigError(f"objective.prefix={n}: {T} tokens under {mask}; give model.masks=(causal() | prefix({n}),)")
        positions = within_segments(batch["segment_ids"]) if "segment_ids" in batch else jnp.arange(T)[None]
        weights = jnp.where(positions >= n - 1, batch["weights"], 0)  # the label of position n - 1 is the first one behind it
        return TokenCrossEntropy()(model, params, batch | {"weights": weights}, context)


def head_cross_entropy(
    config: models.ModelConfig, head: Any, params: Any, hidden: Array, labels: Array, weights: Array, **options: Any
) -> TokenSums:
    """`projected_cross_entropy` of a language model's head, from its stack's parameters and hidden states."""
    head_params, table = params.get("heads", {}).get(head.name, {}), params["embedding"].get("tokens")
    hidden, kernel, bias = heads.unembedding(config, head, head_params, hidden, table)
    return projected_cross_entropy(hidden, kernel, labels, weights, bias=bias, softcap=config.logit_softcap, **options)
