"""Row 15: links in a run folder.

Nothing outside of it is read into a page or an answer, and nothing there is changed.

Each file of ours in a run folder in turn is a link, a hard link, a pipe, a socket; folders are
links. The run folder itself may be a link, as a user makes one to a larger disk.
"""

import contextlib
import itertools
import json
import os
import shutil
import socket
import stat
from pathlib import Path

import pytest
from etils import epath

from jaxformer import cli, config, open_run
from jaxformer.config import no_links
from jaxformer.errors import ConfigError
from jaxformer.runs import checkpoint, lock, metrics
from jaxformer.runs.goodput import Goodput
from jaxformer.runs.initial import FromRun
from jaxformer.runs.run_folder import RunFolder, runs_of
from jaxformer.tools.analysis import figures, report

SECRET = "the secret of another user"
FILES = (
    "config.json",
    "experiment.py",
    "source.json",
    "environment.json",
    "metrics.jsonl",
    "goodput.json",
    "result.json",
    "tokenizer.json",
    "samples/step-2.txt",
)


def link(path, target):
    path.symlink_to(target)


def hard_link(path, target):
    path.hardlink_to(target)


def link_of_link(path, target):
    path.with_name("other").symlink_to(target)
    path.symlink_to("other")


def pipe(path, target):
    os.mkfifo(path)


def plug(path, target):
    # a name of a socket is short
    with (
        socket.socket(socket.AF_UNIX) as server,
        contextlib.chdir(path.parent),
    ):
        server.bind(path.name)


def folder(path, target):
    path.mkdir()


KINDS = {each.__name__: each for each in (link, hard_link, link_of_link, pipe, plug, folder)}


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """Drawing is most of the time of a page."""
    monkeypatch.setattr(figures, "png", lambda draw, dark=False: b"a picture")


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    """A copy of the run, in a copy of its folder, which is the current one."""
    shutil.copytree(trained, tmp_path / "work", symlinks=True)
    monkeypatch.chdir(tmp_path / "work")
    (found,) = Path("runs").glob("tiny-*")
    return found


@pytest.fixture
def outside(tmp_path):
    """A folder with a precious file, and what it looks like now."""
    place = tmp_path / "home"
    place.mkdir()
    (place / "secret").write_text(SECRET)
    return place


def looks(place):
    """All that a folder has: names, contents, links."""
    found = {}
    for path in sorted(place.rglob("*")):
        status = path.lstat()
        text = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
        found[str(path.relative_to(place))] = stat.S_IFMT(status.st_mode), text
    return found


def put(run, name, kind, target):
    path = run / name
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    KINDS[kind](path, target)


def everything_that_reads(run):
    """What each part of the library makes of the files of a run, or why it refuses."""
    folder = RunFolder(epath.Path(run))
    calls = {
        "description": folder.description,
        "scores": folder.last_scores,
        "code": lambda: open_run(run, trust=True),
        "records": lambda: metrics.read_records(folder.metrics),
        "goodput": lambda: Goodput(folder.goodput, 0.0).earlier,
        "tokenizer": lambda: getattr(open_run(run).tokenizer, "state", None),
        "initial": FromRun(str(run)).description,
        "page": lambda: report.report([folder], [{}], folder.path / "figures"),
        "sample": lambda: report.last_sample(folder),
        "trained on": lambda: report.trained_on(folder),
        "logger": lambda: metrics._wandb_id(folder.path, "x", []),
        "runs": lambda: [cli.runs._scores(each) for each in runs_of(None, run.parent)],
    }
    found = {}
    for name, call in calls.items():
        try:
            found[name] = str(call())
        except ConfigError as error:
            found[name] = f"refused: {error}"
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "file"), list(itertools.product(KINDS, FILES)))
def test_no_file_of_a_run_is_read_from_elsewhere(file, kind, run, outside, monkeypatch):
    if kind in ("link", "hard_link", "link_of_link") and file.endswith(".json"):
        (outside / "secret").write_text(json.dumps({"token": SECRET, "steps": 1}))
    before = looks(outside)
    put(run, file, kind, outside / "secret")
    found = everything_that_reads(run)
    assert all(SECRET not in text for text in found.values()), found
    assert all("\n" not in text for text in found.values() if text.startswith("refused")), found
    assert looks(outside) == before
    if kind in ("link", "link_of_link"):
        told = [text for text in found.values() if text.startswith("refused")]
        assert file in ("goodput.json", "result.json") or any(
            f"{file}: is a link" in text for text in told
        ), found


