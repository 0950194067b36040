"""Text of any size: encoded once, by several processes, into files of tokens. Training reads windows of these files.

A cache entry is a folder: plan.json says what to encode, tokenizer.json how; 00012-000.tokens holds tokens of part 12 and
00012-000.json, written after it, what they are; index.json, written last, sums up. Whatever is killed goes on from there.
"""

import contextlib
import glob
import hashlib
import itertools
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxformer.config import execution, write_atomically
from jaxformer.data import tokenizers
from jaxformer.data.records import Part, Policy, Problems, Stream, lines, parts, records
from jaxformer.data.sources import Dataset, Windows, cache_folder, check_lengths, context_length
from jaxformer.errors import ConfigError

log = logging.getLogger("jaxformer")
ENDINGS = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".parquet")
PART = 1 << 27  # bytes of a file that one process encodes at a time
SHARD = 1 << 27  # bytes of text after which a stream notes its state
SAMPLE = 1 << 26  # characters from which byte pairs are learned


@dataclass(frozen=True)
class Corpus:
    """Next-token data of documents, each followed by the token that ends a text. Resident memory does not grow with it.

    A document is a file of text, or a row of a .jsonl[.gz] or .parquet file or of a Hugging Face data set. Tokens lie in a
    cache, whose key is names, sizes and times of the files; the digest of the data set is that of the tokens.
    """

    path: str  # a file, a folder or a glob of files, or hf:NAME[,CONFIG]#SPLIT
    tokenizer: str = "bytes"  # "bytes", "bpe" (learned from a sample), or a tokenizer.json: path, folder or Hugging Face name
    vocab_size: int | None = None  # bpe only
    field: str = "text"  # of a row
    end_of_text: str | None = None  # as the tokenizer writes it; None: <|endoftext|>, </s> and the like
    validation: str | None = None  # as `path`; None: the last tokens of `path`
    validation_fraction: float = 0.0005  # of the tokens
    stride: int | None = None  # tokens from one training window to the next; None: the context length
    bad_rows: Policy = "error"  # what is not readable, not UTF-8, not JSON, without text
    jobs: int | None = execution(None)  # processes that encode; None: one a core
    cache: str | None = execution(None)  # folder for tokens; default ~/.cache/jaxformer

    def open(self, model: Any) -> Dataset:
        return open_corpus(self, context_length(model))


class Tokens:
    """Tokens of many files as one array on disk: tokens[a:b], or tokens[positions] for [B, n] that ascend along a row.

    Files are read, not mapped: the pages of a mapped file count as memory of the process that touches them.
    """

    def __init__(self, files: list[Path], sizes: list[int], dtype: Any, start: int = 0, stop: int | None = None):
        self.files, self.sizes, self.dtype = files, sizes, np.dtype(dtype)
        self.ends = np.cumsum(sizes, dtype=np.int64)
        self.start, self.stop = start, int(self.ends[-1]) if stop is None else stop

    def __len__(self) -> int:
        return self.stop - self.start

    def split(self, position: int) -> "tuple[Tokens, Tokens]":
        """The tokens before `position`, and the others."""
        middle = self.start + position
        bounds = ((self.start, middle), (middle, self.stop))
        first, second = (Tokens(self.files, self.sizes, self.dtype, *bound) for bound in bounds)
        return first, second

    def __getitem__(self, key: Any) -> np.ndarray:
        if isinstance(key, slice):
            start, stop, _ = key.indices(len(self))
            return self._read(start, stop)
        return np.stack([self._read(int(row[0]), int(row[-1]) + 1)[row - row[0]] for row in key])

    def _read(self, start: int, stop: int) -> np.ndarray:
        start, stop, found = start + self.start, stop + self.start, []
        file = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            end, first = int(self.ends[file]), int(self.ends[file]) - self.sizes[file]
            offset, count = (start - first) * self.dtype.itemsize, min(stop, end) - start
            found.append(np.fromfile(self.files[file], self.dtype, count, offset=offset))
            if len(found[-1]) < count:
                raise ConfigError(f"data.cache: {self.files[file]} is damaged; remove {self.files[file].parent}")
            start, file = start + count, file + 1
        return found[0] if len(found) == 1 else np.concatenate([np.zeros(0, self.dtype), *found])


