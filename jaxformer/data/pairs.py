"""Pairs of a text and its answer: translation, summaries, questions.

Rows of a batch hold several packed pairs, or one pair padded to one of a few lengths.
"""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxformer.data import tokenizers
from jaxformer.data.packing import (
    Batches as Batches,
    Buckets as Buckets,
    Example,
    Packed,
    Rows as Rows,
    dataset_of_examples,
)
from jaxformer.data.records import (
    JSON_LINES,
    Policy,
    Problems,
    has_ending,
    lines,
    paths_as_text,
    records,
)
from jaxformer.data.sources import Dataset, Question, Questions, context_length
from jaxformer.errors import ConfigError


class Pair(NamedTuple):
    """A text and its answer, with their place for messages."""

    place: str
    source: str
    target: str


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

    def ask(pair: Pair) -> Question:
        return question(model, tokenizer, pair.source, pair.target, start)

    train_questions, validation_questions = (
        Questions([pair for pair, _ in split], ask) for split in encoded
    )
    train_examples, validation_examples = ([example for _, example in split] for split in encoded)
    return dataset_of_examples(
        train_examples,
        validation_examples,
        tokenizer=tokenizer,
        lengths=lengths,
        rows=rows,
        questions=(train_questions, validation_questions),
        name=name,
        kind="pair",
        problems=problems,
        vocab_size=size,
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
