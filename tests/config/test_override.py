"""Options of the command line over a small nest of configs: what they set, the errors, each in one
line, and the list."""

import dataclasses
import functools
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from jaxformer import config as C, models
from jaxformer.config import expressions
from jaxformer.config.override import walk
from jaxformer.masks import Mask, causal, prefix, window
from tests.config.values import Adam, Lion, Scaled, first_mixer, message, second_mixer


@dataclass(frozen=True)
class Shifted:
    by: int
    word: str
    twice: bool = False

    def __call__(self, x):
        return x + self.by


@dataclass(frozen=True)
class Linear:
    factor: float = 1.0


@dataclass(frozen=True)
class Rope:
    theta: float = 10000.0
    scaling: Linear | Adam | None = None


@dataclass(frozen=True)
class Model:
    width: int
    heads: int = 4  # must divide the width
    # whether linear maps
    # add a bias
    bias: bool = True
    norm: Literal["layer", "rms"] = "layer"
    window: int | None = None
    softcap: float | None = None
    implementation: str | None = None
    rope: Rope | None = None
    mixer: Callable = first_mixer
    other_mixer: Callable | None = None
    masks: tuple[Mask, ...] = ()
    layers: tuple[int, ...] = ()

    def __post_init__(self):
        if self.width % self.heads:
            raise ValueError(f"heads={self.heads} does not divide width={self.width}")


@dataclass(frozen=True)
class Experiment:
    name: str
    model: Model = Model(64)
    optimizer: Adam | Lion = Adam()
    steps: int = 100
    loggers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    mixture: tuple[Adam | Lion, ...] = field(default_factory=tuple)
    initial: Callable | str | None = None
    data: Any = None
    patterns: tuple[str, ...] = ()
    widths: list[int] = field(default_factory=list)
    file: Path = Path("x")
    cache: int | str = 0
    level: Literal[1, 2] = 1


NAMES = {
    "": {
        name: value
        for name, value in globals().items()
        if callable(value) and not name.startswith("_")
    },
    "masks": {"causal": causal, "window": window, "prefix": prefix},
}
BASE = Experiment("base")
FULL = Experiment(
    "full",
    Model(
        8,
        window=3,
        rope=Rope(scaling=Linear(2.0)),
        other_mixer=second_mixer,
        masks=(causal(), window(3)),
    ),
    Lion(),
    mixture=(Adam(), Lion(0.5)),
)


def override(experiment, *args):
    return C.override(experiment, args, NAMES)


