"""What nests too deep, from a file, an option or Python, is one line of ConfigError; never a
RecursionError."""

import functools
import json
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from jaxformer import config as C
from jaxformer.config.files import DEEPEST
from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class Holder:
    inner: Any = None
    width: int = 8


def holders(depth):
    value = Holder()
    for _ in range(depth):
        value = Holder(value)
    return value


def lists(depth):
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return Holder(value)


def partials(depth):
    value: Any = len
    for level in range(depth):
        value = functools.partial(print, value, level)
    return Holder(value)


@pytest.mark.thorough
@pytest.mark.parametrize("build", [holders, lists, partials])
def test_values_are_described_or_refused(build):
    assert (
        C.describe(build(20))
        and len(C.fingerprint(build(20))) == 8
        and C.flat(C.describe(build(20)))
    )
    for function in (C.describe, C.fingerprint, C.changes):
        with pytest.raises(ConfigError, match="nests too deep to be described"):
            function(build(2_000))


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("depth", [5, 50, 150, 199])
def test_an_option_may_nest_what_the_parser_reads(depth):
    """The parser of Python reads 200 brackets; what comes of them is described or refused."""
    text = "Holder(" * depth + ")" * depth
    try:
        made = C.override(Holder(), [f"--inner={text}"], {"": {"Holder": Holder}})
        assert C.fingerprint(made) and C.describe(made)
    except ConfigError as error:
        assert "deep" in str(error)
    else:
        assert depth < 199


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "(" * 9_000,
        "Holder(" * 900 + ")" * 900,
        "-" * 9_000 + "1",
        "not " * 2_000 + "a",
        "a." * 4_000 + "a",
        "1 if 1 else " * 800 + "1",
        "lambda: " * 1_000 + "1",
        "1" + " | 1" * 2_000,
        "a[" * 150 + "0" + "]" * 150,
        "{1: " * 150 + "2" + "}" * 150,
        "f'{" * 50 + "1" + "}'" * 50,
    ],
)
def test_texts_of_thousands_of_levels(text):
    try:
        C.describe(C.expressions.evaluate(text, {"Holder": Holder, "a": 1}))
    except ConfigError as error:
        assert len(str(error)) < 300
    else:
        assert text.count("{1:") == 150  # the parser reads so many brackets


def test_functions_that_nest(tmp_path, monkeypatch):
    """A sum of thousands of terms, which Python compiles and whose text nobody can write again."""
    body = f"def f(x):\n    return {' + '.join(['x'] * 900)}\n"
    (tmp_path / "deep.py").write_text(
        f"from tests_config_classes import Holder\n{body}experiment = Holder(f)\n"
    )
    monkeypatch.setitem(sys.modules, "tests_config_classes", sys.modules[__name__])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ConfigError, match="deep"):
        C.describe(C.load(str(tmp_path / "deep.py")))


def test_json_that_nests(tmp_path):
    path = tmp_path / "x.json"
    for depth in (DEEPEST - 1, DEEPEST, 500, 990, 100_000):
        path.write_text('{"a": ' + "[" * depth + "]" * depth + "}")
        if depth < DEEPEST:
            assert C.flat(C.read_json(path)) and json.dumps(C.read_json(path))
        else:
            with pytest.raises(ConfigError, match=r"x.json.*(deep|recursion)"):
                C.read_json(path)


@pytest.mark.thorough
@pytest.mark.parametrize("build", [holders, lists, partials])
def test_what_is_described_can_be_read_again(build, tmp_path):
    """A run's config.json: a run that could be trained must not be refused when it is resumed."""
    for depth in (10, 50, 90, 150, 200, 250, 300, 350, 400, 500):
        try:
            described = C.describe(build(depth))
        except ConfigError:
            assert depth > 50
        else:
            (tmp_path / "config.json").write_text(json.dumps(described))
            assert not C.diff(C.read_json(tmp_path / "config.json"), described)


def test_small_files_are_small(tmp_path):
    path = tmp_path / "x.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    for read in (C.read_json, C.read_text):
        with pytest.raises(ConfigError, match=r"x.json.*larger than"):
            read(path)


def test_a_link_is_replaced_and_not_followed(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "x").symlink_to(precious)
    C.write_atomically(tmp_path / "x", "new")
    assert (
        precious.read_text() == "precious"
        and (tmp_path / "x").read_text() == "new"
        and not (tmp_path / "x").is_symlink()
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious", "x"]
    C.write_atomically(tmp_path / "x", b"\xff")
    assert (tmp_path / "x").read_bytes() == b"\xff"
