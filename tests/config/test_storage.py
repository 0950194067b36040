"""Calls of a file system that has trouble are made again, and an error is never taken for a file
that is not there."""

import builtins
import errno
import io
import itertools
import os

import pytest

from jaxformer import config
from jaxformer.config import storage
from jaxformer.errors import ConfigError

LASTING = sorted(storage.LASTING)
PASSING = [
    errno.EIO,
    errno.ESTALE,
    errno.EMFILE,
    errno.ETIMEDOUT,
    errno.ENOMEM,
    errno.EAGAIN,
    errno.EINTR,
    errno.EBUSY,
]


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(storage.time, "sleep", lambda seconds: None)


def failing(function, number, times, match=""):
    """The function, whose first calls on paths with `match` fail, and the list of these."""
    failed = []

    def call(*arguments, **options):
        if match in str(arguments[:1]) and len(failed) < times:
            failed.append(arguments)
            raise OSError(number, os.strerror(number))
        return function(*arguments, **options)

    return call, failed


@pytest.mark.parametrize("number", PASSING)
def test_an_error_that_passes_is_tried_again_and_then_names_the_file(number):
    call, failed = failing(lambda: "done", number, 3)
    assert storage.retry(call, "file") == "done" and len(failed) == 3
    call, failed = failing(lambda: "done", number, 99)
    with pytest.raises(OSError, match="'file'") as found:
        storage.retry(call, "file")
    assert len(failed) == 4 and found.value.errno == number
    assert storage.exit_code(found.value) == storage.TROUBLE
    assert "the same command goes on" in storage.message(found.value)


@pytest.mark.parametrize("number", LASTING)
def test_what_the_user_must_mend_is_said_at_once(number):
    call, failed = failing(lambda: "done", number, 99)
    with pytest.raises(OSError) as found:
        storage.retry(call, "file")
    assert len(failed) == 1 and storage.exit_code(found.value) == 2
    assert isinstance(storage.mistake(found.value, "words"), ConfigError)


def test_a_call_inside_of_another_one_does_not_multiply_the_tries():
    call, failed = failing(lambda: "done", errno.EIO, 99)
    with pytest.raises(OSError):
        storage.retry(lambda: storage.retry(call, "inner"), "outer")
    assert len(failed) == 4
    assert storage.retry(lambda: "done", "file") == "done"


def test_an_error_says_nothing_about_what_is_there(tmp_path, monkeypatch):
    file, real = tmp_path / "file", os.stat
    file.write_text("text")
    for ask in (storage.exists, storage.is_file, storage.is_dir):
        call, failed = failing(real, errno.ESTALE, 99, str(file))
        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", call)
            with pytest.raises(OSError, match="Stale"):
                ask(file)
        assert failed
    assert (storage.exists(file), storage.is_file(file), storage.is_dir(file)) == (
        True,
        True,
        False,
    )
    assert (
        not storage.exists(tmp_path / "none")
        and not storage.exists(file / "below")
        and storage.is_dir(tmp_path)
    )
    assert not storage.exists(tmp_path / ("n" * 300)) and not storage.exists(f"{tmp_path}/\0")


