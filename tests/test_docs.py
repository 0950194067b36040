"""The README and the book say what is so: their Python runs, their commands exist, their notebooks
run."""

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import pytest

from jaxformer import cli, config, zoo
from jaxformer.cli.arguments import PRESET, experiment_of
from jaxformer.cli.trials import read_trials
from jaxformer.tools.planning.plan import of_preset
from tests.joints.harness import NAME

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = {path.stem: path for path in sorted((ROOT / "docs").glob("*.md"))}
# a file without these is a part of others
STARTS = re.compile(r"^experiment = |__main__", flags=re.MULTILINE)
FILES = [
    path for path in sorted((ROOT / "experiments").rglob("*.py")) if STARTS.search(path.read_text())
]
EXPERIMENTS = {str(path.relative_to(ROOT)): path for path in FILES}
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "docs" / "notebooks").glob("*.py"))}
SMALL = {"STEPS": 2, "LENGTH": 256, "DRAWS": 2}  # constants of notebooks, as a test sets them
# tests/test_mathematics.py runs it, and compares every printed line
ELSEWHERE = ("one-function-at-a-time",)
NOT_RUN = r"<!-- not run: .+ -->\n"  # a page says why


def python_blocks(text):
    return re.findall(
        r"(?<!-->\n)^```python\n(.*?)^```",
        re.sub(NOT_RUN, "-->\n", text),
        flags=re.DOTALL | re.MULTILINE,
    )


def run(code, name, names, capsys):
    exec(compile(code, name, "exec"), names)
    printed = capsys.readouterr().out
    for said in re.findall(r"print\(.*?\)\s+# (.*)", code):
        assert said in printed


