"""A checkpoint read from a Hugging Face folder, and written to one.

Tensors are read one at a time, checked, and laid down where they are to stay, so the host never holds the model twice.
"""

import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxformer import models
from jaxformer.errors import ConfigError
from jaxformer.interop import safetensors
from jaxformer.interop.huggingface import decoders, encoders, pairs
from jaxformer.interop.huggingface.checkpoint import (
    Checkpoint,
    read_labels,
    read_tokens,
    write_labels,
    write_tokens,
)
from jaxformer.interop.huggingface.tables import Family, Part, Tensor, check_kinds, plan, shortest_pattern
from jaxformer.models.config import EncoderDecoder, ModelConfig
from jaxformer.models.mixers import BigBird, Longformer
from jaxformer.ops.positions import Rope
from jaxformer.params import Spec, paths

Config = ModelConfig | EncoderDecoder
Tree = Any
# what transformers would assume, and find outside a small vocabulary
NO_TOKENS = dict.fromkeys(f"{name}_token_id" for name in ("bos", "eos", "pad", "sep"))
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
) -> Checkpoint:
    """A checkpoint's config and parameters, with its special tokens and conventions, from a folder or from the hub.

    `dtype` of the parameters is the file's own by default. `sharding` is one for all or a tree of them. `heads` go
    before those of the file's architecture: `heads=()` for the stack alone, `heads=(Classification(3),)` for a new task.
    What the file lacks, has besides, or has in another shape is an error; `allow_unexpected` and `allow_missing` are
    regular expressions for names (theirs; ours) that may be left out, the missing ones drawn from `key`. Raises
    ConfigError, in one report, before anything is read.
    """
    file = safetensors.open_checkpoint(path, revision)
    kind, read = _read_settings(file)
    config = _with_tie(file, FAMILIES[kind], read.config)
    if heads is not None:
        config = _with_stack(config, heads=heads)
    params = _read_weights(file, FAMILIES[kind], config, dtype, sharding, allow_unexpected, allow_missing, key)
    labels = read.labels if _classes(config) == len(read.labels) else ()  # else they are of a head that is not loaded
    return replace(read, config=config, params=params, labels=labels)


def save(folder: str | Path, checkpoint: Checkpoint, *, shard_bytes: int = 5_000_000_000) -> None:
    """Writes config.json and safetensors (in shards of at most `shard_bytes`) that transformers opens as it does its own.

    Of a model of your own, `checkpoint` is `Checkpoint(config, params, Tokens(eos=(2,)))`. Raises ConfigError where no
    family of files, or not the checkpoint's, can say all of the config, where tokens or labels are missing or do not fit,
    and where `folder` exists and is not empty.
    """
    config = checkpoint.config
    kind, json = _as_family(config, checkpoint.model_type)
    json = _with_tokens(folder, checkpoint, json)
    leaves, arrays = paths(models.spec(config)), paths(checkpoint.params)
    wrong = [
        f"{path} {getattr(arrays.get(path), 'shape', 'missing')}, not {leaf.shape}"
        for path, leaf in leaves.items()
        if path not in arrays or arrays[path].shape != leaf.shape
    ] + [f"{path} unknown" for path in arrays.keys() - leaves.keys()]
    if wrong:
        raise ConfigError(f"{folder}: the parameters are not those of the config: {_some(wrong)}")
    tensors = []
    for name, tensor in plan(FAMILIES[kind], config).items():
        dtype = np.dtype(arrays[tensor.parts[0].path].dtype) if tensor.parts else np.dtype(np.float32)
        fetch = partial(
            lambda tensor: tensor.theirs([np.asarray(arrays[p.path][p.index]) for p in tensor.parts]), tensor
        )
        tensors.append((name, tensor.shape, dtype, fetch))
    dtypes = {str(dtype) for _, _, dtype, _ in tensors}
    safetensors.save_checkpoint(folder, json | {"dtype": min(dtypes)}, tensors, shard_bytes)


