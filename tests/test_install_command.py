"""The advice to install a package is a command for the Python that runs."""

import ast
import shutil
import sys
from pathlib import Path

import pytest

import jaxformer
from jaxformer import errors

PACKAGE = Path(jaxformer.__file__).parent
BESIDES = (PACKAGE / "errors.py", PACKAGE / "builtin")


@pytest.mark.parametrize(
    ("python", "first", "said"),
    [
        ("/usr/bin/python", "/usr/bin/python", "pip install 'jaxformer[text]'"),
        ("{here}/.venv/bin/python", None, ".venv/bin/python -m pip install 'jaxformer[text]'"),
        (
            "/a b/bin/python",
            "/usr/bin/python",
            "'/a b/bin/python' -m pip install 'jaxformer[text]'",
        ),
    ],
)
def test_the_pip_is_that_of_this_python(tmp_path, monkeypatch, python, first, said):
    """In a clone `pip` belongs to the shell's Python, and the package went there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", python.format(here=tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: first)
    assert errors.install_command("text") == said


def test_no_message_has_a_command_of_its_own():
    own = []
    for path in PACKAGE.rglob("*.py"):
        if any(path.is_relative_to(place) for place in BESIDES):
            continue
        text = path.read_text(encoding="utf-8")
        if "pip install" not in text:
            continue
        tree = ast.parse(text)
        docstrings = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        own += [
            f"{path}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and "pip install" in node.value
            and "jaxformer[" in node.value
            and id(node) not in docstrings
        ]
    assert own == []
