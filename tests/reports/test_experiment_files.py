"""Experiment files: what they import, how they fail, and that one file never gets what belongs to
another."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from jaxformer import cli, config

FILE = """
from dataclasses import dataclass
{imports}
@dataclass(frozen=True)
class Experiment:
    name: str = "e"
    part: object = None
experiment = Experiment({arguments})
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder; the path of imports and the modules are as before afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(path, imports="", arguments=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(FILE.format(imports=imports, arguments=arguments))
    return str(path)


def run(capsys, *argv):
    code = cli.main(list(argv))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.report(
    "kubeedge/ianvs#557",
    "mitmproxy/mitmproxy#2455",
    "AcademySoftwareFoundation/rez#1485",
    right="each of two files in two folders gets the helper of its own folder, now and later",
    hit="the second file got the helper of the first one, without a word",
    listed="third 27",
)
def test_a_helper_belongs_to_the_file_beside_it(folder):
    late = "from helper import name, Own\ndef later():\n    import helper\n    return helper.name"
    sources = {}
    for place in ("one", "two", "three"):
        path = write(folder / place / "mine.py", late, "name, (later, Own())")
        helper = "import deeper\nname = deeper.name\nclass Own:\n    pass\n"
        (folder / place / "helper.py").write_text(helper)
        (folder / place / "deeper.py").write_text(f"name = {place!r}\n")
        sources[place] = config.read(path)
    for place, source in sources.items():
        later, own = source.experiment.part
        assert (source.experiment.name, later()) == (place, place)
        assert set(source.imports) >= {
            str(folder / place / name) for name in ("helper.py", "deeper.py")
        }
        assert not any(
            "/one/" in path or "/two/" in path
            for path in source.imports
            if f"/{place}/" not in path
        )
        assert type(pickle.loads(pickle.dumps(own))) is type(own)  # each has a module of its own
    described = [config.describe(source.experiment) for source in sources.values()]
    # the same code has the same fingerprint wherever it lies
    assert described[0]["part"] == described[1]["part"]
    (folder / "four").mkdir()
    # forgotten: not that of a neighbour
    with pytest.raises(config.ConfigError, match="No module named 'helper'"):
        config.read(write(folder / "four" / "mine.py", "import helper"))


@pytest.mark.parametrize(
    "line",
    ["quit()", "import sys; sys.exit(0)", "raise SystemExit('text')", "raise KeyboardInterrupt"],
)
@pytest.mark.report(
    "hiyouga/LlamaFactory#7243",
    right=(
        "a file that ends the program is an error with its line, never a command that did "
        "nothing with code 0"
    ),
    hit="`quit()` in a file: exit code 0 and nothing trained; a text: a traceback",
    listed="third 15",
)
def test_a_file_that_ends_the_program_is_an_error(folder, capsys, line):
    code, _, err = run(capsys, "train", write(folder / "mine.py", line))
    assert code == 2 and "mine.py:3: " in err and err.count("\n") == 1


@pytest.mark.report(
    "instructlab/instructlab#2546",
    right=(
        "every end without a result is an error: an objective or a data set that ends the "
        "program, too"
    ),
    hit="SystemExit(0) anywhere below a command: exit code 0, not a word",
)
def test_code_that_ends_the_program_later_is_an_error(folder, capsys):
    (folder / "later.py").write_text("def body(argv):\n    quit()\n")
    sys.path.append(str(folder))
    from later import body  # ty: ignore

    assert cli.run(body, []) == 2
    assert (
        "later.py:2: ends the program (None), so the command is not done" in capsys.readouterr().err
    )
    assert cli.main(["evaluate", "--help"]) == 0  # this is a result


@pytest.mark.thorough
@pytest.mark.report(
    "python/cpython#120932",
    "python/cpython#75953",
    right="a helper runs as it is on the disk, however soon after the last run it was edited",
    hit="Python's cache took an edit of the same second and size for no edit: the old code ran",
)
def test_a_helper_that_was_edited_a_moment_ago_runs_as_it_is(folder):
    path, helper = write(folder / "mine.py", "from helper import K", "part=K"), folder / "helper.py"
    code = f"from jaxformer import config; print(config.load({path!r}).part)"
    found = []
    for value in range(4):
        helper.write_text(f"K = {value}\n")
        os.utime(helper, (1e9, 1e9))  # all edits within one second
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        )
        found.append(int(done.stdout))
    assert found == [0, 1, 2, 3]


