"""Text of any size, encoded once by several processes into files of tokens, and read as windows.

A cache entry is a folder:

    plan.json               what to encode
    tokenizer.json          the tokenizer
    000012-0000.tokens      tokens of part 12
    000012-0000.json        its description, written after it
    index.json              the description of all, written last

A killed command continues where it stopped, and a part with a damaged file is encoded again.
`open_corpus` fills an entry; `shards` has the code of the processes that encode.
"""

import contextlib
import glob
import hashlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.config import execution, storage
from jaxformer.data import shards, tokenizers
from jaxformer.data.records import Policy, Problems, hugging_face_name, paths_as_text
from jaxformer.data.shards import Progress, encode_part, vocab_size
from jaxformer.data.sources import (
    Dataset,
    Windows,
    cache_folder,
    check_lengths,
    context_length,
    digests,
)
from jaxformer.data.text_files import group_parts, list_files, read_documents, say_left_out
from jaxformer.data.tokens import (
    Index,
    Tokens,
    checked_index,
    free_bytes,
    is_full,
    load_sealed,
    save_sealed,
)
from jaxformer.errors import ConfigError

log = logging.getLogger("jaxformer")
SAMPLE = 1 << 26  # characters of the sample from which byte pairs are learned


@dataclass(frozen=True)
class Corpus:
    """Next-token data of documents, each followed by the end-of-text token.

    Resident memory does not grow with the data. A document is a text file, or a row of a
    .jsonl[.gz] or .parquet file or of a Hugging Face data set. Tokens are kept in a cache, whose
    key is made of names, sizes and times of the files. The digest of the data set is that of its
    tokens.
    """

    path: str  # a file, a folder or a glob of files, or hf:NAME[,CONFIG]#SPLIT
    # "bytes", "bpe" (learned from a sample), or a tokenizer.json: path, folder or Hugging Face name
    tokenizer: str = "bytes"
    vocab_size: int | None = None  # bpe only
    field: str = "text"  # field of a row that holds the text
    # name of the end-of-text token; None: <|endoftext|>, </s> or another common one
    end_of_text: str | None = None
    validation: str | None = None  # as `path`; None: the last tokens of `path`
    validation_fraction: float = 0.0005  # of the tokens
    stride: int | None = None  # tokens between starts of training windows; None: context length
    bad_rows: Policy = "error"  # rows that are unreadable, not UTF-8, not JSON or without text
    jobs: int | None = execution(None)  # processes that encode; None: one for each core
    cache: str | None = execution(None)  # folder for tokens; default ~/.cache/jaxformer

    def __post_init__(self):
        paths_as_text(self, "path", "validation", "tokenizer", "cache")

    def open(self, model: Any) -> Dataset:
        return open_corpus(self, context_length(model))


def open_corpus(config: Corpus, context_length: int) -> Dataset:
    """The data set of a corpus; text that is not in the cache is encoded.

    Raises ConfigError for impossible settings and for files that cannot be read.
    """
    from jaxformer.parallel import processes  # imports jax; a config does without

    _check_settings(config)
    folder = cache_folder(config.cache)
    paths = [config.path] if config.validation is None else [config.path, config.validation]
    try:
        group = processes.that_see(folder)
        tokenizer = _tokenizer(config, folder, group)
        opened = [_open_tokens(config, path, tokenizer, folder, group) for path in paths]
    except OSError as error:
        raise storage.mistake(error, _disk_problem(config, folder, error)) from None
    indices = [index for _, index in opened]
    train = opened[0][0]
    validation = opened[-1][0]
    if config.validation is None:
        cut = int(len(train) * (1 - config.validation_fraction))
        validation = train.part(cut, len(train))
        train = train.part(0, cut)
    check_lengths(config.path, context_length, train, validation)

    def digest(of_tokenizer: str) -> str:
        words = f"{[index.digest for index in indices]} {len(train)} {of_tokenizer}"
        return hashlib.sha256(words.encode()).hexdigest()

    return Dataset(
        train=Windows(
            train, context_length, config.stride or context_length, tokenizer.end_of_text
        ),
        validation=Windows(validation, context_length, context_length, tokenizer.end_of_text),
        vocab_size=vocab_size(tokenizer),
        tokenizer=tokenizer,
        **digests(tokenizer, digest),
        description=f"{config.path}: {indices[0].documents:,} documents, "
        f"{indices[0].bytes:,} bytes; "
        f"tokenizer {config.tokenizer}, vocabulary {tokenizer.vocab_size:,}; "
        f"{len(train):,} training and {len(validation):,} validation tokens"
        + "".join(str(Problems("skip", index.counts, index.first)) for index in indices)
        + "".join(map(say_left_out, paths)),
    )


