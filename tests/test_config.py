"""config: overrides, JSON, diff and fingerprint over a small nest of configs, and the errors, each in one line."""

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer import config as C
from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class Word:
    """Stands in for a mask: a value with a text form."""

    letters: str

    @staticmethod
    def __parse__(text):
        if not (text.startswith("<") and text.endswith(">")):
            raise ValueError(f"word {text!r}: expected <letters>")
        return Word(text[1:-1])

    def __str__(self):
        return f"<{self.letters}>"


def first_mixer(x):
    return x


def second_mixer(x):
    return x


@dataclass(frozen=True)
class Scaled:
    """A function that is a config."""

    factor: float = 2.0
    inner: Callable | None = None

    def __call__(self, x):
        return self.factor * x


@dataclass(frozen=True)
class Shifted:
    by: int
    word: str
    twice: bool = False

    def __call__(self, x):
        return x + self.by


@dataclass(frozen=True)
class Adam:
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)


@dataclass(frozen=True)
class Lion:
    learning_rate: float = 1e-4
    weight_decay: float = 0.1


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
    heads: int = 4
    bias: bool = True
    norm: Literal["layer", "rms"] = "layer"
    window: int | None = None
    softcap: float | None = None
    implementation: str | None = None
    rope: Rope | None = None
    mixer: Callable = first_mixer
    other_mixer: Callable | None = None
    mask: Word = Word("a")
    masks: tuple[Word, ...] = ()
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


BASE = Experiment("base")
FULL = Experiment(
    "full",
    Model(8, window=3, rope=Rope(scaling=Linear(2.0)), other_mixer=second_mixer, masks=(Word("b"), Word(""))),
    Lion(),
    mixture=(Adam(), Lion(0.5)),
)

number = st.floats(allow_nan=False)
word = st.builds(Word, st.text("ab ", max_size=3))
adam = st.builds(Adam, number, st.tuples(number, number))
lion = st.builds(Lion, number, number)
rope = st.builds(Rope, number, st.none() | st.builds(Linear, number) | adam)
function = st.sampled_from([first_mixer, second_mixer])
mixer = function | st.builds(Scaled, number, st.none() | function) | st.builds(Shifted, st.integers(), st.text())
models = st.builds(
    lambda heads, times, **rest: Model(heads * times, heads, **rest),
    st.integers(1, 8),
    st.integers(1, 8),
    bias=st.booleans(),
    norm=st.sampled_from(["layer", "rms"]),
    window=st.none() | st.integers(),
    softcap=st.none() | number,
    implementation=st.none() | st.text(),
    rope=st.none() | rope,
    mixer=mixer,
    other_mixer=st.none() | mixer,
    mask=word,
    masks=st.lists(word, max_size=3).map(tuple),
    layers=st.lists(st.integers(), max_size=3).map(tuple),
)
experiments = st.builds(
    Experiment,
    st.text(),
    models,
    adam | lion,
    st.integers(),
    st.lists(st.sampled_from(["tensorboard", "wandb"])).map(tuple),
    st.lists(adam | lion, max_size=2).map(tuple),
)