@pytest.mark.report(
    "jupyter/notebook#4156",
    "posit-dev/positron#6158",
    right=(
        "a file that is read again in one process gets its helpers as they are now; what was "
        "read stays as it was"
    ),
    hit="the helper of the first time was used, while its digest was that of the new text",
)
def test_an_edited_helper_is_imported_again(folder):
    path, helper = (
        write(folder / "mine.py", "from helper import function", "part=function"),
        folder / "helper.py",
    )
    sources = []
    for value in (1, 2, 3):
        helper.write_text(f"def function(x):\n    return {value} * x\n")
        sources.append(config.read(path))
    descriptions = [config.describe(source.experiment)["part"]["code"] for source in sources]
    assert [source.experiment.part(1) for source in sources] == [1, 2, 3]
    assert len(set(descriptions)) == 3  # each is described by the text that ran
    assert len({source.imports[str(helper)] for source in sources}) == 3
    # nothing was edited: the same modules
    assert config.read(path).experiment.part is sources[-1].experiment.part


@pytest.mark.report(
    "Farama-Foundation/Minigrid#75",
    right="a module beside the file comes before one of that name in the current folder",
    hit=(
        "`python -m jaxformer` has the current folder first on its path, and its config.py was "
        "imported"
    ),
)
def test_the_current_folder_does_not_hide_what_lies_beside_the_file(folder, monkeypatch):
    for place in ("here", "there"):
        (folder / place).mkdir()
        (folder / place / "config_of_mine.py").write_text(f"name = {place!r}\n")
    monkeypatch.chdir(folder / "here")
    sys.path.insert(0, str(folder / "here"))
    path = write(folder / "there" / "mine.py", "from config_of_mine import name", "name")
    assert config.load(path).name == "there"
    import config_of_mine  # ty: ignore

    assert config_of_mine.name == "here"  # and the current folder keeps its own
    assert config.load(path).name == "there"


@pytest.mark.report(
    "wandb/wandb#5950",
    "ultralytics/yolov5#6040",
    right=(
        "a folder or a file beside the experiment never replaces an installed package or a "
        "module of Python"
    ),
)
def test_files_beside_the_experiment_replace_no_package(folder):
    for name in ("optax", "numpy", "json", "types"):
        (folder / name).mkdir()
        (folder / f"{name}.py").write_text("raise RuntimeError('replaced')\n")
    imports = (
        "import optax, numpy, json, types\nassert all(map(hasattr, (optax, numpy, json), "
        "('adam', 'zeros', 'dumps')))"
    )
    assert config.load(write(folder / "mine.py", imports, "'fine'")).name == "fine"


@pytest.mark.report(
    "sqlalchemy/alembic#1419",
    "aegra/aegra#197",
    "widgetti/solara#208",
    right=(
        "a dataclass with postponed annotations works in an experiment file and in a helper "
        "beside it"
    ),
)
def test_dataclasses_with_postponed_annotations(folder):
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom typing "
        "import ClassVar\n"
    )
    text += (
        "@dataclass(frozen=True)\nclass Part:\n    kind: ClassVar[int] = 3\n    width: int | "
        "None = None\n"
    )
    (folder / "parts.py").write_text(text)
    (folder / "mine.py").write_text(
        text + "import parts\n@dataclass(frozen=True)\nclass Whole:\n    own: Part = Part()\n"
        "    other: parts.Part = parts.Part()\nexperiment = Whole()\n"
    )
    found = config.override(
        config.load(str(folder / "mine.py")), ["--own.width=4", "--other.width=5"]
    )
    assert (found.own.width, found.other.width, found.own.kind) == (4, 5, 3)


