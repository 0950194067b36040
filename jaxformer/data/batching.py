"""Training batches, a function of (seed, step) or of the state; validation batches; prefetching."""

import functools
import hashlib
import inspect
import itertools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from jaxformer.data import sources
from jaxformer.errors import ConfigError


def open_dataset(data: Any, model: Any) -> sources.Dataset:
    """`data.open(model)`. Raises ConfigError if the result is not a data set."""
    dataset = data.open(model)
    if not isinstance(dataset, sources.Dataset):
        advice = "return a jaxformer.data.sources.Dataset"
        raise ConfigError(
            f"data: {type(data).__name__}.open returned a {type(dataset).__name__}; {advice}"
        )
    check_splits(dataset)
    return dataset


# the form of a training split that reads the state
FORM = "(params, key, step) -> {name: array of batch_size rows}"


def reads_state(split: Any) -> bool:
    """Whether a training split is a function of the state: samples of the current policy, say."""
    return callable(split) and not hasattr(split, "__getitem__")


def check_splits(dataset: sources.Dataset) -> None:
    """Raises ConfigError for a split of the wrong kind: only `train` may be a function."""
    if reads_state(dataset.validation):
        advice = (
            "only the training split may be a function of the state; "
            "give examples, such as a list of dicts"
        )
        raise ConfigError(f"data: the validation split is a function; {advice}")
    if not reads_state(dataset.train):
        return
    try:
        inspect.signature(dataset.train).bind(None, None, 0, **size_of(dataset.train, 1))
    except ValueError:  # no signature: a function written in C
        return
    except TypeError as error:
        raise ConfigError(f"data: the training split is called as {FORM}, but {error}") from None


def size_of(split: Callable, batch_size: int) -> dict[str, int]:
    """The batch size as an argument, for a function that has a parameter of this name."""
    try:
        names = inspect.signature(split).parameters
    except ValueError:  # no signature: a function written in C
        return {}
    return {"batch_size": batch_size} if "batch_size" in names else {}


def batch_of_state(
    split: Callable, params: Any, key: Any, step: int, batch_size: int
) -> dict[str, Any]:
    """The global batch `split(params, key, step)`.

    Raises ConfigError if the result is not a batch, and BadBatch if the function fails.
    """
    try:
        made = split(params, key, step, **size_of(split, batch_size))
        return checked_batch(made, batch_size)
    except Exception as error:
        raise _with_place(f"the batch of step {step} could not be made", error) from error


def checked_batch(batch: Any, batch_size: int) -> dict[str, Any]:
    """A batch that the user's function made, as a dict.

    Raises ConfigError unless it is a mapping of arrays [batch_size, ...].
    """
    if not isinstance(batch, Mapping) or not batch:
        raise ConfigError(f"data: the training split returned {_short(batch)}; expected {FORM}")
    for name, value in batch.items():
        try:
            shape = np.shape(value)
            dtype = getattr(value, "dtype", None) or np.asarray(value).dtype
        except ValueError:  # lists of different lengths
            raise ConfigError(
                f"data: {name!r} of a training batch is no array: its rows have several lengths"
            ) from None
        if dtype.kind in "OSUmM":
            raise ConfigError(
                f"data: {name!r} of a training batch is {_short(value)}; "
                "expected an array of numbers"
            )
        if not shape or shape[0] != batch_size:
            size = f"{shape[0]} rows" if shape else "a number"
            raise ConfigError(
                f"data: {name!r} of a training batch has {size}; "
                f"expected batch_size={batch_size} rows"
            )
    return dict(batch)


def _short(value: Any) -> str:
    """The type and the repr of a value, cut to a few words."""
    return f"{type(value).__name__} {value!r:.60}"


def batches(split: Any, batch_size: int, seed: int, rows: np.ndarray | None = None) -> Any:
    """A grain.MapDataset: [step] -> the global batch [B, T], a pure function of (seed, step).

    Only its `rows` are made; None: all.
    """
    selection = slice(None) if rows is None else rows
    # Indices are batched before examples are read: one `take_rows` replaces B small reads.
    return batch_indices(split, batch_size, seed).map(
        lambda indices: take_rows(split, indices[selection])
    )


def batch_indices(split: Any, batch_size: int, seed: int) -> Any:
    """A grain.MapDataset: [step] -> the indices [B] of the global batch.

    Batch `step` has the indices step * B ... step * B + B - 1 of an endless order, in which each
    epoch is a new permutation. A split may choose the indices instead, by a method
    `batch_indices(seed, batch_size)` that returns an endless sequence: [step] -> B indices.
    """
    if reads_state(split):
        raise ConfigError(
            "data: the training batches are made of the state; this needs a sequence of examples"
        )
    if len(split) == 0:
        raise ConfigError("data: the training split is empty; expected at least one example")
    import grain  # takes 1 s; the errors above come first

    choose = getattr(split, "batch_indices", None)
    if choose is not None:
        indices = choose(seed, batch_size)
        return grain.MapDataset.range(sys.maxsize).map(lambda step: np.asarray(indices[step]))
    n = len(split)
    offsets = np.arange(batch_size)
    return grain.MapDataset.range(sys.maxsize // batch_size).map(
        lambda step: shuffled(step * batch_size + offsets, n, seed)
    )


