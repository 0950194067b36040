"""The wheel and the source archive hold what they should, whatever else lies in a checkout.

Wheel: every tracked file of jaxformer/, the experiments that pyproject.toml names, the metadata and
the licence; nothing else. Source archive: the tracked files of the folders that pyproject.toml
names, and the metadata; a wheel that is made from it has the same files.
"""

import importlib.util
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import jaxformer

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
BUILD = PYPROJECT["tool"]["hatch"]["build"]["targets"]
TO_WHEEL = BUILD["wheel"]["force-include"]  # {file here: file in the wheel}
METADATA = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
# what a used checkout has beside its files: caches, environments, runs, a user's texts
LEFT_OVERS = (
    "jaxformer/__pycache__/errors.cpython-313.pyc",
    "jaxformer/ops/__pycache__/old.pyc",
    "experiments/chat/__pycache__/sft.cpython-313.pyc",
    "tests/__pycache__/tiny.cpython-313.pyc",
    ".pytest_cache/README.md",
    ".venv/lib/jax.py",
    "dist/site/index.html",
    "runs/quickstart-1a2b3c4d/metrics.jsonl",
    "texts/private.txt",
    "exported/model.safetensors",
)


def tracked():
    """The files of the checkout that git tracks."""
    words = ["git", "ls-files", "-z"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return sorted(name for name in listed.split("\0") if name and (ROOT / name).is_file())


def build(hatchling, folder, out, *targets):
    """Builds the project in a folder: {the ending of a file: the file}."""
    path = os.pathsep.join(filter(None, [str(hatchling), os.environ.get("PYTHONPATH")]))
    words = [sys.executable, "-m", "hatchling", "build", "-d", str(out)]
    words += [word for target in targets for word in ("-t", target)]
    done = subprocess.run(
        words, cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return {path.suffix: path for path in out.iterdir()}


def contents_of_wheel(path):
    """{name: bytes} of a wheel."""
    with zipfile.ZipFile(path) as wheel:
        return {name: wheel.read(name) for name in wheel.namelist()}


def contents_of_sdist(path):
    """{name: bytes} of a source archive, without the folder that is around all files."""
    with tarfile.open(path) as archive:
        members = [member for member in archive.getmembers() if not member.isdir()]
        assert all(member.isfile() for member in members)  # no links
        assert len({member.name.partition("/")[0] for member in members}) == 1
        return {m.name.partition("/")[2]: archive.extractfile(m).read() for m in members}


@pytest.fixture(scope="module")
def hatchling(tmp_path_factory):
    """A folder with the build backend; without it here, pip fetches it."""
    folder = tmp_path_factory.mktemp("hatchling")
    if not importlib.util.find_spec("hatchling"):
        requirements = PYPROJECT["build-system"]["requires"]
        words = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder)]
        subprocess.run([*words, *requirements], check=True)
    return folder


@pytest.fixture(scope="module")
def built(hatchling, tmp_path_factory):
    """(wheel, source archive) of a copy of the tracked files, among what a used checkout has."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    for name in LEFT_OVERS:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text("left over")
    files = build(hatchling, copy, tmp_path_factory.mktemp("dist"), "wheel", "sdist")
    return files[".whl"], files[".gz"]


def assert_same(found, expected):
    """Two {name: bytes} are equal; says which names are not."""
    assert not found.keys() ^ expected.keys(), sorted(found.keys() ^ expected.keys())
    assert not [name for name in found if found[name] != expected[name]]


@pytest.mark.thorough
def test_the_wheel_has_the_package_its_experiments_and_its_licence(built):
    found = contents_of_wheel(built[0])
    info = f"jaxformer-{jaxformer.__version__}.dist-info"
    expected = {name: name for name in tracked() if name.startswith("jaxformer/")}
    expected |= {to: name for name, to in TO_WHEEL.items()}
    expected |= {f"{info}/licenses/LICENSE": "LICENSE"}
    expected = {to: (ROOT / name).read_bytes() for to, name in expected.items()}
    made = {f"{info}/{name}" for name in METADATA} - expected.keys()
    assert_same({name: found[name] for name in found if name not in made}, expected)
    assert made <= found.keys()
    metadata = found[f"{info}/METADATA"].decode()
    assert f"\nVersion: {jaxformer.__version__}\n" in metadata
    assert f"\nLicense-Expression: {PYPROJECT['project']['license']}\n" in metadata


@pytest.mark.thorough
def test_the_source_archive_has_the_tracked_files_that_are_named(built):
    named = [name.removeprefix("/") for name in BUILD["sdist"]["include"]]
    assert all((ROOT / name).exists() for name in named)
    found = contents_of_sdist(built[1])
    expected = {
        name: (ROOT / name).read_bytes()
        for name in tracked()
        if name.partition("/")[0] in (*named, "pyproject.toml", ".gitignore")
    }
    assert b"\nName: jaxformer\n" in found.pop("PKG-INFO")
    assert_same(found, expected)


@pytest.mark.thorough
def test_the_source_archive_makes_the_same_wheel(built, hatchling, tmp_path):
    wheel, archive = built
    with tarfile.open(archive) as file:
        file.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    again = build(hatchling, source, tmp_path / "dist", "wheel")
    assert_same(contents_of_wheel(again[".whl"]), contents_of_wheel(wheel))


def test_every_experiment_beside_the_library_is_in_the_wheel():
    """Those of bench/, launch/ and theory/ need the clone, and so does the script of a page."""
    folders = ("experiments", "experiments/chat")
    files = [path for folder in folders for path in sorted((ROOT / folder).glob("*.py"))]
    runs = [path for path in files if "\nexperiment = " in path.read_text(encoding="utf-8")]
    names = {path.relative_to(ROOT).as_posix() for path in runs}
    assert "experiments/quickstart.py" in names
    assert names <= TO_WHEEL.keys(), sorted(names - TO_WHEEL.keys())
    assert all(to == f"jaxformer/builtin/{name}" for name, to in TO_WHEEL.items())
