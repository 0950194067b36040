"""Files in a folder that a stranger may have made: no link below it is followed.

This holds for reading and writing. The folder itself may be a link, such as runs/NAME to a larger
disk: the user who names it chose that. Below it each name is opened relative to the open descriptor
of its parent, and never through a link. So nobody can exchange a part of the path between the check
and the use. Buckets have no links, so their paths need none of this.
"""

import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from jaxformer.errors import ConfigError

Root = os.PathLike | str
ADVICE = (
    "put there what it leads to (cp -rL copies a folder so); only a whole run folder may be a link"
)
# with O_PATH, where the system has it, a folder needs no read permission
_PATH = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC


class Link(ConfigError):
    """A name below the folder is a link."""


def is_local(path: Root) -> bool:
    """Whether a path is on this machine, and not a URL of a bucket."""
    return "://" not in os.fspath(path)


def open_folder(path: Root, root: Root, make: bool = False) -> int:
    """The descriptor of the folder `path`, which is `root` or below it.

    `make`: missing folders are made. Raises Link for a link below `root`, and OSError.
    """
    parts = Path(path).relative_to(root).parts
    if make:
        Path(root).mkdir(parents=True, exist_ok=True)
    here = os.open(root, _PATH)
    try:
        for n, name in enumerate(parts, 1):
            if make:
                _make(name, here)
            _check(name, here, Path(root, *parts[:n]))
            below = os.open(name, _PATH | os.O_NOFOLLOW, dir_fd=here)
            os.close(here)
            here = below
    except BaseException:
        os.close(here)
        raise
    return here


def open_file(root: Root, path: Root, flags: int) -> int:
    """The descriptor of a regular file below `root`. It never waits: a pipe is refused.

    Raises Link for a link, ConfigError for a pipe, a device or a socket, and OSError.
    """
    path = Path(path)
    folder = open_folder(path.parent, root)
    try:
        _check(path.name, folder, path)
        handle = os.open(
            path.name,
            flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC,
            0o666,
            dir_fd=folder,
        )
    finally:
        os.close(folder)
    try:
        _check_regular(os.fstat(handle), path)
    except BaseException:
        os.close(handle)
        raise
    return handle


def opener(root: Root) -> Callable[[str, int], int]:
    """The opener in `open(path, mode, opener=opener(root))`."""
    return partial(open_file, root)


def check_folder(path: Root, root: Root) -> None:
    """Raises Link if `path`, or a folder between `root` and `path`, is a link.

    For folders that another library will read or write. Parts that do not exist are not checked.
    """
    if not is_local(path):
        return
    parts = Path(path).relative_to(root).parts
    for n in range(1, len(parts) + 1):
        place = Path(root, *parts[:n])
        if place.is_symlink():
            raise Link(refusal(place))


def has_one_name(path: Root, root: Root) -> bool:
    """Whether a file has no second name (hard link): with one, it may be a file from elsewhere."""
    if not is_local(path):
        return True
    handle = open_file(root, path, os.O_RDONLY)
    try:
        return os.fstat(handle).st_nlink == 1
    finally:
        os.close(handle)


def refusal(path: Any) -> str:
    """The message for a link."""
    return f"{path}: is a link, and none in a run folder is followed; {ADVICE}"


def _make(name: str, folder: int) -> None:
    try:
        os.mkdir(name, dir_fd=folder)
    except FileExistsError:
        return


def _check(name: str, folder: int, path: Path) -> None:
    """Refuses a link or a special file, with its path in the message.

    The call that opens it would raise only an error number, or would wait.
    """
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return
    if stat.S_ISLNK(status.st_mode):
        raise Link(refusal(path))
    if not stat.S_ISDIR(status.st_mode):
        _check_regular(status, path)


def _check_regular(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(
            f"{path}: cannot be read: no regular file; give a file, or save what it gives as one"
        )
