"""The lock of a folder of checkpoints: one trainer at a time writes there."""

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
# what flock says on file systems that have no locks: some of NFS and Lustre
WITHOUT = errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL


def take(folder: epath.Path, log: Callable[[str], None]) -> IO[str]:
    """The open lock file FOLDER.lock. Raises ConfigError where another trainer holds it.

    The lock is the operating system's: it ends with the process, however that ends. OSError where nobody can know whether
    the file system has locks: then a second trainer might start. Of a link, and of a file that holds anything but what this
    function writes, nothing is changed (ConfigError): in a stranger's folder they may be precious.
    """
    path = Path(f"{folder}.lock")
    opener = no_links.opener(path.parent)
    handle = storage.retry(lambda: open(path, "a+", opener=opener), path)  # noqa: SIM115  (`Manager.close` closes it)
    try:
        storage.retry(lambda: _flock(handle), path)
    except ConfigError:
        owner = _text(handle)
        handle.close()
        raise ConfigError(f"{folder}: another trainer holds this run ({owner}); wait for it or stop it") from None
    except OSError as error:
        if error.errno not in WITHOUT:
            handle.close()
            raise
        log(f"{folder}: no lock ({error.strerror}): this file system has none, so nothing stops a second trainer of this run")
        return handle
    if _text(handle) is None:
        handle.close()
        raise ConfigError(f"{path}: is no lock of a run, it holds something else; move it away, and start again")
    if os.fstat(handle.fileno()).st_nlink > 1:  # a file with another name elsewhere is locked, and stays as it is
        return handle
    with suppress(OSError):  # a full disk: the lock holds without its text
        os.ftruncate(handle.fileno(), 0)
        os.write(handle.fileno(), f"pid {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T')}".encode())
    return handle


def _text(handle: IO[str]) -> str | None:
    """What the lock says of its owner, as far as it was written; None where this is the text of another file."""
    handle.seek(0)
    try:
        text = storage.retry(lambda: handle.read(LONGEST), handle.name).strip("\0 ")  # a power failure may leave zeros
    except UnicodeDecodeError:
        return None
    return text if len(text) < LONGEST and re.fullmatch(r"|p|pi|pid|pid [\d]*( .*)?", text) else None


def _flock(handle: IO[str]) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:  # another trainer has it, which does not pass
        raise ConfigError(error.strerror) from error


def is_in_place(lock: IO[str]) -> bool:
    """Whether the file of an open lock is still the one of its name. OSError where that cannot be known."""

    def look() -> bool:
        return os.path.samestat(os.lstat(lock.name), os.fstat(lock.fileno()))

    try:
        return storage.retry(look, lock.name)
    except FileNotFoundError:
        return False
