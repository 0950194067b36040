"""The pre-training of BERT: hidden tokens and next sentences.

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
    key: Array,
    tokens: Int[Array, "B T"],
    mask_token: int,
    rate: float = 0.15,
    word_starts: Bool[Array, "B T"] | None = None,
    vocab_size: int | None = None,
) -> tuple[Int[Array, "B T"], Bool[Array, "B T"]]:
    """(the text with some tokens hidden, whether each token is chosen).

    Each word is chosen with probability `rate`. 80 % of the chosen tokens become `mask_token`, 10 %
    become a random id below `vocab_size` (None: below `mask_token`), and 10 % are unchanged. A word
    is one token, or the tokens from one of `word_starts` to the next. Devlin et al. 2018,
    arXiv:1810.04805, section 3.1.
    """
    word_key, share_key, token_key = jax.random.split(key, 3)
    if word_starts is None:
        is_chosen = jax.random.bernoulli(word_key, rate, tokens.shape)
    else:
        words = jax.random.bernoulli(word_key, rate, (len(tokens), tokens.shape[1] + 1))
        is_chosen = jnp.take_along_axis(words, jnp.cumsum(word_starts, axis=1), axis=1)
    share = jax.random.uniform(share_key, tokens.shape)
    limit = vocab_size or mask_token
    random_tokens = jax.random.randint(token_key, tokens.shape, 0, limit, tokens.dtype)
    hidden = jnp.where(share < 0.8, mask_token, jnp.where(share < 0.9, random_tokens, tokens))
    return jnp.where(is_chosen, hidden, tokens), is_chosen


@dataclass(frozen=True)
class MaskedTokens:
    """BERT's masked language model: cross entropy of the tokens that `hide_tokens` chooses.

    The batch has `tokens` and `weights` `[B, T]` of any text. A token of weight 0 (padding) is
    never chosen. The batch may have `control_tokens` `[B, T]`, which are never chosen either; those
    of a `Corpus` mark the ends of documents, which are no words. It may have `word_starts`
    `[B, T]`: then whole words are hidden.
    """

    mask_token: int  # the id that replaces a hidden token
    rate: float = 0.15  # share of words that are hidden
    # random tokens are ids below it; None: ids below `mask_token`. Google's BERT has 30522 ids, and
    # its mask is 103
    vocab_size: int | None = None

    def __post_init__(self):
        check_numbers("objective.", self, mask_token=0, vocab_size=1)
        if not 0 < self.rate < 1:
            raise ConfigError(f"objective.rate={self.rate}: must be in (0, 1)")

    example = batch_of_row

    @in_both_forms
    def __call__(self, model: Any, params: Any, batch: Batch, context: StepContext) -> LossSums:
        hiding_key, model_key = jax.random.split(context.key)
        hidden = self.hidden(model, batch, hiding_key)
        return TokenCrossEntropy()(model, params, hidden, replace(context, key=model_key))

    def hidden(self, model: Any, batch: Batch, key: Array) -> Batch:
        """The batch with hidden tokens; labels are the tokens, and only chosen ones have weight."""
        needed = max(self.mask_token + 1, self.vocab_size or 0)
        if needed > (size := vocab_size(model, self.mask_token)):
            raise ConfigError(
                f"objective.mask_token={self.mask_token}: "
                f"model.vocab_size={size} must be at least {needed}"
            )
        tokens, weights = batch["tokens"], batch["weights"]
        inputs, is_chosen = hide_tokens(
            key, tokens, self.mask_token, self.rate, batch.get("word_starts"), self.vocab_size
        )
        is_word = (weights > 0) & ~batch.get("control_tokens", jnp.zeros(tokens.shape, bool))
        return batch | {
            "tokens": jnp.where(is_word, inputs, tokens),
            "labels": tokens,
            "weights": jnp.where(is_chosen & is_word, weights, 0),
        }


@dataclass(frozen=True)
class NextSentence:
    """BERT's pre-training: mean loss of hidden tokens + mean loss of `labels` `[B]`.

    One pass of the model gives both. A row holds two sentences; its label says whether the second
    follows the first. `weights` `[B, T]` are those of `MaskedTokens`: 0 for CLS, SEP and padding. A
    row whose weights are all 0 has no label.

    The weight of a batch is that of its hidden tokens, and the mean loss of its labels is
    multiplied by this weight. So in a mean over batches (accumulation, pmap, evaluation) the labels
    of a batch have the weight of its hidden tokens. The metrics `masked_loss` and `sentence_loss`
    are means over all tokens and over all rows. Devlin et al. 2018, arXiv:1810.04805, section 3.1,
    task 2.
    """

    masked: MaskedTokens  # hides the tokens
    head: str = "next_sentence"  # the name of a Classification head with two classes

    example = batch_of_row

    @in_both_forms
    def __call__(self, model: Any, params: Any, batch: Batch, context: StepContext) -> LossSums:
        token_head = heads.language_model(model) if isinstance(model, models.ModelConfig) else None
        if token_head is None or self.head not in (
            getattr(head, "name", None) for head in model.heads
        ):
            problem = (
                "needs a ModelConfig with the heads LanguageModel() "
                f"and Classification(2, name={self.head!r})"
            )
            raise ConfigError(f"objective: NextSentence {problem}")
        hiding_key, model_key = jax.random.split(context.key)
        hidden = self.masked.hidden(model, batch, hiding_key)
        inputs = dict(dropout_key=model_key, dtype=context.dtype, **model_inputs(batch))
        output = models.apply(model, params, hidden["tokens"], **inputs)
        tokens = head_cross_entropy(
            model, token_head, params, output.hidden, hidden["labels"], hidden["weights"]
        )
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
