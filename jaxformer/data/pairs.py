"""Pairs of a text and its answer: translation, summaries, questions.

Rows of a batch hold several packed pairs, or one pair padded to one of a few lengths.
"""

import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxformer.data import tokenizers
from jaxformer.data.records import (
    JSON_LINES,
    Policy,
    Problems,
    has_ending,
    lines,
    paths_as_text,
    records,
)
from jaxformer.data.sources import Dataset, Question, context_length, digests, read_example
from jaxformer.errors import ConfigError


class Pair(NamedTuple):
    """A text and its answer, with their place for messages."""

    place: str
    source: str
    target: str


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


@dataclass(frozen=True)
class Pairs:
    """Pairs from two files of lines, `train`.SOURCE and `train`.TARGET, or from fields of records.

    Files of lines may end in .gz; `data.records` says which files have records. Source and target
    share a vocabulary, learned from the training pairs. Every text ends with the tokenizer's
    `end_of_text`.

    In an encoder-decoder the decoder reads `start` first. To train a pretrained model further, give
    the token that it was trained with: T5 and Marian begin with the padding token
    (`decoder_start_token_id` of their config.json: 0 for T5), BART and fairseq with the end of a
    text, the default. A decoder-only model has no such token: it reads source and target as one
    text, and only the target has weight.
    """

    train: str  # file of records, or path of two files of lines without the ending
    validation: str  # the same for validation pairs
    source: str = "source"  # ending of the file of sources, or field of the source
    target: str = "target"  # ending of the file of targets, or field of the target
    # bytes, characters, bpe, or a tokenizer.json: its path, folder or Hugging Face name
    tokenizer: str = "bpe"
    vocab_size: int | None = 8000  # bpe only
    rows: Callable = Packed()  # (examples, (S, T)) -> Rows for training: Packed or Buckets
    bad_rows: Policy = "error"  # rows that are empty, damaged or longer than the context
    start: int | None = None  # the id in front of a target; None: the tokenizer's `end_of_text`

    def __post_init__(self):
        paths_as_text(self, "train", "validation", "tokenizer")

    def open(self, model: Any) -> Dataset:
        problems = Problems(self.bad_rows)
        train, validation = (
            list(self._pairs(os.path.expanduser(path), problems))
            for path in (self.train, self.validation)
        )
        texts = itertools.chain.from_iterable(pair[1:] for pair in train)
        tokenizer = tokenizers.by_name(self.tokenizer, self.vocab_size, texts)
        name = f"{self.train} ({self.source}-{self.target})"
        return open_pairs(
            train, validation, tokenizer, model, self.rows, problems, name, self.start
        )

    def question(self, model: Any, tokenizer: Any, text: str, reference: str = "") -> Question:
        """The question that asks a model trained on these pairs for the answer to a text."""
        return question(model, tokenizer, text, reference, self.start)

    def _pairs(self, path: str, problems: Problems) -> Iterator[Pair]:
        texts = self._lines(path, problems)
        if path.startswith("hf:") or has_ending(path, *JSON_LINES, ".parquet"):
            texts = (
                (place, *values)
                for place, values in records(path, (self.source, self.target), problems)
            )
        for place, source, target in texts:
            if not (isinstance(source, str) and isinstance(target, str)):
                problems.add(
                    place, "no text", f" but {type(source).__name__} and {type(target).__name__}"
                )
            elif source.strip() and target.strip():
                yield Pair(place, source.strip(), target.strip())
            else:
                problems.add(place, "empty")

    def _lines(self, path: str, problems: Problems) -> Iterator[tuple[str, str, str]]:
        files = [_or_compressed(f"{path}.{ending}") for ending in (self.source, self.target)]
        texts = (lines(file, problems) for file in files)
        for (place, source), (other, target) in itertools.zip_longest(*texts, fillvalue=("", None)):
            if not (place and other):
                problems.add(
                    place or other, "no line beside it", f" in {files[1] if place else files[0]}"
                )
            elif source is not None and target is not None:
                yield place, source, target


def _or_compressed(file: str) -> str:
    """The file, or FILE.gz if only that exists."""
    if not Path(file).exists() and Path(f"{file}.gz").exists():
        return f"{file}.gz"
    return file


