"""Files of the token cache: each gets its name when it is complete and on the disk, and is checked when it is opened.

`corpus` says what an entry of the cache holds.
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
    """Whether a disk or a quota is full, by the error's number or by its words, if they are from another process."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error) or "Disk quota exceeded" in str(error)


def free_bytes(folder: Path) -> int:
    """Free bytes of the disk of a folder, which need not exist yet."""
    return shutil.disk_usage(next(place for place in (folder, *folder.absolute().parents) if place.exists())).free


def save_sealed(path: Path, value: Any) -> None:
    """JSON with its digest in front."""
    text = json.dumps(value)
    write_atomically(path, f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")


def load_sealed(path: Path) -> Any:
    """What `save_sealed` wrote. Raises ValueError for a file that has changed or is torn, FileNotFoundError for none."""
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
    last: bool = True  # whether the part ends here
    written: int = 0  # time of the file of the tokens, in ns
    state: dict[str, Any] | None = None  # of a stream: where its next shard begins
    shards: dict[str, list[int]] | None = None  # of all together: {name: [tokens, written]}

    def save(self, file: Path) -> None:
        save_sealed(file, self._asdict())

    @classmethod
    def load(cls, file: Path) -> "Index":
        return cls(**load_sealed(file))

    @classmethod
    def find(cls, file: Path) -> "Index | None":
        """As `load`, but None for a missing or a damaged file."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return cls.load(file)


def checked_index(entry: Path, itemsize: int) -> Index | None:
    """The index of a finished entry. None if something is missing or damaged: that part is then forgotten.

    Reading all tokens would take minutes at every start. So a file is read only if its time is not the noted one.
    """
    if (index := Index.find(entry / "index.json")) is None:
        return None
    shards, damaged = {}, False
    for name, (tokens, written) in (index.shards or {}).items():
        file = entry / f"{name}.tokens"
        status = storage.retry(file.stat, file) if storage.exists(file) else None
        if status and status.st_size == tokens * itemsize and (status.st_mtime_ns == written or _has_digest(file)):
            shards[name] = [tokens, status.st_mtime_ns]
        else:
            damaged = True
            forget_part(entry, name)
    if damaged:
        return None
    if shards != index.shards:  # the next start need not read them
        with contextlib.suppress(OSError):
            index._replace(shards=shards).save(entry / "index.json")
    return index


def _has_digest(file: Path) -> bool:
    """Whether the tokens of a file have the digest that was noted."""

    def digest() -> str:
        with storage.name_errors(file), file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    shard = Index.find(file.with_suffix(".json"))
    return shard is not None and storage.retry(digest, file) == shard.digest


def forget_part(entry: Path, name: str) -> None:
    """Forgets all shards of a part with a damaged one, because a shard of a stream begins where the previous one ends."""
    log.warning("data.cache: %s is damaged; its part is encoded again", entry / name)
    for shard in entry.glob(f"{name[:6]}-*.json"):
        shard.unlink(missing_ok=True)


def _numbers(file: Path, dtype: np.dtype, count: int, offset: int) -> np.ndarray:
    """Up to `count` numbers of a file, from the `offset`-th on."""
    with storage.name_errors(file), file.open("rb") as stream:
        stream.seek(offset * dtype.itemsize)
        data = stream.read(count * dtype.itemsize)  # np.fromfile takes an error for the end of the file
    return np.frombuffer(data[: len(data) // dtype.itemsize * dtype.itemsize], dtype)


class Tokens:
    """Tokens of many files as one array on disk: tokens[a:b], or tokens[positions] for [B, n] that ascend along a row.

    Files are read, not mapped: the pages of a mapped file count as memory of the process that touches them, and a mapped file
    that another process shortens ends this one by SIGBUS.
    """

    def __init__(self, files: list[Path], sizes: list[int], dtype: Any, start: int = 0, stop: int | None = None):
        self.files, self.sizes, self.dtype = files, sizes, np.dtype(dtype)
        self.ends = np.cumsum(sizes, dtype=np.int64)
        self.start, self.stop = start, int(self.ends[-1]) if stop is None else stop

    def __len__(self) -> int:
        return self.stop - self.start

    def part(self, start: int, stop: int) -> "Tokens":
        return Tokens(self.files, self.sizes, self.dtype, self.start + start, self.start + stop)

    def __getitem__(self, key: Any) -> np.ndarray:
        if isinstance(key, slice):
            return self._read(*key.indices(len(self))[:2])
        return np.stack([self._read(int(row[0]), int(row[-1]) + 1)[row - row[0]] for row in key])

    def _read(self, start: int, stop: int) -> np.ndarray:
        start, stop, pieces = start + self.start, stop + self.start, [np.zeros(0, self.dtype)]
        number = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            file, end = self.files[number], int(self.ends[number])
            count, offset = min(stop, end) - start, start - (end - self.sizes[number])
            try:
                pieces.append(storage.retry(partial(_numbers, file, self.dtype, count, offset), file))
            except OSError as error:
                refused = f"data.cache: cannot read {file} ({error}); started again, the run makes it anew"
                raise storage.mistake(error, refused) from None
            if len(pieces[-1]) < count:
                raise ConfigError(f"data.cache: {file} was shortened; started again, the run makes it anew")
            start, number = start + count, number + 1
        return np.concatenate(pieces)
