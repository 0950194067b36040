"""Other people's weights: a Hugging Face checkpoint as (config, params), and back.

    config, params = huggingface.load("path/to/checkpoint")     # or a hub name, "gpt2"
    huggingface.save("out/", config, params)                    # transformers opens it

Tensors are read one at a time, checked, and laid down where they are to stay, so the host never holds the model twice.
Whose weight is whose stands in `interop.encoders`, `decoders` and `pairs`; files themselves in `interop.safetensors`.
"""

import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxformer import models
from jaxformer.config import ConfigError
from jaxformer.interop import decoders, encoders, pairs, safetensors
from jaxformer.interop.tables import Family, Kind, Rule
from jaxformer.models.config import EncoderDecoder, ModelConfig
from jaxformer.models.mixers import BigBird, Longformer
from jaxformer.ops.positions import Rope
from jaxformer.params import Spec, paths

Config = ModelConfig | EncoderDecoder
Tree = Any
FAMILIES: dict[str, Family] = decoders.FAMILIES | encoders.FAMILIES | pairs.FAMILIES


def load(
    path: str | Path,
    *,
    heads: tuple | None = None,
    dtype=None,
    sharding: Any = None,
    allow_unexpected: str | None = None,
    allow_missing: str | None = None,
    key: jax.Array | None = None,
    revision: str | None = None,
) -> tuple[Config, Tree]:
    """A checkpoint's config and parameters, from a folder or from the hub.

    `dtype` of the parameters is the file's own by default. `sharding` is one for all or a tree of them. `heads` go
    before those of the file's architecture: `heads=()` for the stack alone, `heads=(Classification(3),)` for a new task.
    What the file lacks, has besides, or has in another shape is an error; `allow_unexpected` and `allow_missing` are
    regular expressions for names (theirs; ours) that may be left out, the missing ones drawn from `key`. Raises
    ConfigError, in one report, before anything is read.
    """
    file = safetensors.open_checkpoint(path, revision)
    kind = file.config.get("model_type")
    if kind not in FAMILIES:
        raise ConfigError(
            f"{file.folder}/config.json: model_type {kind!r} (architectures {file.config.get('architectures')}) is not "
            f"known here; expected one of {', '.join(FAMILIES)}"
        )
    family = FAMILIES[kind]
    try:
        config = family.read(file.config, file.names)
    except ConfigError as error:
        raise ConfigError(f"{file.folder}: {error}") from None
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, ZeroDivisionError) as error:
        raise ConfigError(
            f"{file.folder}/config.json: cannot be understood ({type(error).__name__}: {error})"
        ) from error
    config = _with_tie(file, family, config)
    if heads is not None:
        config = _with_stack(config, heads=heads)
    plan = _plan(family, config)
    source, spare = _sources(file, family, plan)
    leaves = paths(models.spec(config))
    ignored = "|".join(filter(None, (family.ignored, allow_unexpected)))
    missing = _check(file, plan, source, spare, leaves, allow_missing, ignored)
    shardings = _shardings(sharding, leaves)
    params: dict[str, Any] = {}
    for name, tensor in plan.items():
        if name in source:
            array = file.read(source[name])
            safetensors.check_finite(source[name], array)
            for part, piece in zip(tensor.parts, tensor.ours(array), strict=True):
                piece = np.ascontiguousarray(piece).astype(dtype or _floating(file.folder, name, piece), copy=False)
                _lay_down(params, part, piece, leaves[part.path].shape, shardings[part.path])
    for path, stack in list(params.items()):
        params[path] = jax.device_put(stack, shardings[path])  # what was put together on the host
    for path in missing:
        params[path] = _drawn(path, leaves[path], key, dtype or jnp.float32, shardings[path])
    return config, unflatten_dict({path: params[path] for path in leaves}, sep="/")