@pytest.mark.parametrize(
    ("args", "path", "expected"),
    [
        (["--steps=7"], "steps", 7),
        (["--steps", "7"], "steps", 7),
        (["--steps=1e4"], "steps", 10_000),
        (["--steps=1", "--steps=-2"], "steps", -2),
        (["--steps", "-2"], "steps", -2),
        (["--name=-x"], "name", "-x"),
        (["--name=a=b c"], "name", "a=b c"),
        (["--name="], "name", ""),
        (["--name=Adam()"], "name", "Adam()"),
        (["--name=None"], "name", "None"),
        (["--name='a'"], "name", "'a'"),
        (["--optimizer.learning-rate=3e-4"], "optimizer.learning_rate", 3e-4),
        (["--optimizer.learning_rate", "1"], "optimizer.learning_rate", 1.0),
        (["--optimizer.learning-rate=inf"], "optimizer.learning_rate", float("inf")),
        (["--optimizer.betas", "(0.9, 1)"], "optimizer.betas", (0.9, 1.0)),
        (["--optimizer.betas=0.9,0.98"], "optimizer.betas", (0.9, 0.98)),
        (["--model.bias=False"], "model.bias", False),
        (["--model.bias=false"], "model.bias", False),
        (["--model.bias", "False"], "model.bias", False),
        (["--model.bias=False", "--model.bias"], "model.bias", True),
        (["--model.norm=rms"], "model.norm", "rms"),
        (["--model.window=5"], "model.window", 5),
        (["--model.window=1e3"], "model.window", 1000),
        (["--model.window=5", "--model.window=None"], "model.window", None),
        (["--model.softcap=5"], "model.softcap", 5.0),
        (["--model.implementation=None"], "model.implementation", None),
        (["--model.implementation=splash"], "model.implementation", "splash"),
        (["--model.layers=(1, 2)"], "model.layers", (1, 2)),
        (["--model.layers=5"], "model.layers", (5,)),
        (["--model.layers=()"], "model.layers", ()),
        (["--widths=[1, 2]"], "widths", [1, 2]),
        (["--loggers", "('wandb', 'tensorboard')"], "loggers", ("wandb", "tensorboard")),
        (["--loggers=wandb"], "loggers", ("wandb",)),
        (["--patterns", "attention.*"], "patterns", ("attention.*",)),
        (["--patterns=Adam"], "patterns", ("Adam",)),
        (["--patterns=('a', 'b')"], "patterns", ("a", "b")),
        (["--file=runs/a-1"], "file", Path("runs/a-1")),
        (["--cache=7"], "cache", 7),
        (["--cache=a/b"], "cache", "a/b"),
        (["--level=2"], "level", 2),
        (["--model.mixer=second_mixer"], "model.mixer", second_mixer),
        (["--model.other-mixer=second_mixer"], "model.other_mixer", second_mixer),
        (
            ["--model.other-mixer=second_mixer", "--model.other-mixer=None"],
            "model.other_mixer",
            None,
        ),
        (["--model.mixer=Scaled"], "model.mixer", Scaled()),
        (["--model.mixer", "Scaled(factor=3)"], "model.mixer", Scaled(3.0)),
        (
            ["--model.mixer", "Scaled(3, inner=Shifted(1, 'a'))"],
            "model.mixer",
            Scaled(3.0, Shifted(1, "a")),
        ),
        (["--model.mixer=Scaled", "--model.mixer.factor=3"], "model.mixer", Scaled(3.0)),
        (["--model.mixer.factor=3", "--model.mixer=Scaled"], "model.mixer", Scaled(3.0)),
        (
            [
                "--model.other-mixer.inner.factor=3",
                "--model.other-mixer=Scaled",
                "--model.other-mixer.inner=Scaled",
            ],
            "model.other_mixer",
            Scaled(inner=Scaled(3.0)),
        ),
        (["--model.masks", "causal() & window(255)"], "model.masks", (causal() & window(255),)),
        (
            ["--model.masks", "(causal() & window(9)) | prefix(2)"],
            "model.masks",
            (causal() & window(9) | prefix(2),),
        ),
        (["--model.masks", "(causal(), ~window(3))"], "model.masks", (causal(), ~window(3))),
        (["--mixture", "(Adam, Lion(0.5))"], "mixture", (Adam(), Lion(0.5))),
        (["--optimizer", "Lion(learning_rate=1)"], "optimizer", Lion(1.0)),
        (["--optimizer=Lion", "--optimizer.weight-decay=0.2"], "optimizer", Lion(weight_decay=0.2)),
        (["--model.rope=Rope", "--model.rope.theta=1"], "model.rope", Rope(1.0)),
        # no subtraction
        (
            ["--initial=runs/quickstart-abcdef12"],
            "initial",
            "runs/quickstart-abcdef12",
        ),
        (["--initial=bert-base-uncased"], "initial", "bert-base-uncased"),
        (["--initial=second_mixer"], "initial", second_mixer),
        (["--initial", "Scaled(3)"], "initial", Scaled(3.0)),
        (["--data", "{'a': (1, None), 'b': Adam}"], "data", {"a": (1, None), "b": Adam()}),
        (["--model.width=10", "--model.heads=5"], "model.heads", 5),  # neither alone would be valid
    ],
)
def test_override(args, path, expected):
    changed = override(BASE, *args)
    for name in path.split("."):
        changed = getattr(changed, name)
    assert changed == expected and type(changed) is type(expected)


def test_override_reaches_the_chosen_member_and_nothing_else():
    chosen = Experiment("x", Model(8, mixer=Shifted(1, "a"), other_mixer=Scaled(3.0)))
    assert override(chosen, "--model.mixer.by=2").model.mixer == Shifted(2, "a")
    twice = dataclasses.replace(chosen.model, mixer=Shifted(1, "a", True))
    assert override(chosen, "--model.mixer.twice").model == twice
    assert override(chosen, "--model.mixer=first_mixer").model.mixer is first_mixer
    assert override(chosen, "--model.other-mixer=None").model.other_mixer is None
    # of the class that is chosen, in any order
    both = (
        "--model.mixer.by=2",
        "--model.mixer=Scaled",
    )
    assert message(override, chosen, *both).startswith("--model.mixer.by: no such option")
    assert override(FULL, "--optimizer.weight-decay=0.2").optimizer == Lion(weight_decay=0.2)
    assert override(FULL, "--model.rope.scaling.factor=3").model.rope == Rope(scaling=Linear(3.0))
    assert override(FULL) is FULL
    heads = C.diff(C.describe(FULL), C.describe(override(FULL, "--model.heads=2")))
    assert heads == {"model.heads": (4, 2)}


