"""Files while the file system has trouble: what cannot be read now is neither damaged nor absent.

On a network, in a bucket, or with too many open files, a call may fail and succeed a second later. So a call is made again a
few times, by `retry`. If it still fails, the OSError goes to the caller with the name of the file, and ends the command
in one line with the exit code `TROUBLE`, which launchers start again. Nobody may take it for damage, or for a file that is
not there: `os.path.exists` answers False for every error, `exists` here only where the file system says so.
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
MOST_SEARCHES = 10  # in a folder that changes meanwhile
TROUBLE = 6  # the exit code of a command that the file system stopped
# What the user must mend: a second try would end in the same way.
LASTING = frozenset(
    (
        errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.EACCES, errno.EPERM, errno.EROFS,
        errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENAMETOOLONG, errno.ELOOP, errno.EPIPE,
    )
)  # fmt: skip
# clear to the user also where their own code met them
PLAIN = errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM
_now = threading.local()  # `patient`: whether this thread is in a call of `retry`


def passes(error: BaseException) -> bool:
    """Whether an error of the file system may be gone at the next try."""
    if not isinstance(error, OSError):
        return False
    if error.errno is None:  # of buckets: a connection that was lost, or too slow
        return isinstance(error, ConnectionError | TimeoutError)
    return error.errno not in LASTING


@contextlib.contextmanager
def name_errors(path: os.PathLike | str) -> Iterator[None]:
    """Around calls on an open file: their errors do not say which file it was."""
    try:
        yield
    except OSError as error:
        if error.errno is None or (isinstance(error.filename, str) and os.path.isabs(error.filename)):
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def retry(call: Callable[[], T], path: os.PathLike | str, waits: Sequence[float] = WAITS) -> T:
    """What `call()` returns, made again after each of these waits while its errors may pass. Its last OSError names `path`.

    Inside of such a call, another one is made once: the outer one makes all again.
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
    """Whether the file system stopped a command, and not a fault of this library or of the user's own functions."""
    if not isinstance(error, OSError) or error.errno is None:
        return False
    return error.errno in PLAIN or users_frame(error) is None


def mistake(error: OSError, text: str) -> Exception:
    """The ConfigError of this text, for what the user must mend; the error itself where it may pass."""
    return error if passes(error) else ConfigError(text)


def message(error: OSError) -> str:
    """The line that a user reads of an error of the file system that stopped a command."""
    if not passes(error):
        return str(error)
    return f"{error}: tried {len(WAITS) + 1} times; what is on the disk stays, and the same command goes on once this works"


def exit_code(error: OSError) -> int:
    """2 for what the user must mend, `TROUBLE` for what may pass."""
    return TROUBLE if passes(error) else 2


def exists(path: os.PathLike | str) -> bool:
    """Whether there is a file or folder of this name, of a bucket too. OSError where that cannot be known."""
    return _mode(path) is not None


def has_name(path: os.PathLike | str) -> bool:
    """Whether there is anything of this name, also a link that leads nowhere. OSError where that cannot be known."""
    if "://" in os.fspath(path):
        return exists(path)
    try:
        retry(lambda: os.lstat(path), path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def is_file(path: os.PathLike | str) -> bool:
    """Whether this is a regular file. OSError where that cannot be known."""
    mode = _mode(path)
    return mode is not None and stat.S_ISREG(mode)


def is_dir(path: os.PathLike | str) -> bool:
    """Whether this is a folder. OSError where that cannot be known."""
    mode = _mode(path)
    return mode is not None and stat.S_ISDIR(mode)


def list_names(folder: os.PathLike | str) -> list[str]:
    """The names in a folder, in order; none where there is no such folder. OSError where they cannot be known."""
    try:
        if "://" in os.fspath(folder):
            return sorted(path.name for path in retry(lambda: list(_bucket(folder).iterdir()), folder))
        return sorted(retry(lambda: os.listdir(folder), folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def files_below(folder: os.PathLike | str) -> list[Path]:
    """All that a folder of this machine holds that is no folder, in order, at any depth. It follows no link."""

    def fail(error: OSError) -> None:
        raise error

    def walk() -> list[Path]:
        found = []
        for at, folders, files in os.walk(folder, onerror=fail):
            links = [name for name in folders if os.path.islink(os.path.join(at, name))]
            found += [Path(at, name) for name in (*files, *links)]
        return sorted(found)

    return retry(walk, folder)


def find_files(search: Callable[[], Iterable[Path | str]], folder: os.PathLike | str, depth: int | None = None) -> list[Any]:
    """The regular files that `search()` finds, such as a glob in `folder`, in order.

    A glob takes a folder that cannot be read now for an empty one. So the folders that it visits, up to `depth` below the
    first one (None: all), are read before, and it must find the same twice in a row (unless they change all the time).
    """
    retry(lambda: _visit(os.fspath(folder), depth), folder)
    found, again = None, sorted(search())
    for _ in range(MOST_SEARCHES):
        if found == again:
            break
        found, again = again, sorted(search())
    return [file for file in again if is_file(file)]


def _visit(folder: str, depth: int | None) -> None:
    """Lists a folder and those below it. Raises an OSError that may pass; one without rights is left out, as by a glob."""

    def fail(error: OSError) -> None:
        if passes(error):
            raise error

    for at, folders, _ in os.walk(folder, onerror=fail):
        if depth is not None and os.path.relpath(at, folder).count(os.sep) + (at != folder) >= depth:
            folders.clear()


def _mode(path: os.PathLike | str) -> int | None:
    """What kind of file there is, as `os.stat` says it; None where there is none."""
    if "://" in os.fspath(path):
        here = _bucket(path)
        if retry(here.is_dir, path):
            return stat.S_IFDIR
        return stat.S_IFREG if retry(here.exists, path) else None
    try:
        return retry(lambda: os.stat(path), path).st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: no name of a file, such as one with a zero byte
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENAMETOOLONG):
            return None
        raise


def _bucket(path: os.PathLike | str) -> Any:
    from etils import epath

    return epath.Path(path)
