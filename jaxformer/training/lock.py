"""The lock of a folder of checkpoints: one trainer at a time writes there."""

import fcntl
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from etils import epath

from jaxformer.errors import ConfigError


def take(folder: epath.Path, log: Callable[[str], None]) -> IO[str]:
    """The open lock file FOLDER.lock. Raises ConfigError where another trainer holds it.

    The lock is the operating system's: it ends with the process, however that ends.
    """
    handle = Path(f"{folder}.lock").open("a+")  # noqa: SIM115  (`Manager.close` closes it)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.seek(0)
        owner = handle.read().strip()
        handle.close()
        raise ConfigError(f"{folder}: another trainer holds this run ({owner}); wait for it or stop it") from None
    except OSError as error:  # ENOLCK, ENOSYS: some of NFS and Lustre
        log(f"{folder}: no lock ({error.strerror}): this file system has none, so nothing stops a second trainer of this run")
        return handle
    with suppress(OSError):  # a full disk: the lock holds without its text
        os.ftruncate(handle.fileno(), 0)
        os.write(handle.fileno(), f"pid {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T')}".encode())
    return handle


def is_in_place(lock: IO[str]) -> bool:
    """Whether the file of an open lock is still the one of its name."""
    try:
        return os.path.samestat(os.stat(lock.name), os.fstat(lock.fileno()))
    except FileNotFoundError:
        return False
