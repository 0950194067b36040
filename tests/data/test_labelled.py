"""Labelled texts: what an example holds, what a bad row is, and how it is reported."""

import json

import numpy as np
import pytest

from jaxformer.data import tokenizers
from jaxformer.data.labelled import Labelled
from jaxformer.errors import ConfigError
from jaxformer.models import Classification, ModelConfig

MODEL = ModelConfig(300, 1, 16, 2, context_length=8, heads=(Classification(3),))
GOOD = [
    {"text": "a cat", "label": 2},
    {"text": "dog", "label": 0},
    {"text": "a very long text", "label": 1},
]


def write(folder, rows, name):
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


def opened(folder, rows, validation=tuple(GOOD), **options):
    return Labelled(
        write(folder, rows, "train"), write(folder, validation, "validation"), **options
    ).open(MODEL)


def test_an_example(tmp_path):
    dataset = opened(tmp_path, GOOD, first_token=256)
    example = dataset.train[0]
    assert (
        example["tokens"].tolist() == [256, *b"a cat", 0, 0]
        and example["segment_ids"].tolist() == [1] * 6 + [0] * 2
    )
    assert (
        example["labels"] == 2
        and example["weights"] == 1
        and dataset.vocab_size == 257
        and len(dataset.validation) == 3
    )
    assert (
        dataset.train[2]["tokens"].tolist() == [256, *b"a very "]
        and "2 cut to 8 tokens" in dataset.description
    )
    assert {name: x.dtype for name, x in example.items()} == dict.fromkeys(
        ("tokens", "segment_ids", "labels"), np.int32
    ) | {"weights": np.float32}
    assert (
        dataset.digest
        == opened(tmp_path, GOOD, first_token=256).digest
        != opened(tmp_path, GOOD).digest
    )
    assert dataset.digest != opened(tmp_path, GOOD[::-1], first_token=256).digest


def test_names_of_classes_and_tokenizers(tmp_path):
    rows = [{"x": {"t": "abc"}, "y": "pets"}, {"x": {"t": "bca"}, "y": "cars"}]
    options = dict(text="x.t", label="y")
    dataset = opened(tmp_path, rows, rows[:1], tokenizer="characters", **options)
    assert [int(dataset.train[i]["labels"]) for i in (0, 1)] == [1, 0] and dataset.validation[0][
        "labels"
    ] == 1
    assert dataset.vocab_size == 3
    dataset.tokenizer.save(tmp_path / "tokenizer.json")
    again = opened(tmp_path, rows, rows[:1], tokenizer=str(tmp_path / "tokenizer.json"), **options)
    assert again.digest == dataset.digest
    learned = opened(tmp_path, rows, rows[:1], tokenizer="bpe", vocab_size=257, **options)
    assert isinstance(learned.tokenizer, tokenizers.BPE)
    with pytest.raises(
        ConfigError,
        match=r"validation.jsonl:1: label out of range \('ships'; 3 classes: \['cars', 'pets'\]\)",
    ):
        opened(tmp_path, rows, [rows[0] | {"y": "ships"}], **options)
    for number in (0, True):  # a number among names would be the class of another name
        with pytest.raises(
            ConfigError,
            match=r"train.jsonl:3: label out of range \((0|True); 3 classes: \['cars', 'pets'\]\)",
        ):
            opened(tmp_path, [*rows, rows[0] | {"y": number}], rows, **options)


BAD = {
    "label out of range": {"text": "x", "label": 3},
    "no text": {"text": "  ", "label": 1},
    "too long": {"text": "longer than eight", "label": 1},
    "no field 'label'": {"text": "x"},
    "not JSON": '{"text": ',
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_row_is_refused_or_counted(kind, tmp_path):
    rows = [*GOOD[:2], BAD[kind], BAD[kind]]
    with pytest.raises(ConfigError, match=rf"train.jsonl:3: {kind}") as caught:
        opened(tmp_path, rows, GOOD[:2], long_texts="bad")
    assert "\n" not in str(caught.value)
    dataset = opened(tmp_path, rows, GOOD[:2], long_texts="bad", bad_rows="skip")
    assert (
        len(dataset.train) == 2
        and f"2 rows skipped: 2 {kind} (first {tmp_path}/train.jsonl:3" in dataset.description
    )


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"validation.jsonl has no row to read"):
        opened(tmp_path, GOOD, [])
    with pytest.raises(ConfigError, match="needs one"):
        opened(tmp_path, GOOD, vocab_size=300)
    with pytest.raises(ConfigError, match=r"need a model with a head Classification\(classes\)"):
        Labelled("a.jsonl", "b.jsonl").open(ModelConfig(300, 1, 16, 2, context_length=8))


def test_a_text_of_other_characters_is_a_bad_row(tmp_path):
    train, validation = (
        [{"text": "abc", "label": 0}],
        [{"text": "cab", "label": 0}, {"text": "abq", "label": 0}],
    )
    dataset = opened(tmp_path, train, validation, tokenizer="characters", bad_rows="skip")
    assert len(dataset.validation) == 1 and "1 not a text of the tokenizer" in dataset.description
    with pytest.raises(ConfigError, match=r"validation\.jsonl:2: not a text of the tokenizer"):
        opened(tmp_path, train, validation, tokenizer="characters")
