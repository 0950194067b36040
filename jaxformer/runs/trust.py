"""Which experiments this user's trainer wrote on this machine.

To open a run is to run the experiment file in its folder, and a run folder may come from anybody.
So the trainer leaves the digest of what it wrote as an empty file in the user's own state folder.
The content decides: a run that is moved or copied keeps its trust, one that is edited loses it.
"""

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any

from jaxformer.config import storage
from jaxformer.errors import ConfigError


def digest(text: str, facts: dict[str, Any]) -> str:
    """The sha256 of an experiment file and of source.json: the file's path, options and imports."""
    return hashlib.sha256(json.dumps([text, facts], sort_keys=True).encode()).hexdigest()


def folder() -> Path:
    """The folder of the digests. Others must not be able to write there."""
    return (
        Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
        / "jaxformer"
        / "experiments"
    )


def add(digest: str) -> None:
    """Trusts an experiment from now on. Raises OSError where the folder cannot be written."""

    def write() -> None:
        folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private()
        (folder() / digest).touch(mode=0o600)

    storage.retry(write, folder() / digest)


def is_trusted(digest: str) -> bool:
    """Whether `add` was called with a digest.

    Raises ConfigError where somebody else could have done so, OSError where that is unknown.
    """
    path = folder() / digest
    try:
        status = storage.retry(path.lstat, path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    storage.retry(_check_private, folder())
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _check_private() -> None:
    status = folder().lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise ConfigError(
            f"{folder()}: must be a folder of yours that nobody else can write; try `chmod 700`,"
            " or XDG_STATE_HOME"
        )
