"""A folder of Hugging Face weights, read and written one tensor at a time.

The `safetensors` package reads and checks the files, with pread: if a mapped file becomes shorter, the process dies (SIGBUS).
We write the files ourselves because the package needs all tensors of a file in memory.
"""

import json
import math
import os
import re
import reprlib
import shutil
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxformer.errors import ConfigError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
TEXT_LIMIT = 32_000_000  # bytes of JSON, for 200,000 tensors
AGAIN = "download or convert it again"

DTYPES: dict[str, np.dtype] = {code: np.dtype(scalar) for code, scalar in {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "C64": np.complex64,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}.items()}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}


class _Tensor(NamedTuple):
    """A tensor to write; `make` returns its array."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], Any]

    nbytes = property(lambda self: math.prod(self.shape) * self.dtype.itemsize)


Opened = dict[str, tuple[Path, Any]]  # the file of each tensor: its path, and the open and checked file


@dataclass(frozen=True)
class Files:
    """A folder of weights that passed all checks."""

    folder: Path
    config: dict[str, Any] = field(repr=False)  # config.json
    generation: dict[str, Any] = field(repr=False)  # generation_config.json; empty if missing
    names: dict[str, tuple[tuple[int, ...], str]] = field(repr=False)  # {tensor: (shape, NumPy dtype name)}
    _opened: Opened = field(repr=False)

    def read(self, name: str) -> np.ndarray:
        """Reads one tensor. Raises ConfigError for an unknown name, and for a file that has changed."""
        if name not in self._opened:
            raise ConfigError(f"{self.folder}: no tensor {_display(name)}; there are {list_names(self.names)}")
        path, file = self._opened[name]
        try:
            return file.get_tensor(name)
        except (OSError, SafetensorError, ValueError):  # ValueError: too few bytes for the shape
            raise ConfigError(f"{path}: cut short since it was opened, {_display(name)} is gone; {AGAIN}") from None


def open_checkpoint(path_or_name: str | Path, revision: str | None = None) -> Files:
    """Opens a local folder or a hub repository (`org/name`; `revision`: a branch, tag or commit) and reads all headers.

    A name is a path if it exists, is absolute, is a `Path` or starts with `.` or `~`. Raises ConfigError for pickled weights
    and for missing, damaged or contradictory files.
    """
    folder = Path(os.path.expanduser(path_or_name))
    local = isinstance(path_or_name, Path) or folder.is_absolute() or path_or_name.startswith((".", "~"))
    if not local and not os.path.exists(folder):
        folder = _download(str(path_or_name), revision)
    elif revision is not None:
        raise ConfigError(f"{folder}: a folder has no revision {revision!r}; leave it out, or give the name on the hub")
    try:
        listing = sorted(os.listdir(folder))
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = "it is a file" if os.path.isfile(folder) else getattr(error, "strerror", None) or error
        raise ConfigError(f"{folder}: not a folder of weights ({reason}); expected {SINGLE} and config.json") from None
    if "config.json" not in listing:
        raise ConfigError(f"{folder}: no config.json, which says what model it is; there are {list_names(listing)}")
    files = ("config.json", "generation_config.json")
    config, generation = (_read_json(folder / file) if file in listing else {} for file in files)
    if SINGLE in listing:
        opened = _open_file(folder / SINGLE)
    elif INDEX in listing:
        opened = _open_shards(folder, listing)
    elif pickles := [file for file in listing if file.endswith(PICKLES)]:
        raise ConfigError(
            f"{folder}: neither {SINGLE} nor {INDEX}, only pickled files ({list_names(pickles)}): loading a pickle runs"
            " whatever code it contains, so we do not; where you trust it, convert it with transformers' `save_pretrained`"
            " (before version 5 with safe_serialization=True), or on the hub with huggingface.co/spaces/safetensors/convert"
        )
    else:
        found = f"there are {list_names(listing)}; give the folder that `save_pretrained` wrote"
        raise ConfigError(f"{folder}: neither {SINGLE} nor {INDEX}; {found}")
    parts = {name: file.get_slice(name) for name, (_, file) in opened.items()}
    names = {name: (tuple(part.get_shape()), str(DTYPES[part.get_dtype()].name)) for name, part in parts.items()}
    return Files(folder, config, generation, names, opened)


def check_finite(name: str, array: np.ndarray) -> None:
    """Raises ConfigError if a value is NaN or infinite."""
    if bad := array.size - np.count_nonzero(np.isfinite(array)):
        problem = f"tensor {_display(name)}: {bad:,} of {array.size:,} values are NaN or infinite"
        raise ConfigError(f"{problem}: damaged weights, or a training that diverged; take another revision or checkpoint")


def save_checkpoint(
    folder: str | Path, config: dict[str, Any], tensors: Iterable[tuple[str, tuple[int, ...], Any, Callable[[], Any]]],
    shard_bytes: int = 5_000_000_000,
) -> None:  # fmt: skip
    """Writes a folder that `open_checkpoint` and transformers' `from_pretrained` open. It appears when it is complete.

    `tensors` holds (name, shape, dtype, function that returns the array): the host holds one array at a time. A file has at
    most `shard_bytes`, unless one tensor has more. Raises ConfigError for a `folder` that is not empty or cannot be written
    and for an unknown dtype. A killed save leaves `folder.unfinished`, which the next save removes.
    """
    folder = Path(os.path.realpath(os.path.expanduser(folder)))
    text = _dumps(config)
    items = [_Tensor(name, tuple(map(int, shape)), np.dtype(dtype), make) for name, shape, dtype, make in tensors]
    if len({item.name for item in items} | {"__metadata__"}) <= len(items):
        raise ValueError(f"{folder}: two tensors have one name, or one is called __metadata__")
    for item in items:
        if item.dtype not in CODES:
            raise ConfigError(f"{folder}: no dtype {item.dtype} for {item.name!r} in safetensors; cast to {', '.join(DTYPES)}")
    total = sum(item.nbytes for item in items)
    unfinished = folder.parent / f"{folder.name}.unfinished"
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder}: exists and is not an empty folder; choose another name, or remove it first")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        _write_shards(unfinished, items, shard_bytes)
        (unfinished / "config.json").write_text(text)
        unfinished.rename(folder)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, OSError):
            reason = f"not saved ({error.strerror or error}; it needs {total:,} bytes)"
            raise ConfigError(f"{folder}: {reason}; choose another folder, or make room") from error
        raise


def _download(name: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        raise ConfigError(f"{name}: no such folder, and the hub needs `pip install 'jaxformer[interop]'`") from None
    advice = {  # the first match counts: a GatedRepoError is also a RepositoryNotFoundError
        errors.GatedRepoError: "accept its terms on its page, then `hf auth login`",
        errors.RevisionNotFoundError: f"it has no revision {revision!r}",
        (errors.RepositoryNotFoundError, errors.HFValidationError): (
            "check the name, or start a path with ./; a private repository needs `hf auth login`"
        ),
        Exception: "check the network, or give a folder",
    }
    try:
        # subfolders and `consolidated` files hold copies of the weights for other programs
        patterns = {"allow_patterns": ["*.json", "*.safetensors"], "ignore_patterns": ["*/*", "consolidated*"]}
        return Path(snapshot_download(name, revision=revision, **patterns))
    except Exception as error:
        hint = next(text for kind, text in advice.items() if isinstance(error, kind))
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:300]}"
        raise ConfigError(f"{name}: no such folder here, and the hub does not give it ({reason}); {hint}") from error


def _open_shards(folder: Path, listing: list[str]) -> Opened:
    """The tensors of all files of an index. Files and index must agree."""
    index = folder / INDEX
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index}: no weight_map that names the file of each tensor; {AGAIN}")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not re.fullmatch(r"[^/\\:\0]+\.safetensors", file):
            expected = "expected a .safetensors file in this folder; do not trust it"
            raise ConfigError(f"{index}: {_display(name)} is to be in {_display(file)}; {expected}")
    files = sorted(set(weight_map.values()))
    if missing := [file for file in files if file not in listing]:
        raise ConfigError(f"{index}: {len(missing)} of {len(files)} files are missing: {list_names(missing)}; download them")
    opened: Opened = {}
    for file in files:
        tensors = _open_file(folder / file)
        expected = {name for name in weight_map if weight_map[name] == file}
        if missing := sorted(expected - tensors.keys()):
            raise ConfigError(f"{folder / file}: lacks {list_names(missing)}, which {INDEX} says is there; {AGAIN}")
        if extra := sorted(tensors.keys() - expected):
            raise ConfigError(f"{folder / file}: has {list_names(extra)}, which {INDEX} does not list there; {AGAIN}")
        opened |= tensors
    return opened


def _open_file(path: Path) -> Opened:
    """The tensors of one file. The package reads its header and checks that the tensors fill the file."""
    first, size = _read_bytes(path, 8)
    if first == b"version ":
        raise ConfigError(f"{path}: a Git LFS pointer instead of the weights; run `git lfs pull` in its folder")
    try:
        file = safe_open(path, "np", backend="pread")
    except SafetensorError as error:
        reason = _display(str(error).removeprefix("Error while deserializing header: "))
        raise ConfigError(f"{path}: damaged or cut short, has {size:,} bytes ({reason}); {AGAIN}") from None
    for name in file.keys():  # noqa: SIM118  (no mapping)
        if (dtype := file.get_slice(name).get_dtype()) not in DTYPES:
            raise ConfigError(f"{path}: {_display(name)} has the dtype {dtype}; we read {', '.join(DTYPES)}")
    return dict.fromkeys(file.keys(), (path, file))


def _read_bytes(path: Path, most: int) -> tuple[bytes, int]:
    """The first bytes of a file, at most so many, and its size. Raises ConfigError if it is not a readable file."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # before opening: a pipe would wait for a writer
            raise ConfigError(f"{path}: not a file; expected one that `save_pretrained` wrote")
        with path.open("rb") as stream:
            text, size = stream.read(most), os.fstat(stream.fileno()).st_size
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    if not size:
        raise ConfigError(f"{path}: empty; {AGAIN}")
    return text, size