def open_pairs(
    train: Sequence[Pair],
    validation: Sequence[Pair],
    tokenizer: Any,
    model: Any,
    rows: Callable = Packed(),
    problems: Problems | None = None,
    name: str = "pairs",
    start: int | None = None,
) -> Dataset:
    """The data set of pairs in memory; `start` as in `Pairs`.

    Raises ConfigError if no pair of a split fits the model.
    """
    problems = problems or Problems()
    encoder = getattr(model, "encoder", None)
    lengths = (0 if encoder is None else encoder.context_length, context_length(model))
    if tokenizer.end_of_text is None:
        raise ConfigError(
            f"data: {name}: the tokenizer has no token that ends a text; "
            f"one of {', '.join(tokenizers.ENDS)} is needed"
        )
    size = max(tokenizer.vocab_size, tokenizer.end_of_text + 1, -1 if start is None else start + 1)
    if start is not None and (start < 0 or encoder is None):
        raise ConfigError(
            f"data.start={start}: expected the id of a token, and a model with an encoder; or None"
        )
    encoded = [
        list(_encode(pairs, tokenizer, lengths, problems, start)) for pairs in (train, validation)
    ]
    questions = [
        question(model, tokenizer, pair.source, pair.target, start) for pair, _ in encoded[1]
    ]
    train_examples, validation_examples = ([example for _, example in split] for split in encoded)
    return dataset_of_examples(
        train_examples,
        validation_examples,
        tokenizer=tokenizer,
        lengths=lengths,
        rows=rows,
        questions=questions,
        name=name,
        kind="pair",
        problems=problems,
        vocab_size=size,
    )


def dataset_of_examples(
    train: Sequence[Example],
    validation: Sequence[Example],
    *,
    tokenizer: Any,
    lengths: tuple[int, int],
    rows: Callable,
    questions: Sequence[Question],
    name: str,
    kind: str,
    problems: Problems,
    vocab_size: int | None = None,
) -> Dataset:
    """The data set of examples that fit `lengths` (source, target). `kind` names one of them.

    Raises ConfigError if a split has none.
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
        train=train_rows,
        validation=replace(validation_rows, questions=questions),
        **digests(tokenizer, digest),
        vocab_size=vocab_size or tokenizer.vocab_size,
        tokenizer=tokenizer,
        description=f"{name}: {len(train):,} training and "
        f"{len(validation):,} validation {kind}s, {tokens:,} target tokens, "
        f"vocabulary {tokenizer.vocab_size:,}; {len(train_rows):,} rows, "
        f"{train_rows.padding():.1%} padding{problems}",
    )


def question(
    model: Any, tokenizer: Any, text: str, reference: str = "", start: int | None = None
) -> Question:
    """The question that asks a model trained on pairs for the answer to a text."""
    source = [*tokenizer.encode(text), tokenizer.end_of_text]
    start = tokenizer.end_of_text if start is None else start
    if hasattr(model, "encoder"):
        return Question([start], reference, source)
    return Question(source, reference)


def _token_pairs(
    pairs: Sequence[Pair], tokenizer: Any, problems: Problems
) -> Iterator[tuple[Pair, np.ndarray, np.ndarray]]:
    """(pair, tokens of its source, tokens of its target) of each pair.

    A text that the tokenizer cannot encode is a problem: a character outside the training texts.
    """
    try:
        texts = [tokenizer.encode_batch([pair[side] for pair in pairs]) for side in (1, 2)]
    except ConfigError:  # one of the texts failed; it is found below
        texts = None
    if texts is not None:
        yield from zip(pairs, *texts, strict=True)
        return
    for pair in pairs:
        try:
            source, target = tokenizer.encode_batch([pair.source, pair.target])
        except ConfigError as error:
            problems.add(pair.place, "not a text of the tokenizer", f" ({error})")
        else:
            yield pair, source, target


def _encode(
    pairs: Sequence[Pair],
    tokenizer: Any,
    lengths: tuple[int, int],
    problems: Problems,
    start: int | None,
) -> Iterator[tuple[Pair, Example]]:
    """(pair, example) of each pair that fits `lengths` (source, target); others are problems."""
    end = np.array([tokenizer.end_of_text], np.int32)
    front = end if start is None else np.array([start], np.int32)
    has_encoder = lengths[0] > 0
    for pair, source, target in _token_pairs(pairs, tokenizer, problems):
        source = np.concatenate([source, end])
        target = np.concatenate([target, end])
        text = np.concatenate([front if has_encoder else source, target])
        unlearned = 0 if has_encoder else len(source) - 1  # labels of the source, of weight 0
        weights = (np.arange(len(text) - 1) >= unlearned).astype(np.int32)
        example = Example(text[:-1], text[1:], weights, source if has_encoder else source[:0])
        for name, tokens, limit in (
            ("source", example.source, lengths[0]),
            ("target", example.tokens, lengths[1]),
        ):
            if len(tokens) > limit:
                problems.add(
                    pair.place,
                    f"{name} longer than the model's {limit} tokens",
                    f" ({len(tokens)})",
                )
                break
        else:
            yield pair, example
