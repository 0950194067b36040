"""Hidden tokens and next sentences: the pre-training of BERT.

The hidden tokens are a function of (seed, step): a resumed run hides the same ones.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int

from jaxformer import models
from jaxformer.errors import ConfigError, check_numbers
from jaxformer.models import heads
from jaxformer.objectives.objective import (
    Batch,
    StepContext,
    batch_of_row,
    in_both_forms,
    model_inputs,
    vocab_size,
    with_reports,
)
from jaxformer.objectives.tokens import TokenCrossEntropy, head_cross_entropy
from jaxformer.ops.losses import LossSums, cross_entropy


def hide_tokens(
    key: Array, tokens: Int[Array, "B T"], mask_token: int, rate: float = 0.15, word_starts: Bool[Array, "B T"] | None = None,
    vocab_size: int | None = None,
) -> tuple[Int[Array, "B T"], Bool[Array, "B T"]]:  # fmt: skip
    """(the text with some tokens hidden, whether each token is chosen). Devlin et al. 2018, arXiv:1810.04805, section 3.1.

    Each word is chosen with probability `rate`. Of the chosen tokens 80 % become `mask_token`, 10 % a random one of the ids
    below `vocab_size` (by default below `mask_token`), 10 % stay as they are. A word is a token, or all from one of
    `word_starts` to the next.
    """
    choose, kind, draw = jax.random.split(key, 3)
    if word_starts is None:
        is_chosen = jax.random.bernoulli(choose, rate, tokens.shape)
    else:
        words = jax.random.bernoulli(choose, rate, (len(tokens), tokens.shape[1] + 1))
        is_chosen = jnp.take_along_axis(words, jnp.cumsum(word_starts, axis=1), axis=1)
    share = jax.random.uniform(kind, tokens.shape)
    others = jax.random.randint(draw, tokens.shape, 0, vocab_size or mask_token, tokens.dtype)
    hidden = jnp.where(share < 0.8, mask_token, jnp.where(share < 0.9, others, tokens))
    return jnp.where(is_chosen, hidden, tokens), is_chosen


@dataclass(frozen=True)
class MaskedTokens:
    """BERT's masked language model: cross entropy of the tokens that `hide_tokens` chooses, given the others.

    It reads `tokens` and `weights` `[B, T]` of any text; a token of weight 0 (padding) is never chosen, nor is one of
    `control_tokens` `[B, T]`, if the data have that: those of a `Corpus` mark the ends of documents, which are no words.
    `word_starts` `[B, T]`, if the data have it, hides whole words.
    """

    mask_token: int  # the id that replaces a hidden token
    rate: float = 0.15  # share of words that are hidden
    # random tokens are ids below it, such as 30522 of Google's BERT, whose mask is 103; None: those below `mask_token`
    vocab_size: int | None = None

    def __post_init__(self):
        check_numbers("objective.", self, mask_token=0, vocab_size=1)
        if not 0 < self.rate < 1:
            raise ConfigError(f"objective.rate={self.rate}: must be in (0, 1)")

    example = batch_of_row

    @in_both_forms
    def __call__(self, model: Any, params: Any, batch: Batch, context: StepContext) -> LossSums:
        choose, inside = jax.random.split(context.key)
        return TokenCrossEntropy()(model, params, self.hidden(model, batch, choose), replace(context, key=inside))

    def hidden(self, model: Any, batch: Batch, key: Array) -> Batch:
        """The batch with some tokens hidden; its labels are the tokens, its weights those of the hidden ones."""
        needed = max(self.mask_token + 1, self.vocab_size or 0)
        if needed > (size := vocab_size(model, self.mask_token)):
            raise ConfigError(f"objective.mask_token={self.mask_token}: model.vocab_size={size} must be at least {needed}")
        tokens, weights = batch["tokens"], batch["weights"]
        inputs, is_chosen = hide_tokens(key, tokens, self.mask_token, self.rate, batch.get("word_starts"), self.vocab_size)
        words = (weights > 0) & ~batch.get("control_tokens", jnp.zeros(tokens.shape, bool))
        inputs = jnp.where(words, inputs, tokens)
        return batch | {"tokens": inputs, "labels": tokens, "weights": jnp.where(is_chosen & words, weights, 0)}


@dataclass(frozen=True)
class NextSentence:
    """BERT's pre-training: mean loss of hidden tokens + mean loss of `labels` `[B]`, one pass of the model for both.

    Two sentences a row; the label says whether the second follows the first. `weights` `[B, T]` are those of `MaskedTokens`,
    0 for CLS, SEP and padding; a row without a weight has no label. The sums of a batch are those of its hidden tokens; the
    mean loss of its labels counts once for each of them. So in a mean over batches (accumulation, pmap, evaluation) the labels
    of a batch weigh as its hidden tokens do; `masked_loss` and `sentence_loss` are means over all tokens and over all rows.
    Devlin et al. 2018, arXiv:1810.04805, section 3.1, task 2.
    """

    masked: MaskedTokens  # which tokens are hidden
    head: str = "next_sentence"  # the name of a Classification head with two classes

    example = batch_of_row

    @in_both_forms
    def __call__(self, model: Any, params: Any, batch: Batch, context: StepContext) -> LossSums:
        words = heads.language_model(model) if isinstance(model, models.ModelConfig) else None
        if words is None or self.head not in (getattr(head, "name", None) for head in model.heads):
            problem = f"needs a ModelConfig with the heads LanguageModel() and Classification(2, name={self.head!r})"
            raise ConfigError(f"objective: NextSentence {problem}")
        choose, inside = jax.random.split(context.key)
        hidden = self.masked.hidden(model, batch, choose)
        inputs = dict(dropout_key=inside, dtype=context.dtype, **model_inputs(batch))
        output = models.apply(model, params, hidden["tokens"], **inputs)
        tokens = head_cross_entropy(model, words, params, output.hidden, hidden["labels"], hidden["weights"])
        sentence_weights = jnp.any(batch["weights"] > 0, axis=1).astype(batch["weights"].dtype)
        sentences = cross_entropy(output.heads[self.head], batch["labels"], sentence_weights)
        sums = with_reports(tokens, output, unit="tokens")
        joint = sums.loss + sentences.loss * (tokens.weight / jnp.maximum(sentences.weight, 1))
        figures = {
            "masked_loss": (tokens.loss, tokens.weight),
            "sentence_loss": (sentences.loss, sentences.weight),
            "sentence_accuracy": (sentences.correct, sentences.weight),
        }
        return replace(sums, loss=joint, metrics=sums.metrics | figures)