def save(
    folder: str | Path,
    config: Config,
    params: Tree,
    *,
    model_type: str | None = None,
    extra: dict | None = None,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes config.json and safetensors (in shards of at most `shard_bytes`) that transformers opens as it does its own.

    `model_type` is the first that can say all of the config; `extra` goes into config.json besides (token ids:
    `{"eos_token_id": 2}`, none by default). Raises ConfigError where none can, or the given one cannot,
    and where `folder` exists and is not empty.
    """
    kind, json = _as_family(config, model_type)
    leaves, arrays = paths(models.spec(config)), paths(params)
    wrong = [
        f"{path} {getattr(arrays.get(path), 'shape', 'missing')}, not {leaf.shape}"
        for path, leaf in leaves.items()
        if path not in arrays or arrays[path].shape != leaf.shape
    ] + [f"{path} unknown" for path in arrays.keys() - leaves.keys()]
    if wrong:
        raise ConfigError(f"{folder}: the parameters are not those of the config: {_some(wrong)}")
    tensors = []
    for name, tensor in _plan(FAMILIES[kind], config).items():
        dtype = np.dtype(arrays[tensor.parts[0].path].dtype)
        fetch = partial(
            lambda tensor: tensor.theirs([np.asarray(arrays[p.path][p.index]) for p in tensor.parts]), tensor
        )
        tensors.append((name, tensor.shape, dtype, fetch))
    dtypes = {str(dtype) for _, _, dtype, _ in tensors}
    safetensors.save_checkpoint(folder, TOKENS | json | {"dtype": min(dtypes)} | (extra or {}), tensors, shard_bytes)


# what transformers would assume, and find outside a small vocabulary
TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id"))


def rope_layout(config: ModelConfig, params: Tree, layout: Literal["half", "interleaved"]) -> tuple[ModelConfig, Tree]:
    """The same model with queries and keys in the other order of features: Hugging Face's `half`, Meta's `interleaved`.

    Pairs (i, i + r/2) and (2i, 2i + 1) of the r features that turn; scores do not change.
    """
    turning = config.positions
    if not isinstance(turning, Rope):
        raise ConfigError(f"model.positions={turning}: only Rope has a layout")
    if turning.layout == layout:
        return config, params
    r = int(config.head_size * turning.fraction)
    order = np.arange(config.head_size)
    pairs = order[:r].reshape(2, -1).T if layout == "interleaved" else order[:r].reshape(-1, 2).T
    order[:r] = pairs.reshape(-1)

    def turned(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        moved = re.search(r"attention/(query|key)(_norm)?/(kernel|bias|scale)$", name)
        return leaf[..., order] if moved else leaf

    config = replace(config, positions=replace(turning, layout=layout))
    return config, jax.tree_util.tree_map_with_path(turned, params)


# The correspondence of leaves


@dataclass(frozen=True)
class Part:
    """A slice of one of our leaves: `leaf[index]`, of `shape`."""

    path: str
    index: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
    """One tensor of theirs, and the parts of ours that it holds, side by side along its last axis where there are several."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    transpose: Literal["no", "matrix", "patches", "unread"]

    def ours(self, array: np.ndarray) -> list[np.ndarray]:
        widths = [math.prod(part.shape) * self.shape[-1] // max(math.prod(self.shape), 1) for part in self.parts]
        pieces = np.split(array, np.cumsum(widths)[:-1], axis=-1) if len(widths) > 1 else [array]
        if self.transpose == "unread":  # a parameter that their model has and never uses
            return [np.zeros_like(array)]
        if self.transpose == "patches":
            return [np.moveaxis(array, 0, -1)]
        if self.transpose == "matrix":
            pieces = [piece.T for piece in pieces]
        return [piece.reshape(part.shape) for piece, part in zip(pieces, self.parts, strict=True)]

    def theirs(self, pieces: list[np.ndarray]) -> np.ndarray:
        if self.transpose == "patches":
            return np.moveaxis(pieces[0], -1, 0)
        if self.transpose == "matrix":
            return pieces[0].reshape(self.shape[::-1]).T
        if len(pieces) == 1:
            return pieces[0].reshape(self.shape)
        return np.concatenate([piece.reshape(*self.shape[:-1], -1) for piece in pieces], axis=-1)


# our leaf -> their name's end
LEAVES: dict[Kind, dict[str, str]] = {
    "linear": {"kernel": "weight", "bias": "bias"},
    "conv1d": {"kernel": "weight", "bias": "bias"},
    "patches": {"kernel": "weight", "bias": "bias"},
    "norm": {"scale": "weight", "bias": "bias"},
    "leaf": {"": ""},
    "leaf1": {"": ""},
    "leaf2": {"": ""},
    "lines": {"": ""},
    "columns": {"": ""},
    "unread": {"": ""},
}


def _plan(family: Family, config: Config) -> dict[str, Tensor]:
    """Every tensor that a file of this config has, by name. Covers every leaf of ours, or the tables are wrong."""
    leaves = paths(models.spec(config))
    plan = {}
    for rule in family.rules(config):
        modules = (rule.ours,) if isinstance(rule.ours, str) else rule.ours
        for ours, theirs in LEAVES[rule.kind].items():
            names = [f"{module}/{ours}".rstrip("/") for module in modules]
            if names[0] in leaves:
                there = rule._replace(theirs=f"{rule.theirs}.{theirs}".rstrip("."))
                plan |= _tensors(there, names, [leaves[name] for name in names])
    lost = leaves.keys() - {part.path for tensor in plan.values() for part in tensor.parts}
    if lost:
        raise ConfigError(f"this family has no place for {_some(sorted(lost))}")
    return plan


def _tensors(rule: Rule, names: list[str], specs: list[Spec]) -> dict[str, Tensor]:
    lead, kind = rule.theirs.count("{}"), rule.kind
    rests = [spec.shape[lead:] for spec in specs]
    matrix = names[0].endswith("kernel") and kind in ("linear", "conv1d")
    shapes = [(math.prod(rest),) if kind in ("linear", "conv1d", "norm") else rest for rest in rests]
    if matrix:
        shapes = []
        for spec, rest in zip(specs, rests, strict=True):
            inside = math.prod(n for n, axis in zip(rest, spec.axes[lead:], strict=True) if axis in spec.contracts)
            shapes.append((inside, math.prod(rest) // inside))
    shape = (*shapes[0][:-1], sum(shape[-1] for shape in shapes))
    transpose = "no"
    if kind == "linear" and matrix:
        shape, transpose = shape[::-1], "matrix"
    elif kind == "patches" and len(shape) > 1:
        shape, transpose = (shape[-1], *shape[:-1]), "patches"
    shape = {
        "leaf1": (1, *shape), "leaf2": (1, 1, *shape), "lines": (shape[0], 1, shape[-1]), "columns": (1, *shape),
    }.get(kind, shape)  # fmt: skip
    transpose = "unread" if kind == "unread" else transpose
    tensors = {}
    for index in np.ndindex(*specs[0].shape[:lead]) if rule.layers is None else rule.layers:
        ours, theirs = (index, index) if rule.layers is None else ((index[0],), (index[1],))
        parts = tuple(Part(name, ours, rest) for name, rest in zip(names, rests, strict=True))
        tensors[rule.theirs.format(*theirs)] = Tensor(shape, parts, transpose)
    return tensors


# Reading


def _canonical(family: Family, name: str, known) -> str | None:
    """A file's name as the tables have it: in the modern spelling, with the base model's prefix."""
    modern = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))
    return next((spelled for spelled in (modern, family.prefix + modern) if spelled in known), None)


def _sources(file, family: Family, plan: dict[str, Tensor]) -> tuple[dict[str, str], set[str]]:
    """(name in the plan -> name in the file, names that say a tied tensor a second time)."""
    source: dict[str, str] = {}
    for name in file.names:
        spelled = _canonical(family, name, plan.keys() | family.aliases.keys())
        if spelled in source:
            raise ConfigError(f"{file.folder}: {source[spelled]} and {name} are the same tensor; remove one")
        if spelled is not None:
            source[spelled] = name
    spare = set()
    for alias, first in family.aliases.items():
        if alias in plan or first not in plan or alias not in source:
            continue
        second = source.pop(alias)
        if source.setdefault(first, second) != second:
            spare.add(second)
            if _digest(file, second) != _digest(file, source[first]):
                raise ConfigError(f"{file.folder}: {second} and {source[first]} should be one tied tensor, but differ")
    return source, spare


def _check(file, plan, source, spare: set[str], leaves: dict[str, Spec], allow_missing, ignored: str) -> list[str]:
    """Raises the report of what does not fit; returns our paths that are missing and may be."""
    used = spare.union(source.values())
    unexpected = [name for name in file.names if name not in used and not re.search(ignored, name)]
    lacking = {part.path: name for name, tensor in plan.items() if name not in source for part in tensor.parts}
    missing = [
        f"{name} (our {path})"
        for path, name in lacking.items()
        if allow_missing is None or not re.search(allow_missing, path)
    ]
    shapes = [
        f"{source[name]} {tuple(file.names[source[name]][0])}, not {tensor.shape}"
        for name, tensor in plan.items()
        if name in source and tuple(file.names[source[name]][0]) != tensor.shape
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": shapes}
    if report := [f"{len(names)} {kind}: {_some(names)}" for kind, names in kinds.items() if names]:
        raise ConfigError(
            f"{file.folder}: the weights are not those of its config.json: {'; '.join(report)}; see allow_missing, "
            "allow_unexpected and heads of interop.huggingface.load"
        )
    return [path for path in leaves if path in lacking]


def _with_stack(config: Config, **changes) -> Config:
    if isinstance(config, EncoderDecoder):
        return replace(config, decoder=replace(config.decoder, **changes))
    return replace(config, **changes)


def _with_tie(file, family: Family, config: Config) -> Config:
    """Tied as the weights have it: a head of its own in the file is used, whatever config.json says (T5 v1.1 in v5 files).

    Where the file has none although config.json unties it, a T5 is tied (v5 writes it so); others miss a tensor.
    """
    stack = _last(config)
    head = next(
        (rule.theirs for rule in family.rules(config) if str(rule.ours).endswith("language_model/kernel")), None
    )
    if head is None or not stack.heads:
        return config
    there = {_canonical(family, name, family.aliases.keys() | family.aliases.values()): name for name in file.names}
    if head not in there:
        return _with_stack(config, tie_embeddings=True) if file.config["model_type"] == "t5" else config
    table = there.get(family.aliases[head])
    if stack.tie_embeddings and table is not None and _digest(file, there[head]) != _digest(file, table):
        return _with_stack(config, tie_embeddings=False)
    return config


def _digest(file, name: str) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(file.read(name)).view(np.uint8).data).digest()


def _floating(folder, name: str, array: np.ndarray):
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ConfigError(
            f"{folder}: {name} holds {array.dtype}, not floating-point numbers; quantised files are not read"
        )
    return jax.dtypes.canonicalize_dtype(array.dtype)


def _shardings(sharding: Any, leaves: dict[str, Spec]) -> dict[str, Any]:
    if sharding is None:
        sharding = SingleDeviceSharding(jax.local_devices()[0])
    if isinstance(sharding, jax.sharding.Sharding):
        return dict.fromkeys(leaves, sharding)
    return paths(sharding)


SMALL = 1 << 24  # bytes of a stack that may be put together on the host: no program is compiled for it


def _lay_down(params: dict, part: Part, piece: np.ndarray, shape: tuple[int, ...], sharding) -> None:
    """Puts a piece where it is to stay: on its own, or into the stack of all layers, whose memory is used again."""
    lead, size = len(part.index), math.prod(shape) * piece.itemsize
    if not lead:
        params[part.path] = jax.device_put(piece, sharding)
    elif size <= SMALL:
        stack = params.setdefault(part.path, np.empty(shape, piece.dtype))
        stack[part.index] = piece
    else:
        if part.path not in params:
            params[part.path] = jax.jit(partial(jnp.zeros, shape, piece.dtype), out_shardings=sharding)()
        of_piece = sharding
        if isinstance(sharding, NamedSharding):
            of_piece = NamedSharding(sharding.mesh, PartitionSpec(*(None,) * lead, *sharding.spec[lead:]))
        start = np.array(part.index + (0,) * piece.ndim, np.int32)
        piece = jax.device_put(piece[(None,) * lead], of_piece)
        params[part.path] = _writer(sharding)(params[part.path], piece, start)


@cache
def _writer(sharding) -> Callable:
    write = lambda stack, piece, start: jax.lax.dynamic_update_slice(stack, piece, tuple(start))
    return jax.jit(write, donate_argnums=0, out_shardings=sharding)


def _drawn(path: str, leaf: Spec, key, dtype, sharding):
    if key is None:
        raise ConfigError(f"{path} is missing in the file and may be; give `key` to draw it")
    from jaxformer import params

    tree = params.init(unflatten_dict({path: leaf}, sep="/"), key, dtype)
    return jax.device_put(paths(tree)[path], sharding)


# Writing


def _as_family(config: Config, wanted: str | None) -> tuple[str, dict]:
    """(model_type, config.json) of the first family that says all of the config: what it writes reads back equal."""
    reasons = {}
    for kind in FAMILIES if wanted is None else [wanted]:
        if kind not in FAMILIES:
            raise ConfigError(f"model_type={kind!r}: expected one of {', '.join(FAMILIES)}")
        try:
            family, json = FAMILIES[kind], FAMILIES[kind].write(config)
            again = family.read(json, _plan(family, config))
            again = _with_stack(again, tie_embeddings=_last(config).tie_embeddings) if kind == "t5" else again
        except (ConfigError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
            reasons[kind] = str(error)
            continue
        lost = _lost(config, again)
        if not lost:
            return kind, json
        reasons[kind] = f"cannot say {_some(lost)}"
    if wanted is None:
        raise ConfigError(f"no family of {', '.join(FAMILIES)} can say this config; give model_type to see why")
    raise ConfigError(f"model_type={wanted!r}: {reasons[wanted]}")


HOW = ("remat", "unroll", "attention_implementation", "init_std", "dropout_rate", "attention_dropout_rate")


def _lost(config: Config, again: Config) -> list[str]:
    """What differs between two configs and is not a matter of how they are run or trained."""
    one, two = _stacks(config), _stacks(again)
    if one.keys() != two.keys():
        return [type(config).__name__]
    lost = ["share_embeddings"] * (getattr(config, "share_embeddings", 0) != getattr(again, "share_embeddings", 0))
    for prefix in one:
        mine, theirs = _resolved(one[prefix]), _resolved(two[prefix])
        names = (name for name in vars(mine) if name not in HOW and getattr(mine, name) != getattr(theirs, name))
        lost += [prefix + name for name in names]
    return lost


def _stacks(config: Config) -> dict[str, ModelConfig]:
    if isinstance(config, ModelConfig):
        return {"": config}
    return {"encoder.": config.encoder, "decoder.": config.decoder}


def _last(config: Config) -> ModelConfig:
    """The stack that has the heads."""
    return config if isinstance(config, ModelConfig) else config.decoder


def _resolved(config: ModelConfig) -> ModelConfig:
    """Defaults that mean the same number written out; biases as the set of what has one."""
    biases = [path for path in paths(models.spec(config)) if path.endswith("/bias")]
    mixer = config.mixer  # what a call decides, not a file: who is global, which random blocks
    if isinstance(mixer, Longformer):
        mixer = Longformer(mixer.window)
    elif isinstance(mixer, BigBird):
        mixer = BigBird(mixer.block, mixer.random)
    return replace(
        config,
        num_kv_heads=config.kv_heads,
        head_width=config.head_size,
        d_ff=config.ff_width,
        use_bias=" ".join(biases),
        tie_embeddings=config.tie_embeddings or not config.heads,
        mixer=mixer,
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
