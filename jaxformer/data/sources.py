"""Text files as next-token data, and the interface of all data: `Dataset` and its splits.

A config of data is any object with `open(model) -> Dataset`. A `Dataset` has two splits. A split
has `len` and `[i] -> {name: array}`. The objective decides which names it reads; `weights` is
always present. Two methods are optional:

    take_rows(indices) -> {name: array}     makes a batch at once
    batch_indices(seed, batch_size)         an endless sequence [step] -> B indices that replaces
                                            the shuffled order

A training split may instead be a function of the state,
`(params, key, step) -> {name: array of batch_size rows}`: the data are samples of the current
policy. `params` are the model's parameters, `key` is a function of (seed, step). Every process
calls it on the host before each step, and it must return the same in all of them.
"""

import codecs
import hashlib
import json
import logging
import os
import sysconfig
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxformer.config import execution, new_file, regular_file, storage
from jaxformer.data import tokenizers
from jaxformer.data.records import foreign_text, paths_as_text
from jaxformer.data.tokens import free_bytes, is_full
from jaxformer.errors import ConfigError, did_you_mean

log = logging.getLogger("jaxformer")
LARGEST_TEXT = 10**9  # bytes that `Text` reads into memory


@dataclass(frozen=True)
class Text:
    """A text file, or a folder of text files in the order of their paths, of at most 1 GB.

    `corpus.Corpus` reads any size.
    """

    path: str  # relative to the folder where the command runs
    tokenizer: Literal["bytes", "characters", "bpe"] = "bytes"  # what a token is
    vocab_size: int | None = None  # bpe only
    validation_fraction: float = 0.1  # share of the text, at its end
    pattern: str = "**/*.txt"  # which files of a folder
    cache: str | None = execution(None)  # folder for bpe tokens; default ~/.cache/jaxformer
    origin: str = execution("")  # where to get the text; shown if it is missing

    def __post_init__(self):
        paths_as_text(self, "path", "cache")

    def open(self, model: Any) -> "Dataset":
        return open_text(self, context_length(model))


@dataclass(frozen=True)
class Stdlib:
    """The source of Python's standard library without its tests: about 12 MB on every machine.

    Each Python version has another text.
    """

    tokenizer: Literal["bytes", "characters", "bpe"] = "bytes"  # what a token is
    vocab_size: int | None = None  # bpe only
    validation_fraction: float = 0.05  # share of the text, at its end
    cache: str | None = execution(None)  # folder for bpe tokens; default ~/.cache/jaxformer

    def __post_init__(self):
        paths_as_text(self, "cache")

    def open(self, model: Any) -> "Dataset":
        return open_text(self, context_length(model))


class Question(NamedTuple):
    """An example whose answer a model writes; a split may have a sequence `questions` of them."""

    prompt: list[int]  # the tokens that the decoder continues
    reference: str  # the right answer
    source: Any = None  # input of the encoder, if there is one: tokens or an image


@dataclass(frozen=True, eq=False)
class Questions(Sequence[Question]):
    """The questions of a split's examples. Each is made when it is read."""

    examples: Sequence[Any]
    make: Callable[[Any], Question]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.make(example) for example in self.examples[index]]
        return self.make(self.examples[index])


@dataclass(frozen=True, eq=False)
class Dataset:
    """Two splits and a digest that identifies them."""

    train: Any
    validation: Any
    digest: str  # identifies content, split and tokenizer: a run does not resume on other data
    description: str = ""  # one line
    vocab_size: int | None = None  # None if there are no tokens
    tokenizer: Any = None  # None if there is no text
    # digests of the same data in earlier versions of this library: their runs can resume
    former_digests: tuple[str, ...] = ()


def digests(tokenizer: Any, of_data: Callable[[str], str]) -> dict[str, Any]:
    """The fields `digest` and `former_digests` of a Dataset.

    `of_data` maps a digest of the tokenizer to one of data and tokenizer.
    """
    former = getattr(tokenizer, "former_digests", ())
    return {
        "digest": of_data(tokenizer.digest),
        "former_digests": tuple(of_data(each) for each in former),
    }


