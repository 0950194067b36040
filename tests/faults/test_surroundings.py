"""Row 18: what lies around a run: the environment of its processes, its place on the disk, a kill
at any call of the system."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.harness import Process, Training, assert_same

OPTIONS = (
    "--steps=40",
    "--log-every=1",
    "--eval-every=10",
    "--checkpoints.every=5",
    "--model.dropout-rate=0.1",
)
CALLS = {
    "rename": (3, 9, 14),
    "fsync": (5, 17),
    "unlink": (2, 8, 15),
    "mkdir": (4, 9),
    "rmdir": (1, 3),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    training = Training(tmp_path_factory.mktemp("undisturbed"), *OPTIONS)
    training.finish()
    return training.ending()


def killed_in_mid_run(training: Training, **environment: str) -> None:
    """Trains some steps, and is killed."""
    with training.start(**environment) as process:
        process.wait_for("step 22/40")
        process.kill()


@pytest.mark.fault
@pytest.mark.parametrize("call", CALLS)
def test_killed_at_a_call(call, failing_calls, undisturbed, tmp_path, report):
    """The process dies at its k-th call on a path of the run, in three starts one after another."""
    trials = 0
    for number in CALLS[call]:
        training = Training(tmp_path / f"{call}-{number}", *OPTIONS)
        fault = {
            "LD_PRELOAD": str(failing_calls),
            "FAIL_CALLS": call,
            "FAIL_KILL": "1",
            "FAIL_FROM": str(number),
        }
        for _ in range(3):
            with training.start(**fault, FAIL_PATH="/runs/") as process:
                code = process.end()
                assert code in (0, -signal.SIGKILL), process.said()[-3000:]
                trials += code != 0
        training.finish()
        assert_same(training.ending(), undisturbed)
        left = [
            path.name
            for path in training.run.rglob("*")
            if path.name.endswith((".unfinished", "-tmp"))
        ]
        # a picture might be another process's: it goes when it is an hour old
        left = [name for name in left if ".png." not in name and ".html." not in name]
        assert not left, left
    assert trials
    report(
        18,
        f"SIGKILL at a {call} in the run's folder",
        trials=trials,
        detected=trials,
        recovered=trials,
    )


def surroundings(folder: Path) -> dict[str, dict[str, str]]:
    """Environments that a process may find itself in."""
    (folder / "state").mkdir()
    own = {"XDG_STATE_HOME": "", "XDG_CACHE_HOME": ""}
    return {
        "another time zone and locale": {
            "TZ": "Pacific/Kiritimati",
            "LC_ALL": "tr_TR.UTF-8",
            "LANG": "C",
        },
        "no home": own | {"HOME": ""},
        "a home that is not there": own | {"HOME": "/proc/nowhere"},
        "a home that is a file": own | {"HOME": "/etc/hostname"},
        "no folder for temporary files": {"TMPDIR": "/nowhere"},
        "a relative state folder": {"XDG_STATE_HOME": "state"},
        "no terminal": {"TERM": "", "COLUMNS": "0"},
        "ASCII": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    }


@pytest.mark.fault
def test_a_run_goes_on_in_other_surroundings(undisturbed, tmp_path, report):
    cases = surroundings(tmp_path)
    for name, environment in cases.items():
        training = Training(tmp_path / name, *OPTIONS)
        killed_in_mid_run(training, **environment)
        said = training.finish(**environment)
        assert "Traceback" not in said, said[-3000:]
        assert_same(training.ending(), undisturbed)
    report(
        18,
        "other surroundings",
        trials=len(cases),
        detected=len(cases),
        recovered=len(cases),
        note=", ".join(cases),
    )


@pytest.mark.fault
@pytest.mark.parametrize("mask", ["000", "077", "277", "777"])
def test_a_umask(mask, undisturbed, tmp_path, report):
    """What the owner may not read or write, root still may: for others the run is refused in one
    line."""
    training = Training(tmp_path / "a", *OPTIONS)
    command = [
        "sh",
        "-c",
        f'umask {mask}; exec "$@"',
        "sh",
        sys.executable,
        "-m",
        "jaxformer",
        "train",
        "tiny",
        *OPTIONS,
    ]
    with Process(command, training.folder, training.folder / "output") as process:
        code = process.end()
        assert code == 0 or (code == 2 and os.geteuid() and "Traceback" not in process.said()), (
            process.said()[-3000:]
        )
    if code:
        subprocess.run(["chmod", "-R", "u+rwX", training.folder], check=True)
        shutil.rmtree(training.folder / "runs")
    training.finish()
    assert_same(training.ending(), undisturbed)
    report(18, f"umask {mask}", trials=1, detected=1, recovered=1)


@pytest.mark.fault
def test_a_full_folder_for_temporary_files(undisturbed, tmp_path, report):
    training = Training(tmp_path / "a", *OPTIONS)
    full = tmp_path / "full"
    full.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", full], capture_output=True
    ).returncode:
        pytest.skip("needs the right to mount")
    try:
        with pytest.raises(OSError), (full / "fill").open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        said = training.finish(TMPDIR=str(full))
        assert "Traceback" not in said, said[-3000:]
    finally:
        subprocess.run(["umount", "-l", full], check=True)
    assert_same(training.ending(), undisturbed)
    report(18, "the folder for temporary files is full", trials=1, detected=1, recovered=1)


@pytest.mark.fault
def test_a_clock_that_jumps(undisturbed, tmp_path, report):
    """The clock of another start is two years back, a year ahead, or in 1970: `time.time` is what
    libraries read."""
    jumps = {
        "two years back": "-6.3e7",
        "a year ahead": "3.15e7",
        "1970": "100000 - now()",
        "each call": "-3e5 * next(calls)",
    }
    for name, jump in jumps.items():
        training = Training(tmp_path / name, *OPTIONS)
        killed_in_mid_run(training)
        code = (
            "import itertools, os, sys, time; now, calls = time.time, itertools.count();"
            f"time.time = lambda: now() + ({jump}); time.time_ns = lambda: int(1e9 * time.time());"
            "from jaxformer import cli; sys.exit(cli.main(sys.argv[1:]))"
        )
        command = [sys.executable, "-c", code, "train", "tiny", *OPTIONS]
        with Process(command, training.folder, training.folder / "output") as process:
            assert process.end() == 0, process.said()[-3000:]
        assert_same(training.ending(), undisturbed)
    report(
        18,
        "a clock that jumps",
        trials=len(jumps),
        detected=len(jumps),
        recovered=len(jumps),
        note=", ".join(jumps),
    )


@pytest.mark.fault
def test_a_run_that_is_moved_or_copied(undisturbed, tmp_path, report):
    """Moved to another folder of runs between two starts; copied while it trains, evaluated and
    trained on there."""
    moved, there = Training(tmp_path / "moved", *OPTIONS), Training(tmp_path / "there", *OPTIONS)
    killed_in_mid_run(moved)
    (there.folder / "runs").mkdir()
    shutil.move(moved.run, there.folder / "runs" / moved.run.name)
    assert "resuming after step" in there.finish()
    assert_same(there.ending(), undisturbed)

    copied, elsewhere = (
        Training(tmp_path / "copied", *OPTIONS),
        Training(tmp_path / "elsewhere", *OPTIONS),
    )
    with copied.start() as process:
        process.wait_for("step 22/40")
        # files come and go meanwhile, so that cp may miss some
        (elsewhere.folder / "runs").mkdir()
        target = elsewhere.folder / "runs" / copied.run.name
        subprocess.run(["cp", "-r", str(copied.run), str(target)], capture_output=True)
        assert process.end() == 0
    before = sorted(path.relative_to(target) for path in target.rglob("*"))
    command = [sys.executable, "-m", "jaxformer", "evaluate", str(target)]
    with Process(command, elsewhere.folder, tmp_path / "output") as process:
        assert process.end() == 0, process.said()[-3000:]
    assert before == sorted(path.relative_to(target) for path in target.rglob("*"))
    elsewhere.finish()
    assert_same(elsewhere.ending(), undisturbed)
    renamed = target.parent / "renamed by me"
    target.rename(renamed)
    command = [sys.executable, "-m", "jaxformer", "evaluate", str(renamed)]
    with Process(command, elsewhere.folder, tmp_path / "output") as process:
        assert process.end() == 0, process.said()[-3000:]
    report(18, "moved, copied while it trained, renamed", trials=3, detected=3, recovered=3)
