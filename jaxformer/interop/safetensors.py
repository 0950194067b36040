"""A folder of Hugging Face weights, read and written by the `safetensors` package.

`open_checkpoint` checks a folder and reads one tensor at a time. `save_checkpoint` writes one file
at a time.
"""

import contextlib
import json
import logging
import math
import os
import re
import reprlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxformer.config import read_json, regular_file
from jaxformer.errors import ConfigError, install_command

log = logging.getLogger("jaxformer")

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
VARIANT = re.compile(r"model\.\w+\.safetensors")  # such as model.fp16.safetensors
HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.weight$")
GENERATION = "generation_config.json"
ADAPTER = "adapter_config.json"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
AGAIN = "download or convert it again"
# numbers that are checked at a time: their flags would be a quarter or a half of a large tensor
PIECE = 1 << 24

DTYPES: dict[str, np.dtype] = {
    code: np.dtype(scalar)
    for code, scalar in {
        "F64": np.float64,
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
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
    }.items()
}
# A value from a file may be long and may hold any character. Messages show a short printable form.
_short = reprlib.Repr()
_short.maxstring, _short.maxlist = 120, 10
_display = _short.repr


@dataclass(frozen=True)
class Files:
    """A folder of weights that passed all checks."""

    folder: Path
    config: dict[str, Any] = field(repr=False)  # config.json
    generation: dict[str, Any] = field(repr=False)  # generation_config.json; empty if missing
    # {tensor: (shape, NumPy dtype name)}
    names: dict[str, tuple[tuple[int, ...], str]] = field(repr=False)
    opened: dict[str, Any] = field(repr=False)  # the open file of each tensor

    def read(self, name: str) -> np.ndarray:
        """Reads one tensor."""
        return self.opened[name].get_tensor(name)


def open_checkpoint(path_or_name: str | Path, revision: str | None = None) -> Files:
    """Opens a local folder or a hub repository `org/name`, and reads the headers of all its files.

    An argument that exists, is absolute, is a `Path`, or starts with `.` or `~` is a path. Any
    other one is the name of a repository; `revision` is its branch, tag or commit. Raises
    ConfigError for pickles and for missing or damaged files.
    """
    folder = _find(path_or_name, revision)
    try:
        listing = sorted(os.listdir(folder))
    except OSError as error:
        raise ConfigError(
            f"{folder}: not a folder of weights ({error.strerror}); "
            f"expected {SINGLE} and config.json"
        ) from None
    if ADAPTER in listing and not {SINGLE, INDEX}.intersection(listing):
        base = read_json(folder / ADAPTER, AGAIN).get("base_model_name_or_path")
        advice = "load that model, and give both to families.peft.load"
        raise ConfigError(
            f"{folder}: an adapter of PEFT for {_display(base)}, no model of its own; {advice}"
        )
    config = read_json(folder / "config.json", AGAIN)
    if ADAPTER in listing:
        effect = "the model is read without it; families.peft.load adds it"
        log.warning("%s: has an adapter beside the model (%s); %s", folder, ADAPTER, effect)
    generation = read_json(folder / GENERATION, AGAIN) if GENERATION in listing else {}
    opened = _open_weights(folder, listing)
    names = {}
    for name, file in opened.items():
        header = file.get_slice(name)
        names[name] = (tuple(header.get_shape()), str(DTYPES[header.get_dtype()].name))
    return Files(folder, config, generation, names, opened)


def check_finite(name: str, array: np.ndarray) -> None:
    """Raises ConfigError if a value is NaN or infinite."""
    numbers = array.reshape(-1)
    pieces = (numbers[first : first + PIECE] for first in range(0, array.size, PIECE))
    if bad := array.size - sum(np.count_nonzero(np.isfinite(piece)) for piece in pieces):
        problem = f"tensor {_display(name)}: {bad:,} of {array.size:,} values are NaN or infinite"
        raise ConfigError(
            f"{problem}: damaged weights, or a training that diverged; "
            "take another revision or checkpoint"
        )


