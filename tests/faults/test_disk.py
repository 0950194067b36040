"""Rows 4 and 5: a disk that is full, a folder that cannot be written, is gone, or belongs to
another; odd paths, no locks."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from jaxformer.runs.checkpoint import Manager
from tests.faults.harness import LONG, Process, Training, assert_same, resumed_after
from tests.runs import conftest as disks
from tests.runs.test_checkpoint import abstract, assert_same as assert_same_state, make
from tests.tiny import EXPERIMENT

T = TypeVar("T")
small_disk, fill = disks.small_disk, disks.fill
EVERY = 20
OPTIONS = (
    "--steps=400",
    "--log-every=10",
    "--eval-every=200",
    f"--checkpoints.every={EVERY}",
    "--model.dropout-rate=0.1",
)
# after a multiple of EVERY one step, which stays
ONE = (
    "--checkpoints.keep-latest=1",
    "--checkpoints.keep-best=0",
)
SHORT = ("--steps=6",)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    training = Training(tmp_path_factory.mktemp("undisturbed"), *OPTIONS)
    training.finish()
    return training.ending()


def on_disk(folder: Path, disk: Path, *options: str) -> Training:
    """A training whose runs lie on another disk."""
    training = Training(folder, *options)
    (folder / "runs").symlink_to(disk)
    return training


def stop(process: Process) -> None:
    """Until no thread of it moves."""
    process.send(signal.SIGSTOP)
    threads = Path(f"/proc/{process.process.pid}/task")
    while any(
        stat.read_text().rpartition(")")[2].split()[0] != "T" for stat in threads.glob("*/stat")
    ):
        time.sleep(0.005)


def between_saves(
    process: Process, training: Training, change: Callable[[], T], most: int = 99
) -> T:
    """Changes something while no save is running, and no more than `most` steps are kept: an older
    one may make room."""
    stop(process)
    while list(training.checkpoints.glob("*tmp*")) or len(training.steps()) > most:
        process.send(signal.SIGCONT)
        time.sleep(0.02)
        stop(process)
    result = change()
    process.send(signal.SIGCONT)
    return result


def lines_of(text: str, *words: str) -> list[str]:
    return [line for line in text.splitlines() if all(word in line for word in words)]


# --- row 4: a full disk


@pytest.mark.fault
def test_a_disk_that_is_full_for_a_while(small_disk, fill, tmp_path, undisturbed, report):
    """During saves, and while lines of the record are written. Later there is room again."""
    training = on_disk(tmp_path / "a", small_disk, *OPTIONS, *ONE)
    with training.start() as process:
        process.wait_for("step  51/400")
        ballast = between_saves(process, training, lambda: fill(small_disk), most=1)
        process.wait_for("was not saved")
        ballast.unlink()
        assert process.end() == 0
    warnings = lines_of(
        process.said(),
        "was not saved",
        "it needs up to",
        "are free",
        "earlier checkpoints are kept",
    )
    assert warnings and "Traceback" not in process.said(), process.said()
    assert len(lines_of(process.said(), "its lines are written once there is room")) <= 1
    assert_same(training.ending(), undisturbed)
    report(
        4,
        "disk full during saves and the record, then room",
        trials=1,
        detected=1,
        recovered=1,
        note=f"{len(warnings)} warnings",
    )


@pytest.mark.fault
def test_a_disk_that_stays_full_until_the_end(small_disk, fill, tmp_path, undisturbed, report):
    """The run cannot keep its result: it says so (2), also when it is started again.

    With room, the same command goes on.
    """
    training = on_disk(tmp_path / "a", small_disk, *OPTIONS, *ONE)
    with training.start() as process:
        process.wait_for("step 201/400")
        ballast = between_saves(process, training, lambda: fill(small_disk), most=1)
        good = training.steps()[-1]
        assert process.end() == 2
    last = process.said().strip().splitlines()[-1]
    assert (
        "step 400 was not saved" in last and f"the same command goes on after step {good}" in last
    ), last
    assert "Traceback" not in process.said() and training.steps()[-1] == good
    refused = training.finish(code=2)
    assert (
        "No space left" in refused.splitlines()[-1]
        and "Traceback" not in refused
        and "loss" not in refused
    )
    ballast.unlink()
    assert resumed_after(training.finish()) == good
    assert_same(training.ending(), undisturbed)
    report(
        4,
        "disk full at the last step and at the next start",
        trials=2,
        detected=2,
        recovered=2,
        note=f"{400 - good} steps again",
    )


@pytest.mark.thorough
def test_where_there_is_no_room_for_one_more_the_oldest_goes_first(small_disk, fill):
    """Of the checkpoints, those which the policy deletes after this save; never the newest one."""
    log = []
    with Manager(small_disk / "c", keep_latest=2, keep_best=0, log=log.append) as manager:
        for step in (1, 2):
            manager.save(step, make(step, width=64), wait=True)
        ballast = fill(small_disk)
        with ballast.open("r+b") as file:
            file.truncate(ballast.stat().st_size - (1 << 16))  # less than one step
        for step in (3, 4):
            manager.save(step, make(step, width=64), wait=True)
        assert manager.steps() == [3, 4] and not log
        assert_same_state(manager.restore(abstract(make(1, width=64)))[1], make(4, width=64))
        manager.save(5, make(5, width=256))  # too large in any case
        manager.wait()
        assert 4 in manager.steps() and len(log) == 1 and "step 5 was not saved" in log[0]


SAVES = """
import os, random, sys, threading, time
from pathlib import Path
from jaxformer.runs.checkpoint import Manager
from tests.runs.test_checkpoint import make

