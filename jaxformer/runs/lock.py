"""The lock of a folder of checkpoints: only one trainer at a time may write there."""

import errno
import fcntl
import os
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from etils import epath

from jaxformer.config import no_links, storage
from jaxformer.errors import ConfigError

LONGEST = 1000  # characters of a lock's text
# flock raises these on file systems without locks, such as some of NFS and Lustre
WITHOUT = errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL


def take(folder: epath.Path, log: Callable[[str], None]) -> IO[str]:
    """The open lock file FOLDER.lock. Raises ConfigError where another trainer holds it.

    The lock is the operating system's: it ends with the process, in whatever way the process ends.
    Raises OSError where it is unknown whether the file system has locks, because a second trainer
    might start. A link, or a file with any text but a lock's, is left unchanged and raises
    ConfigError: in a stranger's folder it may be precious.
    """
    path = Path(f"{folder}.lock")
    opener = no_links.opener(path.parent)
    # `Manager.close` closes it
    handle = storage.retry(lambda: open(path, "a+", opener=opener), path)  # noqa: SIM115
    try:
        storage.retry(lambda: _flock(handle), path)
    except ConfigError:
        owner = _text(handle)
        handle.close()
        raise ConfigError(
            f"{folder}: another trainer holds this run ({owner}); wait for it or stop it"
        ) from None
    except OSError as error:
        if error.errno not in WITHOUT:
            handle.close()
            raise
        log(
            f"{folder}: no lock ({error.strerror}): this file system has none, so nothing stops a"
            " second trainer of this run"
        )
        return handle
    if _text(handle) is None:
        handle.close()
        raise ConfigError(
            f"{path}: is no lock of a run, it holds something else; move it away, and start again"
        )
    # A file that has another name elsewhere is locked, but its contents stay unchanged.
    if os.fstat(handle.fileno()).st_nlink > 1:
        return handle
    with suppress(OSError):  # on a full disk the lock holds without its text
        os.ftruncate(handle.fileno(), 0)
        os.write(
            handle.fileno(),
            f"pid {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T')}".encode(),
        )
    return handle


def _text(handle: IO[str]) -> str | None:
    """The lock's text about its owner, perhaps cut short; None if the text is another file's."""
    handle.seek(0)
    try:
        text = storage.retry(lambda: handle.read(LONGEST), handle.name)
    except UnicodeDecodeError:
        return None
    text = text.strip("\0 ")  # a power failure may leave zeros
    is_lock = len(text) < LONGEST and re.fullmatch(r"|p|pi|pid|pid [\d]*( .*)?", text)
    return text if is_lock else None


def _flock(handle: IO[str]) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:  # another trainer holds it: no error that passes
        raise ConfigError(error.strerror) from error


def is_in_place(lock: IO[str]) -> bool:
    """Whether the file of an open lock still has its name. Raises OSError where that is unknown."""

    def look() -> bool:
        return os.path.samestat(os.lstat(lock.name), os.fstat(lock.fileno()))

    try:
        return storage.retry(look, lock.name)
    except FileNotFoundError:
        return False
