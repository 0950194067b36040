"""Loss and perplexity of a model: over a split, and over a text by overlapping windows."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer import models
from jaxformer.data import sources, tokenizers
from jaxformer.errors import ConfigError, check_whole
from jaxformer.evaluation.metric import Evaluation, as_numbers
from jaxformer.models import heads
from jaxformer.objectives.objective import StepContext
from jaxformer.objectives.tokens import TokenCrossEntropy
from jaxformer.ops.losses import LossSums
from jaxformer.parallel import block_if_simulated
from jaxformer.params import random_key


def perplexity(
    score: Callable[[Any, dict, Any], LossSums], params: Any, batches: Iterable[dict[str, Any]]
) -> dict[str, float]:
    """Perplexity = exp(mean loss) over every weighted token of `batches`.

    The loss is a cross entropy of tokens in nats. `score(params, batch, number of the batch) ->
    LossSums` should be jitted. Returns loss (nats a token), perplexity, bits (a token), the mean of
    each other metric, and tokens. Raises ConfigError if no token has weight.
    """
    sums = add_up(score, params, batches)
    loss = mean_loss(sums)
    return {"loss": loss} | of_loss(loss) | mean_metrics(sums) | {"tokens": float(sums.weight)}


def mean_scores(
    score: Callable[[Any, dict, Any], LossSums], params: Any, batches: Iterable[dict[str, Any]]
) -> dict[str, Any]:
    """The mean scores of an objective over `batches`, in its own unit.

    `score` is that of `perplexity`. Returns loss (a mean), the mean of each other metric, the sum
    of weights under the name of its unit, and that unit. Perplexity and bits are there only if the
    loss is a cross entropy of tokens. Raises ConfigError if nothing has weight.
    """
    sums = add_up(score, params, batches)
    loss = mean_loss(sums)
    scores = {"loss": loss} | (of_loss(loss) if has_perplexity(sums) else {})
    return scores | mean_metrics(sums) | {sums.unit: float(sums.weight), "unit": sums.unit}


def has_perplexity(sums: LossSums) -> bool:
    """Whether exp(mean loss) is a perplexity: the loss is a cross entropy of tokens."""
    return sums.perplexity and sums.unit == "tokens"


def of_loss(loss: float) -> dict[str, float]:
    """The perplexity exp(loss) and the bits loss / ln 2 of a mean loss in nats."""
    return {"perplexity": math.exp(min(loss, 700.0)), "bits": loss / math.log(2)}


def mean_loss(sums: LossSums) -> float:
    """loss / weight."""
    return float(sums.loss) / float(sums.weight)


def mean_metrics(sums: LossSums) -> dict[str, float]:
    """The mean of each metric; a metric with a value for each layer gives NAME/0, NAME/1, ..."""

    def mean(total, weight):
        return total / np.maximum(weight, 1e-30)

    return as_numbers({name: mean(*pair) for name, pair in sums.metrics.items()})


def add_up(
    score: Callable[[Any, dict, Any], LossSums], params: Any, batches: Iterable[dict[str, Any]]
) -> LossSums:
    """The sums over all batches, in float64: a sum over 10^8 tokens is not exact in float32.

    Raises ConfigError if nothing has weight.
    """
    sums = None
    previous = None
    for number, batch in enumerate(batches):
        # a batch on other processes' devices cannot be put
        if not all(isinstance(leaf, jax.Array) for leaf in batch.values()):
            batch = jax.device_put(batch)
        current = block_if_simulated(score(params, batch, np.int32(number)))
        # the sums of one batch are fetched while the device computes the next one
        sums = _add(sums, previous)
        previous = current
    sums = _add(sums, previous)
    if sums is None or float(sums.weight) == 0:
        raise ConfigError(
            "evaluation: nothing has weight; the validation split is empty, "
            "or shorter than the model's context"
        )
    return sums


def _add(sums: LossSums | None, of_batch: LossSums | None) -> LossSums | None:
    """The sum of both in float64, on the host."""
    if of_batch is None:
        return sums
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), jax.device_get(of_batch))
    return exact if sums is None else jax.tree.map(np.add, sums, exact)


@dataclass(frozen=True)
class StridedPerplexity:
    """Perplexity and bits per byte of the validation text, by overlapping windows.

    Window i reads T = context_length tokens from i * stride on. It scores the labels that no
    earlier window has scored: its last `stride` labels, each with at least T - stride tokens before
    it (sliding windows, Baevski & Auli 2019). Every label is scored once. The cost is T / stride
    times that of the plain perplexity; at stride = T both are equal.

    bits_per_byte = nats / (ln 2 x UTF-8 bytes of the scored text). It allows models with different
    tokenizers to be compared. If the tokenizer changes a text before it encodes it, the bytes are
    not known; then bits_per_byte is a text that says so. Raises ConfigError for data without a text
    and for a model that sees later tokens.
    """

    stride: int  # tokens that a window scores, at most context_length
    only_final: bool = True  # at the end of training, not at each evaluation

    def check(self, model: Any, dataset: Any) -> list[str]:
        """The names of the scores. Raises ConfigError if data or model cannot be scored."""
        if getattr(dataset.validation, "tokens", None) is None or dataset.tokenizer is None:
            raise ConfigError(
                "StridedPerplexity: the data have no text; "
                "it needs a split with `tokens`, and a tokenizer"
            )
        length = sources.context_length(model)
        if not 1 <= self.stride <= length:
            raise ConfigError(
                f"StridedPerplexity: stride={self.stride} must be from 1 to context_length={length}"
            )
        if isinstance(model, models.ModelConfig) and heads.sees_later_tokens(
            model, everywhere=True
        ):
            raise ConfigError(
                "StridedPerplexity: the model sees later tokens, "
                "so it does not predict the next one"
            )
        return ["strided_perplexity", "bits_per_byte"]

    def __call__(self, evaluation: Evaluation) -> dict[str, Any]:
        self.check(evaluation.model, evaluation.dataset)
        # those of a Corpus are on disk and are no array: counting bytes needs one
        tokens = np.asarray(evaluation.dataset.validation.tokens[:])
        tokenizer = evaluation.dataset.tokenizer
        length = sources.context_length(evaluation.model)
        objective = TokenCrossEntropy()
        dtype = jnp.dtype(evaluation.precision)

        @jax.jit
        def score(params: Any, batch: dict, number: Any) -> LossSums:
            context = StepContext(random_key(evaluation.seed), dtype)
            return objective(evaluation.model, params, batch, context)

        example = next(evaluation.batches())["weights"]
        put = partial(jax.device_put, device=example.sharding)
        batches = strided_batches(tokens, length, self.stride, len(example))
        scores = perplexity(score, evaluation.params, map(put, batches))
        bits = scores["bits"] * scores["tokens"]
        return {
            "strided_perplexity": scores["perplexity"],
            "bits_per_byte": _bits_per_byte(bits, tokens, tokenizer),
        }


def strided_batches(
    tokens: np.ndarray, length: int, stride: int, rows: int
) -> Iterator[dict[str, np.ndarray]]:
    """Batches of `rows` windows: tokens, labels and weights [B, T].

    A weight is 1 if no earlier window has scored the label, else 0.
    """
    check_whole("strided_batches: length", length)
    check_whole("strided_batches: stride", stride)
    check_whole("strided_batches: rows", rows)
    windows = sources.Windows(tokens, length, stride)
    count = max(0, -(-(len(tokens) - 1 - length) // stride)) + 1
    for first in range(0, count, rows):
        numbers = np.arange(first, first + rows)
        batch = windows.take_rows(numbers)
        scored_before = (numbers[:, None] > 0) & (np.arange(length)[None] < length - stride)
        yield batch | {"weights": np.where(scored_before, np.float32(0), batch["weights"])}


def _bits_per_byte(bits: float, tokens: np.ndarray, tokenizer: Any) -> float | str:
    """bits / UTF-8 bytes of the text of these tokens; a text if the bytes are not known."""
    if pair := equal_texts(tokenizer):
        return f"unknown: the tokenizer takes {pair[0]!r} and {pair[1]!r} for the same text"
    # no window predicts the first token
    count = count_bytes(tokens, tokenizer) - count_bytes(tokens[:1], tokenizer)
    return bits / max(count, 1)


# texts that tokenizers of packages may encode to the same tokens
PAIRS = ("A a", "a a"), ("a  a", "a a"), ("a\na", "a a"), ("é", "e"), ("ﬁ", "fi")


def equal_texts(tokenizer: Any) -> tuple[str, str] | None:
    """Two texts that the tokenizer of a package encodes to the same tokens; None: there are none.

    Such a tokenizer changes a text before it encodes it, so the bytes of the text are lost.
    """
    if not isinstance(tokenizer, tokenizers.BPE):
        return None
    unknown = tokenizer.encode("\U0001f0a1")

    def same(one, other):
        return tokenizer.encode(one) == tokenizer.encode(other) != unknown

    return next((pair for pair in PAIRS if same(*pair)), None)


def count_bytes(tokens: np.ndarray, tokenizer: Any) -> int:
    """The number of UTF-8 bytes of the text of these tokens, without the ends of documents.

    Each document is decoded alone, because some tokenizers put a space before a text and remove it
    when they decode the text.
    """
    end = getattr(tokenizer, "end_of_text", None)
    if isinstance(tokenizer, tokenizers.Bytes):  # its bytes may be no valid UTF-8
        return int((tokens != end).sum())
    documents = np.split(tokens, np.flatnonzero(tokens == end))
    return sum(len(tokenizer.decode(document[document != end]).encode()) for document in documents)
