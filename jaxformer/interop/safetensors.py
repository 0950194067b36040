"""A folder of Hugging Face weights, read one tensor at a time and written one file at a time by the `safetensors` package."""

import json
import logging
import math
import os
import reprlib
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxformer.config import read_json, regular_file
from jaxformer.errors import ConfigError

log = logging.getLogger("jaxformer")

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
ADAPTER = "adapter_config.json"
AGAIN = "download or convert it again"

DTYPES: dict[str, np.dtype] = {code: np.dtype(scalar) for code, scalar in {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "C64": np.complex64,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}.items()}  # fmt: skip
_short = reprlib.Repr()
_short.maxstring, _short.maxlist = 120, 10
_display = _short.repr  # a short printable form of a value from a file, which may be long or hold any character


@dataclass(frozen=True)
class Files:
    """A folder of weights that passed all checks."""

    folder: Path
    config: dict[str, Any] = field(repr=False)  # config.json
    generation: dict[str, Any] = field(repr=False)  # generation_config.json; empty if missing
    names: dict[str, tuple[tuple[int, ...], str]] = field(repr=False)  # {tensor: (shape, NumPy dtype name)}
    _opened: dict[str, Any] = field(repr=False)  # the open file of each tensor

    def read(self, name: str) -> np.ndarray:
        """Reads one tensor."""
        return self._opened[name].get_tensor(name)


def open_checkpoint(path_or_name: str | Path, revision: str | None = None) -> Files:
    """Opens a local folder or a hub repository (`org/name`; `revision`: a branch, tag or commit) and reads all headers.

    A path exists, is absolute, is a `Path`, or starts with `.` or `~`. ConfigError for pickles, missing or damaged files.
    """
    folder = Path(os.path.expanduser(path_or_name))
    local = isinstance(path_or_name, Path) or folder.is_absolute() or path_or_name.startswith((".", "~"))
    if not local and not os.path.exists(folder):
        folder = _download(str(path_or_name), revision)
    elif revision is not None:
        raise ConfigError(f"{folder}: a folder has no revision {revision!r}; leave it out, or give the name on the hub")
    try:
        listing = sorted(os.listdir(folder))
    except OSError as error:
        raise ConfigError(f"{folder}: not a folder of weights ({error.strerror}); expected {SINGLE} and config.json") from None
    if ADAPTER in listing and not {SINGLE, INDEX}.intersection(listing):
        base = read_json(folder / ADAPTER, AGAIN).get("base_model_name_or_path")
        advice = "merge it there (PEFT's `merge_and_unload`), and save the model"
        raise ConfigError(f"{folder}: an adapter of PEFT for {_display(base)}, no model of its own; {advice}")
    config = read_json(folder / "config.json", AGAIN)
    if ADAPTER in listing:
        effect = "the model is read without it; transformers with PEFT would add it"
        log.warning("%s: has an adapter beside the model (%s); %s", folder, ADAPTER, effect)
    generation = read_json(folder / GENERATION, AGAIN) if GENERATION in listing else {}
    if SINGLE in listing:
        if INDEX in listing:
            log.warning("%s: has %s and %s; the first is read, as transformers does", folder, SINGLE, INDEX)
        opened = _open_file(folder / SINGLE)
    elif INDEX in listing:
        opened = _open_shards(folder / INDEX, listing)
    elif pickles := [file for file in listing if file.endswith((".bin", ".pt", ".pth", ".pkl", ".ckpt"))]:
        raise ConfigError(
            f"{folder}: neither {SINGLE} nor {INDEX}, only pickled files ({list_names(pickles)}): loading a pickle runs"
            " whatever code it contains, so we do not; where you trust it, convert it with transformers' `save_pretrained`"
            " (before version 5 with safe_serialization=True), or on the hub with huggingface.co/spaces/safetensors/convert"
        )
    else:
        advice = f"there are {list_names(listing)}; give the folder that `save_pretrained` wrote"
        raise ConfigError(f"{folder}: neither {SINGLE} nor {INDEX}; {advice}")
    parts = {name: file.get_slice(name) for name, file in opened.items()}
    names = {name: (tuple(part.get_shape()), str(DTYPES[part.get_dtype()].name)) for name, part in parts.items()}
    return Files(folder, config, generation, names, opened)


def check_finite(name: str, array: np.ndarray) -> None:
    """Raises ConfigError if a value is NaN or infinite."""
    if bad := array.size - np.count_nonzero(np.isfinite(array)):
        problem = f"tensor {_display(name)}: {bad:,} of {array.size:,} values are NaN or infinite"
        raise ConfigError(f"{problem}: damaged weights, or a training that diverged; take another revision or checkpoint")


