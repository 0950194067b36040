"""The report of the faults: each test says what it did to how many runs, and what became of
them."""

import contextlib
import datetime
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

REPORT = Path("dist/faults.md")
COLUMNS = ("row", "fault", "trials", "detected", "recovered", "lost", "note")
_rows: list[dict] = []
_failed: list[str] = []


@pytest.fixture
def report(record_property):
    """`report(row, fault, trials=, detected=, recovered=, lost=0, note="")`: a line of the table in
    the issue and the book.

    `detected`: the run or the library said what happened, or it made no difference. `recovered`:
    the run went on, or the next start did, to the same end. `lost`: something that was done or
    written is gone, and nobody can have it back.
    """

    def add(
        row: int,
        fault: str,
        *,
        trials: int,
        detected: int,
        recovered: int,
        lost: int = 0,
        note: str = "",
    ) -> None:
        record_property(
            "fault",
            dict(zip(COLUMNS, (row, fault, trials, detected, recovered, lost, note), strict=True)),
        )

    return add


def pytest_runtest_logreport(report):
    if report.failed and "tests/faults" in report.nodeid:
        _failed.append(report.nodeid)
    if report.when == "call":
        _rows.extend(value for name, value in report.user_properties if name == "fault")


def pytest_sessionfinish(session):
    if not _rows or hasattr(session.config, "workerinput"):
        return
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    versions = f"Python {platform.python_version()}, jax {version('jax')}, {platform.machine()}"
    head = f"{datetime.date.today()}, commit {commit}, {versions}"
    lines = [
        f"# Faults, injected\n\n{head}\n",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
    ]
    for row in sorted(_rows, key=lambda row: (row["row"], row["fault"])):
        lines.append(f"| {' | '.join(str(row[name]) for name in COLUMNS)} |")
    total = {
        name: sum(row[name] for row in _rows)
        for name in ("trials", "detected", "recovered", "lost")
    }
    lines.append(
        f"\n{', '.join(f'{name} {count}' for name, count in total.items())}; tests that "
        f"failed: {len(_failed)}"
    )
    lines += [f"- {name}" for name in _failed]
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text("\n".join(lines) + "\n")


def pytest_terminal_summary(terminalreporter):
    if _rows:
        terminalreporter.write_line(f"faults: {REPORT}")


@pytest.fixture(scope="session")
def failing_calls(tmp_path_factory):
    """The library that makes calls fail."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler and Linux")
    # LD_PRELOAD knows no path with spaces
    library = Path("/tmp") / f"failing-calls-{os.getpid()}.so"
    source = Path(__file__).with_name("failing_calls.c")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True
    )
    yield library
    library.unlink()


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """A folder with two checkpoints."""
    from jaxformer.runs.checkpoint import Manager
    from tests.runs.test_checkpoint import make

    folder = tmp_path_factory.mktemp("two")
    with Manager(folder, keep_latest=2) as manager:
        for step in (1, 2):
            manager.save(step, make(step), {"step": step}, wait=True)
    return folder


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A folder in which this user trained a run."""
    from jaxformer import cli
    from tests.tiny import furnish

    folder = furnish(tmp_path_factory.mktemp("trained"))
    with contextlib.chdir(folder):
        assert cli.main(["train", "tiny", "--steps=2"]) == 0
    return folder
