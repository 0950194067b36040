"""Writes an adapter as a folder that PEFT opens."""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxformer import models
from jaxformer.families.family import Family
from jaxformer.families.folder import Checkpoint
from jaxformer.families.peft.adapter import (
    CONFIG,
    MAP_FACTORS,
    PLAIN,
    PREFIX,
    TABLE,
    TABLE_FACTORS,
    WEIGHTS,
    Adapter,
    Pair,
    family_of,
    inputs_first,
)
from jaxformer.families.tensors import Tensor, plan
from jaxformer.interop import safetensors
from jaxformer.params import Spec, paths


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
    tensors = plan(family_of(checkpoint, family), checkpoint.config)
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
            not tensors[name].out_first and inputs_first(leaves[tensors[name].parts[0].path])
            for name, pair in pairs.items()
            if not pair.is_table
        ),
    }
    with safetensors.new_folder(folder) as unfinished:
        makers = {name: partial(np.asarray, array) for name, array in arrays.items()}
        safetensors.write_file(unfinished / WEIGHTS, makers)
        (unfinished / CONFIG).write_text(safetensors.dumps(settings))


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


class Factors(NamedTuple):
    """The factors of one part of a tensor of theirs: a `[in, rank]` and b `[rank, out]`."""

    path: str
    a: np.ndarray
    b: np.ndarray


def _theirs(
    tensor: Tensor, leaves: Mapping[str, Spec], factors: dict[str, dict[str, np.ndarray]]
) -> Pair:
    """The factors of one tensor of theirs, from ours of its parts."""
    found = []
    for part in tensor.parts:
        if part.path in factors:
            a, b = (factors[part.path][key][part.index] for key in ("a", "b"))
            rank = len(b)
            found.append(Factors(part.path, a.reshape(-1, rank), b.reshape(rank, -1)))
    first = found[0]
    if first.path.endswith(TABLE):
        return Pair(first.a.T, first.b.T, True)
    if not inputs_first(leaves[first.path]):
        return Pair(first.b, first.a, False)
    if all(np.array_equal(each.a, first.a) for each in found):
        return _side_by_side(tensor, first.a, {each.path: each.b for each in found})
    # the first factors side by side; each second factor has rows of zeros for the other ranks
    a = np.concatenate([each.a for each in found], axis=1)
    ends = np.cumsum([len(each.b) for each in found]).tolist()
    widened = {}
    for each, end in zip(found, ends, strict=True):
        before, behind = end - len(each.b), a.shape[1] - end
        widened[each.path] = np.pad(each.b, ((before, behind), (0, 0)))
    return _side_by_side(tensor, a, widened)


def _side_by_side(tensor: Tensor, a: np.ndarray, second: dict[str, np.ndarray]) -> Pair:
    """The factors of a tensor whose parts share `a`. A part without a second factor has zeros."""
    inputs, rank = a.shape
    columns = []
    for part in tensor.parts:
        b = second.get(part.path, np.zeros((rank, math.prod(part.shape) // inputs), np.float32))
        columns.append(b.reshape(rank, tensor.groups, -1))
    return Pair(a.T, np.concatenate(columns, axis=-1).reshape(rank, -1).T, False)


def _whole(tensor: Tensor, values: list[np.ndarray]) -> np.ndarray:
    """The tensor of theirs whose parts have these values."""
    parts = tuple(part._replace(index=()) for part in tensor.parts)
    by_path = {part.path: value for part, value in zip(parts, values, strict=True)}
    return tensor._replace(parts=parts).theirs(by_path)
