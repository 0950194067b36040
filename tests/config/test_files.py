"""Experiment files: found by name and path, run, run again from a copy, and what they import and
offer."""

import hashlib
import shutil
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from jaxformer import config as C
from jaxformer.errors import ConfigError
from tests.config.values import message


@dataclass(frozen=True)
class Experiment:
    name: str
    mixer: Any = None
    width: int = 8

    def __post_init__(self):
        if self.width % 4:
            raise ValueError(f"4 does not divide width={self.width}")


FILE = """
from tests_config_classes import Experiment
def local_mixer(x):
    return x
experiment = Experiment("{name}", local_mixer)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with experiments/, as the current one; imports and paths are as before
    afterwards."""
    (tmp_path / "experiments").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    monkeypatch.setitem(sys.modules, "tests_config_classes", sys.modules[__name__])
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_load_by_name_and_by_path(folder):
    (folder / "experiments" / "quickstart.py").write_text(FILE.format(name="q"))
    (folder / "elsewhere.py").write_text(FILE.format(name="e"))
    by_name, by_path = C.load("quickstart"), C.load("elsewhere.py")
    assert (by_name.name, by_path.name, C.load(str(folder / "elsewhere.py")).name) == (
        "q",
        "e",
        "e",
    )
    assert C.load("experiments/quickstart.py").name == "q"
    assert (
        C.available()["quickstart"] == folder / "experiments" / "quickstart.py"
        or "quickstart" in C.available()
    )
    assert C.describe(by_name) | {"name": ""} == C.describe(by_path) | {"name": ""}


def test_the_users_own_experiments_come_first(folder):
    packaged = C.available()["quickstart"].resolve()
    (folder / "experiments" / "quickstart.py").write_text(FILE.format(name="q"))
    mine = C.available()["quickstart"].resolve()
    assert mine == folder / "experiments" / "quickstart.py" != packaged


@pytest.mark.thorough
def test_experiments_may_build_on_each_other(folder):
    (folder / "experiments" / "first.py").write_text(FILE.format(name="first"))
    (folder / "experiments" / "second.py").write_text(
        "import dataclasses\nfrom experiments.first import experiment as first\n"
        "experiment = dataclasses.replace(first, name='second')\n"
    )
    (folder / "experiments" / "third.py").write_text(
        "import dataclasses\nfrom .first import experiment as first\nexperiment = "
        "dataclasses.replace(first, name='third')\n"
    )
    fresh = C.describe(C.load("second"))
    assert fresh["name"] == "second" and C.load("third").name == "third"
    C.load("first")  # to have run it as well is no difference
    assert C.describe(C.load("second")) == fresh


def test_the_copy_of_an_experiment_is_not_what_others_import(folder):
    first = folder / "experiments" / "first.py"
    first.write_text(FILE.format(name="old"))
    facts = C.read("first").facts()
    copy = shutil.copy(first, folder / "copy_of_first.py")
    first.write_text(FILE.format(name="new"))
    (folder / "experiments" / "second.py").write_text("from experiments.first import experiment\n")
    assert C.again(folder / copy, facts).experiment.name == "old"
    assert C.load("second").name == "new"


def test_an_edited_file_is_read_again(folder):
    for name in ("one", "two"):
        (folder / "x.py").write_text(FILE.format(name=name))
        assert C.load("x.py").name == name


def test_a_file_named_like_a_module_does_not_replace_it(folder):
    import copy

    (folder / "copy.py").write_text(FILE.format(name="c"))
    assert C.load("copy.py").name == "c"
    assert sys.modules["copy"] is copy


def test_load_mistakes(folder):
    experiments = folder / "experiments"
    (experiments / "quickstart.py").write_text(FILE.format(name="q"))
    (experiments / "empty.py").write_text("")
    (experiments / "raises.py").write_text("import os\n\nos.environ[\n'no such variable']\n")
    (experiments / "invalid.py").write_text(
        "from tests_config_classes import Experiment\nExperiment(\n  'x', width=3)\n"
    )
    (experiments / "syntax.py").write_text("x = 1\ny = (\n")
    (experiments / "bytes.py").write_bytes(b"x = '\xff'")
    assert (
        message(C.load, "quikstart")
        == "no experiment 'quikstart' in experiments/; did you mean 'quickstart'?"
    )
    assert message(C.load, "zzzz") == "no experiment 'zzzz' in experiments/"
    assert message(C.load, "experiments/quikstart.py") == (
        "no file experiments/quikstart.py; did you mean quickstart.py?"
    )
    before = set(sys.modules)
    assert "empty.py: defines no `experiment`" in message(C.load, "empty")
    assert "raises.py:3: KeyError: 'no such variable'" in message(C.load, "raises")
    assert "invalid.py:2: ValueError: 4 does not divide width=3" in message(C.load, "invalid")
    assert "syntax.py:2: SyntaxError" in message(C.load, "syntax")
    assert "bytes.py: cannot be read" in message(C.load, "bytes")
    assert set(sys.modules) == before


