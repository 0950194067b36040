"""Shards of a cache entry (see `corpus`): `encode_part` writes those of one part of the data.

`corpus` starts one process for each part, whose main function is `work`. Nothing here imports JAX.
"""

import contextlib
import hashlib
import itertools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.config import new_file
from jaxformer.data import text_files, tokenizers
from jaxformer.data.records import Part, Problems, Stream
from jaxformer.data.text_files import read_documents
from jaxformer.data.tokens import Index, forget_part, load_sealed
from jaxformer.errors import ConfigError

# exit codes of an encoding process, each with one line on stderr
CONFIG_ERROR = 2  # the message
OS_ERROR = 3  # the arguments of the OSError as JSON


def work() -> None:
    """The main function of an encoding process: encodes one part of a cache entry."""
    try:
        encode_part(Path(sys.argv[1]), int(sys.argv[2]))
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise SystemExit(CONFIG_ERROR) from None
    except OSError as error:
        arguments = [error.errno, error.strerror or str(error), error.filename]
        print(json.dumps(arguments), file=sys.stderr)
        raise SystemExit(OS_ERROR) from None


def encode_part(entry: Path, number: int) -> None:
    """Writes the missing shards of a part: one for files; of a stream, one for each PART bytes."""
    plan = load_sealed(entry / "plan.json")
    tokenizer = tokenizers.load(entry / "tokenizer.json")
    stretches = plan["groups"][number]  # (file, start, stop) of each
    done = [Index.load(file) for file in sorted(entry.glob(f"{number:06}-*.json"))]
    if done and done[-1].last:
        return
    stream = None
    if stretches[0][0].startswith("hf:"):
        path, *bounds = stretches[0]
        stream = Stream(path, Part(*bounds), done[-1].state if done else None)
    limit = text_files.PART if stream else sys.maxsize
    problems = Problems(plan["policy"])
    documents = _of_files(read_documents(stretches, plan["field"], problems, stream, tokenizer))
    for count in itertools.count(len(done)):
        name = f"{number:06}-{count:04}"
        index = _write_shard(entry / f"{name}.tokens", documents, tokenizer, limit)
        index = index._replace(
            counts=problems.counts,
            first=problems.first,
            state=stream.state() if stream and not index.last else None,
        )
        # FileNotFoundError: another command finished this entry and removed leftovers
        with contextlib.suppress(FileNotFoundError):
            index.save(entry / f"{name}.json")
        problems.counts, problems.first = {}, {}
        if index.last:
            return


def _of_files(documents: Iterator[tuple[str, bool, bool]]) -> Iterator[tuple[str, bool, bool]]:
    """The documents. Raises ConfigError for a file that is gone since the files were listed."""
    try:
        yield from documents
    except FileNotFoundError as error:
        raise ConfigError(
            f"{error.filename}: the file was there when the texts were listed, and is gone; "
            "put it back, or start again without it"
        ) from None


def _write_shard(
    path: Path, documents: Iterator[tuple[str, bool, bool]], tokenizer: Any, limit: int
) -> Index:
    """Writes tokens of documents until their text has `limit` bytes.

    The file appears when it is complete.
    """
    end_of_text = np.array(tokenizer.end_of_text, np.min_scalar_type(vocab_size(tokenizer) - 1))
    parent = os.getppid()
    digest = hashlib.sha256()
    document_count = text_bytes = 0
    is_last = True
    # FileNotFoundError: another command finished this entry and removed leftovers
    with contextlib.suppress(FileNotFoundError), new_file(path) as file:
        for text, continues, ends in documents:
            tokens = tokenizer.encode_piece(text, continues).astype(end_of_text.dtype)
            data = tokens.tobytes() + end_of_text.tobytes() * ends
            file.write(data)
            digest.update(data)
            document_count += ends
            text_bytes += len(text.encode("utf-8", "replace"))
            if os.getppid() != parent:
                raise SystemExit("the command that asked for this is gone")
            is_last = text_bytes < limit
            if not is_last:
                break
        token_count = file.tell() // end_of_text.itemsize
    modified = path.stat().st_mtime_ns
    return Index(
        tokens=token_count,
        documents=document_count,
        bytes=text_bytes,
        digest=digest.hexdigest(),
        counts={},
        first={},
        last=is_last,
        written=modified,
    )


def vocab_size(tokenizer: Any) -> int:
    """The number of ids, with the end-of-text token, whose id may be above all others."""
    return max(tokenizer.vocab_size, tokenizer.end_of_text + 1)


class Progress:
    """The finished shards of a cache entry, by name."""

    def __init__(self, entry: Path):
        self.entry = entry
        self.shards: dict[str, Index] = {}
        self.part_count = len(load_sealed(entry / "plan.json")["groups"])
        self.start_time = time.monotonic()
        self.missing_at_start = len(self.missing())
        self.bytes_at_start = self.total().bytes

    def missing(self) -> list[int]:
        """The parts that are not finished. It reads the folder again."""
        names = {
            name.removesuffix(".json")
            for name in os.listdir(self.entry)
            if name[0].isdigit() and name.endswith(".json")
        }
        new = {name: Index.find(self.entry / f"{name}.json") for name in names - self.shards.keys()}
        for name in sorted(name for name, index in new.items() if index is None):
            forget_part(self.entry, name)
            new = {other: index for other, index in new.items() if other[:6] != name[:6]}
        self.shards |= {name: index for name, index in new.items() if index is not None}
        finished = {
            int(name.partition("-")[0]) for name, index in self.shards.items() if index.last
        }
        return [part for part in range(self.part_count) if part not in finished]

    def total(self) -> Index:
        """The description of all finished shards together."""
        indices = dict(sorted(self.shards.items()))
        counts = Counter[str]()
        first: dict[str, str] = {}
        for index in indices.values():
            counts.update(index.counts)
            first = index.first | first
        digests = " ".join(index.digest for index in indices.values())
        return Index(
            tokens=sum(index.tokens for index in indices.values()),
            documents=sum(index.documents for index in indices.values()),
            bytes=sum(index.bytes for index in indices.values()),
            digest=hashlib.sha256(digests.encode()).hexdigest(),
            counts=dict(counts),
            first=first,
            shards={
                name: [index.tokens, index.written]
                for name, index in indices.items()
                if index.tokens
            },
        )

    def __str__(self) -> str:
        missing = len(self.missing())
        total = self.total()
        seconds = time.monotonic() - self.start_time
        done_here = self.missing_at_start - missing
        time_left = "time left not known yet"
        if done_here > 0:
            time_left = f"{seconds * missing / done_here:,.0f} s left"
        speed = (total.bytes - self.bytes_at_start) / 1e6 / seconds
        return (
            f"{self.part_count - missing} of {self.part_count} parts, "
            f"{total.documents:,} documents, "
            f"{total.bytes / 1e6:,.0f} MB, {speed:,.1f} MB/s, {time_left}"
        )