def message(function, *args) -> str:
    """The one line with which a user's mistake is answered."""
    with pytest.raises(ConfigError) as caught:
        function(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# JSON, diff, fingerprint


@given(experiments)
def test_json_round_trip_is_exact(experiment):
    back = C.loads(Experiment, C.dumps(experiment))
    assert back == experiment
    assert repr(back) == repr(experiment)  # also tells 1 from 1.0, and -0.0 from 0.0
    assert C.fingerprint(back) == C.fingerprint(experiment)
    assert C.diff(experiment, back) == {}


@given(experiments, experiments)
def test_diff_and_fingerprint_tell_configs_apart(one, two):
    assert bool(C.diff(one, two)) == (one != two)
    if one != two:
        assert C.fingerprint(one) != C.fingerprint(two)


def test_json_form():
    plain = C.to_dict(FULL)
    assert plain["optimizer"] == {"type": "Lion", "learning_rate": 1e-4, "weight_decay": 0.1}
    assert plain["model"]["rope"] == {"type": "Rope", "theta": 10000.0, "scaling": {"type": "Linear", "factor": 2.0}}
    assert plain["model"]["mixer"] == f"{__name__}:first_mixer"
    assert plain["model"]["masks"] == ["<b>", "<>"]
    assert "type" not in plain["model"]
    assert type(C.to_dict(Experiment("x", optimizer=Adam(1)))["optimizer"]["learning_rate"]) is float


def test_functions_that_are_configs():
    """In JSON with the name of their class and their fields, wherever a function may stand."""
    model = Model(8, mixer=Scaled(3.0, Shifted(1, "a")), other_mixer=Scaled())
    plain = C.to_dict(Experiment("x", model))["model"]
    shifted = {"type": f"{__name__}:Shifted", "by": 1, "word": "a", "twice": False}
    assert plain["mixer"] == {"type": f"{__name__}:Scaled", "factor": 3.0, "inner": shifted}
    assert plain["other_mixer"] == {"type": f"{__name__}:Scaled", "factor": 2.0, "inner": None}
    by_name = C.from_dict(
        Model, {"width": 8, "mixer": f"{__name__}:Scaled", "other_mixer": {"type": f"{__name__}:Scaled"}}
    )
    assert by_name == Model(8, mixer=Scaled(), other_mixer=Scaled())


def test_fingerprints_of_functions_that_are_configs():
    twin = make_dataclass("Scaled", [("factor", float, 2.0)], frozen=True, namespace={"__call__": first_mixer})
    twin.__module__, twin.__qualname__ = __name__, "Scaled2"
    globals()["Scaled2"] = twin
    mixers = [first_mixer, Scaled(), Scaled(3.0), Scaled(inner=Scaled()), Scaled(inner=first_mixer), twin()]
    prints = [C.fingerprint(Model(8, mixer=f)) for f in mixers]
    assert len(set(prints)) == len(prints)
    assert C.fingerprint(Model(8)) == prints[0]
    assert C.diff(Model(8, mixer=Scaled()), Model(8, mixer=Scaled(3.0))) == {"mixer.factor": (2.0, 3.0)}
    assert C.diff(Model(8), Model(8, other_mixer=Scaled(3.0))) == {
        "other_mixer": (None, "Scaled"),
        "other_mixer.factor": (None, 3.0),
    }
    default = make_dataclass("Outer", [("mixer", Callable, Scaled())], frozen=True)
    empty = make_dataclass("Outer", [], frozen=True)
    assert C.fingerprint(default()) == C.fingerprint(empty()) != C.fingerprint(default(Scaled(3.0)))


def test_absent_fields_take_their_defaults():
    assert C.from_dict(Experiment, {"name": "base"}) == BASE


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"stepz": 3}, "no such key 'stepz'; did you mean steps?"),
        ({"model": {"width": 8, "head": 2}}, "model: no such key 'head'; did you mean heads?"),
        (
            {"model": {"width": 8, "rope": {"type": "Rope", "tetha": 1.0}}},
            "model.rope: no such key 'tetha'; did you mean theta?",
        ),
        ({"model": {}}, "model.width: missing; expected int"),
        ({"model": 3}, "model: expected Model"),
        ({"model": "width"}, "model: expected Model"),
        ({"steps": "3"}, "steps: expected int, got '3'"),
        ({"steps": 1.5}, "steps: expected int, got 1.5"),
        ({"model": {"width": 8, "bias": "False"}}, "model.bias: expected bool, got 'False'"),
        ({"model": {"width": 8, "norm": "batch"}}, "model.norm: expected one of layer, rms"),
        ({"model": {"width": 8, "window": "x"}}, "model.window: expected int or None, got 'x'"),
        ({"loggers": ["tensorboard", "x"]}, "loggers[1]: expected one of tensorboard, wandb"),
        ({"optimizer": {"type": "Adan"}}, "optimizer: no class 'Adan' among Adam, Lion; did you mean Adam?"),
        ({"optimizer": {}}, "optimizer: no class None among Adam, Lion"),
        ({"optimizer": None}, "optimizer: expected Adam or Lion, got None"),
        (
            {"optimizer": {"type": "Adam", "betas": [0.9]}},
            "optimizer.betas: Not enough values in [0.9] to structure as tuple[float, float]",
        ),
        ({"model": {"width": 8, "mask": "x"}}, "model.mask: word 'x': expected <letters>"),
        (
            {"model": {"width": 8, "mixer": "nowhere:f"}},
            "model.mixer: nowhere:f: ModuleNotFoundError: No module named 'nowhere'",
        ),
        ({"model": {"width": 9}}, "model: heads=4 does not divide width=9"),
        (
            {"model": {"width": 8, "mixer": {"type": f"{__name__}:Scaled", "facter": 1.0}}},
            "model.mixer: no such key 'facter'; did you mean factor?",
        ),
        (
            {"model": {"width": 8, "other_mixer": {"type": f"{__name__}:Scaled", "factor": "x"}}},
            "model.other_mixer.factor: expected float, got 'x'",
        ),
        (
            {"model": {"width": 8, "other_mixer": {"type": f"{__name__}:Shifted", "by": 1}}},
            "model.other_mixer.word: missing; expected str",
        ),
        (
            {"model": {"width": 8, "mixer": {"type": f"{__name__}:first_mixer"}}},
            f"model.mixer: {__name__}:first_mixer is a function, which has no fields",
        ),
        (
            {"model": {"width": 8, "mixer": f"{__name__}:Shifted"}},
            f"model.mixer: {__name__}:Shifted has no default for by, word; choose it in the experiment file",
        ),
        (
            {"model": {"width": 8, "mixer": {"type": f"{__name__}:Adam"}}},
            f"model.mixer: {__name__}:Adam is not a function",
        ),
        (
            {"model": {"width": 8, "mixer": {"factor": 1.0}}},
            "model.mixer: expected module:function, got {'factor': 1.0}",
        ),
    ],
)
def test_json_mistakes(change, expected):
    assert message(C.from_dict, Experiment, {"name": "x", **change}) == expected