def open_corpus(config: Corpus, context_length: int) -> Dataset:
    """Encodes what is not in the cache. Raises ConfigError for impossible settings and for what cannot be read."""
    if not 0 < config.validation_fraction < 1:
        raise ConfigError(f"data.validation_fraction: {config.validation_fraction} is not between 0 and 1")
    if (config.tokenizer == "bpe") != (config.vocab_size is not None):
        raise ConfigError("data.vocab_size: tokenizer='bpe' needs one, every other tokenizer has its own")
    for name, value in {"stride": config.stride, "jobs": config.jobs}.items():
        if value is not None and value < 1:
            raise ConfigError(f"data.{name}={value}: must be at least 1")
    folder = cache_folder(config.cache)
    try:
        tokenizer = _tokenizer(config, folder)
        train, index = _encoded(config, config.path, tokenizer, folder)
        indices = [index]
        if config.validation is None:
            train, validation = train.split(int(len(train) * (1 - config.validation_fraction)))
        else:
            validation, index = _encoded(config, config.validation, tokenizer, folder)
            indices.append(index)
    except OSError as error:
        raise ConfigError(f"data: cannot read {config.path} or keep tokens in {folder} ({error})") from error
    check_lengths(config.path, context_length, train, validation)
    digest = " ".join(str(value) for value in (*(index.digest for index in indices), len(train), tokenizer.digest))
    kind = config.tokenizer if config.tokenizer in ("bytes", "bpe") else f"tokenizer {config.tokenizer}"
    return Dataset(
        train=Windows(train, context_length, config.stride or context_length),  # pyrefly: ignore[bad-argument-type]
        validation=Windows(validation, context_length, context_length),  # pyrefly: ignore[bad-argument-type]
        vocab_size=tokenizer.vocab_size, tokenizer=tokenizer, digest=hashlib.sha256(digest.encode()).hexdigest(),
        description=f"{config.path}: {indices[0].documents:,} documents, {indices[0].bytes:,} bytes; {kind}, vocabulary "
        f"{tokenizer.vocab_size:,}; {len(train):,} training and {len(validation):,} validation tokens"
        + "".join(str(Problems("skip", index.counts, index.first)) for index in indices),
    )  # fmt: skip


# --- what to encode


def _files(path: str) -> list[str]:
    if path.startswith("hf:"):
        return [path]
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        found = [file for file in glob.glob(f"{glob.escape(path)}/**", recursive=True) if file.endswith(ENDINGS)]
    else:
        found = glob.glob(path, recursive=True)
    if files := sorted(file for file in found if os.path.isfile(file)):
        return files
    raise ConfigError(f"data.path: no file in {path!r} (looked in {os.getcwd()}); expected files of {', '.join(ENDINGS)}")


def _identity(config: Corpus, path: str, *more: Any) -> str:
    """A key for the files as they are now. A file that changes has another size or time; nothing is read for it."""
    stats = [(file, os.stat(file)) for file in _files(path) if not file.startswith("hf:")]
    files = [(os.path.abspath(file), stat.st_size, stat.st_mtime_ns) for file, stat in stats] or path
    key = json.dumps(["layout 1", files, config.field, config.bad_rows, config.end_of_text, *more])
    return hashlib.sha256(key.encode()).hexdigest()[:24]


def _tokenizer(config: Corpus, folder: Path) -> Any:
    if config.tokenizer == "bytes":
        return tokenizers.Bytes()
    if config.vocab_size is None:
        return tokenizers.hugging_face(config.tokenizer)
    fraction = config.validation_fraction if config.validation is None else 0.0
    saved = folder / f"tokenizer-{_identity(config, config.path, config.vocab_size, fraction)}.json"
    if not saved.exists():
        log.info("learning %s byte pairs from a sample of %s", f"{config.vocab_size:,}", config.path)
        text = "".join(_sample(config.path, config.field, fraction))
        tokenizers.BPE.train(text, config.vocab_size).save(saved)
    return tokenizers.load(saved)


