"""A folder of Hugging Face weights: opened with suspicion, read and written one tensor at a time. Knows no models.

A safetensors file is the header's length (8 bytes, little-endian), the header (JSON: each tensor's dtype, shape and the
range of its bytes) and the bytes, which the tensors cover without gap or overlap. It holds no code, a pickle does.

We parse it ourselves. The `safetensors` package maps the file into memory, where one cut short under a reader kills the
process (SIGBUS), and takes a key that appears twice; through NumPy it has no 8-bit floats. The tests hold us to it.
"""

import contextlib
import fnmatch
import io
import itertools
import json
import math
import os
import re
import reprlib
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import ml_dtypes
import numpy as np

from jaxformer.errors import ConfigError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
TEXT_LIMIT = (
    32_000_000  # bytes of JSON that we parse: some 200,000 tensors a file. The format allows 100 MB, which cost 1.4 GB
)
SLAB = 1 << 22  # bytes that are copied at once

_TYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "C64": np.complex64,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
DTYPES: dict[str, np.dtype] = {code: np.dtype(scalar) for code, scalar in _TYPES.items()}
CODES = {dtype: code for code, dtype in DTYPES.items()}


class _Place(NamedTuple):
    """Where a tensor's bytes are."""

    path: Path
    start: int
    shape: tuple[int, ...]
    dtype: np.dtype


@dataclass(frozen=True)
class Files:
    """A folder whose headers were found good: its config.json, its generation_config.json (empty where there is none) and,
    by name, each tensor's (shape, NumPy dtype name)."""

    folder: Path
    config: dict[str, Any] = field(repr=False)
    generation: dict[str, Any] = field(repr=False)
    names: dict[str, tuple[tuple[int, ...], str]] = field(repr=False)
    _places: dict[str, _Place] = field(repr=False)

    def read(self, name: str) -> np.ndarray:
        """One tensor, fresh from the file. Raises ConfigError where there is none, or the file has changed."""
        if name not in self._places:
            raise ConfigError(f"{self.folder}: no tensor {_shown(name)}; there are {_some(self.names)}")
        path, start, shape, dtype = self._places[name]
        with _reading(path) as (stream, _):
            try:
                array = np.empty(shape, dtype)
            except MemoryError:
                size = math.prod(shape) * dtype.itemsize
                raise ConfigError(f"{path}: no memory for {_shown(name)}, which has {size:,} bytes") from None
            octets = array.reshape(-1).view(np.uint8)
            stream.seek(start)
            if stream.readinto(octets.data) < octets.size:
                raise ConfigError(f"{path}: cut short since it was opened, {_shown(name)} is gone; {_AGAIN}")
        if dtype == np.bool_ and octets.max(initial=0) > 1:
            raise ConfigError(f"{path}: {_shown(name)} holds bytes that are neither true (1) nor false (0); {_AGAIN}")
        return array


def open_checkpoint(path_or_name: str | Path, revision: str | None = None) -> Files:
    """A local folder, or the name of a repository on the Hugging Face hub (`org/name`, at a branch, tag or commit).

    Reads config.json and the headers of model.safetensors, or of the shards that model.safetensors.index.json names;
    the weights come with `read`. Pickled weights are refused. A path is what exists, is absolute, is a `Path` or starts
    with `.` or `~`. Raises ConfigError for whatever is missing, damaged or does not agree with the rest.
    """
    folder = Path(os.path.expanduser(path_or_name))
    local = isinstance(path_or_name, Path) or folder.is_absolute() or path_or_name.startswith((".", "~"))
    if not local and not os.path.exists(folder):
        folder = _download(str(path_or_name), revision)
    elif revision is not None:
        raise ConfigError(f"{folder}: a folder has no revision {revision!r}; leave it out, or give the name on the hub")
    try:
        there = sorted(os.listdir(folder))
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        why = "it is a file" if os.path.isfile(folder) else getattr(error, "strerror", None) or error
        raise ConfigError(f"{folder}: not a folder of weights ({why}); expected {SINGLE} and config.json") from None
    if "config.json" not in there:
        raise ConfigError(f"{folder}: no config.json, which says what model it is; there are {_some(there)}")
    config = _parse(_text(folder / "config.json"), folder / "config.json", dict)
    generation = folder / "generation_config.json"
    generation = _parse(_text(generation), generation, dict) if generation.name in there else {}
    places = _places(folder, there)
    names = {name: (place.shape, str(place.dtype.name)) for name, place in places.items()}
    return Files(folder, config, generation, names, places)


