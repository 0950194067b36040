"""Text of any size: encoded once, by several processes, into files of tokens. Training reads windows of these files.

A cache entry is a folder: plan.json says what to encode, tokenizer.json how; 000012-0000.tokens holds tokens of part 12,
000012-0000.json, written after it, describes them; index.json, written last, describes all. A killed command goes on where it
was, and a part with a damaged file is encoded again.
"""

import contextlib
import glob
import hashlib
import itertools
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.config import execution, new_file, storage
from jaxformer.data import text_files, tokenizers
from jaxformer.data.records import (
    Part,
    Policy,
    Problems,
    Stream,
    hugging_face_name,
    paths_as_text,
)
from jaxformer.data.sources import Dataset, Windows, cache_folder, check_lengths, context_length, digests
from jaxformer.data.text_files import group_parts, list_files, read_documents, say_left_out
from jaxformer.data.tokens import (
    Index,
    Tokens,
    checked_index,
    forget_part,
    free_bytes,
    is_full,
    load_sealed,
    save_sealed,
)
from jaxformer.errors import ConfigError

log = logging.getLogger("jaxformer")
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

    def __post_init__(self):
        paths_as_text(self, "path", "validation", "tokenizer", "cache")

    def open(self, model: Any) -> Dataset:
        return open_corpus(self, context_length(model))


def open_corpus(config: Corpus, context_length: int) -> Dataset:
    """Encodes what is not in the cache. Raises ConfigError for impossible settings and for what cannot be read."""
    from jaxformer.parallel import processes  # imports jax, which those that encode need not have

    if not 0 < config.validation_fraction < 1:
        raise ConfigError(f"data.validation_fraction: {config.validation_fraction} is not between 0 and 1")
    tokenizers.check_vocab_size(config.tokenizer, config.vocab_size)
    if config.tokenizer == "characters":
        raise ConfigError("data.tokenizer='characters': a corpus may hold any; expected bytes, bpe or a tokenizer.json")
    if min(value for value in (1, config.stride, config.jobs) if value is not None) < 1:
        raise ConfigError(f"data.stride={config.stride}, data.jobs={config.jobs}: must be at least 1, or None")
    folder = cache_folder(config.cache)
    try:
        group = processes.that_see(folder)
        tokenizer = _tokenizer(config, folder, group)
        paths = [config.path] if config.validation is None else [config.path, config.validation]
        splits = [_open_tokens(config, path, tokenizer, folder, group) for path in paths]
    except OSError as error:
        problem = f"data: cannot read {config.path}, or keep tokens in {folder} ({error})"
        if is_full(error):
            size = sum(os.path.getsize(file) for file in list_files(config.path) if not file.startswith("hf:"))
            problem += f"; {size:,} bytes of text take up to {4 * size:,} (more if compressed), {free_bytes(folder):,} are"
            problem += " free. Make room, or name another --data.cache; what is encoded is kept, the same command goes on"
        raise storage.mistake(error, problem) from None
    train, validation, index = splits[0][0], splits[-1][0], splits[0][1]
    if config.validation is None:
        cut = int(len(train) * (1 - config.validation_fraction))
        train, validation = train.part(0, cut), train.part(cut, len(train))
    check_lengths(config.path, context_length, train, validation)

    def digest(of_tokenizer: str) -> str:
        words = f"{[index.digest for _, index in splits]} {len(train)} {of_tokenizer}"
        return hashlib.sha256(words.encode()).hexdigest()

    return Dataset(
        train=Windows(train, context_length, config.stride or context_length, tokenizer.end_of_text),
        validation=Windows(validation, context_length, context_length, tokenizer.end_of_text),
        vocab_size=_vocab_size(tokenizer), tokenizer=tokenizer, **digests(tokenizer, digest),
        description=f"{config.path}: {index.documents:,} documents, {index.bytes:,} bytes; tokenizer {config.tokenizer}, "
        f"vocabulary {tokenizer.vocab_size:,}; {len(train):,} training and {len(validation):,} validation tokens"
        + "".join(str(Problems("skip", index.counts, index.first)) for _, index in splits) + "".join(map(say_left_out, paths)),
    )  # fmt: skip


# --- what to encode


