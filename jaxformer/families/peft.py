"""Adapters of PEFT: a folder with low-rank factors and trained modules, for a model beside it.

    checkpoint = families.load("base")
    adapter = peft.load("adapter", checkpoint)
    params = adapter.merged(checkpoint.params)      # the adapted model, for everything here
    peft.save("mine", checkpoint, adapter)          # PEFT opens it

`Lora(rank=adapter.rank, alpha=adapter.alpha)` trains such factors on.
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jaxformer import models, params as parameters
from jaxformer.config import read_json
from jaxformer.errors import ConfigError
from jaxformer.families.family import Family, Tensor, plan
from jaxformer.families.folder import FAMILIES, Checkpoint
from jaxformer.families.settings import Json, get, only
from jaxformer.interop import safetensors
from jaxformer.interop.safetensors import list_names
from jaxformer.models import adaptation
from jaxformer.params import Spec, Tree, paths

CONFIG, WEIGHTS = safetensors.ADAPTER, "adapter_model.safetensors"
PREFIX = "base_model.model."
MAP_FACTORS = ("lora_A.weight", "lora_B.weight")
TABLE_FACTORS = ("lora_embedding_A", "lora_embedding_B")
TABLE = "embedding/tokens"  # the end of the path of an embedding's table
FACTOR = re.compile(r"(.+)\.lora_(embedding_)?([AB])(?:\.default)?(?:\.weight)?$")
# settings that change numbers in a way that has no counterpart here
PLAIN: dict[str, Any] = dict(
    peft_type="LORA", bias="none", use_dora=False, lora_bias=False, use_qalora=False,
    layer_replication=None, trainable_token_indices=None, target_parameters=None,
    alora_invocation_tokens=None,
)  # fmt: skip


class Trained(NamedTuple):
    """New values of a part of a leaf."""

    path: str
    index: tuple[int, ...]  # of the part in the leaf; (): all of it
    value: Any


@dataclass(frozen=True)
class Adapter:
    """W + (alpha / rank) a b for some matrices, and new values for some parameters."""

    rank: int
    alpha: float
    factors: dict[str, dict[str, Any]]  # {path: {"a", "b"}}: see `models.adaptation.lora`
    trained: tuple[Trained, ...] = field(default=())

    def merged(self, params: Tree) -> Tree:
        """The parameters of the adapted model, in the shapes and dtypes of `params`."""
        leaves = dict(paths(params))
        for path, index, value in self.trained:
            leaves[path] = jnp.asarray(leaves[path]).at[index].set(value)
        params = parameters.map_with_name(lambda path, leaf: leaves[path], params)
        return adaptation.merge(params, self.factors, self.alpha / self.rank)


def load(folder: str | Path, checkpoint: Checkpoint, family: Family | None = None) -> Adapter:
    """Reads the adapter of a folder for a model, whose family is `family` or the checkpoint's own.

    A layer without an adapter has factors of zeros. A module with another rank or another alpha is
    scaled to the rank and alpha of the others. Raises ConfigError for another kind of adapter, and
    for tensors that are missing or do not fit the model.
    """
    folder = Path(os.path.expanduser(folder))
    settings = read_json(folder / CONFIG, safetensors.AGAIN)
    opened = safetensors.open_file(folder / WEIGHTS)
    try:
        only(settings, **PLAIN)
        arrays = {name: file.get_tensor(name) for name, file in opened.items()}
        for name, array in arrays.items():
            safetensors.check_finite(name, array)
        return _read(settings, arrays, checkpoint, family or _family(checkpoint))
    except ConfigError as error:
        message = str(error).replace("config.json", CONFIG)
        raise ConfigError(f"{folder}: {message}") from None


def _family(checkpoint: Checkpoint) -> Family:
    if checkpoint.model_type not in FAMILIES:
        raise ConfigError(
            f"the model has model_type={checkpoint.model_type!r}: expected one of "
            f"{', '.join(FAMILIES)}, or give its family"
        )
    return FAMILIES[checkpoint.model_type]


class Pair(NamedTuple):
    """The two factors of one module of theirs: A `[rank, in]` and B `[out, rank]`."""

    a: np.ndarray
    b: np.ndarray
    is_table: bool  # of an embedding: A is `[rank, V]`, B is `[D, rank]`


def _read(
    settings: Json, arrays: Mapping[str, np.ndarray], checkpoint: Checkpoint, family: Family
) -> Adapter:
    tensors = plan(family, checkpoint.config)
    pairs, trained = _sorted_out(arrays, tensors, family)
    if not pairs and not trained:
        raise ConfigError("the adapter has no tensor")
    rank = max((len(pair.a) for pair in pairs.values()), default=get(settings, "r", 8))
    usual = _scale(settings, "", get(settings, "r", 8))
    leaves = paths(models.spec(checkpoint.config))
    adapted = sorted({part.path for name in pairs for part in tensors[name].parts})
    factors = _zeros({path: leaves[path] for path in adapted}, rank)
    for name, pair in pairs.items():
        scale = _scale(settings, name.removesuffix(".weight"), len(pair.a)) / usual
        _place(name, tensors[name], pair, scale, leaves, factors)
    values = []
    weights = paths(checkpoint.params)
    for name, array in trained.items():
        tensor = tensors[name]
        if array.shape != tensor.shape:
            raise ConfigError(f"{name} {array.shape}: the model has {tensor.shape}")
        for part, value in zip(tensor.parts, tensor.ours(array), strict=True):
            # PEFT writes tables beside their factors, though they are those of the base
            if not np.array_equal(np.asarray(weights[part.path][part.index]), value):
                values.append(Trained(part.path, part.index, value))
    return Adapter(rank, usual * rank, factors, tuple(values))


def _zeros(leaves: Mapping[str, Spec], rank: int) -> dict[str, dict[str, np.ndarray]]:
    """Factors of zeros for these matrices. A table has a `[V, rank]` and b `[rank, D]`."""
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for path, leaf in leaves.items():
        if path.endswith(TABLE):
            shapes[path] = {"a": (leaf.shape[0], rank), "b": (rank, leaf.shape[1])}
        else:
            (pair,) = adaptation.lora({path: leaf}, f"^{re.escape(path)}$", rank).values()
            shapes[path] = {key: spec.shape for key, spec in pair.items()}
    return {
        path: {key: np.zeros(shape, np.float32) for key, shape in pair.items()}
        for path, pair in shapes.items()
    }


def _sorted_out(
    arrays: Mapping[str, np.ndarray], tensors: dict[str, Tensor], family: Family
) -> tuple[dict[str, Pair], dict[str, np.ndarray]]:
    """({tensor of the model: its factors}, {tensor of the model: its new value})."""

    def canonical(name: str) -> str:
        name = re.sub(r"\.(?:base_layer|modules_to_save\.default)\.", ".", name)
        tied = family.aliases.get(name, name)
        for candidate in (name, family.prefix + name, tied):
            if candidate in tensors:
                return candidate
        raise ConfigError(f"{name}: the model has no such tensor; is it the base of this adapter?")

    halves: dict[str, dict[str, np.ndarray]] = {}
    tables = set()
    trained = {}
    for full_name, array in arrays.items():
        name = full_name.removeprefix(PREFIX)
        if match := FACTOR.match(name):
            module = canonical(f"{match[1]}.weight")
            halves.setdefault(module, {})[match[3]] = array
            if match[2]:
                tables.add(module)
        else:
            trained[canonical(name)] = array
    if odd := [name for name, half in halves.items() if len(half) < 2]:
        raise ConfigError(f"one of two factors is missing: {list_names(odd, str)}")
    pairs = {name: Pair(half["A"], half["B"], name in tables) for name, half in halves.items()}
    return pairs, trained


def _scale(settings: Json, module: str, rank: int) -> float:
    """The factor of B A: alpha / rank, or alpha / sqrt(rank) of rsLoRA (arXiv:2312.03732)."""
    alpha = get(settings, "lora_alpha", 8.0)
    for pattern, value in (settings.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = float(value)
            break
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _place(
    name: str,
    tensor: Tensor,
    pair: Pair,
    scale: float,
    leaves: Mapping[str, Spec],
    factors: dict[str, dict[str, np.ndarray]],
) -> None:
    """Writes the factors of one tensor of theirs into ours."""
    rank = len(pair.a)
    if pair.b.shape[1:] != (rank,) or pair.a.shape[1] * len(pair.b) != math.prod(tensor.shape):
        raise ConfigError(
            f"{name}: factors {pair.a.shape} and {pair.b.shape} do not make {tensor.shape}"
        )
    # of a matrix [out, in], such as a head over the vocabulary, ours has the same order
    first, second = pair.a.T, scale * pair.b.T
    if not pair.is_table and not _inputs_first(leaves[tensor.parts[0].path]):
        first, second = scale * pair.b, pair.a
    for part, piece in zip(tensor.parts, tensor.split(second), strict=True):
        ours = factors[part.path]
        target = ours["a"][part.index]
        target[..., :rank] = first.reshape(*target.shape[:-1], rank)
        target = ours["b"][part.index]
        target[:rank] = piece.reshape(rank, *target.shape[1:])


def _inputs_first(leaf: Spec) -> bool:
    """Whether the axes of the inputs stand before those of the outputs."""
    return leaf.axes[-1] not in leaf.contracts


def save(
    folder: str | Path,
    checkpoint: Checkpoint,
    adapter: Adapter,
    *,
    base: str = "",
    family: Family | None = None,
) -> None:
    """Writes a folder that PEFT opens on the model of `checkpoint`; `base` is that model's name.

    A tensor of theirs that holds several matrices of ours gets the ranks of all of them, unless
    they share their first factor. Raises ConfigError for a folder that is not empty.
    """
    tensors = plan(family or _family(checkpoint), checkpoint.config)
    leaves = paths(models.spec(checkpoint.config))
    factors = {
        path: {key: np.asarray(array, np.float32) for key, array in pair.items()}
        for path, pair in adapter.factors.items()
    }
    pairs = {
        name: _theirs(tensor, leaves, factors)
        for name, tensor in tensors.items()
        if any(part.path in factors for part in tensor.parts)
    }
    trained = _trained_tensors(adapter, tensors)
    arrays = {PREFIX + name: array for name, array in trained.items()}
    for name, pair in pairs.items():
        module = PREFIX + name.removesuffix(".weight")
        kinds = TABLE_FACTORS if pair.is_table else MAP_FACTORS
        arrays |= {f"{module}.{kinds[0]}": pair.a, f"{module}.{kinds[1]}": pair.b}
    settings = _settings(adapter, pairs, trained) | {
        "base_model_name_or_path": base,
        # GPT-2 stores its matrices as [in, out]
        "fan_in_fan_out": any(
            not tensors[name].out_first and _inputs_first(leaves[tensors[name].parts[0].path])
            for name, pair in pairs.items()
            if not pair.is_table
        ),
    }
    _write(Path(os.path.expanduser(folder)), settings, arrays)


def _trained_tensors(adapter: Adapter, tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """{tensor of theirs: its new value}, of those whose parts were all trained."""
    values = {(path, index): np.asarray(value) for path, index, value in adapter.trained}
    found = {}
    for name, tensor in tensors.items():
        places = [(part.path, part.index) for part in tensor.parts]
        if places and all(place in values for place in places):
            found[name] = _whole(tensor, [values[place] for place in places])
    return found


def _settings(
    adapter: Adapter, pairs: dict[str, Pair], trained: dict[str, np.ndarray]
) -> dict[str, Any]:
    """adapter_config.json, without what the base decides."""
    ranks = {name.removesuffix(".weight"): len(pair.a) for name, pair in pairs.items()}
    other = {module: rank for module, rank in ranks.items() if rank != adapter.rank}
    alpha_of_rank = adapter.alpha / adapter.rank
    return PLAIN | {
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "rank_pattern": other,
        "alpha_pattern": {module: alpha_of_rank * rank for module, rank in other.items()},
        "target_modules": sorted(ranks),
        "modules_to_save": sorted({name.rpartition(".")[0] for name in trained}) or None,
        "lora_dropout": 0.0,
        "use_rslora": False,
        "inference_mode": True,
        "task_type": None,
    }


def _theirs(
    tensor: Tensor, leaves: Mapping[str, Spec], factors: dict[str, dict[str, np.ndarray]]
) -> Pair:
    """The factors of one tensor of theirs, from ours of its parts."""
    found = []
    for part in tensor.parts:
        if part.path not in factors:
            continue
        ours = factors[part.path]
        b = ours["b"][part.index]
        found.append((part, ours["a"][part.index].reshape(-1, len(b)), b.reshape(len(b), -1)))
    part, a, b = found[0]
    if part.path.endswith(TABLE):
        return Pair(a.T, b.T, True)
    if not _inputs_first(leaves[part.path]):
        return Pair(b, a, False)
    shared = all(np.array_equal(a, found[0][1]) for _, a, _ in found)
    firsts = found[:1] if shared else found
    rank = sum(a.shape[1] for _, a, _ in firsts)
    offset = 0
    pieces = {}
    for part, a, b in found:
        widened = np.zeros((rank, b.shape[1]), np.float32)
        start = 0 if shared else offset
        widened[start : start + len(b)] = b
        offset += a.shape[1]
        pieces[part.path] = widened
    inputs = found[0][1].shape[0]
    columns = []
    for part in tensor.parts:
        width = math.prod(part.shape) // inputs
        zeros = np.zeros((rank, width), np.float32)
        columns.append(pieces.get(part.path, zeros).reshape(rank, tensor.groups, -1))
    second = np.concatenate(columns, axis=-1).reshape(rank, -1)
    return Pair(np.concatenate([a for _, a, _ in firsts], axis=1).T, second.T, False)


def _whole(tensor: Tensor, values: list[np.ndarray]) -> np.ndarray:
    """The tensor of theirs whose parts have these values."""
    parts = tuple(part._replace(index=()) for part in tensor.parts)
    by_path = {part.path: value for part, value in zip(parts, values, strict=True)}
    return tensor._replace(parts=parts).theirs(by_path)


def _write(folder: Path, settings: Json, arrays: dict[str, np.ndarray]) -> None:
    """The two files of an adapter. They appear under their names only when they are complete."""
    try:
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder}: is not empty; choose another name, or remove it first")
        folder.mkdir(parents=True, exist_ok=True)
        contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        save_file(contiguous, folder / f"{WEIGHTS}.unfinished", {"format": "pt"})
        (folder / f"{WEIGHTS}.unfinished").rename(folder / WEIGHTS)
        (folder / CONFIG).write_text(safetensors.dumps(settings))
    except OSError as error:
        raise ConfigError(
            f"{folder}: not saved ({error}); choose another folder, or make room"
        ) from error