def test_a_folder_that_cannot_be_read_is_not_an_empty_one(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_text("text")
    search = lambda: tmp_path.glob("**/file")
    assert storage.list_names(tmp_path) == ["a"] and storage.find_files(search, tmp_path) == [
        tmp_path / "a" / "file"
    ]
    assert storage.list_names(tmp_path / "none") == []
    for name, ask in (("listdir", storage.list_names), ("scandir", storage.files_below)):
        call, _ = failing(getattr(os, name), errno.EIO, 99, str(tmp_path))
        with monkeypatch.context() as patch:
            patch.setattr(os, name, call)
            with pytest.raises(OSError, match="Input/output"):
                ask(tmp_path)


@pytest.mark.parametrize("call", ["fsync", "replace", "open"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EINTR, errno.EXDEV])
def test_a_file_is_written_again_as_a_whole(call, number, tmp_path, monkeypatch):
    """Also after an fsync that failed: what it was to bring to the disk may be gone, and a second
    fsync would not say so."""
    file = tmp_path / "file"
    config.write_atomically(file, "old")
    owner, match = (builtins if call == "open" else os), ("" if call == "fsync" else ".unfinished")
    broken, failed = failing(getattr(owner, call), number, 2, match)
    with monkeypatch.context() as patch:
        patch.setattr(owner, call, broken)
        config.write_atomically(file, "new")
    assert len(failed) == 2 and file.read_text() == "new" and os.listdir(tmp_path) == ["file"]
    broken, failed = failing(getattr(owner, call), number, 99, match)
    with monkeypatch.context() as patch:
        patch.setattr(owner, call, broken)
        with pytest.raises(OSError, match=os.strerror(number)) as found:
            config.write_atomically(file, "newer")
    assert str(tmp_path) in str(found.value)
    assert file.read_text() == "new" and os.listdir(tmp_path) == ["file"]


def test_readers_raise_what_may_pass_and_refuse_what_does_not(tmp_path, monkeypatch):
    file = tmp_path / "file.json"
    file.write_text("{}")
    for read in (config.read_text, config.read_json):
        for number, kind in ((errno.ESTALE, OSError), (errno.EACCES, ConfigError)):
            broken, _ = failing(io.open, number, 99, str(file))
            with monkeypatch.context() as patch:
                patch.setattr(io, "open", broken)
                patch.setattr(builtins, "open", broken)
                with pytest.raises(kind, match=os.strerror(number)) as found:
                    read(file)
            assert isinstance(found.value, ConfigError) == (kind is ConfigError)


def test_a_search_reads_no_more_folders_than_its_pattern(tmp_path, monkeypatch):
    """Trouble below them is none of its business, and a folder without rights is left out, as a
    glob leaves it out."""
    (tmp_path / "a" / "deep").mkdir(parents=True)
    for file in ("x.txt", "a/y.txt", "a/deep/z.txt"):
        (tmp_path / file).write_text("text")

    def found(pattern, depth):
        return [
            str(file.relative_to(tmp_path))
            for file in storage.find_files(lambda: tmp_path.glob(pattern), tmp_path, depth)
        ]

    call, failed = failing(os.scandir, errno.EIO, 99, str(tmp_path / "a" / "deep"))
    monkeypatch.setattr(os, "scandir", call)
    assert found("*.txt", 0) == ["x.txt"] and found("a/*.txt", 1) == ["a/y.txt"] and not failed
    with pytest.raises(OSError, match="Input/output"):
        found("**/*.txt", None)
    monkeypatch.undo()
    call, failed = failing(os.scandir, errno.EACCES, 99, str(tmp_path / "a" / "deep"))
    monkeypatch.setattr(os, "scandir", call)
    assert {"a/y.txt", "x.txt"} <= set(found("**/*.txt", None)) and failed


def test_a_search_in_a_folder_that_always_changes_ends(tmp_path):
    numbers = itertools.count()

    def search():
        (tmp_path / f"{next(numbers)}.txt").write_text("text")
        return tmp_path.glob("*.txt")

    assert len(storage.find_files(search, tmp_path, 0)) >= 2


def test_a_file_is_read_through_but_not_its_holes(tmp_path, monkeypatch):
    """A damaged file may be a hole of a terabyte: only what is on the disk can fail."""
    file = tmp_path / "holes"
    block = 1 << 16
    with file.open("wb") as opened:
        opened.truncate(1 << 40)
        for place in (0, 1 << 30, (1 << 40) - block):
            opened.seek(place)
            opened.write(b"x" * block)
    pieces = []

    class Watched(io.FileIO):
        def read(self, size=-1):
            pieces.append(super().read(size))
            return pieces[-1]

    class WatchedPath(type(file)):
        def open(self, mode="r"):
            return Watched(self, mode)

    monkeypatch.setattr(storage, "PIECE", block // 4)
    storage.read_through(WatchedPath(file))
    assert b"".join(pieces).count(b"x") == 3 * block
    assert sum(map(len, pieces)) < 1 << 24  # a file system may round holes to its blocks
    empty = tmp_path / "empty"
    empty.touch()
    storage.read_through(empty)
    with pytest.raises(FileNotFoundError):
        storage.read_through(tmp_path / "none")
