"""The pre-training of T5: sentinels replace spans of a text, and the target lists the spans.

The spans are a function of (seed, step): a resumed run corrupts the same tokens.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

from jaxformer.errors import ConfigError, check_numbers
from jaxformer.objectives.objective import Batch, StepContext, in_both_forms, vocab_size
from jaxformer.objectives.tokens import TokenCrossEntropy
from jaxformer.ops.losses import LossSums


def span_counts(length: int, rate: float = 0.15, mean_span: float = 3.0) -> tuple[int, int]:
    """(corrupted tokens, spans) of a text: length * rate, and corrupted tokens / mean_span.

    Both are rounded, and at least one. The source has length - tokens + spans + 1 tokens, and the
    target has tokens + spans + 1. For a text of 568 tokens these are 512 and 114.
    """
    tokens = min(max(round(length * rate), 1), length - 1)
    return tokens, min(max(round(tokens / mean_span), 1), tokens, length - tokens)


def corrupt_spans(
    key: Array,
    tokens: Int[Array, "B T"],
    sentinel: int,
    end: int,
    rate: float = 0.15,
    mean_span: float = 3.0,
) -> tuple[Int[Array, "B S"], Int[Array, "B U"]]:
    """(source, target): in the source a sentinel replaces each span, in the target it precedes it.

    Sentinels are `sentinel`, `sentinel` - 1, ...; both texts end with `end`. The lengths of the
    spans, and those of the pieces between them, are random partitions. All rows have the same
    number of spans. Raffel et al. 2020, arXiv:1910.10683, section 3.1.4.

    As in the code of the paper, a text begins with a piece that is not corrupted, and it ends with
    a span. So the first token is never in a span, and the last one always is. Tokens near the end
    are in a span more often than `rate`, which is the share over the whole text. A text shorter
    than two spans is always corrupted at its end. Therefore do not put a token that the model must
    read, such as a control token, at the end of a text.
    """
    T = tokens.shape[1]
    count, spans = span_counts(T, rate, mean_span)

    def corrupt(key: Array, row: Array) -> tuple[Array, Array]:
        piece_key, span_key = jax.random.split(key)
        pieces = _partition(piece_key, T - count, spans)
        lengths = jnp.stack([pieces, _partition(span_key, count, spans)], axis=1)
        borders = jnp.cumsum(lengths.reshape(-1))
        # 0: the first piece, 1: the first span, 2: the second piece, ...
        piece = jnp.searchsorted(borders, jnp.arange(T), side="right")
        in_span = piece % 2 == 1
        starts = in_span & (piece != jnp.concatenate([jnp.zeros(1, piece.dtype), piece[:-1]]))
        marks = jnp.where(starts, sentinel - piece // 2, -1)
        source = jnp.where(starts, marks, jnp.where(in_span, -1, row))
        target = jnp.stack([marks, jnp.where(in_span, row, -1)], axis=1).reshape(-1)
        return _compact(source, T - count + spans, end), _compact(target, count + spans, end)

    return jax.vmap(corrupt)(jax.random.split(key, len(tokens)), tokens)


def _partition(key: Array, total: int, parts: int) -> Int[Array, " parts"]:
    """`parts` positive numbers with the sum `total`; all partitions are equally likely."""
    order = jax.random.permutation(key, total - 1)[: parts - 1]
    ends = jnp.sort(jnp.append(order + 1, jnp.array([0, total])))
    return jnp.diff(ends)


def _compact(row: Array, count: int, end: int) -> Array:
    """The `count` entries that are not negative, in their order, then `end`."""
    return jnp.append(row[jnp.argsort(row < 0, stable=True)[:count]], end)


@dataclass(frozen=True)
class SpanCorruption:
    """T5's pre-training: cross entropy of the target of `corrupt_spans`, given its source.

    The model is an encoder-decoder. The batch has `tokens` and `weights` `[B, T]`, with one text in
    each row: texts are not packed. A row that is not full gets weight 0.
    """

    # the first sentinel; sentinels count down, and are above the ids of the text and `end`
    sentinel: int
    end: int  # ends source and target
    start: int = 0  # begins the decoder's input
    rate: float = 0.15  # share of corrupted tokens
    mean_span: float = 3.0  # tokens

    def __post_init__(self):
        check_numbers("objective.", self, sentinel=0, end=0, start=0, mean_span=1)
        if not 0 < self.rate < 1:
            raise ConfigError(f"objective: rate={self.rate} must be in (0, 1)")

    def lengths(self, length: int) -> tuple[int, int]:
        """(number of target tokens, number of source tokens) for a text of `length` tokens."""
        tokens, spans = span_counts(length, self.rate, self.mean_span)
        return tokens + spans + 1, length - tokens + spans + 1

    def example(self, model: Any, batch: Batch) -> Batch:
        """Source and target of a text for reports, with spans from a fixed key."""
        return self.pair(batch, jax.random.key(0))

    def pair(self, batch: Batch, key: Array) -> Batch:
        """Source, inputs, labels and weights of texts, with spans drawn from the key."""
        source, labels = corrupt_spans(
            key, batch["tokens"], self.sentinel, self.end, self.rate, self.mean_span
        )
        start = jnp.full_like(labels[:, :1], self.start)
        inputs = jnp.concatenate([start, labels[:, :-1]], axis=1)
        full = jnp.all(batch["weights"] > 0, axis=1, keepdims=True)
        weights = jnp.broadcast_to(full, labels.shape).astype(batch["weights"].dtype)
        return {"source": source, "tokens": inputs, "labels": labels, "weights": weights}

    @in_both_forms
    def __call__(self, model: Any, params: Any, batch: Batch, context: StepContext) -> LossSums:
        tokens = batch["tokens"]
        _, spans = span_counts(tokens.shape[1], self.rate, self.mean_span)
        size = vocab_size(model, self.sentinel)
        if not self.end < self.sentinel - spans + 1 <= self.sentinel < size:
            problem = (
                f"{spans} sentinels from {self.sentinel} down must lie "
                f"between end={self.end} and model.vocab_size={size}"
            )
            raise ConfigError(f"objective: {problem}")
        span_key, model_key = jax.random.split(context.key)
        pair = self.pair(batch, span_key)
        return TokenCrossEntropy()(model, params, pair, replace(context, key=model_key))
