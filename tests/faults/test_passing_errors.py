"""Row 17: errors of the file system that pass. Nothing is renamed, nothing is lost, one line, and
the next start goes on.

The slow tests make calls of the C library fail in a real process (failing_calls.c), the fast ones
those of Python.
"""

import builtins
import errno
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from etils import epath

from jaxformer import cli
from jaxformer.config import storage
from jaxformer.data.sources import Text, _read_path as read_path
from jaxformer.errors import ConfigError
from jaxformer.runs import checkpoint, checkpoint_reader, lock
from jaxformer.runs.checkpoint import Manager
from jaxformer.runs.manifest import CheckpointError
from jaxformer.runs.metrics import Record
from jaxformer.runs.run_folder import runs_of
from tests.faults.harness import Process
from tests.faults.passing import Trial
from tests.runs.test_checkpoint import abstract, assert_same, make
from tests.tiny import furnish

NUMBERS = (
    "EIO ESTALE EMFILE ENFILE ETIMEDOUT ENOMEM EAGAIN ENXIO EREMOTEIO ECONNRESET ENOTCONN "
    "EHOSTDOWN EBADF EUCLEAN EPROTO"
)
PASSING = [getattr(errno, name) for name in NUMBERS.split()]
LIMIT = 60  # seconds that a command may take that meets such an error


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder for the finished run that all trials start from."""
    folder = tmp_path_factory.mktemp("whole") / "whole"
    folder.mkdir()
    return furnish(folder)


def outcomes(trials: list[Trial], whole: Path, library: Path, name: str) -> list[dict]:
    """What became of the trials, all in one process."""
    file = whole.parent / f"{name}.json"
    file.write_text(json.dumps([asdict(trial) for trial in trials]))
    command = [sys.executable, "-m", "tests.faults.passing", str(whole), str(file)]
    more = {"LD_PRELOAD": str(library), "XDG_STATE_HOME": str(whole.parent / "state"), "QUICK": "1"}
    more["XDG_CACHE_HOME"] = str(whole.parent / "cache")
    with Process(
        command, Path(__file__).parents[2], whole.parent / f"{name}.said", **more
    ) as process:
        code = process.end(3600)
        lines = [
            json.loads(line)
            for line in process.said().splitlines()
            if line.startswith('{"command"')
        ]
        assert code == 0 and len(lines) == len(trials), process.said()[-3000:]
    return lines


def check(found: dict) -> None:
    """Of one trial: the rules of this page."""
    assert found["renamed"] == [], found
    assert found["code"] in (0, 2, storage.TROUBLE), found
    assert "Traceback" not in found["said"] and not re.search(r"\bdelete\b", found["said"]), found
    if found["code"] == storage.TROUBLE:
        last = found["said"].strip().splitlines()[-1]
        assert last.startswith("jaxformer: ") and os.strerror(found["number"]) in last, found
    assert found["healthy"] == 0 and found["same"], found
    assert found["seconds"] < LIMIT, found


@pytest.fixture
def folder(two_steps, tmp_path, monkeypatch):
    """A copy of two checkpoints; nobody waits between two tries."""
    monkeypatch.setattr(storage.time, "sleep", lambda seconds: None)
    shutil.copytree(two_steps, tmp_path / "run")
    return tmp_path / "run"


def break_calls(patch, owner, name, number, match="", times=99):
    """The first `times` calls of owner.name on paths with `match` fail. The list grows by one with
    each."""
    real, failed = getattr(owner, name), []

    def call(*arguments, **options):
        if match in str(arguments[:1]) and len(failed) < times:
            failed.append(arguments)
            raise OSError(number, os.strerror(number), str(arguments[0]) if arguments else None)
        return real(*arguments, **options)

    patch.setattr(owner, name, call)
    if owner is io:  # which of the two a library calls is its own business
        patch.setattr(builtins, name, call)
    return failed


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def status(number: int, file: Path) -> ValueError:
    """As tensorstore says it; orbax wraps it in errors that say less."""
    word = {
        errno.ESTALE: "ABORTED",
        errno.EMFILE: "RESOURCE_EXHAUSTED",
        errno.ENOTCONN: "FAILED_PRECONDITION",
    }
    opened = f'Error reading local file "{file}": Failed to open: "{file}": {os.strerror(number)}'
    return ValueError(
        f"{word.get(number, 'UNKNOWN')}: {opened} [os_error_code='{number}'] [source "
        f"locations='a.cc:1']"
    )


@pytest.mark.thorough
def test_what_tensorstore_cannot_read_is_refused_by_its_number(folder, monkeypatch):
    """For each number of the operating system. Once it can be read, the newest step is there."""
    file, real = folder / "2" / "state" / "manifest.ocdbt", checkpoint_reader.ocp.load
    with Manager(folder) as manager:
        for number in (*PASSING, errno.EINTR, errno.ENOENT):
            failed = []

            def load(*arguments, number=number, failed=failed):
                failed.append(1)
                raise RuntimeError("orbax has failed") from status(number, file)

            monkeypatch.setattr(checkpoint_reader.ocp, "load", load)
            with pytest.raises(OSError, match=r"manifest\.ocdbt") as found:
                manager.restore(abstract(make(1)))
            assert storage.exit_code(found.value) == storage.TROUBLE and len(failed) == 4
            assert found.value.errno == (errno.ESTALE if number == errno.ENOENT else number)
        monkeypatch.setattr(checkpoint_reader.ocp, "load", real)
        step, state, _ = manager.restore(abstract(make(1)))
    assert step == 2 and names(folder) == ["1", "2"]
    assert_same(state, make(2))


@pytest.mark.parametrize(
    ("owner", "name", "match"),
    [
        ("io", "open", "_CHECKPOINT_METADATA"),
        ("os", "listdir", "run"),
        ("os", "stat", "run/2"),
        ("os", "scandir", "run/2"),
    ],
)
def test_no_older_step_is_taken_for_one_that_cannot_be_looked_at(
    owner, name, match, folder, monkeypatch
):
    """Where the trouble ends after two tries, nobody sees it."""
    owner = {"io": io, "os": os}[owner]
    with Manager(folder) as manager:
        for number in (errno.ESTALE, errno.EIO, errno.EMFILE):
            with monkeypatch.context() as patch:
                break_calls(patch, owner, name, number, match)
                with pytest.raises(OSError, match=re.escape(os.strerror(number))):
                    manager.restore(abstract(make(1)))
        with monkeypatch.context() as patch:
            failed = break_calls(patch, owner, name, errno.EIO, match, times=2)
            assert manager.restore(abstract(make(1)))[0] == 2
    assert len(failed) == 2 and names(folder) == ["1", "2"]


def test_where_no_step_is_good_none_is_renamed_and_a_whole_one_is_offered(folder):
    """An earlier version of this library renamed steps that it could not open: the line says how to
    get them back."""
    (folder / "2").rename(folder / "2.corrupt")
    (folder / "1" / "_CHECKPOINT_METADATA").write_text("{}")
    with Manager(folder) as manager:
        with pytest.raises(CheckpointError, match="every checkpoint is damaged: 1 ") as found:
            manager.restore(abstract(make(1)))
        assert names(folder) == ["1", "2.corrupt"] and "delete" not in str(found.value)
        move = str(found.value).partition("rename it (`")[2].partition("`")[0]
        subprocess.run(shlex.split(move), check=True)
        assert manager.restore(abstract(make(1)))[0] == 2
        (folder / "2").rename(folder / "2.corrupt")
        (folder / "2.corrupt" / "_CHECKPOINT_METADATA").write_text("{}")
        with pytest.raises(
            CheckpointError, match=r"all are kept; one that is renamed from STEP\.corrupt to STEP"
        ):
            manager.restore(abstract(make(1)))


def test_a_last_save_is_written_again_and_one_in_mid_run_is_left_out(folder, monkeypatch):
    log = []
    with Manager(folder, log=log.append) as manager:
        for times, raised in ((2, None), (99, OSError)):
            with monkeypatch.context() as patch:
                failed = break_calls(
                    patch, checkpoint.orbax.CheckpointManager, "save", errno.EIO, times=times
                )
                if raised is None:
                    manager.save(3, make(3), wait=True)
                    assert len(failed) == 2 and manager.steps()[-1] == 3
                else:
                    with pytest.raises(
                        OSError, match=r"step 4 was not saved.*goes on after step 3"
                    ) as found:
                        manager.save(4, make(4), wait=True)
                    assert storage.exit_code(found.value) == storage.TROUBLE and len(failed) == 4
                    manager.save(4, make(4))
                    manager.wait()
        # once for each step
        assert [line.partition(": ")[2][:6] for line in log] == ["step 3", "step 4"], log
        manager.save(4, make(4), wait=True)
        assert_same(manager.restore(abstract(make(1)))[1], make(4))


def test_a_step_that_cannot_be_ranked_is_kept(folder, monkeypatch):
    with Manager(folder, keep_latest=1, keep_best=1) as manager:
        manager._policy.metrics.clear()
        break_calls(monkeypatch, io, "open", errno.EIO, "1/_CHECKPOINT_METADATA")
        assert manager.is_among_best(0.5)
        manager.save(3, make(3), metric=9.0, wait=True)
        assert 1 in manager.steps()


def test_a_lock_that_cannot_be_taken_lets_no_second_trainer_in(folder, monkeypatch):
    folder = epath.Path(folder)
    for number, is_refused in (
        (errno.EIO, True),
        (errno.EINTR, True),
        (errno.ENOLCK, False),
        (errno.EOPNOTSUPP, False),
    ):
        log = []
        with monkeypatch.context() as patch:
            break_calls(patch, lock.fcntl, "flock", number)
            if is_refused:
                with pytest.raises(OSError, match=re.escape(os.strerror(number))):
                    lock.take(folder, log.append)
            else:
                lock.take(folder, log.append).close()
                assert "no lock" in log[0]
    with lock.take(folder, log.append) as held, monkeypatch.context() as patch:
        break_calls(patch, os, "fstat", errno.EIO)
        with pytest.raises(OSError):
            lock.is_in_place(held)
    with Manager(folder, log=log.append) as manager:
        with monkeypatch.context() as patch:
            break_calls(patch, os, "fstat", errno.EIO, str(manager._lock.fileno()))
            manager.save(3, make(3))
            manager.wait()
        assert manager.steps() == [1, 2] and "step 3 was not saved" in log[-1]


def test_a_record_that_cannot_be_read_is_not_begun_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(storage.time, "sleep", lambda seconds: None)
    path = tmp_path / "metrics.jsonl"
    record = Record(path)
    for step in range(3):
        record.write(step, {"loss": 1.0})
    before = path.read_text()
    for owner, name in ((io, "open"), (os, "stat"), (os, "lstat")):
        with monkeypatch.context() as patch:
            break_calls(patch, owner, name, errno.ESTALE, "metrics.jsonl")
            with pytest.raises(OSError):
                Record(path)
    assert path.read_text() == before
    record = Record(path)
    with monkeypatch.context() as patch:
        failed = break_calls(patch, os, "fsync", errno.EIO, times=3)
        break_calls(patch, io, "open", errno.EIO, "metrics.jsonl", times=1)
        record.write(3, {"loss": 1.0})
        record.close()
    assert len(failed) >= 1 and [line["step"] for line in Record(path).lines] == [0, 1, 2, 3]


def test_a_folder_of_texts_is_never_read_in_part(tmp_path, monkeypatch):
    """A glob leaves out a folder that it cannot open; the text would be another one, without a
    word."""
    monkeypatch.setattr(storage.time, "sleep", lambda seconds: None)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text("some words of a text\n" * 50)
    data = Text(path=str(tmp_path), pattern="**/*.txt")
    for owner, name in ((os, "scandir"), (os, "stat"), (io, "open")):
        with monkeypatch.context() as patch:
            break_calls(patch, owner, name, errno.EIO, f"{tmp_path}/b")
            with pytest.raises(OSError, match="Input/output"):
                read_path(data)
    assert read_path(data)[0].endswith("(2 files)")


def test_the_newest_run_is_not_passed_over(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(storage.time, "sleep", lambda seconds: None)
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"name": "tiny", "steps": 6}')
    with monkeypatch.context() as patch:
        break_calls(patch, os, "stat", errno.ESTALE, "new/config.json")
        with pytest.raises(OSError, match="Stale"):
            runs_of("tiny", tmp_path)
    with monkeypatch.context() as patch:
        break_calls(patch, os, "stat", errno.EIO, "new/metrics.jsonl")
        # of this file, which is none of the library
        patch.setattr(storage, "users_frame", lambda error: None)
        assert cli.main(["evaluate", "tiny", "--runs", str(tmp_path)]) == storage.TROUBLE
    said = capsys.readouterr().err
    assert (
        "Input/output error" in said
        and "the same command goes on" in said
        and len(said.strip().splitlines()) == 1
    )


def test_a_path_without_room_for_checkpoints_is_refused(tmp_path):
    """Under the longest path of the system, and beyond it."""
    for length in (3_900, 4_050, 5_000):
        runs = str(tmp_path)
        while len(runs) < length:
            runs += "/" + "k" * 100
        with pytest.raises(ConfigError, match=r"--runs: its path has [0-9]+ bytes"):
            cli.check_host(runs, None)
    cli.check_host(str(tmp_path / "k" / "runs"), None)


def of_whole_starts() -> list[Trial]:
    """Each number, as long as the start lasts; then each call, at each place, with a number or
    two."""
    trials = [
        Trial("train", "open_to_read", number, "/checkpoints/6/", "finished") for number in PASSING
    ]
    places = {
        "open_to_read": (
            "/checkpoints/4/_CHECKPOINT_METADATA",
            "/checkpoints/4/state",
            "metrics.jsonl",
            "config.json",
            "goodput.json",
            "source.json",
            "text.txt",
            "experiments/tiny.py",
        ),
        "open_to_write": (
            "/checkpoints",
            "metrics.jsonl",
            "checkpoints.lock",
            "config.json",
            "result.json",
            "samples",
        ),
        "read": ("/checkpoints/4/", "metrics.jsonl", "config.json", "text.txt"),
        "stat": (
            "/checkpoints",
            "metrics.jsonl",
            "config.json",
            "goodput.json",
            "text.txt",
            "/state/",
        ),
        "listdir": ("/checkpoints", "/runs"),
        "flock": ("checkpoints.lock",),
        "write": ("/checkpoints", "metrics.jsonl", "result.json", "goodput.json"),
        "fsync": ("/checkpoints", "metrics.jsonl", "result.json", "config.json", "samples"),
        "rename": ("/checkpoints", "metrics.jsonl", "config.json", "result.json", "report.html"),
        "mkdir": ("/checkpoints", "samples", "/state/"),
        "unlink": ("/runs/",),
        "rmdir": ("/runs/",),
        "close": ("metrics.jsonl", "/checkpoints"),
    }
    for call, paths in places.items():
        trials += [Trial("train", call, errno.EIO, path) for path in paths]
        trials += [Trial("train", call, errno.ESTALE, paths[0])]
    return trials


def of_single_calls() -> list[Trial]:
    """One call fails, or a few: the command goes on as if nothing had been, or says what it left
    out."""
    trials = []
    for call in ("open", "read", "stat", "write", "fsync", "rename", "mkdir", "unlink", "close"):
        for first in (1, 3, 9, 20):
            trials.append(Trial("train", call, errno.EIO, "/runs/", "half", first, 1))
    trials += [
        Trial("train", "open,read", number, "/runs/", "half", 2, 2)
        for number in (errno.EINTR, errno.EMFILE)
    ]
    trials += [
        Trial("train", "rename", number, "/runs/", "new", 2, 1)
        for number in (errno.EINTR, errno.EXDEV, errno.ESTALE)
    ]
    trials += [
        Trial("train", "write", number, "/runs/", "new", 5, 3)
        for number in (errno.ENOSPC, errno.EDQUOT, errno.EAGAIN)
    ]
    return trials


def of_commands() -> list[Trial]:
    """Commands that read a run."""
    trials = []
    for command in ("evaluate", "report", "runs"):
        for call, path in (
            ("open_to_read", "/runs/"),
            ("stat", "config.json"),
            ("read", "metrics.jsonl"),
            ("stat", "/state/"),
        ):
            trials.append(Trial(command, call, errno.ESTALE, path, "finished"))
            trials.append(Trial(command, call, errno.EIO, path, "finished", 1, 1))
    return trials


@pytest.mark.fault
@pytest.mark.parametrize(
    "kind", [of_whole_starts, of_single_calls, of_commands], ids=lambda kind: kind.__name__
)
def test_commands_that_meet_errors(kind, whole, failing_calls, report):
    trials = kind()
    found = outcomes(trials, whole, failing_calls, kind.__name__)
    met = [each for each in found if each["hits"]]
    for each in found:
        check(each)
    assert len(met) > len(found) // 2
    stopped = sum(each["code"] != 0 for each in met)
    note = (
        f"{len(met)} met an error, {stopped} were stopped by it; longest "
        f"{max(each['seconds'] for each in found):.0f} s"
    )
    words = kind.__name__.replace("_", " ")
    report(
        17,
        f"errors that pass, {words}",
        trials=len(found),
        detected=len(found),
        recovered=len(found),
        note=note,
    )