def save_checkpoint(
    folder: str | Path, config: dict[str, Any], tensors: Iterable[tuple[str, tuple[int, ...], Any, Callable[[], Any]]],
    shard_bytes: int = 2_000_000_000, files: Mapping[str, bytes] | None = None,
) -> None:  # fmt: skip
    """Writes a folder that `open_checkpoint` and transformers' `from_pretrained` open. It appears when it is complete.

    `tensors` holds (name, shape, dtype, function that returns the array): the host holds the arrays of one file at a time. A
    file has at most `shard_bytes`, unless one tensor has more. `files` are others, by name. Raises ConfigError for a `folder`
    that is not empty or cannot be written and for an unknown dtype. A killed save leaves `folder.unfinished`, which the next
    save removes.
    """
    folder = Path(os.path.realpath(os.path.expanduser(folder)))
    unfinished = folder.parent / f"{folder.name}.unfinished"
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder}: exists and is not an empty folder; choose another name, or remove it first")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        _write_shards(unfinished, tensors, shard_bytes)
        (unfinished / "config.json").write_text(dumps(config))
        for name, contents in (files or {}).items():
            (unfinished / name).write_bytes(contents)
        unfinished.rename(folder)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{folder}: not saved ({error}); choose another folder, or make room") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _download(name: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ConfigError(f"{name}: no such folder, and the hub needs `pip install 'jaxformer[interop]'`") from None
    # subfolders and `consolidated` files hold copies of the weights for other programs
    patterns = {"allow_patterns": ["*.json", "*.safetensors"], "ignore_patterns": ["*/*", "consolidated*"]}
    try:
        return Path(snapshot_download(name, revision=revision, **patterns))
    except Exception as error:
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:300]}"
        advice = "check name, revision and network, start a path with ./; a gated or private repository needs `hf auth login`"
        raise ConfigError(f"{name}: no such folder here, and the hub does not give it ({reason}); {advice}") from error


def _open_shards(index: Path, listing: list[str]) -> dict[str, Any]:
    """{tensor: open file} of all files of an index."""
    weight_map = read_json(index, AGAIN).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index}: no weight_map that names the file of each tensor; {AGAIN}")
    files = sorted(set(map(str, weight_map.values())))
    if missing := [file for file in files if file not in listing]:
        raise ConfigError(f"{index}: {len(missing)} of {len(files)} files are missing: {list_names(missing)}; download them")
    opened: dict[str, Any] = {}
    for file in files:
        tensors = _open_file(index.parent / file)
        # if two files have a tensor, the index says which one counts
        here = {name: handle for name, handle in tensors.items() if weight_map.get(name, file) == file}
        if twice := sorted(name for name in here if name in opened):
            raise ConfigError(f"{index}: two files have {list_names(twice)}, and it does not say which counts; {AGAIN}")
        opened |= here
    if missing := sorted(weight_map.keys() - opened.keys()):
        raise ConfigError(f"{index}: lists {list_names(missing)}, which no file has; {AGAIN}")
    return opened


def _open_file(path: Path) -> dict[str, Any]:
    """{tensor: open file} of one file. The package reads its header and checks that the tensors fill the file."""
    try:
        regular_file(path).open("rb").close()  # the package calls a file without read permission a missing one
        file = safe_open(path, "np", backend="pread")  # if a mapped file becomes shorter, the process dies (SIGBUS)
    except (OSError, SafetensorError) as error:
        reason = _display(str(error).removeprefix("Error while deserializing header: "))
        raise ConfigError(f"{path}: cannot be read, damaged or cut short ({reason}); {AGAIN}") from None
    for name in file.keys():  # noqa: SIM118  (no mapping)
        if (dtype := file.get_slice(name).get_dtype()) not in DTYPES:
            raise ConfigError(f"{path}: {_display(name)} has the dtype {dtype}; we read {', '.join(DTYPES)}")
    return dict.fromkeys(file.keys(), file)


def dumps(value: Any) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def _write_shards(folder: Path, tensors: Iterable[tuple], limit: int) -> None:
    """One file, or several of at most `limit` bytes and their index."""
    shards, room, total = [{}], limit, 0
    for name, shape, dtype, make in tensors:
        if any(name in shard for shard in shards):
            raise ValueError(f"{folder}: two tensors are called {name}")
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if size > room and shards[-1]:
            shards.append({})
            room = limit
        shards[-1][name] = make
        room -= size
        total += size
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        weight_map |= dict.fromkeys(shard, file)
        _write_file(folder / file, shard)
    if len(shards) > 1:
        (folder / INDEX).write_text(dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))


def _write_file(path: Path, tensors: dict[str, Callable[[], Any]]) -> None:  # its arrays are gone before the next file's
    arrays = {name: np.asarray(make(), order="C") for name, make in tensors.items()}  # the package writes memory as it is
    save_file(arrays, path, {"format": "pt"})  # without the format transformers refuses the file
    with path.open("rb") as file:
        os.fsync(file.fileno())  # on disk before the rename


def list_names(names: Iterable[str], show: Callable = _display) -> str:
    """The first names, and how many more there are."""
    names = list(names)
    rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (", ".join(map(show, names[:5])) or "no others") + rest
