"""Which Python and which packages: the newest is the main line, and every lower bound is one that
is tested."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import jaxformer

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from oldest import BOUND, bounds  # noqa: E402

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_requirement_has_a_lower_bound_that_is_tested():
    """`make test OLDEST=1` installs exactly these versions."""
    project = PYPROJECT["project"]
    extras = [text for texts in project["optional-dependencies"].values() for text in texts]
    ours = [
        text for text in [*project["dependencies"], *extras] if not text.startswith("jaxformer[")
    ]
    assert not [text for text in ours if BOUND.fullmatch(text) is None]
    assert bounds(PYPROJECT)["jax"] == "0.10.2"  # 0.10.0 lacks the platform of an abstract device


def test_extras_and_tests_ask_for_one_bound_of_a_package():
    """Two bounds for one package would leave the lower one untested."""
    project, groups = PYPROJECT["project"], PYPROJECT["dependency-groups"]
    seen = {}
    for texts in [
        project["dependencies"],
        *project["optional-dependencies"].values(),
        groups["dev"],
    ]:
        for text in texts:
            match = BOUND.fullmatch(text)
            if match is not None:
                assert seen.setdefault(match[1], match[2]) == match[2], (
                    f"{match[1]} has two lower bounds"
                )


def test_what_says_a_version_says_the_same_one():
    """The badges of README, the classifiers and the citation agree with the package."""
    project = PYPROJECT["project"]
    words = "Programming Language :: Python :: "
    pythons = [each.removeprefix(words) for each in project["classifiers"]]
    assert project["requires-python"] == f">={pythons[0]}"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, says in {
        "python": f"Python: {' | '.join(pythons)}",
        "licence": f"licence: {project['license']}",
    }.items():
        badge = ROOT / "docs" / "pictures" / f"badge_{name}.svg"
        assert f"<title>{says}</title>" in badge.read_text(encoding="utf-8")
        assert f"![{says.replace(' | ', ', ').replace('Python:', 'Python')}](docs" in readme
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {jaxformer.__version__}\n" in citation


def python(folder, version, works=True):
    """A stand-in for an interpreter: it answers its version, or fails like a shim of pyenv without
    that version."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"python{version}"
    path.write_text(
        "#!/bin/sh\n" + (f'[ "$1" = -c ] || echo Python {version}\n' if works else "exit 127\n")
    )
    path.chmod(0o755)


@pytest.mark.parametrize(
    "on_path, of_pyenv, newest, oldest",
    [
        (["3.12", "3.13"], [], "3.13", "3.12"),
        (["3.11"], ["3.13"], "3.13", "3.11"),
        (["3.12"], ["3.12", "3.14"], "3.14", "3.12"),
    ],
)
def test_make_takes_the_newest_python_at_hand(tmp_path, on_path, of_pyenv, newest, oldest):
    if shutil.which("make") is None:
        pytest.skip("needs make")
    for version in ("3.11", "3.12", "3.13", "3.14"):
        python(tmp_path / "bin", version, works=version in on_path)
    for version in of_pyenv:
        python(tmp_path / ".pyenv" / "versions" / f"{version}.1" / "bin", version)
    environment = {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin",
        "HOME": str(tmp_path),
    }
    for words, version in (([], newest), (["OLDEST=1"], oldest)):
        done = subprocess.run(
            ["make", "-s", "python", *words],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.stdout.strip() == f"Python {version}", done.stderr