def test_not_json():
    assert "not JSON" in message(C.loads, Experiment, "{")
    assert message(C.loads, Experiment, "3") == "expected Experiment, got 3"


def test_functions_without_a_name_are_refused():
    assert "def at the top level" in message(C.dumps, Experiment("x", Model(8, mixer=lambda x: x)))
    assert "def at the top level" in message(C.dumps, Experiment("x", Model(8, other_mixer=lambda x: x)))
    local = make_dataclass("Local", [("factor", float, 2.0)], namespace={"__call__": first_mixer})
    for function in (local(), Scaled(inner=local())):
        assert "top level" in message(C.dumps, Experiment("x", Model(8, other_mixer=function)))


def test_diff():
    assert C.diff(BASE, dataclasses.replace(BASE, steps=7)) == {"steps": (100, 7)}
    assert C.diff(BASE, dataclasses.replace(BASE, optimizer=Lion())) == {
        "optimizer": ("Adam", "Lion"),
        "optimizer.learning_rate": (1e-3, 1e-4),
        "optimizer.betas": ((0.9, 0.999), None),
        "optimizer.weight_decay": (None, 0.1),
    }
    changed = dataclasses.replace(BASE, model=Model(64, rope=Rope(), mixer=second_mixer))
    assert C.diff(BASE, changed) == {
        "model.rope": (None, "Rope"),
        "model.rope.theta": (None, 10000.0),
        "model.mixer": (first_mixer, second_mixer),
    }


def test_fingerprint_ignores_a_new_field_with_a_default():
    other = make_dataclass("Other", [("depth", int, 3)], frozen=True)

    def fingerprints(inner):
        fields = [
            ("inner", inner | other, inner()),
            ("items", tuple[inner, ...], ()),
            ("plain", inner, inner(rate=0.3)),
        ]
        outer = make_dataclass("Outer", fields)
        changes = [
            {},
            {"inner": inner(rate=0.2)},
            {"inner": other()},
            {"items": (inner(), inner(rate=0.2))},
            {"plain": inner(rate=0.1)},
        ]
        return [C.fingerprint(outer(**change)) for change in changes]

    rate, extra = ("rate", float, 0.1), ("extra", tuple[int, ...], (1,))
    old = fingerprints(make_dataclass("Inner", [rate], frozen=True))
    assert fingerprints(make_dataclass("Inner", [rate, extra], frozen=True)) == old
    assert fingerprints(make_dataclass("Inner", [extra, rate], frozen=True)) == old
    assert len(set(old)) == len(old)


