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
from jaxformer.errors import ConfigError
from jaxformer.evaluation.metric import Evaluation
from jaxformer.models import heads
from jaxformer.ops.losses import LossSums
from jaxformer.parallel import block_if_simulated
from jaxformer.training.metrics import numbers
from jaxformer.training.objectives import TokenCrossEntropy


def perplexity(score: Callable[[Any, dict, Any], LossSums], params: Any, batches: Iterable[dict[str, Any]]) -> dict[str, float]:
    """exp of the mean loss over every weighted token of `batches`.

    `score(params, batch, number of the batch) -> LossSums` should be jitted; sums stay on the device until the last batch
    is in. Returns loss (nats a token), perplexity, bits (a token), what else is scored, and tokens. Raises ConfigError
    where no token has weight.
    """
    sums = None
    for number, batch in enumerate(batches):
        # a batch on other processes' devices cannot be put
        there = all(isinstance(leaf, jax.Array) for leaf in batch.values())
        part = block_if_simulated(score(params, batch if there else jax.device_put(batch), np.int32(number)))
        sums = part if sums is None else jax.tree.map(jnp.add, sums, part)
    if sums is None or float(sums.weight) == 0:
        raise ConfigError("perplexity: no token to score; the validation split is empty, or shorter than the model's context")
    loss = float(sums.loss) / float(sums.weight)
    mean = lambda total, weight: np.asarray(total, np.float64) / np.maximum(np.asarray(weight, np.float64), 1e-30)
    metrics = numbers({name: mean(*pair) for name, pair in sums.metrics.items()})
    scores = {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "bits": loss / math.log(2)}
    return scores | metrics | {"tokens": float(sums.weight)}


@dataclass(frozen=True)
class StridedPerplexity:
    """Perplexity of the validation text by windows that overlap, and its bits per byte, which any tokenizer may be compared by.

    Window i reads T = context_length tokens from i * stride on. It scores the labels that no window before it has scored:
    its last `stride`, each with at least T - stride tokens before it (sliding windows, Baevski & Auli 2019). Every label is
    scored once. bits_per_byte = nats / (ln 2 x UTF-8 bytes of the scored text). It costs T / stride times the plain
    perplexity and equals it at stride = T. Raises ConfigError for data without a text and a model that sees later tokens.
    """

    stride: int  # tokens that a window scores, at most context_length
    only_final: bool = True  # at the end of training, not at each evaluation

    def __call__(self, evaluation: Evaluation) -> dict[str, float]:
        tokens, tokenizer = getattr(evaluation.dataset.validation, "tokens", None), evaluation.dataset.tokenizer
        if tokens is None or tokenizer is None:
            raise ConfigError("StridedPerplexity: the data have no text; it needs a split with `tokens`, and a tokenizer")
        length = sources.context_length(evaluation.model)
        if not 1 <= self.stride <= length:
            raise ConfigError(f"StridedPerplexity: stride={self.stride} must be from 1 to context_length={length}")
        if isinstance(evaluation.model, models.ModelConfig) and heads.sees_later_tokens(evaluation.model, everywhere=True):
            raise ConfigError("StridedPerplexity: the model sees later tokens, so it does not predict the next one")
        objective, dtype = TokenCrossEntropy(), jnp.dtype(evaluation.precision)

        @jax.jit
        def score(params: Any, batch: dict, number: Any) -> LossSums:
            return objective(evaluation.model, params, batch, jax.random.key(evaluation.seed), dtype)

        like = next(evaluation.batches())["weights"]
        put = partial(jax.device_put, device=like.sharding)
        scores = perplexity(score, evaluation.params, map(put, strided_batches(tokens, length, self.stride, len(like))))
        bits = scores["bits"] * scores["tokens"] / max(count_bytes(tokens[1:], tokenizer), 1)
        return {"strided_perplexity": scores["perplexity"], "bits_per_byte": bits}


def strided_batches(tokens: np.ndarray, length: int, stride: int, rows: int) -> Iterator[dict[str, np.ndarray]]:
    """Batches of `rows` windows: tokens, labels [B, T], and weights, 1 where no window before has scored the label."""
    windows = sources.Windows(tokens, length, stride)
    count = max(0, -(-(len(tokens) - 1 - length) // stride)) + 1
    for first in range(0, count, rows):
        numbers = np.arange(first, first + rows)
        batch = windows.take_rows(numbers)
        again = (numbers[:, None] > 0) & (np.arange(length)[None] < length - stride)
        yield batch | {"weights": np.where(again, np.float32(0), batch["weights"])}


def count_bytes(tokens: np.ndarray, tokenizer: Any) -> int:
    """UTF-8 bytes of the text of these tokens; what ends a document is no text."""
    text = tokens[tokens != getattr(tokenizer, "end_of_text", None)]
    # bytes need not be UTF-8
    return len(text) if isinstance(tokenizer, tokenizers.Bytes) else len(tokenizer.decode(text).encode())
