"""Texts and their answers: translation, summaries, questions. Several pairs are packed in a row, or rows have a few lengths."""

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
from jaxformer.data.records import JSON_LINES, Policy, Problems, has_ending, lines, paths_as_text, records
from jaxformer.data.sources import Dataset, Question, context_length, digests, read_example
from jaxformer.errors import ConfigError


class Pair(NamedTuple):
    """A text and its answer; where they stand, for messages."""

    place: str
    source: str
    target: str


class Example(NamedTuple):
    """A pair as a model reads it: int arrays [t], and the tokens of an encoder [s], which are none for a decoder alone."""

    tokens: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    source: np.ndarray


@dataclass(frozen=True)
class Packed:
    """Several pairs in a batch row, one after another; each sees only itself. The rows are planned in advance.

    Pairs are taken in a random order. Each goes into the first of `open_rows` that is long enough.
    """

    open_rows: int = 64  # rows that are filled at a time

    def __post_init__(self):
        if self.open_rows < 1:
            raise ConfigError(f"data: Packed(open_rows={self.open_rows}): must be at least 1")

    def __call__(self, examples: Sequence[Example], lengths: tuple[int, int]) -> "Rows":
        members: list[list[int]] = []
        open_rows: list[tuple[int, list[int]]] = []  # (number, free tokens of the source and of the target)
        for pair in np.random.default_rng(0).permutation(len(examples)).tolist():
            s, t = len(examples[pair].source), len(examples[pair].tokens)
            open_row = next(((row, free) for row, free in open_rows if s <= free[0] and t <= free[1]), None)
            if open_row is None:
                open_row = len(members), list(lengths)
                members.append([])
                open_rows = [*open_rows, open_row][-self.open_rows :]
            row, free = open_row
            members[row].append(pair)
            free[:] = free[0] - s, free[1] - t
        return Rows(examples, members, [lengths])


@dataclass(frozen=True)
class Buckets:
    """One pair in a batch row; a batch holds pairs of about one length, padded to the first of `lengths` that fits all.

    The model's own lengths are always among them. A program is compiled for each length.
    """

    lengths: tuple[int, ...] = (16, 32, 64)  # tokens of a source and of a target

    def __call__(self, examples: Sequence[Example], lengths: tuple[int, int]) -> "Rows":
        shapes = [(min(n, lengths[0]), min(n, lengths[1])) for n in sorted(self.lengths) if n < max(lengths)] + [lengths]
        sizes = [(len(example.source), len(example.tokens)) for example in examples]
        kinds = np.array([next(i for i, (S, T) in enumerate(shapes) if s <= S and t <= T) for s, t in sizes])
        groups = [group for i in range(len(shapes)) if len(group := np.flatnonzero(kinds == i))]
        return Rows(examples, [[number] for number in range(len(examples))], shapes, batch_indices=partial(Batches, groups))


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of pairs, each of the first of `shapes` (source length, target length) that holds it.

    Arrays: tokens, labels, segment_ids int32 [B, T], weights float32 [B, T]; source, source_segment_ids int32 [B, S].
    """

    examples: Sequence[Example]
    members: list[list[int]]  # the pairs of each row
    shapes: list[tuple[int, int]]  # the smallest first
    questions: Sequence[Question] = ()
    batch_indices: Callable | None = None  # (seed, batch_size) -> [step] -> rows of one shape; None: any rows
    __getitem__ = read_example

    def __len__(self) -> int:
        return len(self.members)

    def take_rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The rows at `indices`, padded with zeros to the first shape that holds all of them."""
        S, T = self.shape(indices)
        batch: dict[str, np.ndarray] = {"weights": np.zeros((len(indices), T), np.float32)}
        batch |= {name: np.zeros((len(indices), T), np.int32) for name in ("tokens", "labels", "segment_ids")}
        batch |= {name: np.zeros((len(indices), S), np.int32) for name in ("source", "source_segment_ids") if S}
        for row, index in enumerate(indices):
            begin = source_begin = 0
            for segment, number in enumerate(self.members[index], 1):
                example = self.examples[number]
                columns = slice(begin, begin + len(example.tokens))
                source_columns = slice(source_begin, source_begin + len(example.source))
                begin, source_begin = columns.stop, source_columns.stop
                for name in ("tokens", "labels", "weights"):
                    batch[name][row, columns] = getattr(example, name)
                batch["segment_ids"][row, columns] = segment
                if S:
                    batch["source"][row, source_columns] = example.source
                    batch["source_segment_ids"][row, source_columns] = segment
        return batch

    def shape(self, indices: Iterable) -> tuple[int, int]:
        """The first shape (source length, target length) that holds the rows."""
        sizes = [[(len(self.examples[i].source), len(self.examples[i].tokens)) for i in self.members[row]] for row in indices]
        s, t = np.max([np.sum(row, axis=0) for row in sizes], axis=0)
        return next((S, T) for S, T in self.shapes if s <= S and t <= T)

    def padding(self) -> float:
        """The share of padding in the rows, of sources and targets together."""
        capacity = sum(sum(self.shape([row])) for row in range(len(self)))
        return 1 - sum(len(example.source) + len(example.tokens) for example in self.examples) / capacity