def test_fingerprint_form():
    assert len(C.fingerprint(BASE)) == 8 and int(C.fingerprint(BASE), 16) >= 0
    lr = [dataclasses.replace(BASE, optimizer=Adam(value)) for value in (1e-2, 0.01, 2, 2.0)]
    assert C.fingerprint(lr[0]) == C.fingerprint(lr[1]) != C.fingerprint(lr[2]) == C.fingerprint(lr[3])
    shuffled = dict(reversed(C.to_dict(FULL).items()))
    assert C.fingerprint(C.from_dict(Experiment, shuffled)) == C.fingerprint(FULL)
    assert C.fingerprint(dataclasses.replace(BASE, optimizer=Adam(1e-3))) == C.fingerprint(BASE)


# The command line


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
        (["--optimizer.learning-rate=3e-4"], "optimizer.learning_rate", 3e-4),
        (["--optimizer.learning_rate", "1"], "optimizer.learning_rate", 1.0),
        (["--optimizer.betas", "0.9", "0.98"], "optimizer.betas", (0.9, 0.98)),
        (["--model.bias=False"], "model.bias", False),
        (["--model.bias=false"], "model.bias", False),
        (["--model.bias", "False"], "model.bias", False),
        (["--model.no-bias"], "model.bias", False),
        (["--model.no-bias", "--model.bias"], "model.bias", True),
        (["--model.norm=rms"], "model.norm", "rms"),
        (["--model.window=5"], "model.window", 5),
        (["--model.window=1e3"], "model.window", 1000),
        (["--model.window=5", "--model.window=None"], "model.window", None),
        (["--model.softcap=5"], "model.softcap", 5.0),
        (["--model.implementation=None"], "model.implementation", None),
        (["--model.implementation=splash"], "model.implementation", "splash"),
        (["--model.layers", "1", "2", "3"], "model.layers", (1, 2, 3)),
        (["--model.layers"], "model.layers", ()),
        (["--loggers", "wandb", "tensorboard"], "loggers", ("wandb", "tensorboard")),
        ([f"--model.mixer={__name__}:second_mixer"], "model.mixer", second_mixer),
        ([f"--model.other-mixer={__name__}:second_mixer"], "model.other_mixer", second_mixer),
        ([f"--model.other-mixer={__name__}:second_mixer", "--model.other-mixer=None"], "model.other_mixer", None),
        (["--model.mixer=math:sqrt"], "model.mixer", __import__("math").sqrt),
        ([f"--model.mixer={__name__}:Scaled"], "model.mixer", Scaled()),
        ([f"--model.other-mixer={__name__}:Scaled"], "model.other_mixer", Scaled()),
        ([f"--model.mixer={__name__}:Scaled", "--model.mixer.factor=3"], "model.mixer", Scaled(3.0)),
        (["--model.mixer.factor=3", f"--model.mixer={__name__}:Scaled"], "model.mixer", Scaled(3.0)),
        (
            [
                "--model.other-mixer.inner.factor=3",
                f"--model.other-mixer={__name__}:Scaled",
                f"--model.other-mixer.inner={__name__}:Scaled",
            ],
            "model.other_mixer",
            Scaled(inner=Scaled(3.0)),
        ),
        (["--model.mask=<x y>"], "model.mask", Word("x y")),
        (["--model.masks", "<x y>", "<>"], "model.masks", (Word("x y"), Word(""))),
        (["--model.width=10", "--model.heads=5"], "model.heads", 5),  # neither alone would be valid
    ],
)
def test_override(args, path, expected):
    changed = C.override(BASE, args)
    for name in path.split("."):
        before, changed = changed, getattr(changed, name)
    assert changed == expected and type(changed) is type(expected)
    assert type(before) in (Experiment, Model, Adam)


