"""Files on an unreliable file system: a file that cannot be read now is not damaged or absent.

On a network, in a bucket, or with too many open files, a call may fail and succeed a second later.
So `retry` makes a call a few times. If the last one fails, the OSError goes to the caller with the
name of the file. It ends the command with one line and the exit code `TROUBLE`, after which
launchers start the command again. Such an error must never count as damage or as a missing file.
`os.path.exists` returns False for every error; `exists` here returns False only if the file system
says that there is no file.
"""

import contextlib
import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jaxformer.config.code import users_frame
from jaxformer.errors import ConfigError

T = TypeVar("T")
WAITS = (0.1, 0.4, 1.5)  # seconds before the second, third and last try
MOST_SEARCHES = 10  # in a folder that changes during the search
TROUBLE = 6  # the exit code of a command that the file system stopped
# Errors that the user must mend: a second try would fail in the same way.
LASTING = frozenset(
    (
        errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.EACCES,
        errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENAMETOOLONG,
        errno.ELOOP, errno.EPIPE,
    )
)  # fmt: skip
# errors that the user understands without a traceback, even from their own code
PLAIN = errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM
PIECE = 1 << 24  # bytes that are read at a time
_now = threading.local()  # `patient`: whether this thread is inside a call of `retry`


def passes(error: BaseException) -> bool:
    """Whether an error of the file system may be gone at the next try."""
    if not isinstance(error, OSError):
        return False
    if error.errno is None:  # from a bucket: the connection was lost or too slow
        return isinstance(error, ConnectionError | TimeoutError)
    return error.errno not in LASTING


@contextlib.contextmanager
def name_errors(path: os.PathLike | str) -> Iterator[None]:
    """Adds the path to errors of calls on an open file, which do not name it."""
    try:
        yield
    except OSError as error:
        if error.errno is None or (
            isinstance(error.filename, str) and os.path.isabs(error.filename)
        ):
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def retry(call: Callable[[], T], path: os.PathLike | str, waits: Sequence[float] = WAITS) -> T:
    """The result of `call()`, tried again after each of `waits` while its errors may pass.

    The last OSError names `path`. A nested `retry` calls once, because the outer one repeats all.
    """
    is_outer = not getattr(_now, "patient", False)
    _now.patient = True
    try:
        for wait in waits if is_outer else ():
            try:
                return call()
            except OSError as error:
                if not passes(error):
                    raise
            time.sleep(wait)
        with name_errors(path):
            return call()
    finally:
        _now.patient = not is_outer


def stops(error: BaseException) -> bool:
    """Whether the file system stopped a command, not a fault of this library or of user code."""
    if not isinstance(error, OSError) or error.errno is None:
        return False
    return error.errno in PLAIN or users_frame(error) is None


def mistake(error: OSError, text: str) -> Exception:
    """ConfigError(text) if the user must mend the error; the error itself if it may pass."""
    return error if passes(error) else ConfigError(text)


def message(error: OSError) -> str:
    """The line that the user reads when an error of the file system stops a command."""
    if not passes(error):
        return str(error)
    return (
        f"{error}: tried {len(WAITS) + 1} times; "
        "what is on the disk stays, and the same command goes on once this works"
    )


def exit_code(error: OSError) -> int:
    """2 for an error that the user must mend, `TROUBLE` for one that may pass."""
    return TROUBLE if passes(error) else 2


def exists(path: os.PathLike | str) -> bool:
    """Whether there is a file or folder, local or in a bucket. OSError if that cannot be known."""
    return _mode(path) is not None


def has_name(path: os.PathLike | str) -> bool:
    """Whether the name exists, even as a broken link. OSError if that cannot be known."""
    if "://" in os.fspath(path):
        return exists(path)
    try:
        retry(lambda: os.lstat(path), path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def is_file(path: os.PathLike | str) -> bool:
    """Whether this is a regular file. OSError if that cannot be known."""
    mode = _mode(path)
    return mode is not None and stat.S_ISREG(mode)


def is_dir(path: os.PathLike | str) -> bool:
    """Whether this is a folder. OSError if that cannot be known."""
    mode = _mode(path)
    return mode is not None and stat.S_ISDIR(mode)


def list_names(folder: os.PathLike | str) -> list[str]:
    """The sorted names in a folder; [] if there is no such folder. OSError if it cannot be read."""
    try:
        if "://" in os.fspath(folder):
            return sorted(
                path.name for path in retry(lambda: list(_bucket(folder).iterdir()), folder)
            )
        return sorted(retry(lambda: os.listdir(folder), folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def files_below(folder: os.PathLike | str) -> list[Path]:
    """Everything below a local folder except folders, at any depth, sorted. It follows no link."""

    def fail(error: OSError) -> None:
        raise error

    def walk() -> list[Path]:
        paths = []
        for at, folders, files in os.walk(folder, onerror=fail):
            links = [name for name in folders if os.path.islink(os.path.join(at, name))]
            paths += [Path(at, name) for name in (*files, *links)]
        return sorted(paths)

    return retry(walk, folder)


def read_through(file: Path) -> None:
    """Reads what a file has on the disk. A hole has nothing there that could fail.

    A damaged file may be a hole of many terabytes.
    """
    with name_errors(file), file.open("rb") as opened:
        size = file.stat().st_size
        place = 0
        while place < size:
            try:
                start = os.lseek(opened.fileno(), place, os.SEEK_DATA)
                place = os.lseek(opened.fileno(), start, os.SEEK_HOLE)
            except OSError as error:
                if error.errno == errno.ENXIO:  # the rest is a hole
                    return
                if error.errno != errno.EINVAL:
                    raise
                start, place = place, size  # a file system that does not know its holes
            opened.seek(start)
            while start < place and (piece := opened.read(min(PIECE, place - start))):
                start += len(piece)


def find_files(
    search: Callable[[], Iterable[Path | str]], folder: os.PathLike | str, depth: int | None = None
) -> list[Any]:
    """The regular files that `search()`, such as a glob in `folder`, finds, sorted.

    A glob treats a folder that cannot be read now as empty. So the folders that it visits are
    listed first, down to `depth` below `folder` (None: all). Then the search must give the same
    result twice in a row. If the folder keeps changing, the last of `MOST_SEARCHES` results counts.
    """
    retry(lambda: _visit(os.fspath(folder), depth), folder)
    previous = None
    files = sorted(search())
    for _ in range(MOST_SEARCHES):
        if files == previous:
            break
        previous = files
        files = sorted(search())
    return [file for file in files if is_file(file)]


def _visit(folder: str, depth: int | None) -> None:
    """Lists a folder and those below it. Raises an OSError that may pass.

    A folder without read permission is left out, as a glob does.
    """

    def fail(error: OSError) -> None:
        if passes(error):
            raise error

    for at, folders, _ in os.walk(folder, onerror=fail):
        if depth is None:
            continue
        level = os.path.relpath(at, folder).count(os.sep) + (at != folder)
        if level >= depth:
            folders.clear()


def _mode(path: os.PathLike | str) -> int | None:
    """The mode of a file, as in `os.stat`; None if there is none."""
    if "://" in os.fspath(path):
        here = _bucket(path)
        if retry(here.is_dir, path):
            return stat.S_IFDIR
        return stat.S_IFREG if retry(here.exists, path) else None
    try:
        return retry(lambda: os.stat(path), path).st_mode
    # ValueError: not a valid name, such as one with a zero byte
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENAMETOOLONG):
            return None
        raise


def _bucket(path: os.PathLike | str) -> Any:
    from etils import epath

    return epath.Path(path)