def test_names_belong_to_fields_and_those_of_the_users_file_come_first():
    library = lambda: "library"
    library.__module__ = "jaxformer.somewhere"
    names = {"data": {"f": library, "g": library}, "mixer": {"h": library}}
    assert C.override(BASE, ["--data=f()"], names).data == "library"
    assert C.override(BASE, ["--data=f()"], {**names, "": {"f": lambda: "mine"}}).data == "mine"
    imported = lambda: "imported"
    imported.__module__ = "jaxformer.elsewhere"
    assert C.override(BASE, ["--data=f()"], {**names, "": {"f": imported}}).data == "library"
    assert C.override(BASE, ["--model.mixer=h"], names).model.mixer is library
    assert "there is no 'h'" in message(C.override, BASE, ["--data=h"], names)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (
            ["--optimzer.learning-rate=1"],
            "--optimzer.learning-rate: no such option; did you mean --optimizer.learning-rate?",
        ),
        (
            ["--learning_rate=1"],
            "--learning_rate: no such option; did you mean --optimizer.learning-rate?",
        ),
        (["--stepz", "3"], "--stepz: no such option; did you mean --steps?"),
        (["--qqqqqq"], "--qqqqqq: no such option"),
        (["--optimizer.weight-decay=1"], "--optimizer.weight-decay: no such option"),
        (["--no-steps"], "--no-steps: no such option; did you mean --steps?"),
        (["--steps=abc"], "--steps=abc: there is no 'abc' to choose from; expected int"),
        (["--steps=1.0"], "--steps=1.0: expected int, got 1.0"),
        (["--steps=1e-1"], "--steps=1e-1: expected int, got 0.1"),
        (["--steps=1e400"], "--steps=1e400: the number is too large; expected int"),
        (["--steps=True"], "--steps=True: expected int, got True"),
        (["--steps"], "--steps: expected int"),
        (["--steps", "1", "2"], "2: expected an option; did you mean --2?"),
        (
            ["--optimizer.learning-rate=x"],
            "--optimizer.learning-rate=x: there is no 'x' to choose from; expected float",
        ),
        (["--optimizer.betas", "1"], "--optimizer.betas 1: expected float float, got 1"),
        (
            ["--optimizer.betas", "(1, 2, 3)"],
            "--optimizer.betas (1, 2, 3): expected float float, got (1, 2, 3)",
        ),
        (
            ["--model.norm=batch"],
            (
                "--model.norm=batch: there is no 'batch' to choose from; did you mean Path?; "
                "expected one of layer, rms"
            ),
        ),
        (
            ["--model.bias=maybe"],
            "--model.bias=maybe: there is no 'maybe' to choose from; expected bool",
        ),
        (["--model.bias=1"], "--model.bias=1: expected bool, got 1"),
        (
            ["--model.window=x"],
            "--model.window=x: there is no 'x' to choose from; expected int or None",
        ),
        (
            ["--loggers", "x"],
            "--loggers x: there is no 'x' to choose from; expected one of tensorboard, wandb",
        ),
        (["--level=3"], "--level=3: expected one of 1, 2, got 3"),
        (
            ["--model.masks=causal"],
            "--model.masks=causal: expected Mask, got causal",
        ),
        (
            ["--model.masks", "causal & window(3)"],
            (
                "--model.masks causal & window(3): unsupported operand type(s) for &: 'function' "
                "and 'Mask'; expected Mask"
            ),
        ),
        (
            ["--model.mixer=scond_mixer"],
            "--model.mixer=scond_mixer: there is no 'scond_mixer' to choose from; did you "
            "mean second_mixer?; "
            "expected a function such as Name(field=value)",
        ),
        (
            ["--model.mixer=3"],
            "--model.mixer=3: expected a function such as Name(field=value), got 3",
        ),
        (
            ["--model.mixer=Adam"],
            "--model.mixer=Adam: expected a function such as Name(field=value), got Adam(...)",
        ),
        (
            ["--model.mixer=Scaled", "--model.mixer.factor=x"],
            "--model.mixer.factor=x: there is no 'x' to choose from; expected float",
        ),
        (["--optimizer=Linear"], "--optimizer=Linear: expected Adam or Lion, got Linear(...)"),
        (
            ["--optimizer=Adan"],
            (
                "--optimizer=Adan: there is no 'Adan' to choose from; did you mean Adam?; "
                "expected Adam or Lion"
            ),
        ),
        (
            ["--optimizer=first_mixer"],
            "--optimizer=first_mixer: expected Adam or Lion, got first_mixer",
        ),
        (
            ["--optimizer", "Lion(rate=1)"],
            "--optimizer Lion(rate=1): Lion(learning_rate, weight_decay): got an unexpected "
            "keyword argument 'rate'; "
            "expected Adam or Lion",
        ),
        (
            ["--optimizer", "Lion(weight_decay='x')"],
            (
                "--optimizer Lion(weight_decay='x'): Lion(weight_decay=...): expected float, got "
                "'x'; expected Adam or Lion"
            ),
        ),
        (
            ["--model.mixer=Shifted"],
            "--model.mixer=Shifted: Shifted(by, word, twice): missing a required argument: 'by'; "
            "expected a function such as Name(field=value)",
        ),
        (["--data", "f"], "--data f: there is no 'f' to choose from"),
        (["--data", "(("], "--data ((: '(' was never closed, in an expression"),
        (["--model.heads=3"], "--model.heads=3: heads=3 does not divide width=64"),
        (
            ["--model.rope.theta=1"],
            (
                "--model.rope.theta: --model.rope is None, which has no fields; give "
                "--model.rope=Rope(theta=...)"
            ),
        ),
        (["steps=3"], "steps=3: expected an option; did you mean --steps=3?"),
        (["-s", "3"], "-s: expected an option; did you mean --s?"),
    ],
)
def test_override_mistakes(args, expected, capsys):
    assert message(override, BASE, *args) == expected
    assert capsys.readouterr() == ("", "")