def test_no_sample_with_a_second_name_is_shown(run, outside, caplog):
    """A hard link shows no trace of where it leads, and an archive can hold one."""
    folder = RunFolder(epath.Path(run))
    assert report.last_sample(folder)[1].startswith("the ")
    put(run, "samples/step-2.txt", "hard_link", outside / "secret")
    assert report.last_sample(folder) is None and "is left out: it is a hard link" in caplog.text


@pytest.mark.thorough
@pytest.mark.parametrize("inside", ["checkpoints", "samples"])
def test_no_folder_of_a_run_is_a_link(inside, run, outside):
    shutil.move(run / inside, outside / inside)
    (outside / inside / "step-9.txt").write_text(SECRET)
    put(run, inside, "link", outside / inside)
    before, found = looks(outside), everything_that_reads(run)
    try:
        found["restored"] = str(open_run(run).checkpoint[0])
    except ConfigError as error:
        found["restored"] = str(error)
    assert all(SECRET not in text for text in found.values()), found
    assert (
        any(f"{inside}: is a link" in text for text in found.values()) and looks(outside) == before
    )


@pytest.mark.parametrize(
    "part", ["", "state", "_CHECKPOINT_METADATA", "state/manifest.ocdbt", "state/d"]
)
def test_no_part_of_a_checkpoint_is_a_link(part, run, outside):
    """Also where what it leads to is a good checkpoint: the step keeps its name, and its owner
    copies the files."""
    (step,) = (run / "checkpoints").glob("[0-9]*")
    whole = step / part
    shutil.move(whole, outside / "part")
    whole.symlink_to(outside / "part")
    before = looks(outside)
    with pytest.raises(ConfigError, match="is a link, and none in a run folder is followed"):
        open_run(run).checkpoint  # noqa: B018
    assert looks(outside) == before and step.exists() and not list(step.parent.glob("*.corrupt*"))


@pytest.mark.thorough
def test_a_run_folder_that_is_a_link_is_a_run_like_any_other(run, outside):
    """A user moves a run to a larger disk, or all of them."""
    shutil.move(run, outside / "moved")
    run.symlink_to(outside / "moved")
    assert open_run(run).checkpoint[0] == 2 and [f.path.name for f in runs_of(None, "runs")] == [
        run.name
    ]
    shutil.move("runs", outside / "runs")
    Path("runs").symlink_to(outside / "runs")
    run.unlink()
    run.symlink_to(outside / "moved")
    assert open_run(run).checkpoint[0] == 2 and "step-2" in report.report(
        [RunFolder(epath.Path(run))], [{}], epath.Path("x")
    )


# every write of ours into a run folder; each gets the folder
WRITES = {
    "config.json": lambda f: f.write(f.config, "ours"),
    "samples/step-2.txt": lambda f: f.write(f.samples / "step-2.txt", "ours"),
    "report.html": lambda f: report.write(f.path / "report.html", [f], [{}]),
    "figures/loss.png": lambda f: figures.save(
        lambda: figures.losses({"a": []}), f.path / "figures" / "loss.png", f.path
    ),
    "metrics.jsonl": lambda f: record_of(f).write(3, {"loss": 1.0}),
    "goodput.json": lambda f: Goodput(f.goodput, 0.0).save(),
    "tokenizer.json": lambda f: open_run(f.path).tokenizer.save(f.tokenizer),
    "checkpoints.lock": lambda f: lock.take(f.checkpoints, print).close(),
    "wandb_id.txt": lambda f: metrics._wandb_id(f.path, "x", []),
    "tensorboard": lambda f: metrics.open_loggers(["tensorboard"], f.path, "x", {}),
}