def rope_layout(config: ModelConfig, params: Tree, layout: Literal["half", "interleaved"]) -> tuple[ModelConfig, Tree]:
    """The same model with queries and keys in the other order of features: Hugging Face's `half`, Meta's `interleaved`.

    Pairs (i, i + r/2) and (2i, 2i + 1) of the r features that turn; scores do not change. Raises ConfigError for models
    without Rope. Su et al. 2021, arXiv:2104.09864, eq. 34.
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


# Reading


def _read_settings(file: safetensors.Files) -> tuple[str, Checkpoint]:
    """The model type of a folder, and what its config.json and generation_config.json say, without parameters."""
    kind = file.config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ConfigError(
            f"{file.folder}/config.json: model_type {kind!r} (architectures {file.config.get('architectures')}) is not "
            f"known here; expected one of {', '.join(FAMILIES)}"
        )
    family = FAMILIES[kind]
    try:
        check_kinds(file.config, len(file.names))
        config, tokens = family.read(file.config, file.names), read_tokens(file.generation, file.config)
        return kind, Checkpoint(
            config, None, tokens, family.conventions(file.config), read_labels(file.config), model_type=kind
        )
    except ConfigError as error:
        raise ConfigError(f"{file.folder}: {error}") from None
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, ZeroDivisionError) as error:
        raise ConfigError(
            f"{file.folder}/config.json: cannot be understood ({type(error).__name__}: {error})"
        ) from error


def _read_weights(file, family: Family, config: Config, dtype, sharding, allow_unexpected, allow_missing, key) -> Tree:
    """The parameters of the config, tensor by tensor; `load` says what the options mean."""
    tensors = plan(family, config, allow_missing)
    source, spare = _sources(file, family, tensors)
    leaves = paths(models.spec(config))
    ignored = "|".join(filter(None, (family.ignored, allow_unexpected)))
    missing = _check(file, tensors, source, spare, leaves, allow_missing, ignored)
    shardings = _shardings(sharding, leaves)
    dtypes = _dtypes(file, tensors, source, dtype)
    params: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if name in source and tensor.parts:
            array = file.read(source[name])
            safetensors.check_finite(source[name], array)
            for part, piece in zip(tensor.parts, tensor.ours(array), strict=True):
                _lay_down(params, part, piece, dtypes[part.path], leaves[part.path].shape, shardings[part.path])
            del array, piece  # before the next one is read
    for path, stack in list(params.items()):
        params[path] = jax.device_put(stack, shardings[path])  # what was put together on the host
    for path in missing:
        params[path] = _drawn(
            path, leaves[path], key, dtype or next(iter(dtypes.values()), jnp.float32), shardings[path]
        )
    return unflatten_dict({path: params[path] for path in leaves}, sep="/")


def _canonical(family: Family, name: str, known) -> str | None:
    """A file's name as the tables have it: in the modern spelling, with the base model's prefix."""
    modern = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))
    return next((spelled for spelled in (modern, family.prefix + modern) if spelled in known), None)


def _sources(file, family: Family, tensors: dict[str, Tensor]) -> tuple[dict[str, str], set[str]]:
    """(name in the tables -> name in the file, names that say a tied tensor a second time)."""
    source: dict[str, str] = {}
    for name in file.names:
        spelled = _canonical(family, name, tensors.keys() | family.aliases.keys())
        if spelled in source:
            raise ConfigError(f"{file.folder}: {source[spelled]} and {name} are the same tensor; remove one")
        if spelled is not None:
            source[spelled] = name
    spare = set()
    for alias, first in family.aliases.items():
        if alias in tensors or first not in tensors or alias not in source:
            continue
        second = source.pop(alias)
        kept = source.setdefault(first, second)
        if kept != second and _digest(file, second) == _digest(file, kept):  # or else it is none that we expect
            spare.add(second)
    return source, spare


def _check(file, tensors, source, spare: set[str], leaves: dict[str, Spec], allow_missing, ignored: str) -> list[str]:
    """Raises the report of what does not fit; returns our paths that are missing and may be."""
    used = spare.union(source.values())
    unexpected = [name for name in file.names if name not in used and not re.search(ignored, name)]
    lacking = {part.path: name for name, tensor in tensors.items() if name not in source for part in tensor.parts}
    begun = {
        part.path for name in source.keys() & tensors.keys() for part in tensors[name].parts
    }  # in some layer at least
    missing = [
        f"{name} (our {path})"
        for path, name in lacking.items()
        if allow_missing is None or path in begun or not re.search(allow_missing, path)
    ]
    shapes = [
        f"{source[name]} {tuple(file.names[source[name]][0])}, not {tensor.shape}"
        for name, tensor in tensors.items()
        if name in source and tuple(file.names[source[name]][0]) != tensor.shape
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": shapes}
    if report := [f"{len(names)} {kind}: {_some(names)}" for kind, names in kinds.items() if names]:
        raise ConfigError(
            f"{file.folder}: the weights are not those of its config.json: {'; '.join(report)}; see allow_missing, "
            "allow_unexpected and heads of interop.huggingface.load"
        )
    placed = {part.path for tensor in tensors.values() for part in tensor.parts}
    return [path for path in leaves if path in lacking or path not in placed]


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


def _dtypes(file, tensors: dict[str, Tensor], source: dict[str, str], dtype) -> dict[str, Any]:
    """The dtype of each leaf: the one asked for, or the widest of the tensors that it is put together from."""
    dtypes: dict[str, Any] = {}
    for name in (name for name in tensors if name in source):
        own = jnp.dtype(file.names[source[name]][1])
        if not jnp.issubdtype(own, jnp.floating):
            raise ConfigError(
                f"{file.folder}: {source[name]} holds {own}, not floating-point numbers; quantised files are not read"
            )
        for part in tensors[name].parts:
            dtypes[part.path] = dtype or jnp.promote_types(own, dtypes.get(part.path, own))
    return {path: jax.dtypes.canonicalize_dtype(one) for path, one in dtypes.items()}


def _shardings(sharding: Any, leaves: dict[str, Spec]) -> dict[str, Any]:
    if sharding is None:
        sharding = SingleDeviceSharding(jax.local_devices()[0])
    if isinstance(sharding, jax.sharding.Sharding):
        return dict.fromkeys(leaves, sharding)
    places = paths(sharding)
    if lacking := [path for path in leaves if path not in places]:
        raise ConfigError(f"sharding: none for {_some(lacking)}; give one for each parameter, or one for all")
    return places


SLAB = 1 << 24  # bytes that are copied at once; a stack of no more is put together on the host, and compiles nothing


def _lay_down(params: dict, part: Part, piece: np.ndarray, dtype, shape: tuple[int, ...], sharding) -> None:
    """Puts a piece, or a slab of it at a time, where it is to stay: into our whole leaf of `shape`, on its devices."""
    size = math.prod(shape) * dtype.itemsize
    if size <= SLAB:
        params.setdefault(part.path, np.empty(shape, dtype))[part.index] = piece
        return
    if isinstance(sharding, NamedSharding):  # on a mesh of explicit axes JAX would not write a slab into an array
        sharding = NamedSharding(Mesh(sharding.mesh.devices, sharding.mesh.axis_names), sharding.spec)
    if part.path not in params:
        params[part.path] = jax.jit(partial(jnp.zeros, shape, dtype), out_shardings=sharding)()
    lead, of_slab = len(part.index), sharding
    if isinstance(sharding, NamedSharding):  # rows of a slab need not divide among devices
        of_slab = NamedSharding(sharding.mesh, PartitionSpec(*(None,) * (lead + 1), *sharding.spec[lead + 1 :]))
    rows = max(1, SLAB * len(piece) // max(piece.nbytes, 1))
    for begin in range(0, len(piece), rows):
        slab = np.ascontiguousarray(piece[begin : begin + rows], dtype)[(None,) * lead]
        start = np.array((*part.index, begin, *(0,) * (piece.ndim - 1)), np.int32)
        leaf = _writer(sharding)(params[part.path], jax.device_put(slab, of_slab), start)
        params[part.path] = jax.block_until_ready(leaf)  # slabs that wait are memory too


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


def _with_tokens(folder: str | Path, checkpoint: Checkpoint, json: dict) -> dict:
    """config.json with the checkpoint's tokens and labels."""
    tokens, labels = checkpoint.tokens, checkpoint.labels
    if json["model_type"] == "marian" and tokens.start is None:
        raise ConfigError(
            f"{folder}: a Marian needs the token that its targets begin with: Tokens(start=...); got {tokens}"
        )
    offset = getattr(_last(checkpoint.config).positions, "offset", 0)  # theirs begin behind the pad token's number
    if offset and tokens.pad not in (None, offset - 1):
        raise ConfigError(
            f"{folder}: tokens.pad={tokens.pad}, where the offset of model.positions makes it {offset - 1}"
        )
    if labels:
        if len(labels) != _classes(checkpoint.config):
            raise ConfigError(
                f"{folder}: {len(labels)} labels for {_classes(checkpoint.config)} classes of model.heads"
            )
        json = json | write_labels(labels)
    return NO_TOKENS | json | write_tokens(tokens)


