"""Texts with classes: what users of transformers, datasets, scikit-learn and others reported about
labels and texts."""

import json

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from jaxformer import masks
from jaxformer.data.labelled import Labelled
from jaxformer.errors import ConfigError
from jaxformer.models import Classification, ModelConfig


def model_of(classes, length=16):
    return ModelConfig(
        300, 1, 8, 1, length, masks=(masks.full(),), heads=(Classification(classes),)
    )


def opened(folder, train, validation=None, classes=3, length=16, **more):
    """The data set of rows (text, label)."""
    paths = []
    for name, rows in (
        ("train", train),
        ("validation", train if validation is None else validation),
    ):
        paths.append(folder / f"{name}.jsonl")
        paths[-1].write_text(
            "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows)
        )
    return Labelled(*map(str, paths), **more).open(model_of(classes, length))


def texts(labels):
    return [(f"text {number}", label) for number, label in enumerate(labels)]


@pytest.mark.report(
    "huggingface/transformers#10386", "huggingface/transformers#10401", listed="first 08",
    right="The numbers of names are those of the checkpoint that is trained on, and are shown.",
    hit="Names were numbered by the alphabet; no other order could be given.",
)  # fmt: skip
def test_the_order_of_names_may_be_given(tmp_path):
    order = ("contradiction", "neutral", "entailment")
    dataset = opened(tmp_path, texts(["neutral", "entailment", "neutral"]), labels=order)
    assert dataset.train.labels == [1, 2, 1]
    assert "0 contradiction, 1 neutral, 2 entailment" in dataset.description
    by_alphabet = opened(tmp_path, texts(["neutral", "entailment", "neutral"]))
    assert by_alphabet.train.labels == [1, 0, 1]
    assert "0 entailment, 1 neutral" in by_alphabet.description
    assert opened(tmp_path, texts([2, 0]), labels=order).train.labels == [2, 0]
    with pytest.raises(ConfigError, match=r"label out of range.*'other'"):
        opened(tmp_path, texts(["neutral", "other"]), labels=order)
    with pytest.raises(ConfigError, match="a name of its own"):
        opened(tmp_path, texts(["a"]), labels=("a", "a"))


@pytest.mark.report(
    "getsentry/sentry#60928", "edawson/gfakluge#3",
    right="Whole numbers that are written as names keep the order of their values.",
    hit='"10" was class 2, between "1" and "2".',
)  # fmt: skip
def test_numbers_as_names_are_in_order(tmp_path):
    names = [str(number) for number in range(11)]
    assert opened(tmp_path, texts(names[::-1]), classes=11).train.labels == list(range(11))[::-1]
    assert opened(tmp_path, texts(["5", "1", "3"]), classes=5).train.labels == [2, 0, 1]
    # not all are numbers: the alphabet
    assert opened(tmp_path, texts(["10", "9", "b"])).train.labels == [
        0,
        1,
        2,
    ]


@pytest.mark.report(
    "abhishekkrthakur/mlframework#7",
    right="1.0, which pandas makes of 1 beside missing values, is class 1; NaN is a bad row.",
    hit="1.0 was refused as out of range.",
)  # fmt: skip
def test_whole_floats_are_classes(tmp_path):
    rows = texts([1.0, 0.0, float("nan"), 2.0, 0.5, None])
    dataset = opened(tmp_path, rows, bad_rows="skip")
    assert dataset.train.labels == [1, 0, 2]
    assert all(isinstance(label, int) for label in dataset.train.labels)
    with pytest.raises(ConfigError, match=r"train\.jsonl:3: label out of range \(nan"):
        opened(tmp_path, rows[:4])


