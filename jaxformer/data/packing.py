"""Examples of any length as rows of a batch, which hold several packed ones, or one padded."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jaxformer.data.records import Problems
from jaxformer.data.sources import Dataset, Question, digests, read_example
from jaxformer.errors import ConfigError


class Example(NamedTuple):
    """A pair as a model reads it: int arrays [t], and the tokens of the encoder [s].

    For a decoder-only model s = 0.
    """

    tokens: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    source: np.ndarray


@dataclass(frozen=True)
class Packed:
    """Several pairs in a batch row, one after another; a token attends only within its pair.

    The rows are planned in advance: pairs are taken in a random order, and each goes into the first
    of `open_rows` rows with enough free tokens.
    """

    open_rows: int = 64  # rows that are filled at the same time

    def __post_init__(self):
        if self.open_rows < 1:
            raise ConfigError(f"data: Packed(open_rows={self.open_rows}): must be at least 1")

    def __call__(self, examples: Sequence[Example], lengths: tuple[int, int]) -> "Rows":
        rows: list[_PackedRow] = []
        open_rows: list[_PackedRow] = []
        for number in np.random.default_rng(0).permutation(len(examples)).tolist():
            source = len(examples[number].source)
            target = len(examples[number].tokens)
            fitting = (
                row for row in open_rows if source <= row.free_source and target <= row.free_target
            )
            row = next(fitting, None)
            if row is None:
                row = _PackedRow([], *lengths)
                rows.append(row)
                open_rows = [*open_rows, row][-self.open_rows :]
            row.members.append(number)
            row.free_source -= source
            row.free_target -= target
        return Rows(examples, [row.members for row in rows], [lengths])


@dataclass(slots=True)
class _PackedRow:
    """A row while it is filled."""

    members: list[int]  # numbers of its examples
    free_source: int  # tokens
    free_target: int


@dataclass(frozen=True)
class Buckets:
    """One pair in a batch row; a batch holds pairs of similar length, padded to one of `lengths`.

    It is the first that fits all pairs. The model's own lengths are always among them. A program is
    compiled for each length.
    """

    lengths: tuple[int, ...] = (16, 32, 64)  # tokens of a source and of a target

    def __call__(self, examples: Sequence[Example], lengths: tuple[int, int]) -> "Rows":
        shorter = [n for n in sorted(self.lengths) if n < max(lengths)]
        shapes = [(min(n, lengths[0]), min(n, lengths[1])) for n in shorter] + [lengths]
        groups: list[list[int]] = [[] for _ in shapes]
        for number, example in enumerate(examples):
            shape = _first_shape(shapes, len(example.source), len(example.tokens))
            groups[shapes.index(shape)].append(number)
        members = [[number] for number in range(len(examples))]
        indices = [np.array(group) for group in groups if group]
        return Rows(examples, members, shapes, batch_indices=partial(Batches, indices))


def _first_shape(
    shapes: Sequence[tuple[int, int]], source_length: int, target_length: int
) -> tuple[int, int]:
    """The first shape (source length, target length) that is long enough."""
    return next((S, T) for S, T in shapes if source_length <= S and target_length <= T)


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of pairs. A batch has the first of `shapes` (source length, target length) that fits.

    Arrays: tokens, labels and segment_ids int32 [B, T], weights float32 [B, T]; source and
    source_segment_ids int32 [B, S].
    """

    examples: Sequence[Example]
    members: list[list[int]]  # the pairs of each row
    shapes: list[tuple[int, int]]  # the smallest first
    questions: Sequence[Question] = ()
    # (seed, batch_size) -> [step] -> rows of one shape; None: any rows
    batch_indices: Callable | None = None
    __getitem__ = read_example

    def __len__(self) -> int:
        return len(self.members)

    def take_rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The rows at `indices`, padded with zeros to the first shape that holds all of them."""
        S, T = self.shape(indices)
        batch: dict[str, np.ndarray] = {"weights": np.zeros((len(indices), T), np.float32)}
        for name in ("tokens", "labels", "segment_ids"):
            batch[name] = np.zeros((len(indices), T), np.int32)
        if S:
            for name in ("source", "source_segment_ids"):
                batch[name] = np.zeros((len(indices), S), np.int32)
        for row, index in enumerate(indices):
            begin = source_begin = 0
            for segment, number in enumerate(self.members[index], 1):
                example = self.examples[number]
                columns = slice(begin, begin + len(example.tokens))
                source_columns = slice(source_begin, source_begin + len(example.source))
                begin = columns.stop
                source_begin = source_columns.stop
                for name in ("tokens", "labels", "weights"):
                    batch[name][row, columns] = getattr(example, name)
                batch["segment_ids"][row, columns] = segment
                if S:
                    batch["source"][row, source_columns] = example.source
                    batch["source_segment_ids"][row, source_columns] = segment
        return batch

    def shape(self, indices: Iterable) -> tuple[int, int]:
        """The first shape (source length, target length) that holds the rows."""
        sizes = [
            [
                (len(self.examples[i].source), len(self.examples[i].tokens))
                for i in self.members[row]
            ]
            for row in indices
        ]
        source_length, target_length = np.max(
            [np.sum(row, axis=0) for row in sizes], axis=0
        ).tolist()
        return _first_shape(self.shapes, source_length, target_length)

    def padding(self) -> float:
        """The share of padding in the rows, of sources and targets together."""
        capacity = sum(sum(self.shape([row])) for row in range(len(self)))
        used = sum(len(example.source) + len(example.tokens) for example in self.examples)
        return 1 - used / capacity


class Batches:
    """[step] -> row indices of one group, a function of (seed, step).

    `groups` are the rows of each shape. In an epoch each group is shuffled and cut into batches;
    its last batch is filled from its beginning. Then all batches are shuffled.
    """

    def __init__(self, groups: Sequence[np.ndarray], seed: int, batch_size: int):
        self.groups = groups
        self.seed = seed
        self.shapes = [(-(-len(group) // batch_size), batch_size) for group in groups]
        self.count = sum(count for count, _ in self.shapes)
        self._epoch = (-1, np.zeros((0, batch_size), int))

    def __getitem__(self, step: int) -> np.ndarray:
        epoch, index = divmod(step, self.count)
        if self._epoch[0] != epoch:
            rng = np.random.default_rng((self.seed, epoch))
            batches = [
                np.resize(rng.permutation(group), shape)
                for group, shape in zip(self.groups, self.shapes, strict=True)
            ]
            self._epoch = epoch, rng.permutation(np.concatenate(batches))
        return self._epoch[1][index]


def dataset_of_examples(
    train: Sequence[Example],
    validation: Sequence[Example],
    *,
    tokenizer: Any,
    lengths: tuple[int, int],
    rows: Callable,
    questions: tuple[Sequence[Question], Sequence[Question]],
    name: str,
    kind: str,
    problems: Problems,
    vocab_size: int | None = None,
) -> Dataset:
    """The data set of examples that fit `lengths` (source, target). `kind` names one of them.

    `questions` are those of training and of validation. Raises ConfigError if a split has none.
    """
    for split_name, examples in (("training", train), ("validation", validation)):
        if not examples:
            raise ConfigError(
                f"data: {name}: no {split_name} {kind} fits the model's {lengths} tokens{problems}"
            )
    train_rows = rows(train, lengths)
    validation_rows = Packed()(validation, lengths)

    def digest(of_tokenizer: str) -> str:
        content = hashlib.sha256(f"{of_tokenizer} {lengths}".encode())
        for example in [*train, *validation]:
            content.update(
                example.source.tobytes() + example.tokens.tobytes() + example.labels.tobytes()
            )
        return content.hexdigest()

    tokens = sum(int(example.weights.sum()) for example in train)
    return Dataset(
        train=_with_questions(train_rows, questions[0]),
        validation=replace(validation_rows, questions=questions[1]),
        **digests(tokenizer, digest),
        vocab_size=vocab_size or tokenizer.vocab_size,
        tokenizer=tokenizer,
        description=f"{name}: {len(train):,} training and "
        f"{len(validation):,} validation {kind}s, {tokens:,} target tokens, "
        f"vocabulary {tokenizer.vocab_size:,}; {len(train_rows):,} rows, "
        f"{train_rows.padding():.1%} padding{problems}",
    )


def _with_questions(rows: Any, questions: Sequence[Question]) -> Any:
    """The rows with questions. Rows of a user's own function stay as they are."""
    return replace(rows, questions=questions) if isinstance(rows, Rows) else rows
