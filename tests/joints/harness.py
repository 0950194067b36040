"""A page of the book that fills a joint: its files train from an empty folder, survive a kill, and
run on eight devices.

A page holds one file for each block of Python with `experiment = `; the file has the name of its
experiment. Blocks are trained in the order of the page, so a later one may begin from the run of an
earlier one. A test of a page reads:

    PAGE = read_page("your-own-objective")

    def test_the_page(tmp_path):
        assert_short(PAGE)
        assert_resumes_to_the_same_bits(PAGE, tmp_path)
        assert_same_on_eight_devices(PAGE, tmp_path)
"""

import ast
import contextlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

from jaxformer import cli
from jaxformer.config import storage
from jaxformer.runs import checkpoint_reader
from jaxformer.runs.reporter import Reporter

ROOT = Path(__file__).parents[2]
LONGEST = 60  # lines of code of a page that fills a joint
OPTIONS = ("--log-every=1", "--checkpoints.every=4")
EIGHT = ("--mesh.data=1", "--mesh.fsdp=8")
BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
NAME = re.compile(r"\bname=\"([\w-]+)\"")


class Stopped(BaseException):
    """Nothing in the library catches it, as nothing catches SIGKILL."""


def read_page(stem: str) -> dict[str, str]:
    """The files of docs/STEM.md by the name of their experiment, in the order of the page."""
    text = (ROOT / "docs" / f"{stem}.md").read_text(encoding="utf-8")
    blocks = [
        block
        for block in BLOCK.findall(text)
        if re.search(r"^experiment = ", block, flags=re.MULTILINE)
    ]
    return {experiment_name(block): block for block in blocks}


def experiment_name(block: str) -> str:
    """What the experiment of a file is called: the last `name="..."` of it."""
    return NAME.findall(block)[-1]


def lines_of_code(block: str) -> int:
    """Lines that are neither empty nor a comment nor a part of a docstring."""
    lines = {
        number
        for number, line in enumerate(block.splitlines(), 1)
        if line.strip() and line.strip()[0] != "#"
    }
    for node in ast.walk(ast.parse(block)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def assert_short(files: dict[str, str], longest: int = LONGEST) -> None:
    """Every file of the page is read in one sitting, and names nothing private of ours."""
    assert files
    for name, block in files.items():
        assert lines_of_code(block) <= longest, f"{name}: {lines_of_code(block)} lines of code"
        assert not re.findall(
            r"^(?:from|import) (?:tests|experiments)\b.*", block, flags=re.MULTILINE
        ), name
        assert not re.findall(r"\bjaxformer[\w.]*\._\w+|import _\w+", block), name


def train(
    folder: Path, files: dict[str, str], *options: str, stop: dict[str, int] | None = None
) -> None:
    """Trains the files of a page in a folder, by the command that a user types. The folder is made
    if there is none.

    `stop` {experiment: step}: that one is killed when the step is done, before its checkpoint, and
    nothing follows it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, block in files.items():
        (folder / f"{name}.py").write_text(block, encoding="utf-8")
    for name in files:
        with contextlib.chdir(folder), stopped_at((stop or {}).get(name)):
            try:
                code = cli.main(["train", f"{name}.py", *options])
            except Stopped:
                return
        assert code == 0, f"train {name}.py ends with {code}"


@contextlib.contextmanager
def stopped_at(step: int | None) -> Iterator[None]:
    """Inside, a training ends at this step as one that is killed."""
    later = Reporter.later

    def stop(self, number, *arguments):
        if number == step:
            raise Stopped
        later(self, number, *arguments)

    with mock.patch.object(Reporter, "later", stop):
        yield


def run_of(folder: Path, name: str) -> Path:
    """The folder of the only run of an experiment."""
    (path,) = (folder / "runs").glob(f"{name}-????????")  # of reversals, not of reversals-lora
    return path


def leaves(run: Path) -> dict[str, str]:
    """The fingerprint of every leaf of the last state that a run saved."""
    last = max(int(name) for name in storage.list_names(run / "checkpoints") if name.isdecimal())
    manifest = checkpoint_reader.read_manifest(
        checkpoint_reader.resolve(run / "checkpoints") / str(last)
    )
    return {name: leaf["fingerprint"] for name, leaf in manifest["leaves"].items()}


def records(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [
        json.loads(line)
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def assert_resumes_to_the_same_bits(
    files: dict[str, str], tmp_path: Path, *options: str, at: int = 7
) -> Path:
    """The last file of a page, killed at a step between two checkpoints and started again, ends as
    one undisturbed.

    Returns the folder in which nothing was disturbed.
    """
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    *earlier, last = files
    train(whole, {name: files[name] for name in earlier}, *OPTIONS, *options)
    shutil.copytree(whole, killed)  # what the last file begins from is the same
    train(whole, {last: files[last]}, *OPTIONS, *options)
    train(killed, {last: files[last]}, *OPTIONS, *options, stop={last: at})
    # an evaluation has the steps done
    assert max(record["step"] for record in records(run_of(killed, last))) <= at
    train(killed, {last: files[last]}, *OPTIONS, *options)
    expected, found = run_of(whole, last), run_of(killed, last)
    assert expected.name == found.name
    assert leaves(found) == leaves(expected)
    assert records(found) == records(expected)
    return whole


def assert_same_on_eight_devices(
    files: dict[str, str],
    tmp_path: Path,
    *options: str,
    whole: Path | None = None,
    rtol: float = 1e-5,
) -> None:
    """On eight simulated devices, with parameters split over all of them, every loss is that of one
    device.

    `whole` is the folder of a training on one device with the same options, where there is one
    already.
    """
    assert jax.device_count() == 8
    if whole is None:
        whole = tmp_path / "one"
        train(whole, files, *OPTIONS, *options)
    split = tmp_path / "eight"
    train(split, files, *OPTIONS, *options, *EIGHT)
    for name in files:
        expected, found = records(run_of(whole, name)), records(run_of(split, name))
        assert [line["step"] for line in found] == [line["step"] for line in expected]
        for kind in ("loss", "validation_loss"):
            values = [[line[kind] for line in lines if kind in line] for lines in (found, expected)]
            assert values[0], f"{name}: no {kind}"
            np.testing.assert_allclose(values[0], values[1], rtol=rtol, err_msg=f"{name}: {kind}")


def answer(folder: Path, name: str, prompt: str, capsys: Any, *options: str) -> str:
    """What `generate` prints for a run: where a model writes text, its page decodes too."""
    capsys.readouterr()
    with contextlib.chdir(folder):
        assert cli.main(["generate", name, "--prompt", prompt, *options]) == 0
    return capsys.readouterr().out


def install_wheel(folder: Path) -> Path:
    """Builds the wheel of the checkout in a folder, and installs it without its dependencies: the
    folder for PYTHONPATH.

    Without hatchling here, pip fetches it for the build.
    """
    pip = [sys.executable, "-m", "pip"]
    here = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    subprocess.run(
        [*pip, "wheel", "-q", "--no-deps", *here, "-w", str(folder), str(ROOT)], check=True
    )
    (wheel,) = folder.glob("*.whl")
    site = folder / "site"
    subprocess.run(
        [*pip, "install", "-q", "--no-deps", "--no-index", "--target", str(site), str(wheel)],
        check=True,
    )
    return site