def _read_json(path: Path) -> dict[str, Any]:
    text, size = _read_bytes(path, TEXT_LIMIT)
    if size > TEXT_LIMIT:
        raise ConfigError(f"{path}: has {size:,} bytes; expected JSON of at most {TEXT_LIMIT:,}")
    try:
        value = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: its JSON cannot be read ({error}); {AGAIN}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object {{...}}, got {_display(value)}; {AGAIN}")
    return value


def _dumps(value: Any) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def _write_shards(folder: Path, tensors: list[_Tensor], limit: int) -> None:
    """One file, or several of at most `limit` bytes and their index."""
    shards, room = [[]], limit
    for tensor in tensors:
        if tensor.nbytes > room and shards[-1]:
            shards.append([])
            room = limit
        shards[-1].append(tensor)
        room -= tensor.nbytes
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        weight_map |= dict.fromkeys((tensor.name for tensor in shard), file)
        _write_file(folder / file, shard)
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors)
        (folder / INDEX).write_text(_dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))


def _write_file(path: Path, tensors: list[_Tensor]) -> None:
    tensors = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)  # each starts at a multiple of its width
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # without it transformers refuses the file
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        header[tensor.name] = {"dtype": CODES[tensor.dtype], "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, shape, dtype, make in tensors:
            array = np.asarray(make())
            if array.shape != shape or array.dtype != dtype:
                raise ValueError(f"{name}: declared as {dtype}{list(shape)}, made as {array.dtype}{list(array.shape)}")
            stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            del array  # before the next one is made
        stream.flush()
        os.fsync(stream.fileno())  # on disk before the rename


_short = reprlib.Repr()
_short.maxstring, _short.maxlist = 120, 10
_display = _short.repr  # a short printable form of a value from a file, which may be long or hold any character


def list_names(names: Iterable[str], show: Callable = _display) -> str:
    """The first names, and how many more there are."""
    names = list(names)
    rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (", ".join(map(show, names[:5])) or "no others") + rest