def test_types_in_messages_read_well():
    hint = Adam | tuple[Rope | None, ...] | Callable | str | None
    assert expressions.expected(hint) == (
        "Adam, any number of Rope or None, a function such as Name(field=value), str or None"
    )


# The list of options


class Plain:
    """No dataclass, no name, and a text of two lines."""

    def __repr__(self):
        return "two\nlines at 0x7f00"


@pytest.mark.parametrize("columns", ["", "0", "1", "20", "80", "1000"])
def test_help_lists_every_option(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    text = C.help_text(FULL, "show full")
    assert text.startswith("usage: show full")
    names = [path for path, _, _ in walk(FULL)]
    options = [line.split(" ")[0] for line in text.splitlines() if line.startswith("--")]
    assert options == ["--" + name.replace("_", "-") for name in names]
    assert {"--model.rope.scaling.factor", "--optimizer.weight-decay"} <= set(options)
    assert "--optimizer.betas" not in options
    assert max(map(len, text.splitlines())) <= 140


def test_help_says_type_value_and_meaning(monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    text = C.help_text(FULL, "show full")
    lines = text.splitlines()
    assert lines[lines.index("--model.heads  int = 4") + 1] == "      must divide the width"
    assert (
        lines[lines.index("--model.bias  bool = True") + 1]
        == "      whether linear maps add a bias"
    )
    assert "--model.norm  one of layer, rms = 'layer'" in lines
    assert "--model.window  int or None = 3" in lines
    assert (
        "--model.other-mixer  a function such as Name(field=value) or None = second_mixer" in lines
    )
    assert (
        "--model.masks  any number of Mask = (causal(), window(3, 3))" in text or "causal()" in text
    )
    assert "--initial  a function such as Name(field=value), str or None = None" in lines
    scaled = C.help_text(Experiment("x", Model(8, mixer=Scaled())), "x").splitlines()
    assert (
        scaled[scaled.index("--model.mixer  Scaled(...)") + 1]
        == "      A function that is a config."
    )
    assert (
        scaled[scaled.index("--model.mixer.factor  float = 2.0") + 1]
        == "      multiplies the input"
    )


@pytest.mark.parametrize(
    "value",
    [
        Plain(),
        Plain,
        lambda x: x,
        functools.partial(first_mixer, x=Plain()),
        functools.partial(int),
        np.zeros((3, 3)),
        [Plain(), lambda: 0],
        {"a": Plain()},
        Scaled(inner=Plain()),
        dataclasses.make_dataclass("Made", [("a", "no such type", 3)])(),
        first_mixer.__call__,
        object(),
        (),
        b"bytes",
        "two\nlines",
    ],
    ids=lambda value: type(value).__name__,
)
def test_help_never_fails(value):
    text = C.help_text(Experiment("x", data=value, optimizer=value), "x")
    assert " at 0x" not in text and "--data" in text


@pytest.mark.thorough
def test_help_of_every_experiment(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # and there is no terminal
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    for name in C.available():
        experiment = C.load(name)
        text = C.help_text(experiment, name)
        field = (
            r"--model(\.decoder)?\.num-layers  int = "
            if models.is_config(experiment.model)
            else "--model  "
        )
        assert " at 0x" not in text and re.search(field, text)
    for name in {name for name in sys.modules if name.startswith("experiment")} - before:
        del sys.modules[name]