def record_of(folder):
    record = metrics.Record(folder.metrics)
    record.rewind(2)
    return record


@pytest.mark.parametrize("kind", ["link", "hard_link", "link_of_link", "pipe", "plug"])
@pytest.mark.parametrize("name", WRITES)
def test_no_write_reaches_what_a_link_leads_to(name, kind, run, outside):
    target = outside / "secret"
    opened, write = RunFolder(epath.Path(run)), WRITES[name]
    if name == "tokenizer.json":
        saved = open_run(run).tokenizer
        write = lambda f: saved.save(f.tokenizer)
    before = looks(outside)
    put(run, name, kind, target)
    with contextlib.suppress(ConfigError, OSError):
        write(opened)
    assert looks(outside) == before
    assert (run / name).exists() or (run / name).is_symlink() or kind == "folder"


@pytest.mark.parametrize("name", ["samples/step-2.txt", "figures/loss.png", "tensorboard"])
def test_no_write_goes_through_a_folder_that_is_a_link(name, run, outside, caplog):
    put(run, name.partition("/")[0], "link", outside)
    before = looks(outside)
    with contextlib.suppress(ConfigError):
        WRITES[name](RunFolder(epath.Path(run)))
    assert looks(outside) == before
    assert (run / name.partition("/")[0]).is_symlink()


@pytest.mark.parametrize(
    "text", ["precious", "pid", "", "\0" * 40, "pid 1 on a since 2026-01-01 00:00:00"]
)
def test_a_lock_changes_no_text_but_its_own(text, tmp_path):
    """A full disk and a power failure leave a part of its text, or zeros."""
    file = tmp_path / "run.lock"
    file.write_text(text)
    if text == "precious":
        with pytest.raises(
            ConfigError,
            match=r"run\.lock: is no lock of a run, it holds something else; move it away",
        ):
            lock.take(epath.Path(tmp_path / "run"), print)
        assert file.read_text() == text
        return
    with lock.take(epath.Path(tmp_path / "run"), print):
        assert file.read_text().startswith(f"pid {os.getpid()} on ")


def test_what_a_lock_says_is_no_secret(tmp_path):
    """A second trainer is told who holds the lock; the text of another file of that name is not
    told."""
    (tmp_path / "run.lock").write_text("")
    with lock.take(epath.Path(tmp_path / "run"), print):
        (tmp_path / "run.lock").write_text(SECRET)
        with pytest.raises(ConfigError, match="another trainer holds this run") as refused:
            lock.take(epath.Path(tmp_path / "run"), print)
    assert SECRET not in str(refused.value)


def test_remains_of_a_save_that_are_links_are_removed_alone(run, outside):
    """`deleted` and STEP.orbax-checkpoint-tmp are emptied when a folder is opened."""
    before = looks(outside)
    for name in ("deleted", "7.orbax-checkpoint-tmp"):
        (run / "checkpoints" / name).symlink_to(outside)
    with checkpoint.Manager(run / "checkpoints"):
        pass
    assert looks(outside) == before
    assert (
        not list((run / "checkpoints").glob("*tmp"))
        and not (run / "checkpoints" / "deleted").is_symlink()
    )


def test_a_copy_of_a_damaged_record_is_a_file_of_its_own(run, outside):
    (run / "metrics.jsonl").write_text("no record\n")
    # it is not there: an ordinary write would make it
    (run / "metrics.jsonl.damaged-1").symlink_to(outside / "new")
    before = looks(outside)
    metrics.Record(run / "metrics.jsonl")
    assert (
        looks(outside) == before and (run / "metrics.jsonl.damaged-1").read_text() == "no record\n"
    )