OWN = """
import helpers, functools
from pathlib import Path
from helpers import scale
from dataclasses import dataclass
from tests_config_classes import Experiment
K = 3
here = Path(__file__).parent
@dataclass(frozen=True)
class Own:
    rate: float = 1.0
    def __call__(self, x):
        return scale(x) * K
class Plain:
    def __call__(self, x):
        return helpers.scale(x)
preset = Own(2.0)
half = functools.partial(scale, 1)
_hidden = lambda: 0
experiment = Experiment("own", (Own(), Plain(), lambda x: K, functools.partial(scale), here))
"""


@pytest.fixture
def own(folder):
    (folder / "own.py").write_text(OWN)
    (folder / "helpers.py").write_text("import deeper\ndef scale(x): return deeper.K * x\n")
    (folder / "deeper.py").write_text("import math\nK = 2\n")
    return folder


@pytest.mark.thorough
def test_a_copy_run_again_gives_the_same_description(own):
    source = C.read("own.py")
    described = C.describe(source.experiment)
    (own / "runs").mkdir()
    copy = own / "runs" / "experiment.py"
    copy.write_text(source.text)
    facts = source.facts()
    for change in (
        lambda: None,
        lambda: (own / "own.py").write_text("edited"),
        (own / "own.py").unlink,
    ):
        change()
        back = C.again(copy, facts)
        assert C.describe(back.experiment) == described
        assert C.fingerprint(back.experiment) == C.fingerprint(source.experiment)
        assert back.facts() == facts and back.text == source.text
    assert C.describe(source.experiment) == described  # what was read before the file was edited


def test_overrides_as_typed_travel_with_the_facts(own):
    facts = {**C.read("own.py").facts(), "overrides": ["--width=12"]}
    assert C.again(own / "own.py", facts).overrides == ("--width=12",)


def test_a_copy_that_fails_says_that_its_original_is_gone(own):
    facts = C.read("own.py").facts()
    (own / "own.py").rename(own / "copy_of_it.py")
    (own / "copy_of_it.py").write_text("open('beside.txt')")
    told = message(C.again, own / "copy_of_it.py", facts)
    assert "copy_of_it.py:1: FileNotFoundError" in told
    assert told.endswith(f"(a copy of {own / 'own.py'}, which is not there)")
    assert "cannot be read" in message(C.again, own / "nowhere.py", facts)


def test_imports_of_the_users_files_are_recorded_also_indirect_ones(own):
    digest = lambda name: hashlib.sha256((own / name).read_bytes()).hexdigest()
    imports = {
        path: found for path, found in C.read("own.py").imports.items() if path.startswith(str(own))
    }
    assert imports == {str(own / name): digest(name) for name in ("helpers.py", "deeper.py")}
    assert not any(
        "site-packages" in path or "dataclasses" in path for path in C.read("own.py").imports
    )


def test_packages_and_their_modules_are_recorded(folder):
    package = folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("from . import beside\nfrom .beside import K\n")
    (package / "beside.py").write_text("K = 1\n")
    (folder / "x.py").write_text(FILE.format(name="x") + "import package.inner\n")
    names = {path.rpartition("/")[2] for path in C.read("x.py").imports if "/package/" in path}
    assert names == {"__init__.py", "inner.py", "beside.py"}


def test_an_edited_helper_changes_the_description(own):
    before = C.describe(C.load("own.py"))
    (own / "deeper.py").write_text("K = 3\n")
    for name in ("helpers", "deeper"):
        sys.modules.pop(name)
    (own / "__pycache__").exists() and shutil.rmtree(own / "__pycache__")
    assert C.describe(C.load("own.py")) != before


def test_names_offered_are_the_users_own(own):
    names = C.read("own.py").names
    assert {"Own", "Plain", "scale", "preset", "half", "experiment"} <= set(names)
    assert not {"dataclass", "functools", "Path", "K", "_hidden", "here", "helpers"} & set(names)
    assert (
        C.override(C.load("own.py"), ["--mixer=preset", "--mixer.rate=3"], {"": names}).mixer.rate
        == 3.0
    )


def test_names_offered_contain_what_the_file_imports_from_this_library(folder):
    (folder / "x.py").write_text(
        FILE.format(name="x")
        + "from jaxformer.masks import causal\nfrom math import sqrt\nfrom optax import adam\n"
    )
    names = C.read("x.py").names
    assert "causal" in names and not {"sqrt", "adam"} & set(names)


def test_experiments_in_folders_of_experiments(folder):
    """FOLDER/NAME is a file that defines an experiment; other files of the folder are its own."""
    inner = folder / "experiments" / "study"
    inner.mkdir()
    (inner / "_parts.py").write_text("NAME = 'from a neighbour'\n")
    (inner / "helper.py").write_text("NAME = 'no experiment'\n")
    text = FILE.format(name="x").replace("'x'", "NAME").replace('"x"', "NAME")
    (inner / "second.py").write_text(f"from experiments.study._parts import NAME\n{text}")
    assert C.load("study/second").name == "from a neighbour"
    assert "study/second" in C.available()
    assert not {"study/helper", "study/_parts"} & C.available().keys()
    assert {"chat/base", "chat/sft"} <= C.available().keys()
    assert not any(name.startswith(("bench/", "launch/", "theory/")) for name in C.available())
    with pytest.raises(ConfigError, match="did you mean 'study/second'"):
        C.load("study/secnd")
