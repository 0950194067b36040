"""Prompts with two answers, as rows of a batch."""

import json

import numpy as np
import pytest

from jaxformer.data.preferences import Preferences
from jaxformer.errors import ConfigError
from tests.data.test_chat import model

ASK = [{"role": "user", "content": "2+2?"}]
RIGHT, WRONG = ([{"role": "assistant", "content": text}] for text in ("4", "five"))


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


FORMS = {
    "texts": (dict(prompt="2+2?", chosen="4", rejected="five"), {}),
    "messages": (dict(prompt=ASK, chosen=RIGHT, rejected=WRONG), {}),
    "conversations": (dict(chosen=ASK + RIGHT, rejected=ASK + WRONG), dict(prompt=None)),
    "other fields": (dict(q="2+2?", a="4", b="five"), dict(prompt="q", chosen="a", rejected="b")),
}


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_give_the_same_batch(form, tmp_path):
    row, options = FORMS[form]
    path = write(tmp_path / "pairs.jsonl", row)
    data = Preferences(path, path, template="chatml", **options).open(model(64))
    batch = data.train.take_rows(np.array([0]))
    answers = [bytes(batch["labels"][0, i][batch["answers"][0, i] > 0].tolist()) for i in (0, 1)]
    assert answers == [b"4\xfd", b"five\xfd"]
    texts = [bytes(batch["tokens"][0, i].tolist()) for i in (0, 1)]
    start = b"\xfeuser\n2+2?\xfd\n\xfeassistant\n"
    assert all(text.startswith(start) for text in texts) and batch["weights"].tolist() == [1]
    (question,) = data.validation.questions
    assert bytes(question.prompt) == start and question.reference == "4"
    assert batch["tokens"].shape == (1, 2, 64)


def test_earlier_turns_of_the_assistant_are_no_answer(tmp_path):
    prompt = [*ASK, *RIGHT, {"role": "user", "content": "Sure?"}]
    path = write(tmp_path / "p.jsonl", dict(prompt=prompt, chosen="yes", rejected="no"))
    data = Preferences(path, path, template="chatml").open(model(128))
    batch = data.train.take_rows(np.array([0]))
    assert bytes(batch["labels"][0, 0][batch["answers"][0, 0] > 0].tolist()) == b"yes\xfd"


def test_bad_rows(tmp_path):
    good = dict(prompt="a", chosen="b", rejected="c")
    bad = {
        "no field 'rejected'": dict(prompt="a", chosen="b"),
        "no preference": dict(prompt="a", chosen=3, rejected="c"),
        "longer than the model's 64 tokens": dict(prompt="a" * 99, chosen="b", rejected="c"),
        "an answer in which the assistant says nothing": dict(
            prompt="a", chosen=[{"role": "user", "content": "x"}], rejected="c"
        ),
    }
    ok = write(tmp_path / "ok.jsonl", good)
    for problem, row in bad.items():
        path = write(tmp_path / "bad.jsonl", row)
        with pytest.raises(ConfigError, match=rf"bad\.jsonl:1: {problem}"):
            Preferences(path, ok, template="chatml").open(model(64))
    path = write(tmp_path / "some.jsonl", good, *bad.values())
    data = Preferences(path, ok, template="chatml", bad_rows="skip").open(model(64))
    assert "1 training and 1 validation pairs" in data.description
    assert "4 rows skipped" in data.description
    same = write(tmp_path / "same.jsonl", dict(chosen=ASK + RIGHT, rejected=ASK + RIGHT))
    with pytest.raises(ConfigError, match="expected an equal beginning, and two answers"):
        Preferences(same, same, template="chatml", prompt=None).open(model(64))