def test_a_run_that_cannot_be_read_hides_no_other(run, outside, capsys):
    other = Path(shutil.copytree(run, "runs/other"))
    put(other, "metrics.jsonl", "link", outside / "secret")
    put(Path(shutil.copytree(run, "runs/third")), "config.json", "pipe", None)
    capsys.readouterr()
    assert cli.main(["runs"]) == 0
    said = capsys.readouterr()
    lines = dict(line.split("  ", 1) for line in said.out.splitlines())
    assert (
        lines[str(run)].startswith("2/2 steps")
        and "metrics.jsonl: is a link" in lines[str(other)]
        and len(lines) == 2
    )
    assert SECRET not in said.out + said.err


# the door itself, over all small trees


def tree_of(place, names, ends):
    """A path of folders and a file, where one part leads elsewhere; and what is behind it."""
    here = place
    for name, leads in zip(names, ends, strict=True):
        here = here / name
        real = place.parent / "elsewhere" / name
        if leads:
            real.mkdir(parents=True, exist_ok=True) if name != names[-1] else real.parent.mkdir(
                parents=True, exist_ok=True
            )
            if name == names[-1]:
                real.write_text(SECRET)
            here.symlink_to(real)
        elif name != names[-1]:
            here.mkdir(exist_ok=True)
        else:
            here.write_text("ours")
    return here


@pytest.mark.parametrize("ends", list(itertools.product([False, True], repeat=3)))
def test_the_door_of_every_small_tree(ends, tmp_path):
    for place in ("root", "linked"):  # the root may be a link
        root = tmp_path / place / "root"
        root.mkdir(parents=True)
        path = tree_of(root, ("a", "b", "c"), ends)
        if place == "linked":
            root.rename(tmp_path / "real")
            root.symlink_to(tmp_path / "real")
        place, elsewhere = root, tmp_path / place / "elsewhere"
        if any(ends):
            with pytest.raises(no_links.Link, match="is a link"):
                config.read_bytes(path, place)
        else:
            assert config.read_bytes(path, place) == b"ours"
        before = looks(elsewhere)
        with contextlib.suppress(no_links.Link):
            config.write_atomically(path, "ours", place)
        assert looks(elsewhere) == before
        with pytest.raises(ValueError):  # of pathlib: no path below the root
            config.read_bytes(elsewhere / "c", place)
    assert not list(tmp_path.rglob("*.unfinished"))


def test_the_door_holds_where_a_name_changes_between_check_and_use(tmp_path, monkeypatch):
    """The worst moment: a file becomes a link, or a folder one, when it was looked at."""
    (tmp_path / "root" / "a").mkdir(parents=True)
    (tmp_path / "root" / "a" / "file").write_text("ours")
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "file").write_text(SECRET)
    path, check = tmp_path / "root" / "a" / "file", no_links._check

    def swap(name, folder, place):
        check(name, folder, place)
        if place == path and place.parent.is_dir() and not path.is_symlink():
            path.unlink()
            path.symlink_to(tmp_path / "away" / "file")

    monkeypatch.setattr(no_links, "_check", swap)
    with pytest.raises((OSError, ConfigError)):
        config.read_bytes(path, tmp_path / "root")

    def swap_folder(name, folder, place):
        check(name, folder, place)
        if place == path.parent and not path.parent.is_symlink():
            shutil.rmtree(path.parent)
            path.parent.symlink_to(tmp_path / "away")

    path.unlink()
    path.write_text("ours")
    monkeypatch.setattr(no_links, "_check", swap_folder)
    with pytest.raises((OSError, ConfigError)):
        config.write_atomically(path, "ours", tmp_path / "root")
    assert (tmp_path / "away" / "file").read_text() == SECRET and len(
        list((tmp_path / "away").iterdir())
    ) == 1
