"""Texts and their answers: translation, summaries, questions. Several pairs are packed in a row, or rows have a few lengths."""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxformer.data import tokenizers
from jaxformer.data.records import Policy, Problems, lines, records
from jaxformer.data.sources import Dataset, Question, context_length
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
    """Several pairs in a row, one after another, each of which sees only itself: a precomputed index of rows.

    Pairs are taken in a random order, and each goes into the first of `open_rows` that has room.
    """

    open_rows: int = 64

    def __call__(self, examples: Sequence[Example], lengths: tuple[int, int]) -> "Rows":
        done: list[list[int]] = []
        rows: list[tuple[list[int], list[int]]] = []  # (pairs, room left of source and target)
        for number in np.random.default_rng(0).permutation(len(examples)).tolist():
            needed = len(examples[number].source), len(examples[number].tokens)
            for members, room in rows:
                if needed[0] <= room[0] and needed[1] <= room[1]:
                    break
            else:
                if len(rows) == self.open_rows:
                    done.append(rows.pop(0)[0])
                members, room = [], list(lengths)
                rows.append((members, room))
            members.append(number)
            room[:] = room[0] - needed[0], room[1] - needed[1]
        return Rows(examples, [*done, *(members for members, _ in rows)], [lengths])


@dataclass(frozen=True)
class Buckets:
    """One pair in a row; a batch holds pairs of about the same length, padded to the smallest of `lengths` that fits all.

    The model's own lengths are always among them. A program is compiled for each length.
    """

    lengths: tuple[int, ...] = (16, 32, 64)

    def __call__(self, examples: Sequence[Example], lengths: tuple[int, int]) -> "Rows":
        shapes = [(min(n, lengths[0]), min(n, lengths[1])) for n in sorted(self.lengths) if n < max(lengths)]
        return Rows(examples, [[number] for number in range(len(examples))], [*shapes, lengths])


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of pairs, each of the first of `shapes` (source length, target length) that holds it.

    Arrays: tokens, labels, segment_ids int32 [B, T], weights float32 [B, T]; source, source_segment_ids int32 [B, S].
    """

    examples: Sequence[Example]
    members: list[list[int]]  # the pairs of each row
    shapes: list[tuple[int, int]]  # the smallest first
    questions: Sequence[Question] = ()

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {name: rows[0] for name, rows in self.take_rows(np.array([range(len(self))[index]])).items()}

    def take_rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The rows at `indices`, padded with zeros to the shape that holds all of them."""
        S, T = self.shapes[max(self.shape_of(int(index)) for index in indices)]
        batch = {name: np.zeros((len(indices), T), np.int32) for name in ("tokens", "labels", "segment_ids")}
        batch["weights"] = np.zeros((len(indices), T), np.float32)
        batch |= {name: np.zeros((len(indices), S), np.int32) for name in ("source", "source_segment_ids") if S}
        for row, index in enumerate(indices):
            begin = source_begin = 0
            for segment, number in enumerate(self.members[index], 1):
                example = self.examples[number]
                here = slice(begin, begin + len(example.tokens))
                there = slice(source_begin, source_begin + len(example.source))
                begin, source_begin = here.stop, there.stop
                for name in ("tokens", "labels", "weights"):
                    batch[name][row, here] = getattr(example, name)
                batch["segment_ids"][row, here] = segment
                if S:
                    batch["source"][row, there] = example.source
                    batch["source_segment_ids"][row, there] = segment
        return batch

    def shape_of(self, index: int) -> int:
        """The number of the first shape that holds a row."""
        if len(self.shapes) == 1:
            return 0
        (number,) = self.members[index]
        s, t = len(self.examples[number].source), len(self.examples[number].tokens)
        return next(i for i, (S, T) in enumerate(self.shapes) if s <= S and t <= T)

    def batch_indices(self, seed: int, batch_size: int) -> Any:
        """Of rows of several shapes, the rows of each step, all of one shape; None: any row may stand beside any other."""
        return None if len(self.shapes) == 1 else Batches(self, seed, batch_size)

    def padding(self) -> float:
        """The share of what the rows hold that is padding, of sources and targets together."""
        rooms = sum(sum(self.shapes[self.shape_of(index)]) for index in range(len(self)))
        return 1 - sum(len(example.source) + len(example.tokens) for example in self.examples) / rooms


