"""The weights of a folder as the parameters of a config. The host never holds the whole model."""

import logging
import re
from collections import Counter
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from jaxformer import models, params as parameters
from jaxformer.errors import ConfigError
from jaxformer.families.advice import advice_for
from jaxformer.families.family import Family
from jaxformer.families.leaves import OnDevices, OnHost, empty_leaf
from jaxformer.families.tensors import Tensor, plan
from jaxformer.families.tied_head import Config, names_in_file
from jaxformer.interop import safetensors
from jaxformer.interop.safetensors import list_names
from jaxformer.params import Spec, Tree, paths

log = logging.getLogger("jaxformer")


def read_weights(
    file, family: Family, config: Config, dtype, sharding, allow_unexpected, allow_missing, key
) -> Tree:
    """Reads the parameters of the config, one after the other. The options are those of `load`."""
    tensors = plan(family, config, allow_missing)
    source, duplicates = _sources(file, family, tensors)
    leaves = paths(models.spec(config))
    ignored = "|".join(filter(None, (family.ignored, allow_unexpected)))
    used = duplicates.union(source.values())
    if left_out := _heads_left_out(file, family, tensors, used, ignored):
        log.warning(
            "%s: the model has no such heads, left out: %s", file.folder, list_names(left_out, str)
        )
        ignored += "|" + "|".join(f"^{re.escape(name)}$" for name in left_out)
    missing = _check(file, family, tensors, source, duplicates, leaves, allow_missing, ignored)
    if missing and key is None:
        raise ConfigError(f"{missing[0]} is missing in the file and may be; give `key` to draw it")
    _check_fixed(file, family, config)
    shardings = _shardings(sharding, leaves)
    dtypes = _dtypes(file, tensors, source, leaves, dtype)
    in_file = {source[name]: tensor for name, tensor in tensors.items() if name in source}
    params = _read_leaves(file, in_file, leaves, dtypes, shardings)
    for path in missing:
        fallback = dtype or next(iter(dtypes.values()), jnp.float32)
        tree = parameters.init(unflatten_dict({path: leaves[path]}, sep="/"), key, fallback)
        params[path] = jax.device_put(paths(tree)[path], shardings[path])
    return unflatten_dict({path: params[path] for path in leaves}, sep="/")


def _read_leaves(
    file, tensors: dict[str, Tensor], leaves: dict[str, Spec], dtypes, shardings
) -> dict[str, Any]:
    """{path: leaf on its devices}, from the tensors of the file {name in the file: tensor}."""
    to_read = Counter(part.path for tensor in tensors.values() for part in tensor.parts)
    unfinished: dict[str, OnHost | OnDevices] = {}
    params: dict[str, Any] = {}
    with_parts = [(name, tensor) for name, tensor in tensors.items() if tensor.parts]
    # leaf by leaf: the leaves of a pattern of layers would all be unfinished, layer after layer
    for name, tensor in sorted(with_parts, key=lambda item: item[1].parts[0].path):
        array = file.read(name)
        safetensors.check_finite(name, array)
        for part, values in zip(tensor.parts, tensor.ours(array), strict=True):
            path = part.path
            if path not in unfinished:
                unfinished[path] = empty_leaf(leaves[path].shape, dtypes[path], shardings[path])
            unfinished[path].fill(part.index, values)
            to_read[path] -= 1
            if not to_read[path]:
                params[path] = unfinished.pop(path).array()
    return params


def _sources(file, family: Family, tensors: dict[str, Tensor]) -> tuple[dict[str, str], set[str]]:
    """({name in `tensors`: name in the file}, names of second copies of tied tensors)."""
    source = names_in_file(file, family, tensors.keys() | family.aliases.keys())
    duplicates = set()
    for alias, first in family.aliases.items():
        if alias in source and alias not in tensors and first in tensors:
            second = source.pop(alias)
            name = source.setdefault(first, second)
            # a second copy with other values is an unexpected tensor
            if name != second and np.array_equal(file.read(second), file.read(name)):
                duplicates.add(second)
    return source, duplicates


def _heads_left_out(
    file, family: Family, tensors, used: Collection[str], ignored: str
) -> list[str]:
    """Tensors of the file that belong to heads which the model does not have."""

    def module(name):
        return match.group().strip(".") if (match := re.search(family.heads, name)) else None

    modules = {module(name) for name in tensors}
    unused = (name for name in file.names if name not in used and not re.search(ignored, name))
    return [name for name in unused if module(name) is not None and module(name) not in modules]


