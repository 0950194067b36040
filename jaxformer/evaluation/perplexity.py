"""Loss and perplexity of a model over a split, and over a text by overlapping windows."""

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


def perplexity(score: Callable[[Any, dict, Any], LossSums], params: Any, batches: Iterable[dict[str, Any]]) -> dict[str, float]:
    """exp of the mean loss over every weighted token of `batches`, for a loss that is a cross entropy of tokens in nats.

    `score(params, batch, number of the batch) -> LossSums` should be jitted. Returns loss (nats a token), perplexity, bits (a
    token), what else is scored, and tokens. Raises ConfigError where no token has weight.
    """
    sums = add_up(score, params, batches)
    loss = mean_loss(sums)
    return {"loss": loss} | of_loss(loss) | mean_metrics(sums) | {"tokens": float(sums.weight)}


def mean_scores(score: Callable[[Any, dict, Any], LossSums], params: Any, batches: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What an objective scores over `batches`, in its own unit; perplexity and bits only where its loss has them.

    `score` is that of `perplexity`. Returns loss (a mean), what else is scored, the sum of weights under the name of its unit,
    and that unit. Raises ConfigError where nothing has weight.
    """
    sums = add_up(score, params, batches)
    loss = mean_loss(sums)
    scores = {"loss": loss} | (of_loss(loss) if has_perplexity(sums) else {})
    return scores | mean_metrics(sums) | {sums.unit: float(sums.weight), "unit": sums.unit}


def has_perplexity(sums: LossSums) -> bool:
    """Whether exp of the mean loss is a perplexity: the loss is a cross entropy, of tokens."""
    return sums.perplexity and sums.unit == "tokens"


def of_loss(loss: float) -> dict[str, float]:
    """The perplexity and the bits of a mean loss in nats."""
    return {"perplexity": math.exp(min(loss, 700.0)), "bits": loss / math.log(2)}


def mean_loss(sums: LossSums) -> float:
    """The loss over the weight."""
    return float(sums.loss) / float(sums.weight)


def mean_metrics(sums: LossSums) -> dict[str, float]:
    """The mean of each metric; of one with a value for each layer NAME/0, NAME/1, ..."""

    def mean(total, weight):
        return total / np.maximum(weight, 1e-30)

    return as_numbers({name: mean(*pair) for name, pair in sums.metrics.items()})


def add_up(score: Callable[[Any, dict, Any], LossSums], params: Any, batches: Iterable[dict[str, Any]]) -> LossSums:
    """The sums over all batches, in float64: a sum of 10^8 tokens is not exact in float32.

    Raises ConfigError where nothing has weight.
    """
    sums, waiting = None, None
    for number, batch in enumerate(batches):
        # a batch on other processes' devices cannot be put
        there = all(isinstance(leaf, jax.Array) for leaf in batch.values())
        part = block_if_simulated(score(params, batch if there else jax.device_put(batch), np.int32(number)))
        # the sums of one batch are fetched while the device computes the next one
        sums, waiting = _add(sums, waiting), part
    sums = _add(sums, waiting)
    if sums is None or float(sums.weight) == 0:
        raise ConfigError("evaluation: nothing has weight; the validation split is empty, or shorter than the model's context")
    return sums


def _add(sums: LossSums | None, part: LossSums | None) -> LossSums | None:
    """The sum of both in float64, on the host."""
    if part is None:
        return sums
    part = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), jax.device_get(part))
    return part if sums is None else jax.tree.map(np.add, sums, part)


@dataclass(frozen=True)
class StridedPerplexity:
    """Perplexity of the validation text by windows that overlap, and its bits per byte, which any tokenizer may be compared by.

    Window i reads T = context_length tokens from i * stride on. It scores the labels that no window before it has scored:
    its last `stride`, each with at least T - stride tokens before it (sliding windows, Baevski & Auli 2019). Every label is
    scored once. bits_per_byte = nats / (ln 2 x UTF-8 bytes of the scored text); it is a text that says why where the
    tokenizer changes a text before it is encoded, so that its bytes are not known. It costs T / stride times the plain
    perplexity and equals it at stride = T. Raises ConfigError for data without a text and a model that sees later tokens.
    """

    stride: int  # tokens that a window scores, at most context_length
    only_final: bool = True  # at the end of training, not at each evaluation

    def check(self, model: Any, dataset: Any) -> list[str]:
        """The names of the scores. Raises ConfigError where there are none."""
        if getattr(dataset.validation, "tokens", None) is None or dataset.tokenizer is None:
            raise ConfigError("StridedPerplexity: the data have no text; it needs a split with `tokens`, and a tokenizer")
        length = sources.context_length(model)
        if not 1 <= self.stride <= length:
            raise ConfigError(f"StridedPerplexity: stride={self.stride} must be from 1 to context_length={length}")
        if isinstance(model, models.ModelConfig) and heads.sees_later_tokens(model, everywhere=True):
            raise ConfigError("StridedPerplexity: the model sees later tokens, so it does not predict the next one")
        return ["strided_perplexity", "bits_per_byte"]

    def __call__(self, evaluation: Evaluation) -> dict[str, Any]:
        self.check(evaluation.model, evaluation.dataset)
        tokens, tokenizer = evaluation.dataset.validation.tokens, evaluation.dataset.tokenizer
        length = sources.context_length(evaluation.model)
        objective, dtype = TokenCrossEntropy(), jnp.dtype(evaluation.precision)

        @jax.jit
        def score(params: Any, batch: dict, number: Any) -> LossSums:
            return objective(evaluation.model, params, batch, StepContext(random_key(evaluation.seed), dtype))

        like = next(evaluation.batches())["weights"]
        put = partial(jax.device_put, device=like.sharding)
        scores = perplexity(score, evaluation.params, map(put, strided_batches(tokens, length, self.stride, len(like))))
        found = {"strided_perplexity": scores["perplexity"]}
        if pair := equal_texts(tokenizer):
            return found | {"bits_per_byte": f"unknown: the tokenizer takes {pair[0]!r} and {pair[1]!r} for the same text"}
        count = count_bytes(tokens, tokenizer) - count_bytes(tokens[:1], tokenizer)  # nobody predicts the first token
        return found | {"bits_per_byte": scores["bits"] * scores["tokens"] / max(count, 1)}


def strided_batches(tokens: np.ndarray, length: int, stride: int, rows: int) -> Iterator[dict[str, np.ndarray]]:
    """Batches of `rows` windows: tokens, labels [B, T], and weights, 1 where no window before has scored the label."""
    check_whole("strided_batches: length", length)
    check_whole("strided_batches: stride", stride)
    check_whole("strided_batches: rows", rows)
    windows = sources.Windows(tokens, length, stride)
    count = max(0, -(-(len(tokens) - 1 - length) // stride)) + 1
    for first in range(0, count, rows):
        numbers = np.arange(first, first + rows)
        batch = windows.take_rows(numbers)
        again = (numbers[:, None] > 0) & (np.arange(length)[None] < length - stride)
        yield batch | {"weights": np.where(again, np.float32(0), batch["weights"])}


PAIRS = ("A a", "a a"), ("a  a", "a a"), ("a\na", "a a"), ("é", "e"), ("ﬁ", "fi")


def equal_texts(tokenizer: Any) -> tuple[str, str] | None:
    """Two texts of which a package's tokenizer makes the same tokens, so it forgets their bytes; None: there are none."""
    if not isinstance(tokenizer, tokenizers.BPE):
        return None
    unknown = tokenizer.encode("\U0001f0a1")

    def same(one, other):
        return tokenizer.encode(one) == tokenizer.encode(other) != unknown

    return next((pair for pair in PAIRS if same(*pair)), None)


def count_bytes(tokens: np.ndarray, tokenizer: Any) -> int:
    """UTF-8 bytes of the text of these tokens; what ends a document is no text.

    Each document is decoded alone: tokenizers that put a space before a text take it away from its beginning.
    """
    end = getattr(tokenizer, "end_of_text", None)
    if isinstance(tokenizer, tokenizers.Bytes):  # they need not be UTF-8
        return int((tokens != end).sum())
    documents = np.split(tokens, np.flatnonzero(tokens == end))
    return sum(len(tokenizer.decode(document[document != end]).encode()) for document in documents)