def save_checkpoint(
    folder: str | Path,
    config: dict[str, Any],
    tensors: Iterable[tuple[str, tuple[int, ...], Any, Callable[[], Any]]],
    shard_bytes: int = 2_000_000_000,
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Writes a folder that `open_checkpoint` and transformers' `from_pretrained` can open.

    The folder appears under its name only when it is complete. `tensors` holds (name, shape, dtype,
    function that returns the array); the host holds the arrays of one file at a time. A file has at
    most `shard_bytes`, except where a single tensor has more. `files` are further files, {name:
    contents}. Raises ConfigError for a `folder` that is not empty or cannot be written, and for an
    unknown dtype. A save that was killed leaves `folder.unfinished`; the next save removes it.
    """
    with new_folder(folder) as unfinished:
        _write_shards(unfinished, tensors, shard_bytes)
        (unfinished / "config.json").write_text(dumps(config))
        for name, contents in (files or {}).items():
            (unfinished / name).write_bytes(contents)


@contextlib.contextmanager
def new_folder(folder: str | Path) -> Iterator[Path]:
    """A context that yields an empty folder, and gives it the name `folder` when it ends.

    Raises ConfigError for a `folder` that is not empty or cannot be written. A process that is
    killed inside leaves `folder.unfinished`; the next one removes it.
    """
    folder = Path(os.path.realpath(os.path.expanduser(folder)))
    unfinished = folder.parent / f"{folder.name}.unfinished"
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(
                f"{folder}: exists and is not an empty folder; "
                "choose another name, or remove it first"
            )
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        unfinished.rename(folder)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{folder}: not saved ({error}); choose another folder, or make room"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _find(path_or_name: str | Path, revision: str | None) -> Path:
    """The folder of a path or of a repository of the hub, which is downloaded."""
    folder = Path(os.path.expanduser(path_or_name))
    local = (
        isinstance(path_or_name, Path)
        or folder.is_absolute()
        or path_or_name.startswith((".", "~"))
    )
    if not local and not os.path.exists(folder):
        return _download(path_or_name, revision)
    if revision is not None:
        raise ConfigError(
            f"{folder}: a folder has no revision {revision!r}; "
            "leave it out, or give the name on the hub"
        )
    return folder


def _download(name: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ConfigError(
            f"{name}: no such folder, and the hub needs `{install_command('interop')}`"
        ) from None
    # subfolders and `consolidated` files hold copies of the weights for other programs
    patterns = {
        "allow_patterns": ["*.json", "*.safetensors"],
        "ignore_patterns": ["*/*", "consolidated*"],
    }
    try:
        return Path(snapshot_download(name, revision=revision, **patterns))
    except Exception as error:
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:300]}"
        advice = (
            "check name, revision and network, start a path with ./; "
            "a gated or private repository needs `hf auth login`"
        )
        raise ConfigError(
            f"{name}: no such folder here, and the hub does not give it ({reason}); {advice}"
        ) from error


def _open_weights(folder: Path, listing: list[str]) -> dict[str, Any]:
    """{tensor: open file} of a folder with these files."""
    if SINGLE in listing:
        if INDEX in listing:
            log.warning(
                "%s: has %s and %s; the first is read, as transformers does", folder, SINGLE, INDEX
            )
        return open_file(folder / SINGLE)
    if INDEX in listing:
        return _open_shards(folder / INDEX, listing)
    variants = [file for file in listing if VARIANT.fullmatch(file)]
    if len(variants) == 1:
        log.warning("%s: has no %s; %s is read", folder, SINGLE, variants[0])
        return open_file(folder / variants[0])
    if pickles := [file for file in listing if file.endswith(PICKLES)]:
        raise ConfigError(
            f"{folder}: neither {SINGLE} nor {INDEX}, only pickled files ({list_names(pickles)}):"
            " loading a pickle runs whatever code it contains, so we do not; where you trust it,"
            " convert it with transformers' `save_pretrained` (before version 5 with"
            " safe_serialization=True), or on the hub with"
            " huggingface.co/spaces/safetensors/convert"
        )
    advice = f"there are {list_names(listing)}; give the folder that `save_pretrained` wrote"
    raise ConfigError(f"{folder}: neither {SINGLE} nor {INDEX}; {advice}")


def _open_shards(index: Path, listing: list[str]) -> dict[str, Any]:
    """{tensor: open file} of all files of an index."""
    weight_map = read_json(index, AGAIN).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index}: no weight_map that names the file of each tensor; {AGAIN}")
    files = sorted(set(map(str, weight_map.values())))
    if missing := [file for file in files if file not in listing]:
        raise ConfigError(
            f"{index}: {len(missing)} of {len(files)} files are missing: {list_names(missing)}; "
            "download them"
        )
    opened: dict[str, Any] = {}
    for file in files:
        tensors = open_file(index.parent / file)
        # if two files have a tensor, the index says which one counts
        here = {
            name: handle for name, handle in tensors.items() if weight_map.get(name, file) == file
        }
        if twice := sorted(name for name in here if name in opened):
            raise ConfigError(
                f"{index}: two files have {list_names(twice)}, and it does not say which counts; "
                f"{AGAIN}"
            )
        opened |= here
    if missing := sorted(weight_map.keys() - opened.keys()):
        if not all(HEAD.search(name) for name in missing):
            raise ConfigError(f"{index}: lists {list_names(missing)}, which no file has; {AGAIN}")
        # writers list a head that is tied; a model that needs its own is refused when it loads
        log.warning("%s: lists %s, which no file has", index, list_names(missing))
    return opened


def open_file(path: Path) -> dict[str, Any]:
    """{tensor: open file} of one file.

    The package reads the header and checks that the tensors fill the file.
    """
    try:
        # the package reports a file without read permission as missing, so we open it first
        regular_file(path).open("rb").close()
        # "pread" reads: if a memory-mapped file becomes shorter, the process dies (SIGBUS)
        file = safe_open(path, "np", backend="pread")
    except (OSError, SafetensorError) as error:
        reason = _display(str(error).removeprefix("Error while deserializing header: "))
        raise ConfigError(
            f"{path}: cannot be read, damaged or cut short ({reason}); {AGAIN}"
        ) from None
    for name in file.keys():  # noqa: SIM118  (no mapping)
        if (dtype := file.get_slice(name).get_dtype()) not in DTYPES:
            raise ConfigError(
                f"{path}: {_display(name)} has the dtype {dtype}; we read {', '.join(DTYPES)}"
            )
    return dict.fromkeys(file.keys(), file)


def dumps(value: Any) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def _write_shards(folder: Path, tensors: Iterable[tuple], limit: int) -> None:
    """Writes one file, or several of at most `limit` bytes and their index."""
    shards: list[dict[str, Callable[[], Any]]] = [{}]
    free_bytes = limit
    total_bytes = 0
    for name, shape, dtype, make in tensors:
        if any(name in shard for shard in shards):
            raise ValueError(f"{folder}: two tensors are called {name}")
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if size > free_bytes and shards[-1]:
            shards.append({})
            free_bytes = limit
        shards[-1][name] = make
        free_bytes -= size
        total_bytes += size
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        weight_map |= dict.fromkeys(shard, file)
        write_file(folder / file, shard)
    if len(shards) > 1:
        (folder / INDEX).write_text(
            dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map})
        )


def write_file(path: Path, tensors: dict[str, Callable[[], Any]]) -> None:
    """Writes one file. Its arrays are freed when this returns, before those of the next file."""
    # the package writes the memory of an array without a look at its strides
    arrays = {name: np.asarray(make(), order="C") for name, make in tensors.items()}
    path.touch()
    mode = path.stat().st_mode  # as of every new file; the package lets nobody but the owner read
    save_file(arrays, path, {"format": "pt"})  # transformers refuses a file without the format
    path.chmod(mode)
    with path.open("rb") as file:
        os.fsync(file.fileno())  # on disk before the rename


def list_names(names: Iterable[str], show: Callable = _display) -> str:
    """The first five names, and how many more there are."""
    names = list(names)
    rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (", ".join(map(show, names[:5])) or "no others") + rest
