"""Batches as a function of (seed, step), validation in order, and a thread that keeps a few batches ahead."""

import functools
import queue
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxformer.data import sources
from jaxformer.errors import ConfigError


def open_dataset(data: Any, model: Any) -> sources.Dataset:
    """`data.open(model)`, checked. Raises ConfigError, in one line, where it is no data set."""
    dataset = data.open(model)
    for name in ("train", "validation", "digest"):
        if not hasattr(dataset, name):
            raise ConfigError(
                f"data: {type(data).__name__}.open returned no .{name}; return a jaxformer.data.sources.Dataset"
            )
    for name in ("train", "validation"):
        split = getattr(dataset, name)
        for method in ("__len__", "__getitem__"):
            if not hasattr(type(split), method):
                raise ConfigError(
                    f"data: the {name} split {type(split).__name__} has no {method}; a split has len and [i] -> example; of an "
                    "endless stream let len be one epoch"
                )
    if not isinstance(dataset.digest, str):
        raise ConfigError(f"data: digest={dataset.digest!r}: expected a text that identifies the data")
    return dataset


def batches(split: Any, batch_size: int, seed: int, own: np.ndarray | None = None) -> Any:
    """A grain.MapDataset: [step] -> rows `own` (None: all) of the global batch [B, T], a pure function of (seed, step).

    The global batch is elements step*B onwards of an endless order, a new permutation each epoch. Only its own rows are read
    or made here, and the batch is the same however many processes share it.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size: {batch_size} is not positive")
    if seed < 0:
        raise ConfigError(f"seed: {seed} is negative")
    if len(split) == 0:
        raise ConfigError("data: there is nothing to train on, the split is empty")
    # indices are batched rather than examples: one vectorised gather instead of B small ones
    mine = slice(None) if own is None else own
    return _order(len(split), seed).batch(batch_size).map(lambda indices: take_rows(split, indices[mine]))


LARGEST = 2**32 - 1  # grain's shuffle has indices of 32 bits


def _order(n: int, seed: int) -> Any:
    """A grain.MapDataset of indices below n without end: each n of them a permutation, no two epochs the same one."""
    import grain  # 1 s, shared with orbax and jax: a missing file should be reported before that

    if n > 1 << 16:
        # grain shuffles epoch e with seed + e, so that neighbouring seeds would share epochs: spread them out
        spread = int(np.random.SeedSequence(seed).generate_state(1)[0])
        if n > LARGEST:
            raise ConfigError(f"data: a split of {n:,} examples; at most {LARGEST:,} can be shuffled, let len be fewer")
        return grain.MapDataset.range(n).shuffle(seed=spread).repeat()

    # grain's shuffle works on blocks of 2**16 at least and walks to an index below n: 0.5 ms an index where n is 50
    @functools.lru_cache(maxsize=4)
    def permutation(epoch: int) -> np.ndarray:
        return np.random.default_rng((seed, epoch)).permutation(n)

    return grain.MapDataset.range(sys.maxsize).map(lambda index: permutation(index // n)[index % n])


class ValidationBatches:
    """The split in order, once: `len` batches [B, ...]; the last is filled up with rows of weight 0. `own` as in `batches`.

    Weights are [B, ...], of tokens or of whole examples. Raises ConfigError where examples have none.
    """

    def __init__(self, split: Any, batch_size: int, own: np.ndarray | None = None):
        if batch_size < 1:
            raise ConfigError(f"batch_size: {batch_size} is not positive")
        self.split, self.batch_size = split, batch_size
        self.own = np.arange(batch_size) if own is None else own

    def __len__(self) -> int:
        return -(-len(self.split) // self.batch_size)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        indices = range(len(self))[index] * self.batch_size + self.own
        batch = take_rows(self.split, np.minimum(indices, len(self.split) - 1))
        if "weights" not in batch:
            raise ConfigError(f"data: validation examples have no weights, only {', '.join(batch)}; add weights of 1")
        weights = np.asarray(batch["weights"])
        real = (indices < len(self.split)).reshape(-1, *(1,) * (weights.ndim - 1))
        return batch | {"weights": np.where(real, weights, 0).astype(np.float32)}


validation_batches = ValidationBatches


def take_rows(split: Any, indices: np.ndarray) -> dict[str, np.ndarray]:
    """Examples number `indices` as one batch: by the split's own `take_rows`, or one by one where it has none."""
    if hasattr(split, "take_rows"):
        return split.take_rows(indices)
    rows = [split[int(index)] for index in indices]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def unigram_entropy(dataset: sources.Dataset) -> float:
    """-sum_v q(v) ln p(v), nats per token: validation frequencies q under training frequencies p (add-one smoothed).

    What a model that ignores its context can reach. Splits without `tokens` are counted over 4,096 examples at most.
    """
    size = dataset.vocab_size or 0
    train, validation = (_label_counts(split, size) for split in (dataset.train, dataset.validation))
    log_probability = np.log((train + 1) / (train.sum() + size))
    return float(-(validation @ log_probability) / validation.sum())


