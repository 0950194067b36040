"""Reads an adapter of PEFT."""

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxformer import models
from jaxformer.config import read_json
from jaxformer.errors import ConfigError
from jaxformer.families.family import Family
from jaxformer.families.folder import Checkpoint
from jaxformer.families.peft.adapter import (
    CONFIG,
    PLAIN,
    PREFIX,
    TABLE,
    WEIGHTS,
    Adapter,
    Pair,
    Trained,
    family_of,
    inputs_first,
)
from jaxformer.families.settings import Json, get, only
from jaxformer.families.tensors import Tensor, plan
from jaxformer.interop import safetensors
from jaxformer.interop.safetensors import list_names
from jaxformer.models import adaptation
from jaxformer.models.config import ModelConfig
from jaxformer.models.heads import language_model
from jaxformer.params import Spec, paths

FACTOR = re.compile(r"(.+)\.lora_(embedding_)?([AB])(?:\.default)?(?:\.weight)?$")


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
        return _read(settings, arrays, checkpoint, family_of(checkpoint, family))
    except ConfigError as error:
        message = str(error).replace("config.json", CONFIG)
        raise ConfigError(f"{folder}: {message}") from None
    except (TypeError, ValueError, KeyError, IndexError, ZeroDivisionError, re.error) as error:
        raise ConfigError(
            f"{folder}: cannot be understood ({type(error).__name__}: {str(error)[:200]})"
        ) from error


def _read(
    settings: Json, arrays: Mapping[str, np.ndarray], checkpoint: Checkpoint, family: Family
) -> Adapter:
    tensors = plan(family, checkpoint.config)
    pairs, trained = _sorted_out(arrays, tensors, family, models.last_stack(checkpoint.config))
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
    arrays: Mapping[str, np.ndarray],
    tensors: dict[str, Tensor],
    family: Family,
    last: ModelConfig,
) -> tuple[dict[str, Pair], dict[str, np.ndarray]]:
    """({tensor of the model: its factors}, {tensor of the model: its new value}).

    PEFT writes both tables of a tied model whose vocabulary was resized: they must be equal. Raises
    ConfigError for factors of a tied table, because the other table would change with it.
    """

    def canonical(name: str) -> str:
        name = re.sub(r"\.(?:base_layer|modules_to_save\.default)\.", ".", name)
        tied = family.aliases.get(name, name)
        for candidate in (name, family.prefix + name, tied):
            if candidate in tensors:
                return candidate
        raise ConfigError(f"{name}: the model has no such tensor; is it the base of this adapter?")

    tied_tables: set[str] = set()
    if last.tie_embeddings and language_model(last):
        tied_tables = {name for name in family.aliases.values() if _is_table(tensors.get(name))}
    tables_of_tied: dict[str, dict[str, np.ndarray]] = {}
    halves: dict[str, dict[str, np.ndarray]] = {}
    tables = set()
    trained = {}
    for full_name, array in arrays.items():
        name = full_name.removeprefix(PREFIX)
        if match := FACTOR.match(name):
            module = canonical(f"{match[1]}.weight")
            if module in tied_tables:
                raise ConfigError(f"{name}: the embedding and the head are tied: not read here")
            halves.setdefault(module, {})[match[3]] = array
            if match[2]:
                tables.add(module)
        else:
            tensor = canonical(name)
            if tensor in tied_tables:
                tables_of_tied.setdefault(tensor, {})[name] = array
            trained[tensor] = array
    for name, values in tables_of_tied.items():
        if name not in values or any(
            not np.array_equal(values[name], value) for value in values.values()
        ):
            raise ConfigError(f"{name}: the head is tied to it, and the adapter has another head")
    if odd := [name for name, half in halves.items() if len(half) < 2]:
        raise ConfigError(f"one of two factors is missing: {list_names(odd, str)}")
    pairs = {name: Pair(half["A"], half["B"], name in tables) for name, half in halves.items()}
    return pairs, trained


def _is_table(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.parts[0].path.endswith(TABLE)


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
    if not pair.is_table and not inputs_first(leaves[tensor.parts[0].path]):
        first, second = scale * pair.b, pair.a
    for part, piece in zip(tensor.parts, tensor.split(second), strict=True):
        ours = factors[part.path]
        target = ours["a"][part.index]
        target[..., :rank] = first.reshape(*target.shape[:-1], rank)
        target = ours["b"][part.index]
        target[:rank] = piece.reshape(rank, *target.shape[1:])