def context_length(model: Any) -> int:
    """The model's context length, or its decoder's. Raises ConfigError for a model without one."""
    length = getattr(getattr(model, "decoder", model), "context_length", None)
    if not isinstance(length, int | np.integer) or length < 1:
        raise ConfigError(
            f"model.context_length={length}: must be at least 1; a text example has this length"
        )
    return int(length)


def read_example(split: Any, index: int) -> dict[str, Any]:
    """`split[index]`, for a split that defines `len` and `take_rows`: arrays and single numbers."""
    batch = split.take_rows(np.array([range(len(split))[index]]))
    return {name: arrays[0] for name, arrays in batch.items()}


@dataclass(frozen=True, eq=False)
class Windows:
    """Window i has tokens[s : s+T] and labels tokens[s+1 : s+T+1], s = stride * i, T = `length`.

    Stride 1 gives all n - T full windows. With stride T, every token except the first is a label
    exactly once, and padding of weight 0 fills the last window.
    """

    tokens: Any  # an array, or an object that is indexed like one
    length: int
    stride: int = 1
    # the control token that ends a document; if given, rows also have `control_tokens`
    end_of_text: int | None = None
    __getitem__ = read_example

    def __len__(self) -> int:
        return -(-(len(self.tokens) - 1 - self.length) // self.stride) + 1

    def take_rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The windows at `indices` as arrays [B, T]: tokens and labels int32, weights float32.

        `control_tokens`, bool, is True for the end of a document, which is no text: a masked
        language model must not hide it.
        """
        positions = np.asarray(indices)[:, None] * self.stride + np.arange(self.length + 1)
        windows = self.tokens[np.minimum(positions, len(self.tokens) - 1)]
        batch = {
            "tokens": windows[:, :-1].astype(np.int32),
            "labels": windows[:, 1:].astype(np.int32),
            "weights": (positions[:, 1:] < len(self.tokens)).astype(np.float32),
        }
        if self.end_of_text is not None:
            batch["control_tokens"] = batch["tokens"] == self.end_of_text
        return batch


def open_text(config: Text | Stdlib, context_length: int) -> Dataset:
    """Reads, splits and encodes a text.

    As in nanoGPT, the training split is the first int(n (1 - validation_fraction)) bytes, or
    characters for the other tokenizers. BPE merges are learned from the training split. Raises
    ConfigError for an unusable text and for impossible settings.
    """
    if not 0 < config.validation_fraction < 1:
        raise ConfigError(
            f"data.validation_fraction: {config.validation_fraction} is not between 0 and 1"
        )
    tokenizers.check_vocab_size(config.tokenizer, config.vocab_size)
    name, raw = _read_path(config) if isinstance(config, Text) else _read_stdlib()
    if not raw:
        raise ConfigError(f"data.path: {name} is empty")
    source = hashlib.sha256(raw).hexdigest()
    train, validation, tokenizer = _encode(config, name, raw, source)
    check_lengths(name, context_length, train, validation)

    def digest(of_tokenizer: str) -> str:
        words = f"{source} {len(train)} {len(validation)} {of_tokenizer}"
        return hashlib.sha256(words.encode()).hexdigest()

    return Dataset(
        train=Windows(train, context_length),
        validation=Windows(validation, context_length, stride=context_length),
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer,
        **digests(tokenizer, digest),
        description=f"{name}: {len(raw):,} bytes, sha256 {source[:16]}; "
        f"{config.tokenizer}, vocabulary {tokenizer.vocab_size:,}; "
        f"{len(train):,} training and {len(validation):,} validation tokens",
    )


def check_lengths(name: str, context_length: int, train: Any, validation: Any) -> None:
    """Raises ConfigError if a split has no window."""
    for split, tokens, least in (
        ("training", train, context_length + 1),
        ("validation", validation, 2),
    ):
        if len(tokens) < least:
            needed = (
                f"{len(tokens):,} tokens; a context of {context_length:,} needs "
                f"at least {least:,}; take a longer text"
            )
            raise ConfigError(
                f"data: the {split} part of {name} is {needed} or another data.validation_fraction"
            )


def cache_folder(cache: str | None) -> Path:
    """The folder for tokens: `cache`, else ~/.cache/jaxformer."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "jaxformer"
    return Path(cache or default).expanduser()


def _encode(
    config: Text | Stdlib, name: str, raw: bytes, source: str
) -> tuple[np.ndarray, np.ndarray, Any]:
    """(training tokens, validation tokens, tokenizer)."""
    train_fraction = 1 - config.validation_fraction
    if config.tokenizer == "bytes":
        cut = int(len(raw) * train_fraction)
        tokens = np.frombuffer(raw, np.uint8)
        return tokens[:cut], tokens[cut:], tokenizers.Bytes()
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        problem = (
            f"data.path: {name} is not UTF-8 "
            f"(byte {raw[error.start]:#04x} at position {error.start:,})"
        )
        raise ConfigError(f"{problem}; convert it, or use tokenizer='bytes'") from None
    cut = int(len(text) * train_fraction)
    if config.tokenizer == "bpe":
        return _encode_bpe(config, text, cut, source)
    if config.tokenizer != "characters":
        advice = "Corpus(path=…, tokenizer=…) takes the file of one"
        raise ConfigError(
            f"data.tokenizer={config.tokenizer!r}: expected bytes, characters or bpe; {advice}"
        )
    tokenizer = tokenizers.Characters.of(text)
    tokens = tokenizer.encode_text(text)
    return tokens[:cut], tokens[cut:], tokenizer


def _encode_bpe(
    config: Text | Stdlib, text: str, cut: int, source: str
) -> tuple[np.ndarray, np.ndarray, Any]:
    """Tokens from the cache; the first time they are encoded and stored there.

    Several processes may do so at once.
    """
    key = hashlib.sha256(f"layout 2 {source} {cut} {config.vocab_size}".encode()).hexdigest()[:24]
    file = cache_folder(config.cache) / f"tokens-{key}.npz"
    try:
        # report a bad folder now, and not after minutes of encoding
        storage.retry(lambda: file.parent.mkdir(parents=True, exist_ok=True), file.parent)
        return storage.retry(lambda: _load_tokens(file), file)
    except OSError as error:
        if not (isinstance(error, FileNotFoundError) or is_full(error)):
            raise _cannot_keep(file, error) from None
    except Exception as error:  # a flipped bit in a zip file can make its reader raise anything
        log.warning(
            "data.cache: %s is damaged (%s: %s); it is made anew", file, type(error).__name__, error
        )
    tokenizer = tokenizers.BPE.train(text[:cut], config.vocab_size or 0)
    state = np.frombuffer(json.dumps(tokenizer.state["tokenizer"]).encode(), np.uint8)
    arrays = {
        "train": tokenizer.encode_text(text[:cut]),
        "validation": tokenizer.encode_text(text[cut:]),
        "tokenizer": state,
    }
    _keep_arrays(file, arrays)
    return arrays["train"], arrays["validation"], tokenizer


def _keep_arrays(file: Path, arrays: dict[str, Any]) -> None:
    """Writes arrays to the cache; on a full disk it only warns."""
    try:
        with new_file(file) as stream:
            np.savez(stream, **arrays)
    except OSError as error:
        if not is_full(error):
            raise _cannot_keep(file, error) from None
        size = sum(array.nbytes for array in arrays.values())
        free = free_bytes(file.parent)
        needed = f"they need {size:,} bytes, {free:,} are free in {file.parent}"
        log.warning(
            "data.cache: tokens are not kept (%s): %s; "
            "the run goes on, the next start encodes again",
            error,
            needed,
        )


def _cannot_keep(file: Path, error: OSError) -> Exception:
    """The error for a folder of the cache that cannot be used."""
    refused = f"data.cache: cannot keep tokens in {file.parent} ({error.strerror}); choose another"
    return storage.mistake(error, refused)


def _load_tokens(file: Path) -> tuple[np.ndarray, np.ndarray, Any]:
    # np.load alone checks no CRC if a damaged header makes an array shorter
    with zipfile.ZipFile(file) as archive:
        if bad := archive.testzip():
            raise ValueError(f"the CRC of {bad} is wrong")
    with np.load(file) as saved:
        tokenizer = tokenizers.BPE(saved["tokenizer"].tobytes().decode())
        return saved["train"], saved["validation"], tokenizer


def _read_path(config: Text) -> tuple[str, bytes]:
    path = Path(config.path).expanduser()
    try:
        if not storage.is_dir(path):
            return str(path), _read_files([path])
        depth = None if "**" in config.pattern else config.pattern.count("/")
        paths = storage.find_files(lambda: path.glob(config.pattern), path, depth)
        names = [file.relative_to(path) for file in paths]
        if not (config.pattern.startswith(".") or "/." in config.pattern):
            names = [name for name in names if not _is_hidden(name)]
        files = sorted(name.as_posix() for name in names)
        if not files:
            raise ConfigError(
                f"data.path: no file in {path} matches data.pattern={config.pattern!r}"
            )
        return f"{path} ({len(files)} files)", _read_files([path / file for file in files])
    except FileNotFoundError:
        names = os.listdir(path.parent) if path.parent.is_dir() else []
        hint = (
            did_you_mean(repr(path.name), map(repr, names)) or "; give the file with --data.path=…"
        )
        hint += f"; get it from {config.origin}" if config.origin else ""
        raise ConfigError(
            f"data.path: there is no {config.path!r} (looked for {path.absolute()}){hint}"
        ) from None
    except OSError as error:
        raise storage.mistake(
            error, f"data.path: cannot read {error.filename or path} ({error.strerror})"
        ) from None


def _is_hidden(path: Path) -> bool:
    return any(name.startswith(".") for name in path.parts)


def _read_files(files: list[Path]) -> bytes:
    for file in files:
        regular_file(file)
        if file.suffix.lower() in (".gz", ".bz2", ".xz", ".zst", ".zip", ".lz4", ".7z", ".tgz"):
            raise ConfigError(
                f"data.path: {file} is compressed; "
                "unpack it, or read .txt.gz with data=Corpus(path=…)"
            )
    size = sum(storage.retry(file.stat, file).st_size for file in files)
    if size > LARGEST_TEXT:
        advice = "read it with data=Corpus(path=…), whose tokens stay on disk"
        raise ConfigError(
            f"data.path: {size:,} bytes; Text takes at most {LARGEST_TEXT:,} into memory; {advice}"
        )
    texts = [storage.retry(file.read_bytes, file) for file in files]
    for file, text in zip(files, texts, strict=True):
        if (foreign := foreign_text(text[:4096])) is not None:
            raise ConfigError(f"data.path: {file} is {foreign}; convert it to UTF-8")
    # the mark is not part of the text
    return b"".join(text.removeprefix(codecs.BOM_UTF8) for text in texts)


def _read_stdlib() -> tuple[str, bytes]:
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    # Tests and packages differ between machines; config-* and _sysconfigdata* have build paths.
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    for folder, folders, names in os.walk(root):
        folders[:] = [
            name for name in folders if name not in skip and not name.startswith("config-")
        ]
        sources = [
            name for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
        files += [(Path(folder) / name).relative_to(root).as_posix() for name in sources]
    if not files:
        raise ConfigError(
            f"data: there is no Python source in {root}; use a text file: Text(path=…)"
        )
    name = f"standard library of Python {sysconfig.get_python_version()} ({len(files)} files)"
    return name, b"".join((root / file).read_bytes() for file in sorted(files))