@pytest.mark.thorough
@pytest.mark.parametrize("index", range(len(python_blocks(README.read_text()))))
def test_each_block_of_the_readme_runs_alone(index, capsys):
    run(
        python_blocks(README.read_text())[index],
        f"README block {index}",
        {"__name__": "__readme__"},
        capsys,
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page not in ELSEWHERE and python_blocks(PAGES[page].read_text())],
)
def test_the_blocks_of_a_page_run_as_they_are_read(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__page__"}
    for block in python_blocks(PAGES[page].read_text()):
        run(block, page, names, capsys)
        # the file of an experiment, which a later file of the page may import
        for name in NAME.findall(block)[-1:]:
            monkeypatch.setitem(sys.modules, name, SimpleNamespace(**names))


@pytest.mark.parity
@pytest.mark.filterwarnings("default")  # theirs
def test_weights_of_torch_load_as_the_page_says(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__page__"}
    for block in re.findall(
        r"^```python\n(.*?)^```", PAGES["pytorch"].read_text(), flags=re.DOTALL | re.MULTILINE
    ):
        run(block, "pytorch", names, capsys)


def test_all_python_is_in_blocks_that_run_or_say_why_not():
    """An indented block of Python would be shown and never run."""
    for name, path in PAGES.items():
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        assert not re.findall(
            r"^    (?:import|from) .*$|^    \w+ = .*$", text, flags=re.MULTILINE
        ), name


def operands_of_or(text):
    """Each a & b inside an a & b | c of Python code, and whether it stands in brackets."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            begins, ends = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
            for side in (node.left, node.right):
                if isinstance(side, ast.BinOp) and isinstance(side.op, ast.BitAnd):
                    inside = begins < (side.lineno, side.col_offset) if side is node.left else None
                    inside = (
                        ends > (side.end_lineno, side.end_col_offset) if inside is None else inside
                    )
                    yield ast.unparse(side), inside


def test_masks_of_both_operators_have_brackets():
    """& binds before |: `causal() & window(4) | prefix(2)` shows the first token the second one,
    which no reader sees."""
    assert [
        inside for _, inside in operands_of_or("x = a & b | c\ny = (a & b) | c\nz = c | (a & b)")
    ] == [False, True, True]
    texts = [
        *python_blocks(README.read_text()),
        *(path.read_text() for path in (*NOTEBOOKS.values(), *FILES)),
    ]
    texts += [block for path in PAGES.values() for block in python_blocks(path.read_text())]
    texts += [path.read_text() for path in (ROOT / "jaxformer" / "masks").glob("*.py")]
    assert not [operand for text in texts for operand, inside in operands_of_or(text) if not inside]


def test_the_readme_stays_short():
    assert README.read_text().count("\n") < 250


# commands: nothing is run; experiments, targets and options must exist

TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
MAKE = r"""\bmake ([a-z-]+)((?: [A-Z]+=(?:"[^"]*"|'[^']*'|[^\s;,`"']+))*)"""
PYTHON = r"python -m ((?:jaxformer|experiments)\b[^`\n;]*)"
OPEN = re.compile(r"…|\.\.\.|[<>]|\b[A-Z_]{4,}\b")  # what the reader puts in


def code_of(text):
    """Blocks that are not Python, and code inside of lines; without comments. A backslash at the
    end of a line joins the next one."""
    text = re.sub(r"\\\n\s*", "", text)
    fenced = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    blocks = [body for language, body in fenced if language not in ("python", "diff")]
    rest = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    blocks += re.findall(r"^    .*$", rest, flags=re.MULTILINE) + re.findall(r"`([^`\n]+)`", rest)
    return re.sub(
        r"\s{2,}#.*$|\s{3,}[(]?.*$",
        "",
        "\n".join(block.strip() for block in blocks),
        flags=re.MULTILINE,
    )


def check_make(target, variables):
    assert target in TARGETS, f"make {target}: no such target"
    given = [word for word in shlex.split(variables) if not OPEN.search(word.partition("=")[2])]
    for word in given:
        assert re.search(rf"\b{word.partition('=')[0]}\b", (ROOT / "Makefile").read_text()), (
            f"make {target}: no {word}"
        )
    if len(given) < len(shlex.split(variables)):
        return
    made = subprocess.run(["make", "-n", target, *given], cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    # a command inside of $(...) ends at its bracket
    commands = re.sub(r"\$\(([^()]*)\)", r"\n\1\n", made.stdout)
    for line in re.findall(PYTHON, commands):
        check_python(line)


def check_python(line):
    """A command after `python -m`: its module, command, experiment and options."""
    words = [re.sub(r"^\[|\]+$", "", word) for word in shlex.split(line)]
    module, *words = words
    words = [word for word in words if word not in ("|", "--")]
    path = ROOT / (module.replace(".", "/") + ".py")
    assert path.is_file() or path.with_suffix("").is_dir(), f"{module}: no such module"
    files = (
        [path]
        if path.is_file()
        else (ROOT / "jaxformer" / "cli").glob("*.py")
        if module == "jaxformer"
        else []
    )
    source = "".join(file.read_text() for file in files)
    if (
        module == "jaxformer"
        and words
        and not words[0].startswith("-")
        and not OPEN.search(words[0])
    ):
        assert f'"{words[0]}": ' in source, f"{line}: no such command"
    dotted, names = [], [word for word in words if not word.startswith("-")]
    # the value of a grid is made of options, which `read_trials` checks
    grids = [value for flag, value in pairwise(words) if flag in ("--grid", "--sizes")]
    for word in (word for word in words if word.startswith("--") and word not in grids):
        flag, _, value = word.partition("=")
        value = value or [*words, ""][words.index(word) + 1]
        if flag in source:
            if flag == "--grid" and not OPEN.search(" ".join([value, *names])):
                experiment = names[1 if module == "jaxformer" else 0]  # behind the command's name
                read_trials(experiment, value, [])
        elif not OPEN.search(word):
            is_bare = not value or value.startswith("--")  # such as --profile
            dotted.append(flag if is_bare else f"{flag}={value}")
    known = [
        name
        for name in names
        if name in config.available() or name.removeprefix(PRESET) in zoo.PRESETS
    ]
    check_options((known or ["quickstart"])[0], dotted)


def check_options(name, options):
    """That an experiment has these fields and takes these values."""
    if not options:
        return
    if name in config.available():
        cli.read_experiment(name, options)
    else:
        experiment_of(name, options, of_preset)


def check_commands(text):
    for target, variables in re.findall(MAKE, text):
        check_make(target, variables)
    for line in re.findall(PYTHON, text):
        check_python(line)


@pytest.mark.thorough
@pytest.mark.parametrize("page", ["README", *PAGES])
def test_the_commands_of_a_page_exist(page):
    check_commands(code_of((PAGES | {"README": README})[page].read_text()))


@pytest.mark.thorough
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_says_its_command_and_what_to_expect(name):
    docstring = ast.get_docstring(ast.parse(EXPERIMENTS[name].read_text()))
    assert docstring
    if "launch/" not in name and "bench/" not in name:
        for word in ("Expected", "Time", "Command"):
            assert re.search(rf"\b{word}\b", docstring), f"does not say: {word}"
    check_commands(docstring)


@pytest.mark.thorough
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name, tmp_path, monkeypatch):
    """As the book runs it, but smaller."""
    spec = importlib.util.spec_from_file_location(
        "notebook", ROOT / "docs" / "site" / "notebook.py"
    )
    notebook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(notebook)
    monkeypatch.chdir(tmp_path)
    source = NOTEBOOKS[name].read_text()
    for constant, value in SMALL.items():
        source = re.sub(rf"^{constant} = \d+", f"{constant} = {value}", source, flags=re.MULTILINE)
    with matplotlib.rc_context():
        page = notebook.page(source, name, tmp_path)
    assert page.startswith("# ") and "![](" in page
    assert len(list(tmp_path.glob("*.png"))) == page.count("![](")


@pytest.mark.thorough
def test_the_table_of_reports_is_that_of_the_tests():
    """docs/checks.md counts what tests/reports holds; `python tests/reports/table.py` prints the
    table."""
    spec = importlib.util.spec_from_file_location(
        "reports_table", ROOT / "tests" / "reports" / "table.py"
    )
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    assert table.table() in PAGES["checks"].read_text()
    own = [report for report in table.reports() if report.listed is None]
    assert len({report.names[0] for report in own}) >= 200
