"""Generated sequences with known answers: reverse, copy, sort and associative recall.

Example i of a split is a pure function of (config, split, i): no order of asking changes it, and nothing is stored.
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
    """Random ids x and an answer y, both of `length`.

    aligned: tokens = x, labels = y, T = length (for bidirectional models). causal: x, separator, y as next-token data
    with weight 1 on y alone, T = 2 length. pair: source = x, tokens = separator and y but its last, labels = y, T = length
    (for an encoder-decoder). The separator is one more id, number `vocab_size`.
    """

    vocab_size: int = 16  # ids of x and y
    length: int = 8  # of x, and of y
    examples: int = 10_000  # of the training split
    validation_examples: int = 256  # of the validation split
    form: Literal["aligned", "causal", "pair"] = "causal"  # how an example is laid out
    seed: int = 0  # of the examples

    def open(self, model: Any) -> Dataset:
        return open_task(self, context_length(model))  # pyrefly: ignore[bad-argument-type]  (one of its subclasses)


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
    """Associative recall with many queries (Arora et al. 2023): k1 v1 ... kn vn, then the n = `length` keys reordered.

    At each queried key the label is its value, with weight 1; elsewhere the weight is 0. T = 3 length. Causal and
    bidirectional models read the same sequence. Keys are distinct and from the lower half of the ids, values from the
    upper half.
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
    """Tokens, labels and weights of one example, int32 [3, T]; a pair has its source, [4, T]. Split 0 trains, 1 validates."""
    rng = np.random.default_rng((config.seed, split, index))
    if isinstance(config, Recall):
        half = config.vocab_size // 2
        keys = rng.permutation(half)[: config.length]
        values = rng.integers(half, config.vocab_size, size=config.length)
        order = rng.permutation(config.length)
        pairs = np.stack([keys, values], axis=1).reshape(-1)
        tokens, labels = np.concatenate([pairs, keys[order]]), np.concatenate([pairs, values[order]])
        return np.stack([tokens, labels, np.arange(len(tokens)) >= len(pairs)]).astype(np.int32)
    x = rng.integers(0, config.vocab_size, size=config.length)
    y = np.sort(x) if isinstance(config, Sort) else x[::-1] if isinstance(config, Reverse) else x
    if config.form == "aligned":
        return np.stack([x, y, np.ones_like(x)]).astype(np.int32)
    if config.form == "pair":
        return np.stack([np.concatenate([[config.vocab_size], y[:-1]]), y, np.ones_like(x), x]).astype(np.int32)
    whole = np.concatenate([x, [config.vocab_size], y])
    return np.stack([whole[:-1], whole[1:], np.arange(len(whole) - 1) >= config.length]).astype(np.int32)


class Examples:
    """`length` examples of one split of a task."""

    def __init__(self, config: Task, split: int, length: int):
        self._length = length
        # a fresh generator costs more than the rest of an example: keep those that come again
        self._example = functools.lru_cache(maxsize=1 << 14)(functools.partial(example, config, split))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {name: rows[0] for name, rows in self.take_rows(np.array([range(len(self))[index]])).items()}

    def take_rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Examples number `indices` as arrays [B, T]: tokens and labels int32, weights float32."""
        rows = np.stack([self._example(int(index)) for index in indices], axis=1)
        batch = {"tokens": rows[0], "labels": rows[1], "weights": rows[2].astype(np.float32)}
        return batch | {"source": rows[3]} if len(rows) == 4 else batch


def open_task(config: Task, limit: int) -> Dataset:
    """Raises ConfigError for impossible sizes, and when an example is longer than the context."""
    for name, least in {"vocab_size": 2, "length": 1, "examples": 1, "validation_examples": 1, "seed": 0}.items():
        if getattr(config, name) < least:
            raise ConfigError(f"data.{name}: {getattr(config, name)} is too small; at least {least}")
    if isinstance(config, Recall) and config.length > config.vocab_size // 2:
        raise ConfigError(f"data.vocab_size: {config.length} distinct keys need at least {2 * config.length}")
    train, validation = Examples(config, 0, config.examples), Examples(config, 1, config.validation_examples)
    length = len(train[0]["tokens"])
    if length > limit:
        raise ConfigError(
            f"data.length: an example of {config} is {length} tokens, longer than the context of {limit}; "
            f"lower data.length or raise the context to {length}"
        )
    # some examples are part of the digest: NumPy may change what a seed gives, and then the data is other data
    content = [example(config, split, index).tobytes() for split in (0, 1) for index in range(16)]
    return Dataset(
        train=train,
        validation=validation,
        vocab_size=config.vocab_size + (getattr(config, "form", None) in ("causal", "pair")),
        digest=hashlib.sha256(repr(config).encode() + b"".join(content)).hexdigest(),
        description=f"{config}: {length} tokens an example",
    )