def _classes(config: Config) -> int:
    """How many classes the heads tell apart; 0 without such a head."""
    return next((classes for head in _last(config).heads if (classes := getattr(head, "classes", None))), 0)


def _as_family(config: Config, wanted: str | None) -> tuple[str, dict]:
    """(model_type, config.json) of the first family that says all of the config: what it writes reads back equal."""
    reasons = {}
    for kind in FAMILIES if wanted is None else [wanted]:
        if kind not in FAMILIES:
            raise ConfigError(f"model_type={kind!r}: expected one of {', '.join(FAMILIES)}")
        try:
            family, json = FAMILIES[kind], FAMILIES[kind].write(config)
            again = family.read(json, plan(family, config))
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
    mixers = config.mixer if isinstance(config.mixer, tuple) else (config.mixer,)
    return replace(
        config,
        num_kv_heads=config.kv_heads,
        head_width=config.head_size,
        d_ff=config.ff_width,
        use_bias=" ".join(biases),
        tie_embeddings=config.tie_embeddings or not config.heads,
        mixer=shortest_pattern([_of_file(mixer) for mixer in mixers]),
    )


def _of_file(mixer):
    """Without what a call decides and no file: which tokens are global, which blocks random."""
    match mixer:
        case Longformer():
            return Longformer(mixer.window)
        case BigBird():
            return BigBird(mixer.block, mixer.random)
    return mixer


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