def _key(config: Corpus, path: str, *more: Any) -> str:
    """A digest of the files as they are now. A file that changes has another size or time, so no file is read for it."""
    stream = [*hugging_face_name(path)] if path.startswith("hf:") else None  # its files if it is a local folder, else its name
    names = list_files(path) if stream is None else sorted(glob.glob(f"{glob.escape(stream[0])}/**/*.*", recursive=True))
    files = [(os.path.abspath(file), os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in names]
    words = ["layout 2", stream, files, config.field, config.bad_rows, config.end_of_text, *more]
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:24]


def _tokenizer(config: Corpus, folder: Path, group: Any) -> Any:
    end, name = config.end_of_text, config.tokenizer
    tokenizer = _learn_tokenizer(config, folder, group) if name == "bpe" else tokenizers.by_name(name, None)
    if (tokenizer.end_of_text if end is None else tokenizer.id_of(end)) is None:
        problem = f"the tokenizer {name!r} has no {(end or ' '.join(tokenizers.ENDS))!r}"
        raise ConfigError(f"data.end_of_text: {problem}; name its token for the end")
    if end is not None and isinstance(tokenizer, tokenizers.BPE):  # only these have control tokens
        return tokenizer.ending_with(end)
    return tokenizer


def _learn_tokenizer(config: Corpus, folder: Path, group: Any) -> tokenizers.BPE:
    """Byte pairs from the cache, or learned from a sample and stored there."""
    held_out = config.validation_fraction if config.validation is None else 0.0

    def learn() -> str:
        saved = folder / f"tokenizer-{_key(config, config.path, config.vocab_size, held_out)}.json"
        with contextlib.suppress(FileNotFoundError, ValueError):  # a damaged one is learned again
            load_sealed(saved)
            return saved.name
        log.info("learning %s byte pairs from a sample of %s", f"{config.vocab_size:,}", config.path)
        tokenizer = tokenizers.BPE.train("".join(_sample(config.path, config.field, held_out)), config.vocab_size or 0)
        save_sealed(saved, json.dumps(tokenizer.state["tokenizer"]))
        return saved.name

    return tokenizers.BPE(load_sealed(folder / group.first(learn)))