class Batches:
    """[step] -> indices of one shape. In an epoch, each shape's rows are shuffled and cut; the last batch of a shape is
    filled from its beginning; then all batches are shuffled. A function of (seed, step)."""

    def __init__(self, rows: Rows, seed: int, batch_size: int):
        shapes = np.array([rows.shape_of(index) for index in range(len(rows))])
        self.groups = [found for i in range(len(rows.shapes)) if len(found := np.flatnonzero(shapes == i))]
        self.seed, self.batch_size, self._epoch = seed, batch_size, (-1, np.zeros((0, batch_size), int))
        self.count = sum(-(-len(group) // batch_size) for group in self.groups)

    def __getitem__(self, step: int) -> np.ndarray:
        epoch, index = divmod(step, self.count)
        if self._epoch[0] != epoch:
            rng, cut = np.random.default_rng((self.seed, epoch)), self.batch_size
            batches = [np.resize(rng.permutation(group), (-(-len(group) // cut), cut)) for group in self.groups]
            self._epoch = epoch, rng.permutation(np.concatenate(batches))
        return self._epoch[1][index]


@dataclass(frozen=True)
class Pairs:
    """Pairs from two files of lines, `train`.SOURCE and `train`.TARGET (.gz too), or fields of .jsonl, .parquet and hf:NAME#SPLIT.

    Source and target share a vocabulary, learned from the training pairs. Every text ends with the tokenizer's `end`, and a
    target begins with it. A decoder alone reads source and target as one text, of which the target is learned.
    """

    train: str  # of files of lines the path without the ending
    validation: str
    source: str = "source"  # the ending of the file of sources, or the field
    target: str = "target"
    tokenizer: Literal["bpe", "bytes"] = "bpe"  # what a token is
    vocab_size: int | None = 8000  # bpe only
    rows: Callable = Packed()  # (examples, (S, T)) -> training rows: Packed or Buckets
    bad_rows: Policy = "error"  # rows that are empty, damaged or longer than the context

    def open(self, model: Any) -> Dataset:
        problems = Problems(self.bad_rows)
        train = list(self._pairs(self.train, problems))
        validation = list(self._pairs(self.validation, problems))
        tokenizer = self._learn(train)
        return open_pairs(train, validation, tokenizer, model, self.rows, problems, f"{self.train} ({self.source}-{self.target})")

    def _learn(self, pairs: Sequence[Pair]) -> Any:
        if self.tokenizer == "bytes":
            return tokenizers.Bytes()
        return tokenizers.BPE.train("\n".join(itertools.chain.from_iterable(pair[1:] for pair in pairs)), self.vocab_size or 0)

    def _pairs(self, path: str, problems: Problems) -> Iterator[Pair]:
        found = self._lines(path, problems)
        if path.startswith("hf:") or path.removesuffix(".gz").endswith((".jsonl", ".json", ".parquet")):
            found = ((place, *map(str, values)) for place, values in records(path, (self.source, self.target), problems))
        for place, source, target in found:
            if source.strip() and target.strip():
                yield Pair(place, source.strip(), target.strip())
            else:
                problems.add(place, "empty")

    def _lines(self, path: str, problems: Problems) -> Iterator[tuple[str, str, str]]:
        files = [f"{path}.{ending}" for ending in (self.source, self.target)]
        files = [file if Path(file).exists() else f"{file}.gz" if Path(f"{file}.gz").exists() else file for file in files]
        for source, target in itertools.zip_longest(*(lines(file, problems) for file in files)):
            if source is None or target is None:
                there, missing = (target or source)[0], files[0 if source is None else 1]
                problems.add(there, "no line beside it", f" in {missing}")
            elif source[1] is not None and target[1] is not None:
                yield source[0], source[1], target[1]


def open_pairs(
    train: Sequence[Pair], validation: Sequence[Pair], tokenizer: Any, model: Any, rows: Callable = Packed(),
    problems: Problems | None = None, name: str = "pairs",
) -> Dataset:  # fmt: skip
    """A data set of pairs that are in memory. Raises ConfigError where a split has none that fits the model."""
    problems = problems or Problems()
    encoder, T = getattr(model, "encoder", None), context_length(model)
    lengths = (0 if encoder is None else encoder.context_length, T)
    splits = []
    for part, pairs in (("training", train), ("validation", validation)):
        found = list(_encoded(pairs, tokenizer, lengths, problems))
        if not found:
            raise ConfigError(f"data: {name}: no {part} pair fits the model's {lengths} tokens{problems}")
        splits.append(found)
    learned, held_out = ([example for _, example in found] for found in splits)
    made, scored = rows(learned, lengths), Packed()(held_out, lengths)
    questions = [
        Question(example.tokens[: int(np.argmax(example.weights)) + 1].tolist(), pair.target, example.source.tolist() or None)
        for pair, example in splits[1]
    ]
    content = hashlib.sha256(f"{tokenizer.digest} {rows} {lengths}".encode())
    for example in itertools.chain(learned, held_out):
        content.update(example.source.tobytes() + example.tokens.tobytes() + example.labels.tobytes())
    tokens = sum(int(example.weights.sum()) for example in learned)
    return Dataset(
        train=made, validation=Rows(held_out, scored.members, scored.shapes, questions), digest=content.hexdigest(),
        vocab_size=max(tokenizer.vocab_size, tokenizer.end + 1), tokenizer=tokenizer,
        description=f"{name}: {len(learned):,} training and {len(held_out):,} validation pairs, {tokens:,} target tokens, "
        f"vocabulary {tokenizer.vocab_size:,}; {len(made):,} rows, {made.padding():.1%} padding{problems}",
    )  # fmt: skip


def _encoded(
    pairs: Sequence[Pair], tokenizer: Any, lengths: tuple[int, int], problems: Problems
) -> Iterator[tuple[Pair, Example]]:
    end, whole = np.array([tokenizer.end], np.int32), lengths[0] == 0
    texts = [tokenizer.encode_batch([pair[side] for pair in pairs]) for side in (1, 2)]
    for pair, source, target in zip(pairs, *texts, strict=True):
        source, labels = np.concatenate([source, end]), np.concatenate([target, end])
        text = np.concatenate([source if whole else end, labels])
        weights = (np.arange(len(text) - 1) >= (len(source) - 1 if whole else 0)).astype(np.int32)
        example = Example(text[:-1], text[1:], weights, source[:0] if whole else source)
        for name, tokens, most in (("source", example.source, lengths[0]), ("target", example.tokens, lengths[1])):
            if len(tokens) > most:
                problems.add(pair.place, f"{name} longer than the model's {most} tokens", f" ({len(tokens)})")
                break
        else:
            yield pair, example