def _label_counts(split: Any, vocab_size: int) -> np.ndarray:
    if not hasattr(split, "tokens"):
        batch = take_rows(split, np.arange(min(len(split), 4096)))
        return np.bincount(batch["labels"].ravel(), batch["weights"].ravel(), vocab_size)
    counts = np.zeros(vocab_size)
    for start in range(1, len(split.tokens), 1 << 22):  # a piece at a time: bincount widens its input to 8 bytes
        counts += np.bincount(split.tokens[start : start + (1 << 22)], minlength=vocab_size)
    return counts


class Prefetch:
    """Iterates over put(get(step)) for start <= step < stop; a thread, begun at once, works `depth` steps ahead.

    What `get` or `put` raises is raised in the consumer as a RuntimeError that names the step, with the original as its
    cause. Leaving early (`close`, `with`, dropping it, the end of the program) stops the thread when the batch in the
    making is done, and waits for that up to 10 s.
    """

    def __init__(
        self, get: Callable[[int], Any], start: int, stop: int, depth: int = 2, put: Callable[[Any], Any] | None = None
    ):
        self._queue: queue.Queue = queue.Queue(maxsize=max(depth, 1))
        stopped = threading.Event()
        # the thread knows the queue and the event but not this object, which can therefore be dropped while it runs
        arguments = (get, put, range(start, stop), self._queue, stopped)
        thread = threading.Thread(target=_produce, args=arguments, name="prefetch", daemon=True)
        self._finalizer = weakref.finalize(self, _stop, thread, self._queue, stopped)
        thread.start()

    def __iter__(self) -> "Prefetch":
        return self

    def __next__(self) -> Any:
        if not self._finalizer.alive:
            raise StopIteration
        step, batch, error = self._queue.get()
        if step is not None and error is None:
            return batch
        self.close()
        if error is None:
            raise StopIteration
        raise RuntimeError(f"the batch of step {step} could not be made: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Stops the thread and waits for it; harmless when repeated."""
        self._finalizer()

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


prefetch = Prefetch


def _produce(get: Callable, put: Callable | None, steps: range, out: queue.Queue, stopped: threading.Event) -> None:
    """Puts (step, batch, None) for every step, then (None, None, None); or (step, None, error) as the last."""
    item: tuple = (None, None, None)
    for step in steps:
        if stopped.is_set():
            return
        try:
            batch = get(step)
            out.put((step, batch if put is None else put(batch), None))
        except BaseException as error:
            item = (step, None, error)
            break
    if not stopped.is_set():
        out.put(item)


def _stop(thread: threading.Thread, out: queue.Queue, stopped: threading.Event) -> None:
    stopped.set()
    # Emptied, the queue has room for the one thing that the thread may still put before it looks at the event.
    try:
        while True:
            out.get_nowait()
    except queue.Empty:
        pass
    if thread is not threading.current_thread():
        thread.join(timeout=10)