@pytest.mark.report(
    "etano/productner#11",
    "argilla-io/biome-text#336",
    right=(
        "A label that nobody filled in is a bad row, not a class; blanks around a name do not "
        "make another class."
    ),
    hit=(
        "An empty name was class 0 and moved all others by one; ' pos' was another class than "
        "'pos'."
    ),
)
def test_an_empty_label_is_no_class(tmp_path):
    dataset = opened(
        tmp_path, texts(["neg", "", "pos", "  ", " pos\n"]), classes=2, bad_rows="skip"
    )
    assert dataset.train.labels == [0, 1, 1]
    assert "4 no label" in dataset.description
    with pytest.raises(ConfigError, match=r"train\.jsonl:2: no label"):
        opened(tmp_path, texts(["neg", "", "pos"]))


@pytest.mark.report(
    "huggingface/datasets#5624", "keras-team/keras-hub#175",
    right="-1, the label of rows without one, is refused by its row or skipped and counted.",
)  # fmt: skip
def test_rows_without_a_label_are_not_trained_on(tmp_path):
    with pytest.raises(ConfigError, match=r"train\.jsonl:2: label out of range \(-1"):
        opened(tmp_path, texts([0, -1, 1]))
    dataset = opened(tmp_path, texts([0, -1, 1]), bad_rows="skip")
    assert dataset.train.labels == [0, 1] and "2 label out of range" in dataset.description
    with pytest.raises(ConfigError, match="has no row to read"):
        opened(tmp_path, texts([0, 1]), texts([-1, -1]), bad_rows="skip")


@pytest.mark.report(
    "dimagi/commcare-hq#25732", "GEOLYTIX/xyz#1389",
    right="Class 0, also as false or as a name, is a class and not a missing value.",
)  # fmt: skip
@pytest.mark.parametrize("labels", [[0, 1], [False, True], ["0", "1"], [0.0, 1.0]])
def test_class_zero_is_not_missing(tmp_path, labels):
    assert opened(tmp_path, texts(labels), bad_rows="skip").train.labels == [0, 1]


@pytest.mark.report(
    "dmlc/xgboost#803",
    right="Validation rows have the numbers of the training rows, whatever names they lack.",
)  # fmt: skip
def test_validation_has_the_numbers_of_training(tmp_path):
    dataset = opened(tmp_path, texts(["a", "b", "c"]), texts(["c", "b", "c"]))
    assert dataset.validation.labels == [2, 1, 2]


@pytest.mark.report(
    "lightgbm-org/LightGBM#4626",
    "scikit-learn/scikit-learn#19830",
    "EducationalTestingService/skll#279",
    right="A class that training lacks is refused by row and name, or skipped and counted.",
)
def test_a_class_that_training_lacks_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"validation\.jsonl:2: .*'qux'.*\['bar', 'foo'\]"):
        opened(tmp_path, texts(["foo", "bar"]), texts(["foo", "qux"]))
    dataset = opened(tmp_path, texts(["foo", "bar"]), texts(["foo", "qux"]), bad_rows="skip")
    assert dataset.validation.labels == [1] and "'qux'" in dataset.description


@pytest.mark.report(
    "NVIDIA-NeMo/Speech#3094", "jackroos/VL-BERT#28",
    right="A long text is cut to the context with its first token, and no longer.",
)  # fmt: skip
@pytest.mark.parametrize("length", [3, 15, 16, 17, 40])
def test_a_long_text_keeps_its_first_token(tmp_path, length):
    dataset = opened(tmp_path, [("a" * length, 0)], first_token=256)
    row = dataset.train[0]
    read = row["tokens"][row["segment_ids"] == 1]
    assert row["tokens"].shape == (16,)
    assert read.tolist() == [256, *[ord("a")] * min(length, 15)]
    assert ("2 cut to 16 tokens" in dataset.description) == (length > 15)
    if length > 15:
        with pytest.raises(ConfigError, match="too long"):
            opened(tmp_path, [("a" * length, 0)], first_token=256, long_texts="bad")


@pytest.mark.report(
    "allenai/longformer#160",
    "huggingface/transformers#12763",
    right=(
        "An id outside the table of embeddings is refused; the vocabulary counts the first token."
    ),
    hit="first_token=-1 was taken.",
)
def test_the_first_token_is_an_id(tmp_path):
    assert opened(tmp_path, texts([0]), first_token=299).vocab_size == 300
    with pytest.raises(ConfigError, match=r"data\.first_token=-1"):
        opened(tmp_path, texts([0]), first_token=-1)


