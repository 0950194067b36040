"""The weights of a folder as the parameters of a config. The host never holds the whole model."""

import logging
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from jaxformer import models, params as parameters
from jaxformer.errors import ConfigError
from jaxformer.families.family import Family, Tensor, plan
from jaxformer.interop import safetensors
from jaxformer.interop.safetensors import list_names
from jaxformer.models.config import EncoderDecoder, ModelConfig
from jaxformer.params import Spec, Tree, paths

log = logging.getLogger("jaxformer")
Config = ModelConfig | EncoderDecoder


def read_weights(file, family: Family, config: Config, dtype, sharding, allow_unexpected, allow_missing, key) -> Tree:
    """The parameters of the config, one after the other. The options are those of `load`."""
    tensors = plan(family, config, allow_missing)
    source, duplicates = _sources(file, family, tensors)
    leaves = paths(models.spec(config))
    ignored = "|".join(filter(None, (family.ignored, allow_unexpected)))
    if left_out := _heads_left_out(file, family, tensors, duplicates.union(source.values()), ignored):
        log.warning("%s: the model has no such heads, left out: %s", file.folder, list_names(left_out, str))
        ignored += "|" + "|".join(f"^{re.escape(name)}$" for name in left_out)
    missing = _check(file, tensors, source, duplicates, leaves, allow_missing, ignored)
    if missing and key is None:
        raise ConfigError(f"{missing[0]} is missing in the file and may be; give `key` to draw it")
    shardings = _shardings(sharding, leaves)
    dtypes = _dtypes(file, tensors, source, dtype)
    pending = Counter(part.path for name, tensor in tensors.items() if name in source for part in tensor.parts)
    host: dict[str, np.ndarray] = {}
    params: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if name not in source or not tensor.parts:
            continue
        array = file.read(source[name])
        safetensors.check_finite(source[name], array)
        for part, piece in zip(tensor.parts, tensor.ours(array), strict=True):
            path = part.path
            if path not in host:
                host[path] = np.empty(leaves[path].shape, dtypes[path])
            host[path][part.index] = piece
            pending[path] -= 1
            if not pending[path]:
                leaf = host.pop(path)
                copy = jax.make_array_from_callback(leaf.shape, shardings[path], leaf.__getitem__)
                params[path] = jax.block_until_ready(copy)  # copies under way would keep their leaves on the host
    for path in missing:
        fallback = dtype or next(iter(dtypes.values()), jnp.float32)
        tree = parameters.init(unflatten_dict({path: leaves[path]}, sep="/"), key, fallback)
        params[path] = jax.device_put(paths(tree)[path], shardings[path])
    return unflatten_dict({path: params[path] for path in leaves}, sep="/")


def _names_in_file(file, family: Family, names: Collection[str]) -> dict[str, str]:
    """{name in `names`: name in the file}. Old files say gamma and beta, and may leave out the prefix."""
    source: dict[str, str] = {}
    for name in file.names:
        modern = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))
        canonical = modern if modern in names else family.prefix + modern
        if canonical in names:
            source[canonical] = name
    return source


def _sources(file, family: Family, tensors: dict[str, Tensor]) -> tuple[dict[str, str], set[str]]:
    """({name in the tables: name in the file}, names of second copies of tied tensors)."""
    source = _names_in_file(file, family, tensors.keys() | family.aliases.keys())
    duplicates = set()
    for alias, first in family.aliases.items():
        if alias in source and alias not in tensors and first in tensors:
            second = source.pop(alias)
            name = source.setdefault(first, second)
            if name != second and np.array_equal(file.read(second), file.read(name)):  # with other values it is unexpected
                duplicates.add(second)
    return source, duplicates


def _heads_left_out(file, family: Family, tensors, used: Collection[str], ignored: str) -> list[str]:
    """Tensors of the file that belong to heads of which the model has no part."""

    def module(name):
        return match.group().strip(".") if (match := re.search(family.heads, name)) else None

    modules = {module(name) for name in tensors}
    unused = (name for name in file.names if name not in used and not re.search(ignored, name))
    return [name for name in unused if module(name) is not None and module(name) not in modules]


