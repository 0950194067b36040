"""A weighted mixture of data sets, as a function of (seed, step)."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxformer.data import batching
from jaxformer.data.sources import Dataset, Questions, read_example
from jaxformer.errors import ConfigError

SHARES = 1 << 20  # shares become whole numbers with about this sum


@dataclass(frozen=True)
class Mixed:
    """Every training batch takes its examples from several sources in fixed shares.

    The validation splits follow one another. Each source goes through epochs of its own. All must
    give the same arrays and have the same tokenizer.
    """

    # (share, data) of each source: ((0.7, Corpus("web/")), (0.3, Stdlib())); any sum of shares
    sources: tuple[tuple[float | int, Any], ...]

    def open(self, model: Any) -> Dataset:
        return open_mixture(self, model)


class Mixture:
    """Several splits, one after another, as one split. Batches take examples by the shares."""

    __getitem__ = read_example

    def __init__(self, splits: Sequence[Any], shares: Sequence[int]):
        self.splits = splits
        self.shares = shares
        self.ends = np.cumsum([len(split) for split in splits])
        marked = [getattr(split, "end_of_text", None) for split in splits]
        self.end_of_text = next((token for token in marked if token is not None), None)
        if all(hasattr(split, "questions") for split in splits):
            places = [(split.questions, i) for split in splits for i in range(len(split.questions))]
            self.questions = Questions(places, lambda place: place[0][place[1]])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def take_rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The examples at `indices` [B], each from its own split."""
        indices = np.asarray(indices)
        sources = np.searchsorted(self.ends, indices, side="right")
        batches = []
        selections = []
        for source in np.unique(sources):
            selection = np.flatnonzero(sources == source)
            first = self.ends[source] - len(self.splits[source])
            batches.append(batching.take_rows(self.splits[source], indices[selection] - first))
            selections.append(selection)
        # all batches need the same arrays; a text without documents has no control tokens
        if self.end_of_text is not None:
            batches = [
                {"control_tokens": np.zeros(batch["tokens"].shape, bool)} | batch
                for batch in batches
            ]
        order = np.argsort(np.concatenate(selections))
        return {
            name: np.concatenate([batch[name] for batch in batches])[order] for name in batches[0]
        }

    def batch_indices(self, seed: int, batch_size: int) -> "Order":
        """[step] -> the indices of a batch. Each split has epochs and an order of its own."""
        seeds = np.random.SeedSequence(seed).generate_state(len(self.splits)).tolist()
        lengths = [len(split) for split in self.splits]
        return Order(lengths, seeds, [0, *self.ends[:-1].tolist()], self.shares, batch_size)


@dataclass(frozen=True, eq=False)
class Order:
    """[step] -> the indices of a batch."""

    lengths: Sequence[int]  # examples of each source
    seeds: Sequence[int]  # of the order of each source
    firsts: Sequence[int]  # index of the first example of each source
    shares: Sequence[int]
    batch_size: int

    def __getitem__(self, step: int) -> np.ndarray:
        positions = step * self.batch_size + np.arange(self.batch_size + 1)
        counts = count_before(positions, self.shares)
        sources = np.argmax(np.diff(counts), axis=0)
        indices = np.zeros(self.batch_size, np.int64)
        for k in np.unique(sources):
            selection = np.flatnonzero(sources == k)
            indices[selection] = self.firsts[k] + batching.shuffled(
                counts[k, selection], self.lengths[k], self.seeds[k]
            )
        return indices


def count_before(positions: np.ndarray, shares: Sequence[int]) -> np.ndarray:
    """The number of examples of each source among the first p: [K, len(positions)].

    For every p it differs from the exact share by at most K. Of p examples the first source takes
    floor(p s / S + 1/2), with share s and sum S; the others share the rest in the same way.
    """
    remaining = positions.astype(np.int64)
    counts = []
    for k, share in enumerate(shares):
        total = sum(shares[k:])
        counts.append((2 * remaining * share + total) // (2 * total))
        remaining = remaining - counts[-1]
    return np.stack(counts)


def open_mixture(config: Mixed, model: Any) -> Dataset:
    """Opens every source. Raises ConfigError if they cannot be one data set."""
    if not config.sources or not all(0 < share < float("inf") for share, _ in config.sources):
        raise ConfigError(
            f"data.sources: expected pairs (finite share above 0, data), not {config.sources}"
        )
    datasets = [batching.open_dataset(data, model) for _, data in config.sources]
    for number, dataset in enumerate(datasets):
        _check_source(f"data.sources[{number}]", dataset, datasets[0])
    total = sum(share for share, _ in config.sources)
    shares = [max(1, round(share / total * SHARES)) for share, _ in config.sources]
    digests = [dataset.digest for dataset in datasets]
    former = [next(iter(dataset.former_digests), dataset.digest) for dataset in datasets]
    words = [
        f"{share / sum(shares):.1%} {dataset.description}"
        for share, dataset in zip(shares, datasets, strict=True)
    ]
    return Dataset(
        train=Mixture([dataset.train for dataset in datasets], shares),
        validation=Mixture([dataset.validation for dataset in datasets], shares),
        digest=_digest(shares, digests),
        description=" + ".join(words),
        former_digests=() if former == digests else (_digest(shares, former),),
        vocab_size=datasets[0].vocab_size,
        tokenizer=datasets[0].tokenizer,
    )


def _check_source(name: str, dataset: Dataset, first: Dataset) -> None:
    """Raises ConfigError if a source cannot be mixed with the first one."""
    if batching.reads_state(dataset.train):
        raise ConfigError(
            f"{name} makes its batches of the state ({dataset.description}); it cannot be mixed"
        )
    if len(dataset.train) == 0:
        raise ConfigError(f"{name} has no training example ({dataset.description})")
    if getattr(dataset.train, "batch_indices", None) is not None:
        raise ConfigError(
            f"{name} chooses its own batches ({dataset.description}); it cannot be mixed"
        )
    form = _form(dataset)
    first_form = _form(first)
    if form != first_form:
        raise ConfigError(
            f"{name} gives {form}, but data.sources[0] {first_form}; all must be alike"
        )


def _digest(shares: Sequence[int], digests: Sequence[str]) -> str:
    return hashlib.sha256(f"{shares} {digests}".encode()).hexdigest()


def _form(dataset: Dataset) -> str:
    """The arrays of an example, the vocabulary and the tokenizer: equal for all sources."""
    example = {name: array for name, array in dataset.train[0].items() if name != "control_tokens"}
    arrays = [f"{name} {array.dtype}{list(array.shape)}" for name, array in sorted(example.items())]
    return (
        f"{', '.join(arrays)}, vocabulary {dataset.vocab_size}, "
        f"tokenizer {getattr(dataset.tokenizer, 'digest', None)}"
    )
