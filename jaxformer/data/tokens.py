"""Files of the token cache. `corpus` describes an entry of the cache.

Each file gets its name when it is complete and on the disk, and is checked when it is opened.
"""

import contextlib
import errno
import hashlib
import json
import logging
import shutil
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxformer.config import storage, write_atomically
from jaxformer.errors import ConfigError

log = logging.getLogger("jaxformer")


def is_full(error: OSError) -> bool:
    """Whether a disk or a quota is full.

    Decided by the error's number, or by its text: an error of another process may have no number.
    """
    return (
        error.errno in (errno.ENOSPC, errno.EDQUOT)
        or "No space left" in str(error)
        or "Disk quota exceeded" in str(error)
    )


def free_bytes(folder: Path) -> int:
    """The free bytes on the disk of a folder, which need not exist yet."""
    return shutil.disk_usage(
        next(place for place in (folder, *folder.absolute().parents) if place.exists())
    ).free


def save_sealed(path: Path, value: Any) -> None:
    """Writes JSON with its sha256 in the first line."""
    text = json.dumps(value)
    write_atomically(path, f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")


def load_sealed(path: Path) -> Any:
    """The value that `save_sealed` wrote.

    Raises ValueError for a damaged file, FileNotFoundError if there is none.
    """
    digest, _, text = storage.retry(path.read_bytes, path).partition(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != digest:
        raise ValueError(f"{path} is damaged")
    return json.loads(text)


class Index(NamedTuple):
    """The description of a shard, or of all shards together."""

    tokens: int
    documents: int
    bytes: int  # of text
    digest: str  # of the tokens
    counts: dict[str, int]  # as in Problems
    first: dict[str, str]
    last: bool = True  # whether this is the last shard of its part
    written: int = 0  # modification time of the file of tokens, in ns
    state: dict[str, Any] | None = None  # of a stream: where its next shard begins
    shards: dict[str, list[int]] | None = None  # all shards together: {name: [tokens, written]}

    def save(self, file: Path) -> None:
        save_sealed(file, self._asdict())

    @classmethod
    def load(cls, file: Path) -> "Index":
        return cls(**load_sealed(file))

    @classmethod
    def find(cls, file: Path) -> "Index | None":
        """As `load`; None for a missing or damaged file."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return cls.load(file)


def checked_index(entry: Path, itemsize: int) -> Index | None:
    """The index of a finished entry. None if a file is missing or damaged; its part is forgotten.

    Reading all tokens would take minutes at every start. So a file is read only if its modification
    time is not the noted one.
    """
    if (index := Index.find(entry / "index.json")) is None:
        return None
    shards = {}
    noted = index.shards or {}
    for name, (tokens, written) in noted.items():
        file = entry / f"{name}.tokens"
        status = storage.retry(file.stat, file) if storage.exists(file) else None
        if (
            status
            and status.st_size == tokens * itemsize
            and (status.st_mtime_ns == written or _has_digest(file))
        ):
            shards[name] = [tokens, status.st_mtime_ns]
        else:
            forget_part(entry, name)
    if len(shards) < len(noted):
        return None
    if shards != index.shards:  # note the new times, so that the next start reads nothing
        with contextlib.suppress(OSError):
            index._replace(shards=shards).save(entry / "index.json")
    return index


def _has_digest(file: Path) -> bool:
    """Whether the tokens of a file have the noted digest."""

    def digest() -> str:
        with storage.name_errors(file), file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    shard = Index.find(file.with_suffix(".json"))
    return shard is not None and storage.retry(digest, file) == shard.digest


def forget_part(entry: Path, name: str) -> None:
    """Forgets all shards of a part that has a damaged one.

    A shard of a stream begins where the previous one ends, so none can be made anew alone.
    """
    log.warning("data.cache: %s is damaged; its part is encoded again", entry / name)
    for shard in entry.glob(f"{name[:6]}-*.json"):
        shard.unlink(missing_ok=True)


def _numbers(file: Path, dtype: np.dtype, count: int, offset: int) -> np.ndarray:
    """Up to `count` numbers of a file, from the `offset`-th on."""
    with storage.name_errors(file), file.open("rb") as stream:
        stream.seek(offset * dtype.itemsize)
        # not np.fromfile, which treats an error as the end of the file
        data = stream.read(count * dtype.itemsize)
    return np.frombuffer(data[: len(data) // dtype.itemsize * dtype.itemsize], dtype)


class Tokens:
    """The tokens of many files as one array on disk.

    Indexed by tokens[a:b], or by tokens[positions] with positions [B, n] that ascend along n. Files
    are read and not mapped: the pages of a mapped file count as memory of the process, and if
    another process shortens a mapped file, SIGBUS ends this one.
    """

    def __init__(
        self,
        files: list[Path],
        sizes: list[int],
        dtype: Any,
        start: int = 0,
        stop: int | None = None,
    ):
        self.files = files
        self.sizes = sizes
        self.dtype = np.dtype(dtype)
        self.ends = np.cumsum(sizes, dtype=np.int64)
        self.start = start
        self.stop = int(self.ends[-1]) if stop is None else stop

    def __len__(self) -> int:
        return self.stop - self.start

    def part(self, start: int, stop: int) -> "Tokens":
        return Tokens(self.files, self.sizes, self.dtype, self.start + start, self.start + stop)

    def __getitem__(self, key: Any) -> np.ndarray:
        if isinstance(key, slice):
            return self._read(*key.indices(len(self))[:2])
        windows = []
        for positions in key:
            first, last = int(positions[0]), int(positions[-1])
            windows.append(self._read(first, last + 1)[positions - first])
        return np.stack(windows)

    def _read(self, start: int, stop: int) -> np.ndarray:
        start, stop = start + self.start, stop + self.start
        pieces = [np.zeros(0, self.dtype)]
        number = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            file = self.files[number]
            end = int(self.ends[number])
            count = min(stop, end) - start
            offset = start - (end - self.sizes[number])
            try:
                pieces.append(
                    storage.retry(partial(_numbers, file, self.dtype, count, offset), file)
                )
            except OSError as error:
                refused = (
                    f"data.cache: cannot read {file} ({error}); "
                    "started again, the run makes it anew"
                )
                raise storage.mistake(error, refused) from None
            if len(pieces[-1]) < count:
                raise ConfigError(
                    f"data.cache: {file} was shortened; started again, the run makes it anew"
                )
            start += count
            number += 1
        return np.concatenate(pieces)
