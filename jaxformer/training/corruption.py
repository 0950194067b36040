"""Training tasks made from plain text: hidden tokens and next sentences (BERT), corrupted spans and prefixes (T5).

Objectives, and functions of a random key. The key is a function of (seed, step): a resumed run hides the same tokens.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int

from jaxformer import models
from jaxformer.errors import ConfigError, check_numbers
from jaxformer.masks import FULL, prefix
from jaxformer.models import heads
from jaxformer.ops.losses import LossSums, cross_entropy
from jaxformer.ops.positions import within_segments
from jaxformer.training.objectives import Batch, TokenCrossEntropy, head_cross_entropy, model_inputs, with_reports


def hide_tokens(
    key: Array, tokens: Int[Array, "B T"], mask_token: int, rate: float = 0.15, word_starts: Bool[Array, "B T"] | None = None,
    vocab_size: int | None = None,
) -> tuple[Int[Array, "B T"], Bool[Array, "B T"]]:  # fmt: skip
    """(the text with some tokens hidden, which they are). Devlin et al. 2018, arXiv:1810.04805, section 3.1.

    Each word is chosen with probability `rate`. Of the chosen tokens 80 % become `mask_token`, 10 % a random one of the ids
    below `vocab_size` (by default below `mask_token`), 10 % stay as they are. A word is a token, or all from one of
    `word_starts` to the next.
    """
    choose, kind, draw = jax.random.split(key, 3)
    if word_starts is None:
        chosen = jax.random.bernoulli(choose, rate, tokens.shape)
    else:
        words = jax.random.bernoulli(choose, rate, (len(tokens), tokens.shape[1] + 1))
        chosen = jnp.take_along_axis(words, jnp.cumsum(word_starts, axis=1), axis=1)
    share = jax.random.uniform(kind, tokens.shape)
    others = jax.random.randint(draw, tokens.shape, 0, vocab_size or mask_token, tokens.dtype)
    hidden = jnp.where(share < 0.8, mask_token, jnp.where(share < 0.9, others, tokens))
    return jnp.where(chosen, hidden, tokens), chosen


def span_counts(length: int, rate: float = 0.15, mean_span: float = 3.0) -> tuple[int, int]:
    """(corrupted tokens, spans) of a text: its share `rate`, in spans of this mean length, at least one of each.

    The source has length - tokens + spans + 1 tokens, the target tokens + spans + 1: of 568 tokens 512 and 114.
    """
    tokens = min(max(round(length * rate), 1), length - 1)
    return tokens, min(max(round(tokens / mean_span), 1), tokens, length - tokens)


def corrupt_spans(
    key: Array, tokens: Int[Array, "B T"], sentinel: int, end: int, rate: float = 0.15, mean_span: float = 3.0
) -> tuple[Int[Array, "B S"], Int[Array, "B U"]]:
    """(source, target): in the source each span is one sentinel, in the target each sentinel is followed by its span.

    Sentinels are `sentinel`, `sentinel` - 1, ...; both texts end with `end`. The lengths of spans, and of what stays between
    them, are a random partition, the same number in each row. Raffel et al. 2020, arXiv:1910.10683, section 3.1.4.

    As in the code of the paper, a text begins with what stays and ends with a span. So the first token is never in a span, the
    last one always, and tokens near the end more often than the share `rate`, which holds for the text as a whole. A text
    shorter than two spans is always corrupted at its end. The last token of a text is therefore not a place to put what the
    model must read, such as a control token.
    """
    T = tokens.shape[1]
    count, spans = span_counts(T, rate, mean_span)

    def corrupt(key: Array, row: Array) -> tuple[Array, Array]:
        lengths = [_partition(each, n, spans) for each, n in zip(jax.random.split(key), (T - count, count), strict=True)]
        borders = jnp.cumsum(jnp.stack(lengths, axis=1).reshape(-1))
        part = jnp.searchsorted(borders, jnp.arange(T), side="right")  # 0: stays, 1: first span, 2: stays, ...
        in_span = part % 2 == 1
        starts = in_span & (part != jnp.concatenate([jnp.zeros(1, part.dtype), part[:-1]]))
        marks = jnp.where(starts, sentinel - part // 2, -1)
        source = jnp.where(starts, marks, jnp.where(in_span, -1, row))
        target = jnp.stack([marks, jnp.where(in_span, row, -1)], axis=1).reshape(-1)
        return _compact(source, T - count + spans, end), _compact(target, count + spans, end)

    return jax.vmap(corrupt)(jax.random.split(key, len(tokens)), tokens)


def _partition(key: Array, total: int, parts: int) -> Int[Array, " parts"]:
    """Positive numbers with this sum: all partitions are as likely."""
    order = jax.random.permutation(key, total - 1)[: parts - 1]
    ends = jnp.sort(jnp.append(order + 1, jnp.array([0, total])))
    return jnp.diff(ends)


def _compact(row: Array, count: int, end: int) -> Array:
    """The `count` entries that are not negative, in their order, and `end`."""
    return jnp.append(row[jnp.argsort(row < 0, stable=True)[:count]], end)


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

    def __call__(self, model: Any, params: Any, batch: Batch, key: Array, dtype: Any) -> LossSums:
        choose, inside = jax.random.split(key)
        return TokenCrossEntropy()(model, params, self.hidden(model, batch, choose), inside, dtype)

    def hidden(self, model: Any, batch: Batch, key: Array) -> Batch:
        """The batch with some tokens hidden; its labels are the tokens, its weights those of the hidden ones."""
        needed = max(self.mask_token + 1, self.vocab_size or 0)
        if needed > (size := _vocab_size(model, self.mask_token)):
            raise ConfigError(f"objective.mask_token={self.mask_token}: model.vocab_size={size} must be at least {needed}")
        tokens, weights = batch["tokens"], batch["weights"]
        inputs, chosen = hide_tokens(key, tokens, self.mask_token, self.rate, batch.get("word_starts"), self.vocab_size)
        words = (weights > 0) & ~batch.get("control_tokens", jnp.zeros(tokens.shape, bool))
        inputs = jnp.where(words, inputs, tokens)
        return batch | {"tokens": inputs, "labels": tokens, "weights": jnp.where(chosen & words, weights, 0)}


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

    def __call__(self, model: Any, params: Any, batch: Batch, key: Array, dtype: Any) -> LossSums:
        words = heads.language_model(model) if isinstance(model, models.ModelConfig) else None
        if words is None or self.head not in (getattr(head, "name", None) for head in model.heads):
            problem = f"needs a ModelConfig with the heads LanguageModel() and Classification(2, name={self.head!r})"
            raise ConfigError(f"objective: NextSentence {problem}")
        choose, inside = jax.random.split(key)
        hidden = self.masked.hidden(model, batch, choose)
        output = models.apply(model, params, hidden["tokens"], dropout_key=inside, dtype=dtype, **model_inputs(batch))
        tokens = head_cross_entropy(model, words, params, output.hidden, hidden["labels"], hidden["weights"])
        rows = jnp.any(batch["weights"] > 0, axis=1).astype(batch["weights"].dtype)
        sentences = cross_entropy(output.heads[self.head], batch["labels"], rows)
        sums = with_reports(tokens, output)
        joint = sums.loss + sentences.loss * (tokens.weight / jnp.maximum(sentences.weight, 1))
        return LossSums(joint, sums.weight, sums.metrics | {
            "masked_loss": (tokens.loss, tokens.weight), "sentence_loss": (sentences.loss, sentences.weight),
            "sentence_accuracy": (sentences.correct, sentences.weight),
        })  # fmt: skip


@dataclass(frozen=True)
class PrefixLanguageModel:
    """Cross entropy of the tokens behind a prefix, whose tokens all see each other. Raffel et al. 2020, section 3.2.1.

    It reads next-token data. The model has the mask `causal() | prefix(n)` with the same n. A mask that hides a part of the
    prefix, or shows more of the tokens behind it than `causal()`, is refused.
    """

    prefix: int  # tokens of a text that are given

    def __post_init__(self):
        check_numbers("objective.", self, prefix=1)

    def __call__(self, model: Any, params: Any, batch: Batch, key: Array, dtype: Any) -> LossSums:
        tokens, n = batch["tokens"], self.prefix
        T = tokens.shape[1]
        for mask in models.last_stack(model).masks if models.is_config(model) else ():
            shown = n < T and mask.blocks(T, T, (T, n))[0, 0] == FULL
            if not shown or heads.shows_later(mask & ~prefix(n), T):
                raise ConfigError(f"objective.prefix={n}: {T} tokens under {mask}; give model.masks=(causal() | prefix({n}),)")
        positions = within_segments(batch["segment_ids"]) if "segment_ids" in batch else jnp.arange(T)[None]
        weights = jnp.where(positions >= n - 1, batch["weights"], 0)  # the label of position n - 1 is the first one behind it
        return TokenCrossEntropy()(model, params, batch | {"weights": weights}, key, dtype)


@dataclass(frozen=True)
class SpanCorruption:
    """T5's pre-training of an encoder-decoder: cross entropy of the target of `corrupt_spans` given its source.

    It reads `tokens` and `weights` `[B, T]`: one text a row, not packed ones; a row that is not full has weight 0.
    """

    sentinel: int  # the first of the sentinels, which count down: the ids above those of the text and `end`
    end: int  # ends source and target
    start: int = 0  # begins the decoder's input
    rate: float = 0.15  # share of corrupted tokens
    mean_span: float = 3.0  # tokens

    def __post_init__(self):
        check_numbers("objective.", self, sentinel=0, end=0, start=0, mean_span=1)
        if not 0 < self.rate < 1:
            raise ConfigError(f"objective: rate={self.rate} must be in (0, 1)")

    def lengths(self, length: int) -> tuple[int, int]:
        """(tokens of the target, tokens of the source) of a text."""
        tokens, spans = span_counts(length, self.rate, self.mean_span)
        return tokens + spans + 1, length - tokens + spans + 1

    def __call__(self, model: Any, params: Any, batch: Batch, key: Array, dtype: Any) -> LossSums:
        tokens = batch["tokens"]
        _, spans = span_counts(tokens.shape[1], self.rate, self.mean_span)
        size = _vocab_size(model, self.sentinel)
        if not self.end < self.sentinel - spans + 1 <= self.sentinel < size:
            problem = f"{spans} sentinels from {self.sentinel} down must lie between end={self.end} and model.vocab_size={size}"
            raise ConfigError(f"objective: {problem}")
        corrupt, inside = jax.random.split(key)
        source, labels = corrupt_spans(corrupt, tokens, self.sentinel, self.end, self.rate, self.mean_span)
        inputs = jnp.concatenate([jnp.full_like(labels[:, :1], self.start), labels[:, :-1]], axis=1)
        full = jnp.all(batch["weights"] > 0, axis=1, keepdims=True)
        weights = jnp.broadcast_to(full, labels.shape).astype(batch["weights"].dtype)
        pair = {"source": source, "tokens": inputs, "labels": labels, "weights": weights}
        return TokenCrossEntropy()(model, params, pair, inside, dtype)


def _vocab_size(model: Any, largest: int) -> int:
    """Of a model that is no config, as large as it must be."""
    return models.last_stack(model).vocab_size if models.is_config(model) else largest + 1