def _check(
    file,
    family: Family,
    tensors,
    source,
    duplicates: set[str],
    leaves: dict[str, Spec],
    allow_missing,
    ignored,
) -> list[str]:
    """Our paths that are missing in the file and may be missing.

    Raises ConfigError with a list of all problems.
    """
    used = duplicates.union(source.values())
    unexpected = [name for name in file.names if name not in used and not re.search(ignored, name)]
    present: set[str] = set()  # our paths that the file has, perhaps only for some layers
    absent: dict[str, str] = {}  # {our path: name of a tensor that the file does not have}
    for name, tensor in tensors.items():
        if name in source:
            present |= {part.path for part in tensor.parts}
        else:
            absent |= {part.path: name for part in tensor.parts}

    def optional(path):
        # a file that has a parameter for some layers only is damaged
        return allow_missing is not None and path not in present and re.search(allow_missing, path)

    missing = [f"{name} (our {path})" for path, name in absent.items() if not optional(path)]
    other_shapes = []
    for planned_name, name in source.items():
        if planned_name in tensors:
            shape, expected = file.names[name][0], tensors[planned_name].shape
            if shape != expected:
                other_shapes.append(f"{name} {shape}, not {expected}")
    problems = {"missing": missing, "unexpected": unexpected, "of another shape": other_shapes}
    report = [
        f"{len(names)} {problem}: {list_names(names, str)}"
        for problem, names in problems.items()
        if names
    ]
    if report:
        advice = advice_for(file, family, tensors, source, unexpected, leaves)
        if quantised := (file.config.get("quantization_config") or {}).get("quant_method"):
            advice = (
                f"they are quantised ({quantised}), which is not read: "
                "give the model that was quantised"
            )
        raise ConfigError(
            f"{file.folder}: the weights are not those of its config.json: "
            f"{'; '.join(report)}; {advice}"
        )
    planned = {part.path for tensor in tensors.values() for part in tensor.parts}
    return [path for path in leaves if path in absent or path not in planned]


def _check_fixed(file, family: Family, config: Config) -> None:
    """Raises ConfigError for a table of the file that `family.fixed` computes otherwise."""
    if not any(re.search(family.ignored, name) for name in file.names):
        return
    tables = family.fixed(config)
    for name, stored in names_in_file(file, family, tables.keys()).items():
        found, table = file.read(stored).astype(np.float32), tables[name]
        # at position 1000, two sines in float32 differ by 1e-4
        rounding = 1e-3 + float(jnp.finfo(file.names[stored][1]).eps)
        if found.shape != table.shape or not np.allclose(found, table, rtol=0, atol=rounding):
            raise ConfigError(
                f"{file.folder}: {stored} {found.shape} does not hold the sinusoids {table.shape} "
                "that this family computes; delete the tensor to have those"
            )


def _dtypes(
    file, tensors: dict[str, Tensor], source: dict[str, str], leaves: dict[str, Spec], dtype
) -> dict[str, Any]:
    """The dtype of each leaf: `dtype`, or the widest of its tensors in the file.

    A variable stays at least as wide as in the file: the biases that choose the experts of
    DeepSeek-V3 differ by less than bfloat16 can tell.
    """
    dtypes: dict[str, Any] = {}
    for name in (name for name in tensors if name in source):
        stored = jnp.dtype(file.names[source[name]][1])
        if not jnp.issubdtype(stored, jnp.floating):
            raise ConfigError(
                f"{file.folder}: {source[name]} holds {stored}, not floating-point numbers: "
                "quantised, not read"
            )
        for part in tensors[name].parts:
            widest = jnp.promote_types(stored, dtypes.get(part.path, stored))
            if dtype is not None and not leaves[part.path].trained:
                widest = jnp.promote_types(widest, dtype)
            elif dtype is not None:
                widest = dtype
            dtypes[part.path] = widest
    return {path: jax.dtypes.canonicalize_dtype(leaf_dtype) for path, leaf_dtype in dtypes.items()}


def _shardings(sharding: Any, leaves: dict[str, Spec]) -> dict[str, Any]:
    """A sharding for each leaf. The default is the first local device."""
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    if isinstance(sharding, jax.sharding.Sharding):
        return dict.fromkeys(leaves, sharding)
    shardings = paths(sharding)
    if missing := [path for path in leaves if path not in shardings]:
        raise ConfigError(
            f"sharding: none for {list_names(missing, str)}; "
            "give one for each parameter, or one for all"
        )
    return shardings