@pytest.mark.report(
    "open-mmlab/mmcv#248",
    right=(
        "an experiment file may read another one, of another folder, and go on with its own modules"
    ),
)
def test_a_file_may_read_another(folder):
    for place in ("one", "two"):
        (folder / place).mkdir()
        (folder / place / "helper.py").write_text(f"name = {place!r}\n")
    first = write(folder / "one" / "first.py", "from helper import name", "name")
    nested = (
        f"from jaxformer import config\nother = config.load({first!r})\nfrom helper import name"
    )
    found = config.load(write(folder / "two" / "second.py", nested, "name, other.name"))
    assert (found.name, found.part) == ("two", "one")


@pytest.mark.report(
    "pecan/pecan#90",
    "cubist38/mlx-openai-server#93",
    right=(
        "a relative import works in a folder experiments/ and is refused elsewhere with the "
        "line, as one line"
    ),
)
def test_relative_imports(folder, capsys):
    write(folder / "experiments" / "first.py", "", "'first'")
    path = write(
        folder / "experiments" / "second.py", "from .first import experiment as other", "other.name"
    )
    assert config.load(path).name == "first"
    code, _, err = run(
        capsys, "show", write(folder / "mine.py", "from .first import experiment", "")
    )
    assert (
        code == 2
        and "mine.py:3: ImportError: attempted relative import" in err
        and err.count("\n") == 1
    )


@pytest.mark.report(
    "cityjson/cjio#21",
    "couchapp/couchapp#89",
    right="a byte order mark, which some editors write, is no part of the text",
    hit="an experiment file with one: SyntaxError: invalid non-printable character",
)
def test_a_byte_order_mark_is_no_code(folder):
    path = folder / "mine.py"
    write(path, "", "'marked'")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert config.load(str(path)).name == "marked"
    (folder / "facts.json").write_bytes(b'\xef\xbb\xbf{"path": "x"}')
    assert config.read_json(folder / "facts.json", path=str) == {"path": "x"}


@pytest.mark.report(
    "open-mmlab/mmcv#1732",
    right=(
        "an error in a helper names the file and line where it arose, beside the line that "
        "imported it"
    ),
    hit="only the line of the import was named",
)
def test_an_error_in_a_helper_names_its_line(folder):
    (folder / "helper.py").write_text("a = 1\nb = test_list\n")
    with pytest.raises(config.ConfigError) as error:
        config.load(write(folder / "mine.py", "import helper"))
    assert "mine.py:3: NameError: name 'test_list' is not defined" in str(error.value)
    assert str(error.value).endswith(f"(in {folder / 'helper.py'}:2)")


@pytest.mark.report(
    "oobabooga/textgen#3016",
    right=(
        "an experiment file has no command line: what it would read is refused, and the message "
        "says how to do it"
    ),
    hit="argparse in a file read the words of `python -m jaxformer` and ended the program",
    listed="third 15",
)
def test_a_file_reads_no_command_line(folder, capsys):
    code, _, err = run(
        capsys,
        "show",
        write(folder / "mine.py", "import argparse\nargparse.ArgumentParser().parse_args()"),
    )
    assert code == 2 and "make the option a field" in err and err.count("\n") == 1


@pytest.mark.report(
    "hydra-ecosystem/hydra#922",
    "hydra-ecosystem/hydra#2414",
    "hydra-ecosystem/hydra#990",
    right=(
        "a file that changes the current folder is refused: runs/ and relative paths are those "
        "of the command"
    ),
    hit="runs/ and figures/ were made in the folder that the experiment's file had changed to",
)
def test_a_file_does_not_move_the_run(folder):
    write(folder / "moves.py", f"import os\nos.chdir({str(folder.parent)!r})")
    before = os.getcwd()
    with pytest.raises(config.ConfigError, match=r"moves.py: it changes the current folder"):
        config.load(str(folder / "moves.py"))
    assert os.getcwd() == before
    write(folder / "stays.py", f"import os\nos.chdir({before!r})")
    config.load(str(folder / "stays.py"))