# The version of the order of large splits. A checkpoint says which one its run uses.
ORDER = 2
# the most indices that are shuffled as a table; above, each index is computed when it is needed
LARGEST_TABLE = 1 << 16


def order_changed(split: Any) -> bool:
    """Whether the order of this split depends on the version `ORDER`: only large splits do."""
    if reads_state(split):
        return False
    if splits := getattr(split, "splits", None):  # a mixture orders each of its parts
        return any(len(each) > LARGEST_TABLE for each in splits)
    return getattr(split, "batch_indices", None) is None and len(split) > LARGEST_TABLE


def shuffled(positions: np.ndarray, n: int, seed: int) -> np.ndarray:
    """The indices below n at `positions` of an endless order: each epoch of n is a new permutation.

    A pure function of (seed, position). Each index comes exactly once in an epoch.
    """
    positions = np.asarray(positions)
    epochs = positions // n
    permute = _looked_up if n <= LARGEST_TABLE else scattered
    indices = np.zeros(positions.shape, np.int64)
    for epoch in np.unique(epochs):
        in_epoch = epochs == epoch
        indices[in_epoch] = permute(positions[in_epoch] % n, n, (seed, int(epoch)))
    return indices


def _looked_up(indices: np.ndarray, n: int, seed: tuple[int, ...]) -> np.ndarray:
    return _permutation(n, seed)[indices]


