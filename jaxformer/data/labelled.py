"""Texts with class labels, from rows of files."""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxformer.data import tokenizers
from jaxformer.data.records import Policy, Problems, paths_as_text, records
from jaxformer.data.sources import Dataset, context_length, digests
from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class Labelled:
    """Rows of .jsonl or .parquet files or of hf:NAME#SPLIT with a text and its class.

    For `ClassCrossEntropy`. A class is a number below the classes of the model's head, or a name.
    `labels` are the names of classes 0, 1, ... The checkpoint of a pretrained model has them in its
    own order (`Checkpoint.labels`). Without `labels` the names in the training rows are sorted by
    the alphabet, or by value if all are whole numbers ("2" before "10"). The description of the
    data says the number of each name. A text longer than the context is cut and counted, or it is a
    bad row.
    """

    train: str  # file of the training rows
    validation: str  # file of the validation rows
    text: str = "text"  # field of the text
    label: str = "label"  # field of the class
    # the names of the classes 0, 1, ...; (): those of the training rows, sorted
    labels: tuple[str, ...] = ()
    # bytes, characters or bpe (of the training texts), or a run's tokenizer.json
    tokenizer: str = "bytes"
    vocab_size: int | None = None  # bpe only
    first_token: int | None = None  # id in front of every text (BERT: that of CLS); None: no id
    # a text longer than the context: "cut" it, or treat it as a "bad" row
    long_texts: Literal["cut", "bad"] = "cut"
    bad_rows: Policy = "error"  # "error" stops at a bad row, "skip" counts it

    def __post_init__(self):
        paths_as_text(self, "train", "validation", "tokenizer")

    def open(self, model: Any) -> Dataset:
        numbers = (getattr(head, "classes", None) for head in getattr(model, "heads", ()))
        classes = next(filter(None, numbers), None)
        if classes is None:
            raise ConfigError(
                "data: labelled texts need a model with a head Classification(classes)"
            )
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
        arrays = {
            "tokens": np.pad(tokens, padding),
            "segment_ids": np.pad(np.ones_like(tokens), padding),
        }
        return arrays | {"labels": np.int32(self.labels[index]), "weights": np.float32(1)}


def open_labelled(config: Labelled, length: int, classes: int) -> Dataset:
    """Reads, checks and encodes the rows of both files.

    Raises ConfigError for bad rows, unless `config.bad_rows` is "skip".
    """
    if config.first_token is not None and config.first_token < 0:
        raise ConfigError(
            f"data.first_token={config.first_token}: expected the id of a token, or None"
        )
    problems = Problems(config.bad_rows)
    paths = [os.path.expanduser(path) for path in (config.train, config.validation)]
    examples_of_files = [list(_examples(config, path, problems)) for path in paths]
    names = _class_names(config, examples_of_files[0])
    training_texts = (text for _, text, _ in examples_of_files[0])
    tokenizer = tokenizers.by_name(config.tokenizer, config.vocab_size, training_texts)
    splits = []
    for path, examples in zip(paths, examples_of_files, strict=True):
        split = _encode(config, examples, tokenizer, names, length, classes, problems)
        if not split.texts:
            raise ConfigError(f"data: {path} has no row to read{problems}")
        splits.append(split)
    train, validation = splits
    content = b"|".join(tokens.tobytes() for split in splits for tokens in split.texts)

    def digest(of_tokenizer: str) -> str:
        labels = [split.labels for split in splits]
        return hashlib.sha256(f"{of_tokenizer} {length} {labels}".encode() + content).hexdigest()

    sizes = [f"{path}: {len(split):,} texts" for path, split in zip(paths, splits, strict=True)]
    numbered = ", ".join(f"{i} {name}" for i, name in enumerate(names[:20]))
    truncated = sum(len(tokens) > length for split in splits for tokens in split.texts)
    return Dataset(
        train,
        validation,
        **digests(tokenizer, digest),
        description=f"{' and '.join(sizes)}, {classes} classes{f' ({numbered})' if names else ''}, "
        f"{truncated:,} cut to {length} tokens{problems}",
        vocab_size=max(tokenizer.vocab_size, *(token + 1 for token in _front(config)), 0),
        tokenizer=tokenizer,
    )


def _encode(
    config: Labelled,
    examples: Iterable[tuple[str, str, Any]],
    tokenizer: Any,
    names: list[str],
    length: int,
    classes: int,
    problems: Problems,
) -> LabelledTexts:
    """The tokens and class numbers of the examples (place, text, label) that have no problem."""
    split = LabelledTexts([], [], length)
    for place, text, label in examples:
        number = _number(label, names, bool(config.labels))
        try:
            tokens = np.array([*_front(config), *tokenizer.encode(text)], np.int32)
        except ConfigError as error:  # a character that the training texts do not have
            problems.add(place, "not a text of the tokenizer", f" ({error})")
            continue
        if number is None or not 0 <= number < classes:
            expected = f"{classes} classes: {names}" if names else f"{classes} classes"
            problems.add(place, "label out of range", f" ({label!r}; {expected})")
        elif len(tokens) > length and config.long_texts == "bad":
            problems.add(
                place, "too long", f" ({len(tokens)} tokens, model.context_length={length})"
            )
        else:
            split.texts.append(tokens)
            split.labels.append(number)
    return split


def _front(config: Labelled) -> list[int]:
    """The tokens in front of every text."""
    return [] if config.first_token is None else [config.first_token]


def _class_names(config: Labelled, examples: Iterable[tuple[str, str, Any]]) -> list[str]:
    """The names of the classes 0, 1, ...: those of the config, else those of the training rows."""
    if isinstance(config.labels, str):
        raise ConfigError(
            f"data.labels={config.labels!r}: "
            "its letters would be the classes; give a tuple of names"
        )
    names = list(config.labels) or _names(label for _, _, label in examples)
    if len(set(names)) < len(names):
        raise ConfigError(f"data.labels={config.labels}: each class needs a name of its own")
    return names


def _names(labels: Iterator[Any]) -> list[str]:
    """The names among the labels, in the order of their class numbers."""
    names = sorted({label for label in labels if isinstance(label, str)})
    if all(re.fullmatch(r"-?\d+", name, re.ASCII) for name in names):
        names.sort(key=int)
    return names


def _number(label: Any, names: list[str], named_by_user: bool) -> int | None:
    """The class number of a label; None if it has none.

    Beside names, a number is a class only if the user gave the names.
    """
    if isinstance(label, str):
        return names.index(label) if label in names else None
    # pandas writes 1.0 for 1 in a column with missing values
    if isinstance(label, float) and label.is_integer():
        label = int(label)
    return label if isinstance(label, int) and (named_by_user or not names) else None


def _examples(config: Labelled, path: str, problems: Problems) -> Iterator[tuple[str, str, Any]]:
    """(place, text, label) of the rows that have a text."""
    for place, (text, label) in records(path, (config.text, config.label), problems):
        label = label.strip() if isinstance(label, str) else label
        if not (isinstance(text, str) and text.strip()):
            problems.add(place, "no text", f" in the field {config.text!r}")
        # an empty cell; as a name it would be class 0 and shift all others
        elif label == "":
            problems.add(place, "no label", f" in the field {config.label!r}")
        else:
            yield place, text, label
