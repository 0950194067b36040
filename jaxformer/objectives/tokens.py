"""One label for each token: the next token of a text, an answer, or the text after a prefix."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxformer import models
from jaxformer.errors import ConfigError, check_numbers
from jaxformer.masks import FULL, prefix
from jaxformer.models import heads
from jaxformer.objectives.logits import language_head
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
    """Weighted sum of the cross entropy of `labels` given `tokens`, all `[B, T]`.

    The data decide the labels: for text the next token, for aligned tasks the answer at the same
    position. Other fields of a batch are passed to the model by name: `segment_ids`, `positions`;
    `source` and `source_segment_ids` for an encoder-decoder.
    """

    # share of the target spread over all classes; not used in evaluation
    label_smoothing: float = 0.0
    z_loss: float = 0.0  # weight of (log sum exp of the logits)^2; not used in evaluation

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
        # smoothing and z-loss add terms to the loss, so exp(loss) would be no perplexity
        perplexity = not (self.label_smoothing or self.z_loss)
        report = partial(with_reports, unit="tokens", perplexity=perplexity)
        if not models.is_config(model):
            output = models.apply(model, params, batch["tokens"], **inputs)
            return report(cross_entropy(output.logits, labels, weights, **options), output)
        output = models.encode(model, params, batch["tokens"], **inputs)
        config, head, tree = language_head(model, params)
        sums = head_cross_entropy(config, head, tree, output.hidden, labels, weights, **options)
        return report(sums, output)


@dataclass(frozen=True)
class PrefixLanguageModel:
    """Cross entropy of the tokens after a prefix; the tokens of the prefix all see each other.

    The data are next-token data. The model needs the mask `causal() | prefix(n)` with the same n. A
    mask that hides a part of the prefix, or that shows more of the later tokens than `causal()`, is
    refused. Raffel et al. 2020, section 3.2.1.
    """

    prefix: int  # number of tokens of the prefix

    def __post_init__(self):
        check_numbers("objective.", self, prefix=1)

    example = batch_of_row

    @in_both_forms
    def __call__(self, model: Any, params: Any, batch: Batch, context: StepContext) -> LossSums:
        n = self.prefix
        T = batch["tokens"].shape[1]
        for mask in models.last_stack(model).masks if models.is_config(model) else ():
            shown = n < T and mask.blocks(T, T, (T, n))[0, 0] == FULL
            if not shown or heads.shows_later(mask & ~prefix(n), T):
                raise ConfigError(
                    f"objective.prefix={n}: {T} tokens under {mask}; "
                    f"give model.masks=(causal() | prefix({n}),)"
                )
        if "segment_ids" in batch:
            positions = within_segments(batch["segment_ids"])
        else:
            positions = jnp.arange(T)[None]
        # the label of position n - 1 is the first token after the prefix
        weights = jnp.where(positions >= n - 1, batch["weights"], 0)
        return TokenCrossEntropy()(model, params, batch | {"weights": weights}, context)


def head_cross_entropy(
    config: models.ModelConfig,
    head: Any,
    params: Any,
    hidden: Array,
    labels: Array,
    weights: Array,
    **options: Any,
) -> TokenSums:
    """`projected_cross_entropy` of a language model's head, given the stack's hidden states.

    `params` are those of the stack.
    """
    head_params, table = heads.tables(head, params)
    hidden, kernel, bias = heads.unembedding(config, head, head_params, hidden, table)
    return projected_cross_entropy(
        hidden, kernel, labels, weights, bias=bias, softcap=config.logit_softcap, **options
    )