def _sample(path: str, field: str, left_out: float) -> Iterator[str]:
    """The beginnings of up to 64 parts, evenly spaced among all but the last fraction `left_out` of them."""
    found = [(file, part) for file in _files(path) for part in parts(file, PART)]
    found = found[: max(1, int(len(found) * (1 - left_out)))]
    found = found[:: -(-len(found) // 64)]
    for file, part in found:
        size = 0
        for text, _ in _documents(file, part, field, Problems("skip")):
            yield text[: SAMPLE // len(found) - size]
            if (size := size + len(text)) >= SAMPLE // len(found):
                break


def _documents(
    path: str, part: Part, field: str, problems: Problems, stream: Stream | None = None
) -> Iterator[tuple[str, bool]]:
    """(text, whether a document ends with it). Files of text come in pieces of about a megabyte; line ends become \\n."""
    if not path.startswith("hf:") and not path.removesuffix(".gz").endswith((".jsonl", ".json", ".parquet")):
        piece, size, empty = [], 0, True
        for _, text in lines(path, problems, part):
            if text is None:
                continue
            piece.append(f"{text}\n")
            if (size := size + len(text)) > 1 << 20:
                yield "".join(piece), False
                piece, size = [], 0
            empty = False
        if empty and not part.start:
            problems.add(path, "empty")
        elif piece or part.stop is None:
            yield "".join(piece), part.stop is None
        return
    empty = not path.startswith("hf:")
    for place, (text,) in records(path, [field], problems, part, stream):
        empty = False
        if not isinstance(text, str):
            problems.add(place, f"{field!r} is no text", f" but {type(text).__name__}")
        elif text:
            yield text, True
    if empty and os.path.getsize(path) == 0:
        problems.add(path, "empty")


# --- encoding


class Index(NamedTuple):
    """What a shard holds, or all shards together."""

    tokens: int
    documents: int
    bytes: int  # of text
    digest: str  # of the tokens
    counts: dict[str, int]  # as in Problems
    first: dict[str, str]
    last: bool = True  # whether the part ends here
    state: dict[str, Any] | None = None  # of a stream, where the next shard begins
    shards: list[tuple[str, int]] | None = None  # of a whole: name and tokens of each


def _encoded(config: Corpus, path: str, tokenizer: Any, folder: Path) -> tuple[Tokens, Index]:
    """All tokens of a path, from the cache or new."""
    named = config.end_of_text and getattr(tokenizer, "id_of", lambda _: None)(config.end_of_text)
    end = named if config.end_of_text else tokenizer.end_of_text
    if end is None:
        name = repr(config.end_of_text or " ".join(tokenizers.ENDS))
        raise ConfigError(
            f"data.end_of_text: the tokenizer {config.tokenizer!r} has no {name}; name its token that ends a text"
        )
    entry = folder / f"corpus-{_identity(config, path, tokenizer.digest)}"
    if not (entry / "index.json").exists():
        if not (entry / "plan.json").exists():
            found = [(file, *part) for file in _files(path) for part in parts(file, PART)]
            plan = {"parts": found, "field": config.field, "policy": config.bad_rows, "end": end}
            tokenizer.save(entry / "tokenizer.json")
            write_atomically(entry / "plan.json", json.dumps(plan))
        _encode(entry, path, config.jobs or os.cpu_count() or 1)
    index = _load(entry / "index.json")
    sizes, dtype = dict(index.shards or []), np.min_scalar_type(tokenizer.vocab_size - 1)
    for name, size in sizes.items():
        file = entry / f"{name}.tokens"
        if not file.exists() or file.stat().st_size != size * dtype.itemsize:
            raise ConfigError(f"data.cache: {file} is damaged; remove {entry}")
    return Tokens([entry / f"{name}.tokens" for name in sizes], list(sizes.values()), dtype), index


def _encode(entry: Path, path: str, jobs: int) -> None:
    """Runs the processes that encode the missing parts, and sums up. Several commands may do so at once."""
    plan = json.loads((entry / "plan.json").read_text())
    progress = _Progress(entry, len(plan["parts"]))
    missing = progress.missing()
    if len(missing) == 1 and not path.startswith("hf:"):
        encode_part(entry, missing[0])
    elif missing:
        random.shuffle(missing)  # two commands that encode the same corpus share the work
        _run_workers(entry, path, missing, jobs, progress)
    progress.missing()
    total = progress.total()
    if not total.tokens:
        raise ConfigError(f"data.path: {path} has no text{Problems('skip', total.counts, total.first)}")
    _save(entry / "index.json", total)
    for leftover in entry.glob("*.unfinished"):
        leftover.unlink(missing_ok=True)


class _Progress:
    """The finished shards of a cache entry, by name."""

    def __init__(self, entry: Path, parts: int):
        self.entry, self.parts, self.shards = entry, parts, dict[str, Index]()
        self.start, self.left, self.bytes = time.monotonic(), len(self.missing()), self.total().bytes

    def missing(self) -> list[int]:
        """The parts that are not finished, by another look at the folder."""
        names = [name.removesuffix(".json") for name in os.listdir(self.entry) if name[0].isdigit() and name.endswith(".json")]
        self.shards |= {name: _load(self.entry / f"{name}.json") for name in names if name not in self.shards}
        finished = {int(name.partition("-")[0]) for name, index in self.shards.items() if index.last}
        return [part for part in range(self.parts) if part not in finished]

    def total(self) -> Index:
        found = sorted(self.shards.items())
        tokens, documents, size = (sum(getattr(i, name) for _, i in found) for name in ("tokens", "documents", "bytes"))
        counts, first = Counter[str](), {}
        for _, index in found:
            counts.update(index.counts)
            first = index.first | first
        digest = hashlib.sha256(" ".join(index.digest for _, index in found).encode()).hexdigest()
        shards = [(name, index.tokens) for name, index in found if index.tokens]
        return Index(tokens, documents, size, digest, dict(counts), first, shards=shards)

    def __str__(self) -> str:
        left, total, seconds = len(self.missing()), self.total(), time.monotonic() - self.start
        rest = f"{seconds * left / (self.left - left):,.0f} s left" if left < self.left else "time left not known yet"
        speed = f"{total.bytes / 1e6:,.0f} MB, {(total.bytes - self.bytes) / 1e6 / seconds:,.1f} MB/s"
        return f"{self.parts - left} of {self.parts} parts, {total.documents:,} documents, {speed}, {rest}"


def _run_workers(entry: Path, path: str, missing: list[int], jobs: int, progress: _Progress) -> None:
    """One process a part: its memory goes with it. Raises ConfigError for the first bad row, and ends the others."""
    code = "from jaxformer.data import corpus; corpus.work()"
    # -P: files of the folder where the command runs do not shadow modules
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false"}
    running: dict[int, subprocess.Popen] = {}
    said = time.monotonic()
    try:
        while missing or running:
            while missing and len(running) < jobs:
                part = missing.pop()
                command = [sys.executable, "-P", "-c", code, str(entry), str(part)]
                running[part] = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
            time.sleep(0.1)
            for part in [part for part, process in running.items() if process.poll() is not None]:
                process = running.pop(part)
                words = process.communicate()[1].strip()
                if process.returncode == 2:
                    raise ConfigError(words.splitlines()[-1])
                if process.returncode:
                    problem = f"encoding part {part} of {path} ended with code {process.returncode}"
                    raise RuntimeError(f"{problem}; finished parts are kept, start again. {words[-2000:]}")
            if time.monotonic() - said > 5 or not (missing or running):
                said = time.monotonic()
                log.info("encoding %s: %s", path, progress)
    finally:
        for process in running.values():
            process.kill()
            process.communicate()


def work() -> None:
    """The body of a process: encodes one part of a cache entry. Exit code 2 is a ConfigError, one line on stderr."""
    try:
        encode_part(Path(sys.argv[1]), int(sys.argv[2]))
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


def encode_part(entry: Path, number: int) -> None:
    """Writes the missing shards of a part: one for a part of a file, more for a stream."""
    plan, tokenizer = json.loads((entry / "plan.json").read_text()), tokenizers.load(entry / "tokenizer.json")
    path, *bounds = plan["parts"][number]
    part, problems = Part(*bounds), Problems(plan["policy"])
    done = [_load(file) for file in sorted(entry.glob(f"{number:06}-*.json"))]
    if done and done[-1].last:
        return
    stream = Stream(path, part, done[-1].state if done else None) if path.startswith("hf:") else None
    documents = _documents(path, part, plan["field"], problems, stream)
    for count in itertools.count(len(done)):
        name = f"{number:06}-{count:04}"
        index = _write_shard(entry / f"{name}.tokens", documents, tokenizer, plan["end"], SHARD if stream else sys.maxsize)
        state = stream.state() if stream and not index.last else None
        _save(entry / f"{name}.json", index._replace(counts=dict(problems.counts), first=dict(problems.first), state=state))
        problems.counts.clear()
        problems.first.clear()
        if index.last:
            return


def _write_shard(path: Path, documents: Iterator[tuple[str, bool]], tokenizer: Any, end: int, limit: int) -> Index:
    """Tokens of documents until their text has `limit` bytes. The file appears when it is complete."""
    digest, parent, total = hashlib.sha256(), os.getppid(), Counter(tokens=0, documents=0, bytes=0)
    dtype, last = np.min_scalar_type(tokenizer.vocab_size - 1), True
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".unfinished", delete=False) as file:
        for text, ends in documents:
            tokens = np.append(tokenizer.encode_text(text), np.array([end] * ends, dtype)).astype(dtype, copy=False)
            file.write(tokens.tobytes())
            digest.update(tokens)
            total.update(tokens=len(tokens), documents=int(ends), bytes=len(text.encode("utf-8", "replace")))
            if os.getppid() != parent:
                raise SystemExit("the command that asked for this is gone")
            if total["bytes"] >= limit:
                last = False
                break
        os.fsync(file.fileno())
    with contextlib.suppress(FileNotFoundError):  # another command has finished the corpus and tidied up
        os.replace(file.name, path)
    return Index(**total, digest=digest.hexdigest(), counts={}, first={}, last=last)


def _load(file: Path) -> Index:
    return Index(**json.loads(file.read_text()))


def _save(file: Path, index: Index) -> None:
    write_atomically(file, json.dumps(index._asdict()))