def _check(file, tensors, source, duplicates: set[str], leaves: dict[str, Spec], allow_missing, ignored) -> list[str]:
    """Raises ConfigError with a list of all problems. Returns the paths of ours that are missing with permission."""
    used = duplicates.union(source.values())
    unexpected = [name for name in file.names if name not in used and not re.search(ignored, name)]
    absent = {part.path: name for name, tensor in tensors.items() if name not in source for part in tensor.parts}
    # if the file has a parameter for some layers only, it is damaged
    incomplete = {part.path for name in source.keys() & tensors.keys() for part in tensors[name].parts}

    def optional(path):
        return allow_missing is not None and path not in incomplete and re.search(allow_missing, path)

    missing = [f"{name} (our {path})" for path, name in absent.items() if not optional(path)]
    pairs = [(name, file.names[name][0], tensors[table].shape) for table, name in source.items() if table in tensors]
    shapes = [f"{name} {shape}, not {expected}" for name, shape, expected in pairs if shape != expected]
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": shapes}
    if report := [f"{len(names)} {kind}: {list_names(names, str)}" for kind, names in kinds.items() if names]:
        advice = "see allow_missing, allow_unexpected and heads of families.load"
        if quantised := (file.config.get("quantization_config") or {}).get("quant_method"):
            advice = f"they are quantised ({quantised}), which is not read: give the model that was quantised"
        raise ConfigError(f"{file.folder}: the weights are not those of its config.json: {'; '.join(report)}; {advice}")
    planned = {part.path for tensor in tensors.values() for part in tensor.parts}
    return [path for path in leaves if path in absent or path not in planned]


def with_stack(config: Config, **changes) -> Config:
    if isinstance(config, EncoderDecoder):
        return replace(config, decoder=replace(config.decoder, **changes))
    return replace(config, **changes)


def with_tie(file, family: Family, config: Config) -> Config:
    """The config, tied or not as the weights are."""
    # A separate head in the file is used even if config.json ties it (T5 v1.1 written by transformers 5). If config.json
    # unties the head and the file has none, a T5 is tied (transformers 5 writes it so) and other models miss a tensor.
    stack, rules = models.last_stack(config), family.rules(config)
    head = next((rule.theirs for rule in rules if str(rule.ours).endswith("language_model/kernel")), None)
    if head is None or not stack.heads:
        return config
    names = _names_in_file(file, family, family.aliases.keys() | family.aliases.values())
    if head not in names:
        return with_stack(config, tie_embeddings=True) if family.tied_without_head else config
    first = family.aliases[head]
    tables_in_file = [first, *(alias for alias, name in family.aliases.items() if name == first and alias != head)]
    table = next((names[name] for name in tables_in_file if name in names), None)
    if stack.tie_embeddings and table is not None and not np.array_equal(file.read(names[head]), file.read(table)):
        return with_stack(config, tie_embeddings=False)
    return config


def _dtypes(file, tensors: dict[str, Tensor], source: dict[str, str], dtype) -> dict[str, Any]:
    """The dtype of each leaf: `dtype`, or the widest of its tensors in the file."""
    dtypes: dict[str, Any] = {}
    for name in (name for name in tensors if name in source):
        stored = jnp.dtype(file.names[source[name]][1])
        if not jnp.issubdtype(stored, jnp.floating):
            raise ConfigError(f"{file.folder}: {source[name]} holds {stored}, not floating-point numbers: quantised, not read")
        for part in tensors[name].parts:
            dtypes[part.path] = dtype or jnp.promote_types(stored, dtypes.get(part.path, stored))
    return {path: jax.dtypes.canonicalize_dtype(leaf_dtype) for path, leaf_dtype in dtypes.items()}


def _shardings(sharding: Any, leaves: dict[str, Spec]) -> dict[str, Any]:
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    if isinstance(sharding, jax.sharding.Sharding):
        return dict.fromkeys(leaves, sharding)
    shardings = paths(sharding)
    if missing := [path for path in leaves if path not in shardings]:
        raise ConfigError(f"sharding: none for {list_names(missing, str)}; give one for each parameter, or one for all")
    return shardings