@pytest.mark.report(
    "rasbt/LLMs-from-scratch#566",
    "QData/TextAttack#413",
    right=(
        "Padding is marked as such, so that the classes of a text do not depend on how much is "
        "behind it."
    ),
)
def test_padding_is_marked(tmp_path):
    short, long = (opened(tmp_path, [("words", 0)], length=length).train[0] for length in (8, 16))
    for row in (short, long):
        assert row["segment_ids"].tolist() == [1] * 5 + [0] * (len(row["tokens"]) - 5)
        assert not row["tokens"][row["segment_ids"] == 0].any()
    np.testing.assert_array_equal(short["tokens"][:5], long["tokens"][:5])


# --- any labels

LABELS = (
    0,
    1,
    2,
    True,
    2.0,
    "b",
    "a",
    "7",
    3,
    -1,
    1.5,
    float("nan"),
    float("inf"),
    None,
    "",
    [0],
    {"of": 1},
)


def number_of(label, names, classes):
    """The class of a label, or None: names and numbers are not mixed, and nothing is guessed."""
    if names:
        number = names.index(label) if isinstance(label, str) and label in names else -1
    else:
        number = label if isinstance(label, int | float) else -1
    return int(number) if number in range(classes) else None


@pytest.mark.report(
    "dotnet/machinelearning#6534",
    "EricFillion/happy-transformer#248",
    listed="third 10",
    right=(
        "A label that is no class (missing, -1, from one on, of another kind) is refused by its "
        "row."
    ),
)
@given(st.lists(st.sampled_from(LABELS), min_size=1, max_size=6), st.integers(1, 4))
@example([1, 2, 3], 3)
@example(["a", 0], 2)
@example([0, None], 1)
@example([0], 1)
@settings(max_examples=25, deadline=None)
def test_a_label_is_a_class_or_refused(tmp_path_factory, labels, classes):
    folder = tmp_path_factory.mktemp("labels")
    names = sorted({label for label in labels if isinstance(label, str) and label})
    names.sort(key=lambda name: (len(name) > 1, name))
    numbers = [number_of(label, names, classes) for label in labels]
    kept = [number for number in numbers if number is not None]
    if kept:
        dataset = opened(folder, texts(labels), classes=classes, bad_rows="skip")
        assert list(dataset.train.labels) == list(dataset.validation.labels) == kept
        assert len(dataset.train) == len(kept)
    if len(kept) == len(labels):
        assert list(opened(folder, texts(labels), classes=classes).train.labels) == kept
        return
    rows = "|".join(str(row) for row, number in enumerate(numbers, 1) if number is None)
    with pytest.raises(ConfigError, match=rf"train\.jsonl:({rows}): "):
        opened(folder, texts(labels), classes=classes)
    with pytest.raises(ConfigError, match=r"validation\.jsonl:1: "):
        opened(folder, texts([0]), texts([None]), classes=classes)


@pytest.mark.report(
    "dotnet/machinelearning#6534",
    listed="third 10",
    right=(
        "A row without the field of the label is refused; with bad_rows=skip it is left out and "
        "counted."
    ),
)
def test_a_row_without_the_field_is_no_class(tmp_path):
    for name in ("train", "validation"):
        rows = [{"text": "a", "label": 1}, {"text": "b"}, {"label": 0}, {"text": "  ", "label": 0}]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = [str(tmp_path / f"{name}.jsonl") for name in ("train", "validation")]
    with pytest.raises(ConfigError, match=r"train\.jsonl:2"):
        Labelled(*paths).open(model_of(2))
    dataset = Labelled(*paths, bad_rows="skip").open(model_of(2))
    assert list(dataset.train.labels) == [1]
    assert "6 rows skipped" in dataset.description