def check_finite(name: str, array: np.ndarray) -> None:
    """Raises ConfigError if a value is NaN or infinite. One pass, a few megabytes beside the array."""
    if array.dtype.kind in "biu":
        return
    bad = array.size - sum(np.count_nonzero(np.isfinite(slab)) for slab in _slabs(array))
    if bad:
        raise ConfigError(
            f"tensor {_shown(name)}: {bad:,} of {array.size:,} values are NaN or infinite; the weights are damaged, or"
            " are those of a training that diverged: take another revision or checkpoint"
        )


def save_checkpoint(
    folder: str | Path,
    config: dict[str, Any],
    tensors: Iterable[tuple[str, tuple[int, ...], Any, Callable[[], Any]]],
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes what `open_checkpoint` and transformers' `from_pretrained` open; `folder` appears once it is whole.

    `tensors` has (name, shape, NumPy dtype, function that gives the array). The functions are called one by one while
    writing, so the host holds one array at a time. Above `shard_bytes` the weights are split into several files; a
    tensor is never split. Raises ConfigError where `folder` exists and is not empty, where it cannot be written and for
    a dtype that the format lacks; TypeError for a config that is not JSON; ValueError where an array is not as declared
    or two tensors have one name. A killed save leaves `folder.unfinished`, which the next one removes.
    """
    folder = Path(os.path.realpath(os.path.expanduser(folder)))
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    tensors = [(name, tuple(map(int, shape)), np.dtype(dtype), make) for name, shape, dtype, make in tensors]
    if len({name for name, *_ in tensors} | {"__metadata__"}) <= len(tensors):
        raise ValueError(f"{folder}: two tensors have one name, or one is called __metadata__")
    for name, _, dtype, _ in tensors:
        if dtype not in CODES:
            raise ConfigError(f"{folder}: safetensors has no dtype {dtype} for {name!r}; cast it to one of {_known()}")
    shards = _shards(tensors, shard_bytes)
    total = sum(map(_size, tensors))
    unfinished = folder.parent / f"{folder.name}.unfinished"
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder}: exists and is not an empty folder; choose another name, or remove it first")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        weight_map = {}
        for number, shard in enumerate(shards, 1):
            file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            weight_map |= dict.fromkeys((name for name, *_ in shard), file)
            _write(unfinished / file, shard)
        if len(shards) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (unfinished / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        (unfinished / "config.json").write_text(text)
        unfinished.rename(folder)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, OSError):
            why = f"{error.strerror or error}; it needs {total:,} bytes"
            raise ConfigError(f"{folder}: not saved ({why}); choose another folder, or make room") from error
        raise


# Opening

_AGAIN = "download or convert it again"


def _download(name: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        raise ConfigError(
            f"{name}: there is no such folder, and the hub needs `pip install 'jaxformer[interop]'`"
        ) from None
    try:
        # the same weights may lie there again, as `consolidated` or converted for other programs in subfolders
        wanted = {"allow_patterns": ["*.json", "*.safetensors"], "ignore_patterns": ["*/*", "consolidated*"]}
        return Path(snapshot_download(name, revision=revision, **wanted))
    except Exception as error:
        if isinstance(error, errors.GatedRepoError):
            advice = "accept its terms on its page, then `hf auth login`"
        elif isinstance(error, errors.RevisionNotFoundError):
            advice = f"it has no revision {revision!r}"
        elif isinstance(error, (errors.RepositoryNotFoundError, errors.HFValidationError)):
            advice = "check the name, or start a path with ./; a private repository needs `hf auth login`"
        else:
            advice = "check the network, or give a folder"
        why = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:300]}"
        raise ConfigError(f"{name}: no such folder here, and the hub does not give it ({why}); {advice}") from error


def _places(folder: Path, there: list[str]) -> dict[str, _Place]:
    """Every tensor of a folder, from one file or from the shards of an index."""
    if SINGLE in there:
        return _header(folder / SINGLE)
    if INDEX not in there:
        found = f"{folder}: neither {SINGLE} nor {INDEX}"
        if pickles := [file for file in there if any(fnmatch.fnmatch(file, pattern) for pattern in PICKLES)]:
            raise ConfigError(
                f"{found}, only pickled files ({_some(pickles)}): loading a pickle runs whatever code it contains, so"
                " we do not; where you trust it, convert it with transformers' `save_pretrained` (before version 5 with"
                " safe_serialization=True), or on the hub with huggingface.co/spaces/safetensors/convert"
            )
        raise ConfigError(f"{found}; there are {_some(there)}; give the folder that `save_pretrained` wrote")
    index = folder / INDEX
    weight_map = _parse(_text(index), index, _unique).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index}: no weight_map that names the file of each tensor; {_AGAIN}")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not re.fullmatch(r"[^/\\:\0]+\.safetensors", file):
            raise ConfigError(
                f"{index}: {_shown(name)} is to be in {_shown(file)}; expected a .safetensors file in this folder;"
                " do not trust it"
            )
    files = sorted(set(weight_map.values()))
    if missing := [file for file in files if file not in there]:
        raise ConfigError(f"{index}: {len(missing)} of {len(files)} files are missing: {_some(missing)}; download them")
    places = {}
    for file in files:
        for name, place in _header(folder / file).items():
            if name in places:
                raise ConfigError(f"{folder / file}: {_shown(name)} is in {places[name].path.name} too; {_AGAIN}")
            places[name] = place
    for name, place in places.items():
        if name not in weight_map:
            raise ConfigError(f"{place.path}: has {_shown(name)}, which {INDEX} does not list; {_AGAIN}")
    for name, file in weight_map.items():
        if name not in places or places[name].path.name != file:
            raise ConfigError(f"{folder / file}: lacks {_shown(name)}, which {INDEX} says is there; {_AGAIN}")
    return places


def _header(path: Path) -> dict[str, _Place]:
    """The tensors of one file, in the order of their bytes. Allocates nothing for a header that cannot be."""
    with _reading(path) as (stream, size):
        first = stream.read(8)
        length = int.from_bytes(first, "little")
        if first == b"version ":
            raise ConfigError(f"{path}: a Git LFS pointer instead of the weights; run `git lfs pull` in its folder")
        if length > TEXT_LIMIT:
            raise ConfigError(
                f"{path}: its header is to have {length:,} bytes, more than {TEXT_LIMIT:,}; no safetensors file, or damaged"
            )
        if len(first) < 8 or 8 + length > size:
            raise ConfigError(f"{path}: cut short, has {size:,} bytes and a header of {8 + length:,}; {_AGAIN}")
        tensors = _parse(stream.read(length), path, _unique)
    metadata = tensors.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ConfigError(f"{path}: __metadata__ is to map text to text; {_AGAIN}")
    ranges = [(*_range(path, name, entry), name) for name, entry in tensors.items()]
    places, covered = {}, 0
    for start, end, name in sorted(ranges):
        if start != covered:
            wrong = "overlaps the tensor before" if start < covered else f"leaves {start - covered:,} bytes unused"
            raise ConfigError(f"{path}: {_shown(name)} starts at byte {start:,} and {wrong}; {_AGAIN}")
        covered = end
        entry = tensors[name]
        places[name] = _Place(path, 8 + length + start, tuple(entry["shape"]), DTYPES[entry["dtype"]])
    if 8 + length + covered != size:
        wrong = "cut short" if 8 + length + covered > size else "too long"
        raise ConfigError(f"{path}: {wrong}, has {size:,} bytes instead of {8 + length + covered:,}; {_AGAIN}")
    return places


def _range(path: Path, name: str, entry: Any) -> tuple[int, int]:
    """The bytes of one tensor, once its dtype, shape and size agree."""
    where = f"{path}: {_shown(name)}"
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ConfigError(f"{where} has the dtype {_shown(dtype)}; we read {_known()}")
    if not _whole_numbers(shape) or len(shape) > 64:  # NumPy has at most 64 axes
        raise ConfigError(f"{where} has the shape {_shown(shape)}; expected up to 64 whole numbers; {_AGAIN}")
    size = math.prod(shape) * DTYPES[dtype].itemsize
    if math.prod(axis or 1 for axis in shape) * DTYPES[dtype].itemsize >= 2**63:
        raise ConfigError(f"{where} has the shape {_shown(shape)}, more than a computer can address; {_AGAIN}")
    if not _whole_numbers(offsets) or len(offsets) != 2 or offsets[1] - offsets[0] != size:
        raise ConfigError(
            f"{where}, {dtype} {_shown(shape)}, has {size:,} bytes, not those of {_shown(offsets)}; {_AGAIN}"
        )
    return offsets[0], offsets[1]


def _whole_numbers(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(number) is int and 0 <= number < 2**63 for number in value)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[tuple[io.BufferedReader, int]]:
    """The open file and its size. Raises ConfigError for what is no file or cannot be read."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # before opening: a pipe would wait for a writer
            raise ConfigError(f"{path}: not a file; expected one that `save_pretrained` wrote")
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if not size:
                raise ConfigError(f"{path}: empty; {_AGAIN}")
            yield stream, size
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None


def _text(path: Path) -> bytes:
    with _reading(path) as (stream, size):
        if size > TEXT_LIMIT:
            raise ConfigError(f"{path}: has {size:,} bytes; expected JSON of at most {TEXT_LIMIT:,}")
        return stream.read(size)


def _parse(text: bytes, path: Path, pairs: Callable) -> dict[str, Any]:
    """A JSON object; `pairs` makes a dict of its pairs."""
    try:
        value = json.loads(text.decode(), object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: its JSON cannot be read ({error}); {_AGAIN}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object {{...}}, got {_shown(value)}; {_AGAIN}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Two readers may take different ones of two equal keys, so there must not be two."""
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = sorted(key for key, _ in pairs)
        twice = next(key for key, following in itertools.pairwise(keys) if key == following)
        raise ValueError(f"the key {_shown(twice)} appears twice")
    "".join(value).encode()  # half of a surrogate pair is no text: ValueError
    return value


# Writing


def _size(tensor: tuple) -> int:
    return math.prod(tensor[1]) * tensor[2].itemsize


def _shards(tensors: list[tuple], limit: int) -> list[list[tuple]]:
    """Tensors in their order, a new shard where one would pass the limit; at least one shard."""
    shards, room = [[]], limit
    for tensor in tensors:
        if _size(tensor) > room and shards[-1]:
            shards.append([])
            room = limit
        shards[-1].append(tensor)
        room -= _size(tensor)
    return shards


def _write(path: Path, tensors: list[tuple]) -> None:
    tensors = sorted(tensors, key=lambda tensor: -tensor[2].itemsize)  # so that each starts at a multiple of its width
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # without it transformers refuses the file
    end = 0
    for tensor in tensors:
        name, shape, dtype, _ = tensor
        header[name] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": [end, end := end + _size(tensor)]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, shape, dtype, make in tensors:
            array = np.asarray(make())
            if array.shape != shape or array.dtype != dtype:
                raise ValueError(f"{name}: declared as {dtype}{list(shape)}, made as {array.dtype}{list(array.shape)}")
            for slab in _slabs(array):
                stream.write(slab.reshape(-1).view(np.uint8).data)
            del array  # before the next is made
        stream.flush()
        os.fsync(stream.fileno())  # on the disk before the rename is


def _slabs(array: np.ndarray) -> Iterator[np.ndarray]:
    """The array in contiguous pieces of its first axis, so that a transposed view needs no second array."""
    array = np.atleast_1d(array)
    rows = max(1, SLAB // max(1, array[:1].nbytes))
    for start in range(0, len(array), rows):
        yield np.ascontiguousarray(array[start : start + rows])


_short = reprlib.Repr()
_short.maxstring, _short.maxlist = 120, 10


def _known() -> str:
    return ", ".join(DTYPES)


def _shown(value: Any) -> str:
    """A value out of a file, which may be long or hold any character, in a few printable ones."""
    return _short.repr(value)


def _some(names: Iterable[str]) -> str:
    names = list(names)
    rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (", ".join(map(_shown, names[:5])) or "no others") + rest