def fill_after(seconds):
    time.sleep(seconds)
    file = os.open(disk / "ballast", os.O_CREAT | os.O_WRONLY)
    try:
        while os.write(file, bytes(4096)):
            pass
    except OSError:
        os.close(file)

disk, rng, failed = Path(sys.argv[1]), random.Random(0), []
with Manager(disk / "c", keep_latest=1, keep_best=0, log=failed.append) as manager:
    for step in range(1, 60, 2):
        filling = threading.Thread(target=fill_after, args=[0.1 * rng.random()])
        filling.start()
        manager.save(step, make(step, width=64))
        manager.wait()
        filling.join()
        (disk / "ballast").unlink()
        before = len(failed)
        manager.save(step + 1, make(step + 1, width=64), wait=True)
        assert manager.steps()[-1] == step + 1 and len(failed) == before, failed[before:]
print(len(failed))
"""


@pytest.mark.fault
def test_the_disk_fills_up_at_a_random_moment_of_a_save(small_disk, tmp_path, report):
    """Whatever of the save that stops, the next one works, and nobody reads a traceback."""
    with Process(
        [sys.executable, "-c", SAVES, str(small_disk)], tmp_path, tmp_path / "said"
    ) as process:
        assert process.end() == 0, process.said()
    (failed,) = process.said().splitlines()
    assert int(failed) > 0
    note = f"{failed} saves failed"
    report(
        4, "disk full at a random moment of a save", trials=30, detected=30, recovered=30, note=note
    )


@pytest.mark.fault
def test_a_log_on_a_full_disk(small_disk, fill, tmp_path, report):
    """What is printed goes to a file on the full disk: lines are lost, the run is not."""
    training = Training(tmp_path / "a", *SHORT)
    (small_disk / "log").touch()
    fill(small_disk)
    command = [sys.executable, "-m", "jaxformer", "train", "tiny", *SHORT]
    with Process(command, training.folder, small_disk / "log") as process:
        code = process.end()
    assert training.steps()[-1] == 6 and (training.run / "result.json").is_file()
    assert code in (0, 120), code  # 120: Python could not write what was left at its exit
    report(
        4,
        "the log file on a full disk",
        trials=1,
        detected=1,
        recovered=1,
        note="lines of the log are lost, the run is not",
    )


CORPUS = EXPERIMENT.replace("data.sources import Text", "data.corpus import Corpus")
CORPUS = CORPUS.replace(
    'Text(path="text.txt")', 'Corpus(path="rows.jsonl", cache="cache", validation_fraction=0.01)'
)
BPE = EXPERIMENT.replace(
    'Text(path="text.txt")',
    'Text(path="text.txt", tokenizer="bpe", vocab_size=256 + 40, cache="cache")',
)
BPE = BPE.replace("vocab_size=256,", "vocab_size=296,")


@pytest.mark.fault
@pytest.mark.parametrize("kind", ["corpus", "bpe"])
def test_a_disk_that_is_full_while_tokens_are_cached(kind, small_disk, fill, tmp_path, report):
    """Tokens of a corpus must lie on a disk: one line says how many bytes. A text's tokens are in
    memory: the run goes on."""
    training = Training(tmp_path / "a", *SHORT, experiment=CORPUS if kind == "corpus" else BPE)
    (training.folder / "cache").symlink_to(small_disk)
    rows = "".join(
        json.dumps({"text": f"document {i} " + "word " * 20}) + "\n" for i in range(15_000)
    )
    (training.folder / "rows.jsonl").write_text(rows)
    ballast = fill(small_disk)
    if kind == "corpus":
        with ballast.open("r+b") as file:
            # room for its beginning: it fills up in the middle
            file.truncate(ballast.stat().st_size - (1 << 18))
        said = training.finish(code=2)
        last = said.strip().splitlines()[-1]
        assert (
            "No space left" in last
            and f"{len(rows):,} bytes of text take up to" in last
            and "Traceback" not in said
        )
        assert not list(small_disk.rglob("*.unfinished")) and not list(small_disk.rglob("*.tokens"))
        assert not (training.folder / "runs").exists()
    else:
        said = training.finish()
        assert (
            lines_of(said, "data.cache: tokens are not kept", "they need", "are free")
            and "Traceback" not in said
        )
        assert not list(small_disk.rglob("*.npz")) and not list(small_disk.rglob("*.unfinished"))
    ballast.unlink()
    training.finish()
    assert list(small_disk.rglob("*.tokens" if kind == "corpus" else "*.npz"))
    report(
        4,
        f"disk full while tokens are cached ({kind})",
        trials=1,
        detected=1,
        recovered=1,
        note="nothing half-written stays",
    )


# --- row 5: folders


def assert_refused(said: str, *words: str) -> None:
    """One line, and nothing was computed."""
    assert "Traceback" not in said and "loss" not in said, said
    assert lines_of(said, "jaxformer: ", *words), said


@pytest.mark.fault
def test_a_runs_folder_that_cannot_be_written(tmp_path, report):
    """Read-only as a mount, immutable, and as another user without rights: one line before anything
    is computed."""
    training = Training(tmp_path / "a", *SHORT)
    runs = training.folder / "runs"
    runs.mkdir()
    trials = 0
    if not subprocess.run(["mount", "--bind", runs, runs], capture_output=True).returncode:
        try:
            subprocess.run(["mount", "-o", "remount,bind,ro", runs], check=True)
            assert_refused(training.finish(code=2), "Read-only file system", "--runs")
            trials += 1
        finally:
            subprocess.run(["umount", "-l", runs], check=True)
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable]
    # a Python in the home of root is no other user's
    if (
        os.geteuid() == 0
        and shutil.which("setpriv")
        and not subprocess.run([*nobody, "-c", ""], capture_output=True).returncode
    ):
        (training.folder / "output").touch()
        command = [*nobody, "-m", "jaxformer", "train", "tiny"]
        # of pytest's folders only their owner may read
        for folder in (
            tmp_path,
            *list(tmp_path.parents)[:-2],
        ):
            folder.chmod(folder.stat().st_mode | 0o055)
        with Process(
            command, training.folder, training.folder / "output", HOME=str(tmp_path)
        ) as process:
            assert process.end() == 2
        assert_refused(process.said(), "Permission denied")
        trials += 1
    assert trials, "needs root"
    training.finish()
    report(
        5,
        "runs folder read-only or without rights",
        trials=trials,
        detected=trials,
        recovered=trials,
        note="before compiling",
    )


@pytest.mark.fault
def test_a_run_whose_folder_becomes_immutable_for_a_while(tmp_path, undisturbed, report):
    """As a file system that the kernel makes read-only: warnings, and all is written once that is
    mended."""
    training = Training(tmp_path / "a", *OPTIONS)
    immutable = lambda sign: (
        subprocess.run(["chattr", "-R", f"{sign}i", training.run], capture_output=True).returncode
    )
    with training.start() as process:
        process.wait_for("step  51/400")
        try:
            if between_saves(process, training, lambda: immutable("+")):
                pytest.skip("needs chattr")
            process.wait_for("was not saved")
        finally:
            immutable("-")
        assert process.end() == 0, process.said()
    assert "Traceback" not in process.said() and lines_of(
        process.said(), "was not saved", "earlier checkpoints are kept"
    )
    assert_same(training.ending(), undisturbed)
    report(5, "run folder immutable in mid-run", trials=1, detected=1, recovered=1)


@pytest.mark.fault
def test_a_run_folder_that_is_removed_in_mid_run(tmp_path, undisturbed, report):
    """Its run stops at the next save: another may have started there.

    The same command begins anew: the files are gone.

    A save that had looked at its lock just before the removal is still written, and is good: then
    the run goes on from it, and only the lines of the record before it are gone with their file.
    """
    training = Training(tmp_path / "a", *OPTIONS)
    with training.start() as process:
        process.wait_for("step  51/400")
        between_saves(process, training, lambda: shutil.rmtree(training.run))
        assert process.end() == 2
    assert lines_of(
        process.said(), "jaxformer: ", "was removed while this run held it", "without saving"
    ), process.said()
    assert "Traceback" not in process.said()
    after, ending = resumed_after(training.finish()), training.ending()
    assert ending.leaves == undisturbed.leaves
    assert ending.record == [line for line in undisturbed.record if line["step"] >= after]
    report(
        5,
        "run folder removed in mid-run",
        trials=1,
        detected=1,
        recovered=1,
        note="a clean stop at the next save",
    )


@pytest.mark.fault
def test_a_run_that_another_process_owns(tmp_path, undisturbed, report):
    """Refused with pid, host and time.

    After kill -9 of the owner the next start goes on at once.
    """
    training = Training(tmp_path / "a", *OPTIONS)
    with training.start() as owner:
        owner.wait_for("step  51/400")
        owner.send(signal.SIGSTOP)
        said = training.finish(code=2)
        assert_refused(
            said, "another trainer holds this run", f"pid {owner.process.pid} on ", " since 20"
        )
        owner.kill()
    assert resumed_after(training.finish()) > 0
    assert_same(training.ending(), undisturbed)
    report(
        5,
        "owned by a live run; then its lock is stale",
        trials=2,
        detected=2,
        recovered=2,
        note="pid, host and time",
    )


FLOCK = """
#include <errno.h>
#include <stdlib.h>
int flock(int file, int operation) { errno = atoi(getenv("FLOCK_ERRNO")); return -1; }
"""


@pytest.mark.fault
@pytest.mark.parametrize("number", ["ENOLCK", "ENOSYS"])
def test_a_file_system_without_locks(number, tmp_path, report):
    """A library in front of the C library's makes flock fail as on some of NFS and Lustre."""
    if not shutil.which("gcc"):
        pytest.skip("needs a C compiler")
    import errno

    (tmp_path / "flock.c").write_text(FLOCK)
    library = tmp_path.parent / "flock.so"  # LD_PRELOAD knows no path with spaces
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "flock.c"], check=True)
    training = Training(tmp_path / "a", *SHORT)
    said = training.finish(LD_PRELOAD=str(library), FLOCK_ERRNO=str(getattr(errno, number)))
    assert len(lines_of(said, "no lock", "nothing stops a second trainer of this run")) == 1, said
    assert "another trainer" not in said and training.steps()[-1] == 6
    report(
        5,
        f"flock fails with {number}",
        trials=1,
        detected=1,
        recovered=1,
        note="LD_PRELOAD; goes on, with one line",
    )


@pytest.mark.fault
def test_a_path_with_spaces_and_unicode(tmp_path, report):
    """Training, evaluation, generation, the report and a pod."""
    training = Training(tmp_path, *SHORT)  # such a path, as in all tests
    training.finish()
    run, commands = f"runs/{training.run.name}", 0
    for command in (
        ("evaluate", run),
        ("generate", run, "--prompt", "the fö 火", "--tokens=4"),
        ("report", run),
    ):
        output = training.folder / "output"
        with Process(
            [sys.executable, "-m", "jaxformer", *command], training.folder, output
        ) as process:
            assert process.end() == 0, process.said()
        commands += 1
    pod = [
        sys.executable,
        "-m",
        "experiments.launch.pod_sim",
        "2",
        "tiny",
        "--steps=4",
        "--batch-size=8",
        "--name=pod",
    ]
    with Process(pod, training.folder, training.folder / "output") as process:
        assert process.end(2 * LONG) == 0, process.said()
    assert list((training.folder / "runs").glob("pod-*/checkpoints/4")), process.said()
    report(
        5,
        "a path with spaces, quotes and Unicode",
        trials=commands + 2,
        detected=commands + 2,
        recovered=commands + 2,
    )
