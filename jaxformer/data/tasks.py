"""Synthetic sequence tasks: reverse, copy, sort and associative recall.

Example i is a pure function of (config, split, i). No file is read or written.
"""

import functools
import hashlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxformer.data.sources import Dataset, context_length
from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class _Rewrite:
    """Random ids x and an answer y, both of `length`. The separator is the id `vocab_size`.

    aligned, for bidirectional models: tokens = x, labels = y, T = length.
    causal: next-token data of (x, separator, y) with weight 1 on y and 0 on x, T = 2 length.
    pair, for an encoder-decoder: source = x, tokens = (separator, y[:-1]), labels = y, T = length.
    """

    vocab_size: int = 16  # ids of x and y
    length: int = 8  # of x, and of y
    examples: int = 10_000  # of the training split
    validation_examples: int = 256  # of the validation split
    form: Literal["aligned", "causal", "pair"] = "causal"  # the arrays of an example
    seed: int = 0  # of the examples

    def open(self, model: Any) -> Dataset:
        # pyrefly: ignore[bad-argument-type]  (self is a subclass)
        return open_task(self, context_length(model))


@dataclass(frozen=True)
class Reverse(_Rewrite):
    """y = x backwards."""


@dataclass(frozen=True)
class Copy(_Rewrite):
    """y = x."""


@dataclass(frozen=True)
class Sort(_Rewrite):
    """y = x in ascending order."""


@dataclass(frozen=True)
class Recall:
    """Multi-query associative recall (Arora et al. 2023): k1 v1 ... kn vn, then the keys shuffled.

    n = `length`, T = 3 n. The last n labels are the values of the keys and have weight 1; all
    others have weight 0. Keys are distinct ids of the lower half of the vocabulary, values are ids
    of the upper half. Causal and bidirectional models can learn it.
    """

    vocab_size: int = 32  # half of them keys, half values
    length: int = 8  # pairs of an example
    examples: int = 10_000  # of the training split
    validation_examples: int = 256  # of the validation split
    seed: int = 0  # of the examples

    def open(self, model: Any) -> Dataset:
        return open_task(self, context_length(model))


Task = Reverse | Copy | Sort | Recall


def example(config: Task, split: int, index: int) -> np.ndarray:
    """Tokens, labels, weights and, for a pair, source: int32 [3 or 4, T].

    `split` 0 is training, 1 is validation.
    """
    rng = np.random.default_rng((config.seed, split, index))
    if isinstance(config, Recall):
        half = config.vocab_size // 2
        keys = rng.permutation(half)[: config.length]
        values = rng.integers(half, config.vocab_size, size=config.length)
        order = rng.permutation(config.length)
        pairs = np.stack([keys, values], axis=1).reshape(-1)
        tokens = np.concatenate([pairs, keys[order]])
        labels = np.concatenate([pairs, values[order]])
        return np.stack([tokens, labels, np.arange(len(tokens)) >= len(pairs)]).astype(np.int32)
    x = rng.integers(0, config.vocab_size, size=config.length)
    y = np.sort(x) if isinstance(config, Sort) else x[::-1] if isinstance(config, Reverse) else x
    if config.form == "aligned":
        return np.stack([x, y, np.ones_like(x)]).astype(np.int32)
    if config.form == "pair":
        tokens = np.concatenate([[config.vocab_size], y[:-1]])
        return np.stack([tokens, y, np.ones_like(x), x]).astype(np.int32)
    sequence = np.concatenate([x, [config.vocab_size], y])
    weights = np.arange(len(sequence) - 1) >= config.length
    return np.stack([sequence[:-1], sequence[1:], weights]).astype(np.int32)


class Examples:
    """`length` examples of one split: tokens, labels, source int32 [T], weights float32 [T]."""

    def __init__(self, config: Task, split: int, length: int):
        self._length = length
        # A new generator costs more than the rest of an example, so examples are cached.
        self._example = functools.lru_cache(maxsize=1 << 14)(
            functools.partial(example, config, split)
        )

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        tokens, labels, weights, *source = self._example(range(self._length)[index]).copy()
        arrays = {"tokens": tokens, "labels": labels, "weights": weights.astype(np.float32)}
        return arrays | {"source": source[0]} if source else arrays


# the smallest value of each field
LEAST = {"vocab_size": 2, "length": 1, "examples": 1, "validation_examples": 1, "seed": 0}


def open_task(config: Task, limit: int) -> Dataset:
    """The data set of a task.

    Raises ConfigError for impossible sizes and for examples longer than `limit` tokens.
    """
    for name, least in LEAST.items():
        if getattr(config, name) < least:
            raise ConfigError(
                f"data.{name}: {getattr(config, name)} is too small; at least {least}"
            )
    if isinstance(config, Recall) and config.length > config.vocab_size // 2:
        raise ConfigError(
            f"data.vocab_size: {config.length} distinct keys need at least {2 * config.length}"
        )
    train = Examples(config, 0, config.examples)
    validation = Examples(config, 1, config.validation_examples)
    length = len(train[0]["tokens"])
    if length > limit:
        problem = (
            f"data.length: an example of {config} is {length} tokens, "
            f"longer than the context of {limit}"
        )
        raise ConfigError(f"{problem}; lower data.length or raise the context to {length}")
    # The digest includes examples: another NumPy version may draw other numbers from the same seed.
    content = [example(config, split, index).tobytes() for split in (0, 1) for index in range(16)]
    return Dataset(
        train=train,
        validation=validation,
        vocab_size=config.vocab_size + (getattr(config, "form", None) in ("causal", "pair")),
        digest=hashlib.sha256(repr(config).encode() + b"".join(content)).hexdigest(),
        description=f"{config}: {length} tokens an example",
    )
