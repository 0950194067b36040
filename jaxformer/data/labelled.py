"""Texts with a class each, from rows of files."""

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxformer.data import tokenizers
from jaxformer.data.records import Policy, Problems, paths_as_text, records
from jaxformer.data.sources import Dataset, context_length, digests
from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class Labelled:
    """Rows of .jsonl or .parquet files or of hf:NAME#SPLIT, with a text and its class, for `ClassCrossEntropy`.

    A class is a number below the classes of the model's head, or a name. `labels` are the names of classes 0, 1, ...: a model
    that is trained on has them in its checkpoint (`Checkpoint.labels`), in an order of its own. Without `labels` the names of
    the training rows are numbered in the order of the alphabet, or by their values if all are whole numbers ("2" before "10").
    The description of the data says which name has which number. A text that is longer than the context is cut and counted, or
    it is a bad row.
    """

    train: str  # file of the training rows
    validation: str  # file of the validation rows
    text: str = "text"  # field of the text
    label: str = "label"  # field of the class
    labels: tuple[str, ...] = ()  # the names of the classes 0, 1, ...; (): those of the training rows, in order
    tokenizer: str = "bytes"  # bytes, characters or bpe (of the training texts), or a run's tokenizer.json
    vocab_size: int | None = None  # bpe only
    first_token: int | None = None  # an id in front of every text (BERT: that of CLS); None: none
    long_texts: Literal["cut", "bad"] = "cut"  # what becomes of a text longer than the context
    bad_rows: Policy = "error"  # what becomes of a bad row

    def __post_init__(self):
        paths_as_text(self, "train", "validation", "tokenizer")

    def open(self, model: Any) -> Dataset:
        classes = next((head.classes for head in getattr(model, "heads", ()) if getattr(head, "classes", None)), None)
        if classes is None:
            raise ConfigError("data: labelled texts need a model with a head Classification(classes)")
        return open_labelled(self, context_length(model), classes)


@dataclass(frozen=True, eq=False)
class LabelledTexts:
    """Example i: tokens and segment_ids (0: padding) int32 [T], labels int32, weights float32."""

    texts: list[np.ndarray]  # the tokens of each
    labels: list[int]
    length: int

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self.texts[index][: self.length]
        padding = (0, self.length - len(tokens))
        arrays = {"tokens": np.pad(tokens, padding), "segment_ids": np.pad(np.ones_like(tokens), padding)}
        return arrays | {"labels": np.int32(self.labels[index]), "weights": np.float32(1)}


def open_labelled(config: Labelled, length: int, classes: int) -> Dataset:
    """Reads, checks and encodes the rows of both files. Raises ConfigError for bad rows, unless `config.bad_rows` is skip."""
    if config.first_token is not None and config.first_token < 0:
        raise ConfigError(f"data.first_token={config.first_token}: expected the id of a token, or None")
    problems, paths = Problems(config.bad_rows), [os.path.expanduser(path) for path in (config.train, config.validation)]
    examples_of_files = [list(_examples(config, path, problems)) for path in paths]
    if isinstance(config.labels, str):
        raise ConfigError(f"data.labels={config.labels!r}: its letters would be the classes; give a tuple of names")
    names = list(config.labels) or _names(label for _, _, label in examples_of_files[0])
    if len(set(names)) < len(names):
        raise ConfigError(f"data.labels={config.labels}: each class needs a name of its own")
    tokenizer = tokenizers.by_name(config.tokenizer, config.vocab_size, (text for _, text, _ in examples_of_files[0]))
    splits = []
    front = [] if config.first_token is None else [config.first_token]
    for path, examples in zip(paths, examples_of_files, strict=True):
        split = LabelledTexts([], [], length)
        for place, text, label in examples:
            number = _number(label, names, bool(config.labels))
            try:
                tokens = np.array([*front, *tokenizer.encode(text)], np.int32)
            except ConfigError as error:  # a character that the training texts do not have
                problems.add(place, "not a text of the tokenizer", f" ({error})")
                continue
            if number is None or not 0 <= number < classes:
                expected = f"{classes} classes: {names}" if names else f"{classes} classes"
                problems.add(place, "label out of range", f" ({label!r}; {expected})")
            elif len(tokens) > length and config.long_texts == "bad":
                problems.add(place, "too long", f" ({len(tokens)} tokens, model.context_length={length})")
            else:
                split.texts.append(tokens)
                split.labels.append(number)
        if not split.texts:
            raise ConfigError(f"data: {path} has no row to read{problems}")
        splits.append(split)
    content = b"|".join(tokens.tobytes() for split in splits for tokens in split.texts)

    def digest(of_tokenizer: str) -> str:
        labels = [split.labels for split in splits]
        return hashlib.sha256(f"{of_tokenizer} {length} {labels}".encode() + content).hexdigest()

    truncated = sum(len(tokens) > length for split in splits for tokens in split.texts)
    shown = " and ".join(f"{path}: {len(split):,} texts" for path, split in zip(paths, splits, strict=True))
    shown_names = f" ({', '.join(f'{i} {name}' for i, name in enumerate(names[:20]))})" if names else ""
    return Dataset(
        splits[0], splits[1], **digests(tokenizer, digest), description=f"{shown}, {classes} classes{shown_names}, "
        f"{truncated:,} cut to {length} tokens{problems}",
        vocab_size=max(tokenizer.vocab_size, *(token + 1 for token in front), 0), tokenizer=tokenizer,
    )  # fmt: skip


def _names(labels: Iterator[Any]) -> list[str]:
    """The names among labels, in the order of their numbers."""
    names = sorted({label for label in labels if isinstance(label, str)})
    if all(re.fullmatch(r"-?\d+", name, re.ASCII) for name in names):
        names.sort(key=int)
    return names


def _number(label: Any, names: list[str], named_by_user: bool) -> int | None:
    """The class of a label; None if it has none. A number counts into the names only where the user gave them."""
    if isinstance(label, str):
        return names.index(label) if label in names else None
    if isinstance(label, float) and label.is_integer():  # pandas makes 1.0 of 1 beside missing values
        label = int(label)
    return label if isinstance(label, int) and (named_by_user or not names) else None


def _examples(config: Labelled, path: str, problems: Problems) -> Iterator[tuple[str, str, Any]]:
    """(place, text, label) of the rows that have a text."""
    for place, (text, label) in records(path, (config.text, config.label), problems):
        label = label.strip() if isinstance(label, str) else label
        if not (isinstance(text, str) and text.strip()):
            problems.add(place, "no text", f" in the field {config.text!r}")
        elif label == "":  # a cell that nobody filled in; as a name it would be class 0 and move all others
            problems.add(place, "no label", f" in the field {config.label!r}")
        else:
            yield place, text, label
