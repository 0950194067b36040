"""Spans of a text replaced by sentinels, which the target spells out: the pre-training of T5.

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
        piece = jnp.searchsorted(borders, jnp.arange(T), side="right")  # 0: stays, 1: first span, 2: stays, ...
        in_span = piece % 2 == 1
        starts = in_span & (piece != jnp.concatenate([jnp.zeros(1, piece.dtype), piece[:-1]]))
        marks = jnp.where(starts, sentinel - piece // 2, -1)
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

    def example(self, model: Any, batch: Batch) -> Batch:
        """For reports: source and target of a text, with spans from a fixed key."""
        return self.pair(batch, jax.random.key(0))

    def pair(self, batch: Batch, key: Array) -> Batch:
        """Source, inputs, labels and weights of texts whose spans are drawn from the key."""
        source, labels = corrupt_spans(key, batch["tokens"], self.sentinel, self.end, self.rate, self.mean_span)
        inputs = jnp.concatenate([jnp.full_like(labels[:, :1], self.start), labels[:, :-1]], axis=1)
        full = jnp.all(batch["weights"] > 0, axis=1, keepdims=True)
        weights = jnp.broadcast_to(full, labels.shape).astype(batch["weights"].dtype)
        return {"source": source, "tokens": inputs, "labels": labels, "weights": weights}

    @in_both_forms
    def __call__(self, model: Any, params: Any, batch: Batch, context: StepContext) -> LossSums:
        tokens = batch["tokens"]
        _, spans = span_counts(tokens.shape[1], self.rate, self.mean_span)
        size = vocab_size(model, self.sentinel)
        if not self.end < self.sentinel - spans + 1 <= self.sentinel < size:
            problem = f"{spans} sentinels from {self.sentinel} down must lie between end={self.end} and model.vocab_size={size}"
            raise ConfigError(f"objective: {problem}")
        corrupt, inside = jax.random.split(context.key)
        return TokenCrossEntropy()(model, params, self.pair(batch, corrupt), replace(context, key=inside))