def _sample(path: str, field: str, held_out: float) -> Iterator[str]:
    """The beginnings of up to 64 parts, evenly spaced, without the last fraction `held_out` of all characters."""
    groups, limit = group_parts(path), SAMPLE

    def texts(group):
        return (text for text, _, _ in read_documents(group, field, Problems("skip")))

    if len(groups) == 1:  # it holds the last ones too
        limit = min(limit, int((1 - held_out) * sum(map(len, texts(groups[0])))))
    else:
        groups = groups[: max(1, int(len(groups) * (1 - held_out)))]
        groups = groups[:: -(-len(groups) // 64)]
    for group in groups:
        remaining = limit // len(groups)
        for text in texts(group):
            yield text[:remaining]
            if (remaining := remaining - len(text)) <= 0:
                break


# --- encoding


def _vocab_size(tokenizer: Any) -> int:
    """The number of tokens, with the end of a text, whose id may be above all others."""
    return max(tokenizer.vocab_size, tokenizer.end_of_text + 1)


def _open_tokens(config: Corpus, path: str, tokenizer: Any, folder: Path, group: Any) -> tuple[Tokens, Index]:
    """All tokens of a path, from the cache or new. A `processes.Group` shares the work."""
    keys = group.first(lambda: [_key(config, path, digest) for digest in (tokenizer.digest, *tokenizer.former_digests)])
    # an earlier version of this library may have encoded the text, under the digest that it had for the same tokenizer
    key = group.first(lambda: next((key for key in keys if storage.exists(folder / f"corpus-{key}/index.json")), keys[0]))
    entry, dtype = folder / f"corpus-{key}", np.min_scalar_type(_vocab_size(tokenizer) - 1)

    def begin() -> None:
        tokenizer.save(entry / "tokenizer.json")
        try:
            load_sealed(entry / "plan.json")
        except (FileNotFoundError, ValueError):  # shards without their plan are worth nothing
            for shard in entry.glob("0*.json"):
                shard.unlink(missing_ok=True)
            plan = {"groups": group_parts(path, tokenizer), "field": config.field, "policy": config.bad_rows}
            save_sealed(entry / "plan.json", plan)

    def finish() -> None:
        total = _Progress(entry).total()
        if not total.tokens:
            raise ConfigError(f"data.path: {path} has no text{Problems('skip', total.counts, total.first)}")
        for leftover in entry.glob(".[0-9]*.unfinished"):  # of parts: a killed process leaves them
            leftover.unlink(missing_ok=True)
        if keys[0] != _key(config, path, tokenizer.digest):
            raise ConfigError(f"data.path: files of {path} changed while they were read; start again once they do not")
        total.save(entry / "index.json")

    for _ in range(3):
        if (found := group.first(lambda: checked_index(entry, dtype.itemsize))) is not None:
            break
        group.first(begin)
        _encode(entry, path, config.jobs or os.cpu_count() or 1, group.index, group.count)
        group.wait()
        group.first(finish)
    else:
        raise ConfigError(f"data.cache: what is written to {entry} is damaged each time; choose another disk")
    index = Index(*found)  # JSON has no named tuples
    sizes = {entry / f"{name}.tokens": tokens for name, (tokens, _) in (index.shards or {}).items()}
    return Tokens(list(sizes), list(sizes.values()), dtype), index


def _encode(entry: Path, path: str, jobs: int, number: int, count: int) -> None:
    """Runs the processes that encode our share of the missing parts, every `count`th. Several commands may do so at once."""
    progress = _Progress(entry)
    missing = [part for part in progress.missing() if part % count == number]
    if len(missing) == 1 and not path.startswith("hf:"):
        encode_part(entry, missing[0])
    elif missing:
        random.shuffle(missing)  # two commands that encode the same corpus share the work
        _run_workers(entry, path, missing, jobs, progress)


class _Progress:
    """The finished shards of a cache entry, by name."""

    def __init__(self, entry: Path):
        self.entry, self.shards = entry, dict[str, Index]()
        self.parts = len(load_sealed(entry / "plan.json")["groups"])
        self.start, self.left, self.bytes = time.monotonic(), len(self.missing()), self.total().bytes

    def missing(self) -> list[int]:
        """The parts that are not finished, by another look at the folder."""
        names = {name.removesuffix(".json") for name in os.listdir(self.entry) if name[0].isdigit() and name.endswith(".json")}
        new = {name: Index.find(self.entry / f"{name}.json") for name in names - self.shards.keys()}
        for name in sorted(name for name, index in new.items() if index is None):
            forget_part(self.entry, name)
            new = {other: index for other, index in new.items() if other[:6] != name[:6]}
        self.shards |= {name: index for name, index in new.items() if index is not None}
        finished = {int(name.partition("-")[0]) for name, index in self.shards.items() if index.last}
        return [part for part in range(self.parts) if part not in finished]

    def total(self) -> Index:
        indices, counts, first = dict(sorted(self.shards.items())), Counter[str](), {}
        tokens, documents, size = (sum(getattr(i, name) for i in indices.values()) for name in ("tokens", "documents", "bytes"))
        for index in indices.values():
            counts.update(index.counts)
            first = index.first | first
        digest = hashlib.sha256(" ".join(index.digest for index in indices.values()).encode()).hexdigest()
        shards = {name: [index.tokens, index.written] for name, index in indices.items() if index.tokens}
        return Index(tokens, documents, size, digest, dict(counts), first, shards=shards)

    def __str__(self) -> str:
        parts_left, total, seconds = len(self.missing()), self.total(), time.monotonic() - self.start
        rest = (
            f"{seconds * parts_left / (self.left - parts_left):,.0f} s left"
            if parts_left < self.left
            else "time left not known yet"
        )
        speed = f"{total.bytes / 1e6:,.0f} MB, {(total.bytes - self.bytes) / 1e6 / seconds:,.1f} MB/s"
        return f"{self.parts - parts_left} of {self.parts} parts, {total.documents:,} documents, {speed}, {rest}"


def _run_workers(entry: Path, path: str, missing: list[int], jobs: int, progress: _Progress) -> None:
    """Runs a process for each part, whose memory ends with it. The first bad row ends all of them with a ConfigError."""
    from jaxformer.parallel import processes  # imports jax, which those that encode need not have

    running: dict[int, subprocess.Popen] = {}
    printed, encoded = time.monotonic(), progress.bytes
    with tempfile.TemporaryDirectory() as errors, contextlib.ExitStack() as stack:
        stack.callback(lambda: [(process.kill(), process.wait()) for process in running.values()])
        while missing or running:
            while missing and len(running) < jobs:
                part = missing.pop()
                running[part] = _start_worker(entry, part, f"{errors}/{part}")
            time.sleep(0.1)
            for part in [part for part, process in running.items() if process.poll() is not None]:
                code, words = running.pop(part).returncode, Path(errors, str(part)).read_text().strip()
                if code in (2, 3):
                    line = words.splitlines()[-1]
                    raise ConfigError(line) if code == 2 else OSError(*json.loads(line))
                if code:
                    ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
                    problem = f"encoding part {part} of {path} {ended}; finished parts are kept, the same command goes on"
                    raise (ConfigError if code < 0 else RuntimeError)(f"{problem}. {words[-2000:]}")
            if time.monotonic() - printed > 5 or not (missing or running):
                printed = time.monotonic()
                log.info("encoding %s: %s", path, progress)
                if (done := progress.total().bytes) > encoded:  # a stream is one part, which may take hours
                    encoded = done
                    processes.report_place(f"the encoding of {path}")  # those who wait for this process are patient


def _start_worker(entry: Path, part: int, errors: str) -> subprocess.Popen:
    # -P: files of the folder where the command runs do not shadow modules
    command = [sys.executable, "-P", "-c", "from jaxformer.data import corpus; corpus.work()", str(entry), str(part)]
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false"}
    with open(errors, "w") as file:
        return subprocess.Popen(command, env=environment, stderr=file)


def work() -> None:
    """The body of a process: encodes one part of a cache entry. Exit codes: 2 ConfigError, 3 OSError, with a line on stderr."""
    try:
        encode_part(Path(sys.argv[1]), int(sys.argv[2]))
    except (ConfigError, OSError) as error:
        is_mistake = isinstance(error, ConfigError)
        print(error if is_mistake else json.dumps([error.errno, error.strerror or str(error), error.filename]), file=sys.stderr)
        raise SystemExit(2 if is_mistake else 3) from None


def encode_part(entry: Path, number: int) -> None:
    """Writes the missing shards of a part: one for files, one for each PART bytes of a stream."""
    plan, tokenizer = load_sealed(entry / "plan.json"), tokenizers.load(entry / "tokenizer.json")
    group, problems = plan["groups"][number], Problems(plan["policy"])
    done = [Index.load(file) for file in sorted(entry.glob(f"{number:06}-*.json"))]
    if done and done[-1].last:
        return
    stream = None
    if group[0][0].startswith("hf:"):
        stream = Stream(group[0][0], Part(*group[0][1:]), done[-1].state if done else None)
    documents = read_documents(group, plan["field"], problems, stream, tokenizer)
    for count in itertools.count(len(done)):
        name = f"{number:06}-{count:04}"
        index = _write_shard(entry / f"{name}.tokens", documents, tokenizer, text_files.PART if stream else sys.maxsize)
        index = index._replace(counts=problems.counts, first=problems.first)
        index = index._replace(state=stream.state() if stream and not index.last else None)
        with contextlib.suppress(FileNotFoundError):  # another command has finished and tidied up
            index.save(entry / f"{name}.json")
        problems.counts, problems.first = {}, {}
        if index.last:
            return


def _write_shard(path: Path, documents: Iterator[tuple[str, bool, bool]], tokenizer: Any, limit: int) -> Index:
    """Tokens of documents until their text has `limit` bytes. The file appears when it is complete."""
    digest, parent, count, size, last = hashlib.sha256(), os.getppid(), 0, 0, True
    end_of_text = np.array(tokenizer.end_of_text, np.min_scalar_type(_vocab_size(tokenizer) - 1))
    with contextlib.suppress(FileNotFoundError), new_file(path) as file:  # another command has finished and tidied up
        for text, continues, ends in documents:
            tokens = tokenizer.encode_piece(text, continues).astype(end_of_text.dtype)
            data = tokens.tobytes() + end_of_text.tobytes() * ends
            file.write(data)
            digest.update(data)
            count, size = count + ends, size + len(text.encode("utf-8", "replace"))
            if os.getppid() != parent:
                raise SystemExit("the command that asked for this is gone")
            if not (last := size < limit):
                break
        tokens = file.tell() // end_of_text.itemsize
    return Index(tokens, count, size, digest.hexdigest(), {}, {}, last, path.stat().st_mtime_ns)