def _check_settings(config: Corpus) -> None:
    """Raises ConfigError for impossible settings."""
    if not 0 < config.validation_fraction < 1:
        raise ConfigError(
            f"data.validation_fraction: {config.validation_fraction} is not between 0 and 1"
        )
    tokenizers.check_vocab_size(config.tokenizer, config.vocab_size)
    if config.tokenizer == "characters":
        raise ConfigError(
            "data.tokenizer='characters': a corpus may hold any; "
            "expected bytes, bpe or a tokenizer.json"
        )
    if min(value for value in (1, config.stride, config.jobs) if value is not None) < 1:
        raise ConfigError(
            f"data.stride={config.stride}, data.jobs={config.jobs}: must be at least 1, or None"
        )


def _disk_problem(config: Corpus, folder: Path, error: OSError) -> str:
    """The message for an error of the file system: for a full disk, with the space needed."""
    problem = f"data: cannot read {config.path}, or keep tokens in {folder} ({error})"
    if not is_full(error):
        return problem
    files = [file for file in list_files(config.path) if not file.startswith("hf:")]
    size = sum(map(os.path.getsize, files))
    return (
        f"{problem}; {size:,} bytes of text take up to {4 * size:,} (more if compressed), "
        f"{free_bytes(folder):,} are free. Make room, or name another --data.cache; "
        "what is encoded is kept, the same command goes on"
    )


# --- the key of a cache entry, and the tokenizer


def _key(config: Corpus, path: str, *more: Any) -> str:
    """A digest of names, sizes and times of the files.

    No file is read: a file that changes has another size or time.
    """
    # a data set of the hub is known by its name, a saved one in a local folder by its files, too
    stream = [*hugging_face_name(path)] if path.startswith("hf:") else None
    if stream is None:
        names = list_files(path)
    else:
        names = sorted(glob.glob(f"{glob.escape(stream[0])}/**/*.*", recursive=True))
    files = [
        (os.path.abspath(file), os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in names
    ]
    words = ["layout 2", stream, files, config.field, config.bad_rows, config.end_of_text, *more]
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:24]


def _tokenizer(config: Corpus, folder: Path, group: Any) -> Any:
    """The tokenizer, which has a token for the end of a text."""
    name = config.tokenizer
    end = config.end_of_text
    if name == "bpe":
        tokenizer = _learn_tokenizer(config, folder, group)
    else:
        tokenizer = tokenizers.by_name(name, None)
    if (tokenizer.end_of_text if end is None else tokenizer.id_of(end)) is None:
        problem = f"the tokenizer {name!r} has no {(end or ' '.join(tokenizers.ENDS))!r}"
        raise ConfigError(f"data.end_of_text: {problem}; name its token for the end")
    if end is not None and isinstance(tokenizer, tokenizers.BPE):  # others have no control tokens
        return tokenizer.ending_with(end)
    return tokenizer