def test_override_reaches_the_chosen_member_and_nothing_else():
    chosen = Experiment("x", Model(8, mixer=Shifted(1, "a"), other_mixer=Scaled(3.0)))
    assert C.override(chosen, ["--model.mixer.by=2"]).model.mixer == Shifted(2, "a")
    assert C.override(chosen, ["--model.mixer.twice"]).model == dataclasses.replace(
        chosen.model, mixer=Shifted(1, "a", True)
    )
    assert C.override(chosen, [f"--model.mixer={__name__}:first_mixer"]).model.mixer is first_mixer
    assert C.override(chosen, ["--model.other-mixer=None"]).model.other_mixer is None
    both = ["--model.mixer.by=2", f"--model.mixer={__name__}:Scaled"]  # of the class that is chosen, in any order
    assert message(C.override, chosen, both).startswith("--model.mixer.by: no such option")
    assert C.override(FULL, ["--optimizer.weight-decay=0.2"]).optimizer == Lion(weight_decay=0.2)
    assert C.override(FULL, ["--model.rope.scaling.factor=3"]).model.rope == Rope(scaling=Linear(3.0))
    assert C.override(FULL, []) is FULL
    assert C.diff(FULL, C.override(FULL, ["--model.heads=2"])) == {"model.heads": (4, 2)}


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (
            ["--optimzer.learning-rate=1"],
            "--optimzer.learning-rate: no such option; did you mean --optimizer.learning-rate?",
        ),
        (["--learning_rate=1"], "--learning_rate: no such option; did you mean --optimizer.learning-rate?"),
        (["--stepz", "3"], "--stepz: no such option; did you mean --steps?"),
        (["--qqqqqq"], "--qqqqqq: no such option"),
        (["--optimizer.weight-decay=1"], "--optimizer.weight-decay: no such option"),
        (["--no-steps"], "--no-steps: no such option; did you mean --steps?"),
        (["--steps=abc"], "--steps=abc: expected int"),
        (["--steps=1.0"], "--steps=1.0: expected int"),
        (["--steps=1e-1"], "--steps=1e-1: expected int"),
        (["--steps=1e400"], "--steps=1e400: expected int"),
        (["--steps"], "--steps: expected int"),
        (["--steps", "1", "2"], "--steps 1 2: expected int"),
        (["--optimizer.learning-rate=x"], "--optimizer.learning-rate=x: expected float"),
        (["--optimizer.betas", "1"], "--optimizer.betas 1: expected float float"),
        (["--model.norm=batch"], "--model.norm=batch: expected one of layer, rms"),
        (["--model.bias=maybe"], "--model.bias=maybe: expected bool"),
        (["--model.window=x"], "--model.window=x: expected int or None"),
        (["--loggers", "x"], "--loggers x: expected any number of one of tensorboard, wandb"),
        (["--model.mask=x"], "--model.mask=x: word 'x': expected <letters>"),
        (["--model.masks", "<a>", "x"], "--model.masks <a> x: word 'x': expected <letters>"),
        (["--model.mixer=sqrt"], "--model.mixer=sqrt: expected module:function, got 'sqrt'"),
        (["--model.mixer=math:pi"], "--model.mixer=math:pi: math:pi is not a function"),
        (
            [f"--model.mixer={__name__}:Shifted"],
            f"--model.mixer={__name__}:Shifted: {__name__}:Shifted has no default for by, word; "
            "choose it in the experiment file",
        ),
        ([f"--model.mixer={__name__}:Adam"], f"--model.mixer={__name__}:Adam: {__name__}:Adam is not a function"),
        ([f"--model.mixer={__name__}:Scaled", "--model.mixer.factor=x"], "--model.mixer.factor=x: expected float"),
        (["--model.heads=3"], "--model.heads=3: heads=3 does not divide width=64"),
        (["--model.rope.theta=1"], "--model.rope.theta: no such option; did you mean --model.rope?"),
        (["--model.rope=Rope"], "--model.rope: chosen in the experiment file; edit it there"),
        (
            ["--optimizer=Lion"],
            "--optimizer: chosen in the experiment file; edit it there",
        ),
        (["steps=3"], "steps=3: expected an option; did you mean --steps=3?"),
        (["-s", "3"], "-s: expected an option; did you mean --s?"),
    ],
)
def test_override_mistakes(args, expected, capsys):
    assert message(C.override, BASE, args) == expected
    assert capsys.readouterr() == ("", "")