@functools.lru_cache(maxsize=8)
def _permutation(n: int, seed: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(seed).permutation(n)


def scattered(indices: np.ndarray, n: int, seed: tuple[int, ...]) -> np.ndarray:
    """The images of `indices` under a pseudo-random permutation of range(n), without a table.

    A Feistel network of ten rounds permutes the numbers that have as many bits as n - 1. A result
    that is not below n goes through it again, until it is ("cycle walking": Black and Rogaway 2002,
    section 4). grain's own shuffle is not used: of 65,537 indices it gives some twice and others
    never, and of more, neighbouring positions have correlated indices.
    """
    bits = max((n - 1).bit_length(), 2)
    low_bits = np.uint64(bits // 2)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    low_mask = np.uint64((1 << bits // 2) - 1)
    keys = np.random.SeedSequence(seed).generate_state(10, np.uint64).reshape(5, 2)
    values = np.asarray(indices).astype(np.uint64)
    outside = np.ones(values.shape, bool)
    while outside.any():
        high, low = values[outside] >> low_bits, values[outside] & low_mask
        for first, second in keys:
            high = high ^ (_mixed_bits(low, first) & high_mask)
            low = low ^ (_mixed_bits(high, second) & low_mask)
        values[outside] = high << low_bits | low
        outside = values >= n
    return values.astype(np.int64)


def _mixed_bits(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """A 64-bit hash of values and key: the finalizer of SplitMix64 (Steele et al. 2014)."""
    values = values + key  # unsigned arithmetic wraps around
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class ValidationBatches:
    """One pass over the split in order, as batches [B, ...]. Rows of weight 0 fill the last batch.

    Weights are [B, ...], one for each token or example. `rows` as in `batches`. `examples`: only
    this many from the beginning of the split.
    """

    def __init__(
        self,
        split: Any,
        batch_size: int,
        rows: np.ndarray | None = None,
        examples: int | None = None,
    ):
        self.split = split
        self.batch_size = batch_size
        self.examples = len(split) if examples is None else min(examples, len(split))
        self.rows = np.arange(batch_size) if rows is None else rows

    def __len__(self) -> int:
        return -(-self.examples // self.batch_size)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        indices = range(len(self))[index] * self.batch_size + self.rows
        batch = take_rows(self.split, np.minimum(indices, self.examples - 1))
        if "weights" not in batch:
            names = ", ".join(map(repr, batch))
            advice = "give each example `weights`: 1.0, or 0.0 for what no score counts"
            raise ConfigError(
                f"data: an example of the validation split has {names}, and no 'weights'; {advice}"
            )
        weights = np.asarray(batch["weights"])
        is_example = (indices < self.examples).reshape(-1, *(1,) * (weights.ndim - 1))
        return batch | {"weights": np.where(is_example, weights, 0).astype(np.float32)}


class BadBatch(RuntimeError):
    """A batch could not be made. The message names batch and example; the cause is the error."""


def _with_place(place: str, error: BaseException) -> Exception:
    """A BadBatch whose message begins with `place`.

    A ConfigError stays a ConfigError: the user sees it as one line, without a traceback.
    """
    if isinstance(error, ConfigError):
        return ConfigError(f"{place}: {error}")
    if isinstance(error, BadBatch):
        return BadBatch(f"{place}: {error}")
    return BadBatch(f"{place}: {type(error).__name__}: {error}")


def take_rows(split: Any, indices: np.ndarray) -> dict[str, np.ndarray]:
    """The examples at `indices` as one batch, by the split's `take_rows` if it has one.

    An error names the first example that cannot be read alone, or all if each one can.
    """
    try:
        return _take_rows(split, indices)
    except Exception as error:
        indices = np.asarray(indices).tolist()
        bad = next((index for index in indices if not _is_readable(split, index)), None)
        place = f"examples {indices}" if bad is None else f"example {bad}"
        raise _with_place(place, error) from error


def every_row(split: Any) -> dict[str, np.ndarray]:
    """All examples of a split as one batch."""
    return take_rows(split, np.arange(len(split)))


def digest_of_drawn(facts: str, split: Any, examples: int = 16) -> str:
    """The digest of a split whose examples are drawn: of what decides them, and of the first ones.

    Another version of Python or NumPy may draw other numbers from the same seed.
    """
    digest = hashlib.sha256(facts.encode())
    rows = take_rows(split, np.arange(min(examples, len(split))))
    for name in sorted(rows):
        digest.update(name.encode() + np.ascontiguousarray(rows[name]).tobytes())
    return digest.hexdigest()


def _is_readable(split: Any, index: int) -> bool:
    try:
        _take_rows(split, np.array([index]))
    except Exception:
        return False
    return True


def _take_rows(split: Any, indices: np.ndarray) -> dict[str, np.ndarray]:
    if hasattr(split, "take_rows"):
        return split.take_rows(indices)
    return stacked([split[int(index)] for index in indices])


def stacked(examples: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Examples {name: array} as a batch {name: array [B, ...]}."""
    return {name: np.stack([each[name] for each in examples]) for name in examples[0]}


def unigram_entropy(dataset: sources.Dataset) -> float | None:
    """-sum_v q(v) ln p(v) in nats per token: the best loss of a model that ignores its context.

    q are validation frequencies; p are training frequencies with add-one smoothing. None if the
    splits have no `tokens`. Of more than 2^28 tokens, evenly spaced pieces are counted.
    """
    size = dataset.vocab_size
    if not size or not (hasattr(dataset.train, "tokens") and hasattr(dataset.validation, "tokens")):
        return None
    train, validation = (
        _token_counts(split.tokens, size) for split in (dataset.train, dataset.validation)
    )
    log_probability = np.log((train + 1) / (train.sum() + size))
    return float(-(validation @ log_probability) / validation.sum())


def _token_counts(tokens: Any, vocab_size: int, piece: int = 1 << 22) -> np.ndarray:
    """The count [V] of each token, without the first token, which is never a label."""
    # in pieces, because bincount copies its input to 8-byte integers
    counts = np.zeros(vocab_size)
    starts = range(1, len(tokens), piece)
    for start in starts[:: -(-len(starts) // 64)]:
        counts += np.bincount(tokens[start : start + piece], minlength=vocab_size)
    return counts


class Prefetch(Iterator, AbstractContextManager):
    """Iterates over put(get(step)) for start <= step < stop, made by a thread `depth` steps ahead.

    The thread starts at once. An error of `get` or `put` becomes a BadBatch that names the step and
    has the error as its cause; a ConfigError stays a ConfigError. `close`, `with` and deletion stop
    the thread after the batch that it is making, and the program waits for that batch, too.
    """

    def __init__(
        self, get: Callable, start: int, stop: int, depth: int = 2, put: Callable | None = None
    ):
        pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        make = get if put is None else lambda step: put(get(step))
        self._submitted = ((step, pool.submit(make, step)) for step in range(start, stop))
        self._ahead = deque(itertools.islice(self._submitted, depth + 1))
        self.close = weakref.finalize(self, pool.shutdown, cancel_futures=True)

    def __next__(self) -> Any:
        if not self._ahead or not self.close.alive:
            self.close()
            raise StopIteration
        step, batch = self._ahead.popleft()
        self._ahead.extend(itertools.islice(self._submitted, 1))
        if error := batch.exception():
            self.close()
            raise _with_place(f"the batch of step {step} could not be made", error) from error
        return batch.result()

    def __exit__(self, *_: object) -> None:
        self.close()