def _learn_tokenizer(config: Corpus, folder: Path, group: Any) -> tokenizers.BPE:
    """The byte pairs in the cache, or else learned from a sample and stored there."""
    held_out = config.validation_fraction if config.validation is None else 0.0

    def learn() -> str:
        saved = folder / f"tokenizer-{_key(config, config.path, config.vocab_size, held_out)}.json"
        with contextlib.suppress(FileNotFoundError, ValueError):  # a damaged one is learned again
            load_sealed(saved)
            return saved.name
        log.info(
            "learning %s byte pairs from a sample of %s", f"{config.vocab_size:,}", config.path
        )
        sample = "".join(_sample(config.path, config.field, held_out))
        tokenizer = tokenizers.BPE.train(sample, config.vocab_size or 0)
        save_sealed(saved, json.dumps(tokenizer.state["tokenizer"]))
        return saved.name

    return tokenizers.BPE(load_sealed(folder / group.first(learn)))


def _sample(path: str, field: str, held_out: float) -> Iterator[str]:
    """The beginnings of up to 64 evenly spaced parts, without the last fraction `held_out`."""
    groups = group_parts(path)
    limit = SAMPLE
    if len(groups) == 1:  # it holds the last characters, too
        size = sum(map(len, _texts(groups[0], field)))
        limit = min(limit, int((1 - held_out) * size))
    else:
        groups = groups[: max(1, int(len(groups) * (1 - held_out)))]
        groups = groups[:: -(-len(groups) // 64)]
    for group in groups:
        remaining = limit // len(groups)
        for text in _texts(group, field):
            yield text[:remaining]
            remaining -= len(text)
            if remaining <= 0:
                break


def _texts(group: Sequence[Sequence], field: str) -> Iterator[str]:
    """The texts of a part, without bad rows."""
    for text, _, _ in read_documents(group, field, Problems("skip")):
        yield text


# --- encoding


def _open_tokens(
    config: Corpus, path: str, tokenizer: Any, folder: Path, group: Any
) -> tuple[Tokens, Index]:
    """All tokens of a path, from the cache or encoded now.

    The hosts of `group`, a `processes.Group`, share the work.
    """
    key, key_of_entry = group.first(lambda: _keys(config, path, tokenizer, folder))
    entry = folder / f"corpus-{key_of_entry}"
    dtype = np.min_scalar_type(vocab_size(tokenizer) - 1)
    for _ in range(3):
        if (found := group.first(lambda: checked_index(entry, dtype.itemsize))) is not None:
            break
        group.first(lambda: _begin(entry, config, path, tokenizer))
        _encode(entry, path, config.jobs or os.cpu_count() or 1, group.index, group.count)
        group.wait()
        group.first(lambda: _finish(entry, config, path, tokenizer, key))
    else:
        raise ConfigError(
            f"data.cache: what is written to {entry} is damaged each time; choose another disk"
        )
    index = Index(*found)  # `group.first` passes it on as JSON, which has no named tuples
    sizes = {entry / f"{name}.tokens": tokens for name, (tokens, _) in (index.shards or {}).items()}
    return Tokens(list(sizes), list(sizes.values()), dtype), index


def _keys(config: Corpus, path: str, tokenizer: Any, folder: Path) -> tuple[str, str]:
    """(the key of the files as they are now, the key of their cache entry).

    They differ if an earlier version of this library made the entry, when the same tokenizer had
    another digest.
    """
    keys = [_key(config, path, digest) for digest in (tokenizer.digest, *tokenizer.former_digests)]
    finished = (key for key in keys if storage.exists(folder / f"corpus-{key}/index.json"))
    return keys[0], next(finished, keys[0])


def _begin(entry: Path, config: Corpus, path: str, tokenizer: Any) -> None:
    """Writes the plan and the tokenizer of an entry."""
    tokenizer.save(entry / "tokenizer.json")
    try:
        load_sealed(entry / "plan.json")
    except (FileNotFoundError, ValueError):  # shards are useless without their plan
        for shard in entry.glob("0*.json"):
            shard.unlink(missing_ok=True)
        plan = {
            "groups": group_parts(path, tokenizer),
            "field": config.field,
            "policy": config.bad_rows,
        }
        save_sealed(entry / "plan.json", plan)


def _finish(entry: Path, config: Corpus, path: str, tokenizer: Any, key: str) -> None:
    """Writes the index of an entry. `key` is the key of the files before they were encoded.

    Raises ConfigError for data without text, and for files that changed meanwhile.
    """
    total = Progress(entry).total()
    if not total.tokens:
        raise ConfigError(
            f"data.path: {path} has no text{Problems('skip', total.counts, total.first)}"
        )
    for leftover in entry.glob(".[0-9]*.unfinished"):  # files that killed processes left
        leftover.unlink(missing_ok=True)
    if key != _key(config, path, tokenizer.digest):
        raise ConfigError(
            f"data.path: files of {path} changed while they were read; start again once they do not"
        )
    total.save(entry / "index.json")


def _encode(entry: Path, path: str, jobs: int, number: int, count: int) -> None:
    """Encodes this host's share of the missing parts: every `count`th, from `number` on.

    Several commands may do so at once.
    """
    progress = Progress(entry)
    missing = [part for part in progress.missing() if part % count == number]
    if len(missing) == 1 and not path.startswith("hf:"):
        encode_part(entry, missing[0])
    elif missing:
        random.shuffle(missing)  # so two commands that encode the same corpus share the work
        _run_workers(entry, path, missing, jobs, progress)


def _run_workers(entry: Path, path: str, missing: list[int], jobs: int, progress: Progress) -> None:
    """Runs a process for each missing part, at most `jobs` at a time.

    A process frees its memory when it ends. The first bad row ends all of them with a ConfigError.
    """
    from jaxformer.parallel import processes  # imports jax; a config does without

    running: dict[int, subprocess.Popen] = {}
    log_time = time.monotonic()
    encoded_bytes = progress.bytes_at_start
    with tempfile.TemporaryDirectory() as errors, contextlib.ExitStack() as stack:
        stack.callback(lambda: [(process.kill(), process.wait()) for process in running.values()])
        while missing or running:
            while missing and len(running) < jobs:
                part = missing.pop()
                running[part] = _start_worker(entry, part, f"{errors}/{part}")
            time.sleep(0.1)
            for part in [part for part, process in running.items() if process.poll() is not None]:
                code = running.pop(part).returncode
                _check_exit(code, Path(errors, str(part)), part, path)
            if time.monotonic() - log_time > 5 or not (missing or running):
                log_time = time.monotonic()
                log.info("encoding %s: %s", path, progress)
                # bytes, not parts: a stream is one part, which may take hours
                total_bytes = progress.total().bytes
                if total_bytes > encoded_bytes:
                    encoded_bytes = total_bytes
                    # tells the hosts that wait for this process that it goes on
                    processes.report_place(f"the encoding of {path}")


def _check_exit(code: int, stderr: Path, part: int, path: str) -> None:
    """Raises the error of an encoding process that ended with `code`; none for 0."""
    if code == 0:
        return
    output = stderr.read_text().strip()
    if code in (shards.CONFIG_ERROR, shards.OS_ERROR):
        line = output.splitlines()[-1]
        raise ConfigError(line) if code == shards.CONFIG_ERROR else OSError(*json.loads(line))
    was_killed = code < 0
    ended = (
        f"was killed by {signal.Signals(-code).name}" if was_killed else f"ended with code {code}"
    )
    problem = (
        f"encoding part {part} of {path} {ended}; finished parts are kept, the same command goes on"
    )
    raise (ConfigError if was_killed else RuntimeError)(f"{problem}. {output[-2000:]}")


def _start_worker(entry: Path, part: int, errors: str) -> subprocess.Popen:
    # -P: files in the current folder do not shadow modules
    code = "from jaxformer.data import shards; shards.work()"
    command = [sys.executable, "-P", "-c", code, str(entry), str(part)]
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "TOKENIZERS_PARALLELISM": "false",
    }
    with open(errors, "w") as file:
        return subprocess.Popen(command, env=environment, stderr=file)