def test_help_lists_every_option():
    text = C.help_text(FULL, prog="show full")
    assert text.startswith("usage: show full")
    for name in ("name", "steps", "model.width", "model.mixer", "model.masks", "model.rope.scaling.factor"):
        assert f"--{name} " in text
    assert "--optimizer.weight-decay" in text and "--optimizer.betas" not in text
    assert "<b>" in text and "second_mixer" in text


def test_help_lists_the_fields_of_functions_that_are_configs():
    model = Model(8, mixer=Scaled(3.0, Shifted(1, "a")), other_mixer=Scaled())
    text = C.help_text(Experiment("x", model, mixture=(Adam(),)))
    for name in (
        "mixer.factor",
        "mixer.inner.by",
        "mixer.inner.word",
        "other-mixer.factor",
        "other-mixer.inner",
        "heads",
    ):
        assert f"--model.{name} " in text
    assert "--optimizer.learning-rate " in text and "Scaled" not in text.split("options")[0]


# Experiment files

FILE = """
from tests_config_classes import Experiment, Model
def local_mixer(x):
    return x
experiment = Experiment("{name}", Model(8, mixer=local_mixer))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with experiments/, as the current one; imports and paths are as before afterwards."""
    (tmp_path / "experiments").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", sys.modules)
    before = set(sys.modules)
    monkeypatch.setitem(sys.modules, "tests_config_classes", sys.modules[__name__])
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_load_by_name_and_by_path(folder):
    (folder / "experiments" / "quickstart.py").write_text(FILE.format(name="q"))
    (folder / "elsewhere.py").write_text(FILE.format(name="e"))
    by_name, by_path = C.load("quickstart"), C.load("elsewhere.py")
    assert (by_name.name, by_path.name, C.load(str(folder / "elsewhere.py")).name) == ("q", "e", "e")
    assert by_name.model.mixer.__module__ == "experiments.quickstart"
    for experiment in (by_name, C.load("elsewhere.py")):
        assert C.loads(Experiment, C.dumps(experiment)) == experiment
    changed = C.override(by_path, ["--model.mixer=experiments.quickstart:local_mixer"])
    assert changed.model.mixer is by_name.model.mixer


def test_experiments_may_build_on_each_other(folder):
    (folder / "experiments" / "first.py").write_text(FILE.format(name="first"))
    (folder / "experiments" / "second.py").write_text(
        "import dataclasses\nfrom experiments.first import experiment as first\n"
        "experiment = dataclasses.replace(first, name='second')\n"
    )
    assert C.load("second").name == "second"


def test_an_edited_file_is_read_again(folder):
    for name in ("one", "two"):
        (folder / "x.py").write_text(FILE.format(name=name))
        assert C.load("x.py").name == name


def test_load_mistakes(folder):
    experiments = folder / "experiments"
    (experiments / "quickstart.py").write_text(FILE.format(name="q"))
    (experiments / "empty.py").write_text("")
    (experiments / "raises.py").write_text("import os\n\nos.environ[\n'no such variable']\n")
    (experiments / "invalid.py").write_text("from tests_config_classes import Model\nModel(\n  3)\n")
    (experiments / "syntax.py").write_text("x = 1\ny = (\n")
    assert message(C.load, "quikstart") == "no experiment 'quikstart' in experiments/; did you mean 'quickstart'?"
    assert message(C.load, "zzzz") == "no experiment 'zzzz' in experiments/"
    assert message(C.load, "experiments/quikstart.py") == (
        "no file experiments/quikstart.py; did you mean quickstart.py?"
    )
    assert "empty.py: defines no `experiment`" in message(C.load, "empty")
    assert "raises.py:3: KeyError: 'no such variable'" in message(C.load, "raises")
    assert "invalid.py:2: ValueError: heads=4 does not divide width=3" in message(C.load, "invalid")
    assert "syntax.py:2: SyntaxError" in message(C.load, "syntax")
    assert "experiments.raises" not in sys.modules