class Batches:
    """[step] -> row indices of one group, a function of (seed, step): `groups` are the rows of each shape.

    In an epoch each group is shuffled and cut into batches, the last one filled from its beginning; then all are shuffled.
    """

    def __init__(self, groups: Sequence[np.ndarray], seed: int, batch_size: int):
        self.groups, self.seed = groups, seed
        self.shapes = [(-(-len(group) // batch_size), batch_size) for group in groups]
        self.count = sum(count for count, _ in self.shapes)
        self._epoch = (-1, np.zeros((0, batch_size), int))

    def __getitem__(self, step: int) -> np.ndarray:
        epoch, index = divmod(step, self.count)
        if self._epoch[0] != epoch:
            rng = np.random.default_rng((self.seed, epoch))
            batches = [np.resize(rng.permutation(group), shape) for group, shape in zip(self.groups, self.shapes, strict=True)]
            self._epoch = epoch, rng.permutation(np.concatenate(batches))
        return self._epoch[1][index]


@dataclass(frozen=True)
class Pairs:
    """Pairs from two files of lines, `train`.SOURCE and `train`.TARGET (.gz too), or fields of what `data.records` reads.

    Source and target share a vocabulary, learned from the training pairs. Every text ends with the tokenizer's `end_of_text`.
    In an encoder-decoder the decoder reads `start` first, which must be the token that a model was trained with if it is
    trained on: T5 and Marian begin with the padding token (`decoder_start_token_id` of their config.json: 0 for T5), BART and
    fairseq with the end of a text, the default. A decoder alone has no such token: it reads source and target as one text, of
    which the target is learned.
    """

    train: str  # of files of lines the path without the ending
    validation: str  # the same of validation pairs
    source: str = "source"  # the ending of the file of sources, or the field
    target: str = "target"  # the same of targets
    tokenizer: str = "bpe"  # bytes, characters, bpe, or a tokenizer.json: its path, folder or Hugging Face name
    vocab_size: int | None = 8000  # bpe only
    rows: Callable = Packed()  # (examples, (S, T)) -> Rows for training: Packed or Buckets
    bad_rows: Policy = "error"  # rows that are empty, damaged or longer than the context
    start: int | None = None  # the id in front of a target; None: the tokenizer's `end_of_text`

    def __post_init__(self):
        paths_as_text(self, "train", "validation", "tokenizer")

    def open(self, model: Any) -> Dataset:
        problems = Problems(self.bad_rows)
        train, validation = (list(self._pairs(os.path.expanduser(path), problems)) for path in (self.train, self.validation))
        texts = itertools.chain.from_iterable(pair[1:] for pair in train)
        tokenizer = tokenizers.by_name(self.tokenizer, self.vocab_size, texts)
        name = f"{self.train} ({self.source}-{self.target})"
        return open_pairs(train, validation, tokenizer, model, self.rows, problems, name, self.start)

    def question(self, model: Any, tokenizer: Any, text: str, reference: str = "") -> Question:
        """A text as a model that was trained on these pairs is asked for its answer."""
        return question(model, tokenizer, text, reference, self.start)

    def _pairs(self, path: str, problems: Problems) -> Iterator[Pair]:
        texts = self._lines(path, problems)
        if path.startswith("hf:") or has_ending(path, *JSON_LINES, ".parquet"):
            texts = ((place, *values) for place, values in records(path, (self.source, self.target), problems))
        for place, source, target in texts:
            if not (isinstance(source, str) and isinstance(target, str)):
                problems.add(place, "no text", f" but {type(source).__name__} and {type(target).__name__}")
            elif source.strip() and target.strip():
                yield Pair(place, source.strip(), target.strip())
            else:
                problems.add(place, "empty")

    def _lines(self, path: str, problems: Problems) -> Iterator[tuple[str, str, str]]:
        files = [f"{path}.{ending}" for ending in (self.source, self.target)]
        files = [file if Path(file).exists() else f"{file}.gz" if Path(f"{file}.gz").exists() else file for file in files]
        texts = (lines(file, problems) for file in files)
        for (place, source), (other, target) in itertools.zip_longest(*texts, fillvalue=("", None)):
            if not (place and other):
                problems.add(place or other, "no line beside it", f" in {files[1] if place else files[0]}")
            elif source is not None and target is not None:
                yield place, source, target


def open_pairs(
    train: Sequence[Pair], validation: Sequence[Pair], tokenizer: Any, model: Any, rows: Callable = Packed(),
    problems: Problems | None = None, name: str = "pairs", start: int | None = None,
) -> Dataset:  # fmt: skip
    """A data set of pairs that are in memory; `start` as in `Pairs`. Raises ConfigError where no pair of a split fits."""
    problems = problems or Problems()
    encoder, T = getattr(model, "encoder", None), context_length(model)
    lengths = (0 if encoder is None else encoder.context_length, T)
    if tokenizer.end_of_text is None:
        raise ConfigError(
            f"data: {name}: the tokenizer has no token that ends a text; one of {', '.join(tokenizers.ENDS)} is needed"
        )
    size = max(tokenizer.vocab_size, tokenizer.end_of_text + 1, -1 if start is None else start + 1)
    if start is not None and (start < 0 or encoder is None):
        raise ConfigError(f"data.start={start}: expected the id of a token, and a model with an encoder; or None")
    splits = []
    for split_name, pairs in (("training", train), ("validation", validation)):
        splits.append(list(_encode(pairs, tokenizer, lengths, problems, start)))
        if not splits[-1]:
            raise ConfigError(f"data: {name}: no {split_name} pair fits the model's {lengths} tokens{problems}")
    train_examples, validation_examples = ([example for _, example in split] for split in splits)
    train_rows, packed = rows(train_examples, lengths), Packed()(validation_examples, lengths)
    questions = [question(model, tokenizer, pair.source, pair.target, start) for pair, _ in splits[1]]

    def digest(of_tokenizer: str) -> str:
        content = hashlib.sha256(f"{of_tokenizer} {lengths}".encode())
        for example in train_examples + validation_examples:
            content.update(example.source.tobytes() + example.tokens.tobytes() + example.labels.tobytes())
        return content.hexdigest()

    tokens = sum(int(example.weights.sum()) for example in train_examples)
    return Dataset(
        train=train_rows, validation=replace(packed, questions=questions), **digests(tokenizer, digest),
        vocab_size=size, tokenizer=tokenizer,
        description=f"{name}: {len(train_examples):,} training and {len(validation_examples):,} validation pairs, "
        f"{tokens:,} target tokens, vocabulary {tokenizer.vocab_size:,}; {len(train_rows):,} rows, "
        f"{train_rows.padding():.1%} padding{problems}",
    )  # fmt: skip


def question(model: Any, tokenizer: Any, text: str, reference: str = "", start: int | None = None) -> Question:
    """A text as a model that was trained on pairs is asked for its answer."""
    source = [*tokenizer.encode(text), tokenizer.end_of_text]
    start = tokenizer.end_of_text if start is None else start
    return Question([start], reference, source) if hasattr(model, "encoder") else Question(source, reference)


def _token_pairs(pairs: Sequence[Pair], tokenizer: Any, problems: Problems) -> Iterator[tuple[Pair, np.ndarray, np.ndarray]]:
    """(pair, tokens of its source, tokens of its target). A character that the training texts do not have is a problem."""
    try:
        texts = [tokenizer.encode_batch([pair[side] for pair in pairs]) for side in (1, 2)]
    except ConfigError:  # of one of them, which is looked for below
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
    pairs: Sequence[Pair], tokenizer: Any, lengths: tuple[int, int], problems: Problems, start: int | None
) -> Iterator[tuple[Pair, Example]]:
    end, one_text = np.array([tokenizer.end_of_text], np.int32), lengths[0] == 0
    front = end if start is None else np.array([start], np.int32)
    for pair, source, target in _token_pairs(pairs, tokenizer, problems):
        source, labels = np.concatenate([source, end]), np.concatenate([target, end])
        text = np.concatenate([source if one_text else front, labels])
        weights = (np.arange(len(text) - 1) >= (len(source) - 1 if one_text else 0)).astype(np.int32)
        example = Example(text[:-1], text[1:], weights, source[:0] if one_text else source)
        for name, tokens, limit in (("source", example.source, lengths[0]), ("target", example.tokens, lengths[1])):
            if len(tokens) > limit:
                problems.add(pair.place, f"{name} longer than the model's {limit} tokens", f" ({len(tokens)})")
                break
        else:
            yield pair, example
