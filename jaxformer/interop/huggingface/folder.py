"""A checkpoint read from a Hugging Face folder, and written to one.

Tensors are read one at a time, checked, and written into their place on the devices: the host never holds two models.
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
from jaxformer import params as parameters
from jaxformer.errors import ConfigError
from jaxformer.interop import safetensors
from jaxformer.interop.huggingface import decoders, encoders, pairs
from jaxformer.interop.huggingface.checkpoint import Checkpoint, read_labels, read_tokens, write_tokens
from jaxformer.interop.huggingface.tables import (
    Family,
    Part,
    Tensor,
    check_kinds,
    plan,
    shortest_pattern,
    write_labels,
)
from jaxformer.models.config import EncoderDecoder, ModelConfig
from jaxformer.models.mixers import BigBird, Longformer
from jaxformer.ops.positions import Rope
from jaxformer.params import Spec, paths

Config = ModelConfig | EncoderDecoder
Tree = Any
# without these, transformers assumes tokens that a small vocabulary does not have
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
    """A checkpoint from a folder or from the hub: config, parameters, special tokens, conventions and labels.

    `dtype` of the parameters is the file's by default. `sharding` is one for all or a tree of them. `heads` replace those
    of the file's architecture: `heads=()` loads only the stack, `heads=(Classification(3),)` is for a new task.
    A tensor that is missing, unexpected or of another shape is an error. `allow_unexpected` (their names) and
    `allow_missing` (ours) are regular expressions for exceptions; what is missing is drawn from `key`. Raises ConfigError
    with a full list, before any weight is read.
    """
    file = safetensors.open_checkpoint(path, revision)
    kind, read = _read_settings(file)
    config = _with_tie(file, FAMILIES[kind], read.config)
    if heads is not None:
        config = _with_stack(config, heads=heads)
    params = _read_weights(file, FAMILIES[kind], config, dtype, sharding, allow_unexpected, allow_missing, key)
    labels = read.labels if _classes(config) == len(read.labels) else ()  # else of a head that is not loaded
    return replace(read, config=config, params=params, labels=labels)


def save(folder: str | Path, checkpoint: Checkpoint, *, shard_bytes: int = 5_000_000_000) -> None:
    """Writes config.json and safetensors (files of at most `shard_bytes`) that transformers opens.

    For a new model, `checkpoint` is `Checkpoint(config, params, Tokens(eos=(2,)))`. Raises ConfigError where no
    family of files, or not the checkpoint's, can express the config, where tokens or labels are missing or do not fit,
    and where `folder` exists and is not empty.
    """
    config = checkpoint.config
    kind, json = _as_family(config, checkpoint.model_type)
    json = _with_tokens(folder, checkpoint, json)
    if wrong := parameters.mismatch(models.spec(config), checkpoint.params):
        raise ConfigError(f"{folder}: the parameters are not those of the config: {wrong}")
    arrays = paths(checkpoint.params)
    tensors = []
    for name, tensor in plan(FAMILIES[kind], config).items():
        dtype = np.dtype(arrays[tensor.parts[0].path].dtype) if tensor.parts else np.dtype(np.float32)
        tensors.append((name, tensor.shape, dtype, partial(_fetch, arrays, tensor)))
    dtypes = {str(dtype) for _, _, dtype, _ in tensors}
    safetensors.save_checkpoint(folder, json | {"dtype": min(dtypes)}, tensors, shard_bytes)


def _fetch(arrays: dict[str, Any], tensor: Tensor) -> np.ndarray:
    """One of their tensors, of our arrays."""
    return tensor.theirs([np.asarray(arrays[part.path][part.index]) for part in tensor.parts])


def rope_layout(config: ModelConfig, params: Tree, layout: Literal["half", "interleaved"]) -> tuple[ModelConfig, Tree]:
    """The same model with the features of queries and keys in the other order: Hugging Face's `half`, Meta's `interleaved`.

    Rotated pairs are (i, i + r/2) or (2i, 2i + 1) of r features; scores do not change. Raises ConfigError for models
    without Rope. Su et al. 2021, arXiv:2104.09864, eq. 34.
    """
    rope = config.positions
    if not isinstance(rope, Rope):
        raise ConfigError(f"model.positions={rope}: only Rope has a layout")
    if rope.layout == layout:
        return config, params
    r = int(config.head_size * rope.fraction)
    order = np.arange(config.head_size)
    order[:r] = (order[:r].reshape(2, -1) if layout == "interleaved" else order[:r].reshape(-1, 2)).T.reshape(-1)
    rotated = re.compile(r"attention/(query|key)(_norm)?/(kernel|bias|scale)$")

    def reorder(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return leaf[..., order] if rotated.search(name) else leaf

    config = replace(config, positions=replace(rope, layout=layout))
    return config, jax.tree_util.tree_map_with_path(reorder, params)


# Reading


def _read_settings(file: safetensors.Files) -> tuple[str, Checkpoint]:
    """The model type of a folder, and all of its checkpoint but the parameters."""
    kind = file.config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ConfigError(
            f"{file.folder}/config.json: model_type {kind!r} (architectures {file.config.get('architectures')}) is not "
            f"supported; expected one of {', '.join(FAMILIES)}"
        )
    family = FAMILIES[kind]
    try:
        check_kinds(file.config, len(file.names))
        config, tokens = family.read(file.config, file.names), read_tokens(file.generation, file.config)
        conventions, labels = family.conventions(file.config), read_labels(file.config)
    except ConfigError as error:
        raise ConfigError(f"{file.folder}: {error}") from None
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, ZeroDivisionError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{file.folder}/config.json: cannot be understood ({why})") from error
    return kind, Checkpoint(config, None, tokens, conventions, labels, kind)


def _read_weights(file, family: Family, config: Config, dtype, sharding, allow_unexpected, allow_missing, key) -> Tree:
    """The parameters of the config, tensor by tensor; the options are those of `load`."""
    tensors = plan(family, config, allow_missing)
    source, spare = _sources(file, family, tensors)
    leaves = paths(models.spec(config))
    ignored = "|".join(filter(None, (family.ignored, allow_unexpected)))
    missing = _check(file, tensors, source, spare, leaves, allow_missing, ignored)
    if missing and key is None:
        raise ConfigError(f"{missing[0]} is missing in the file and may be; give `key` to draw it")
    shardings = _shardings(sharding, leaves)
    dtypes = _dtypes(file, tensors, source, dtype)
    params: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if name in source and tensor.parts:
            array = file.read(source[name])
            safetensors.check_finite(source[name], array)
            for part, piece in zip(tensor.parts, tensor.ours(array), strict=True):
                _write_part(params, part, piece, dtypes[part.path], leaves[part.path].shape, shardings[part.path])
            del array, piece  # before the next one is read
    for path, leaf in list(params.items()):
        params[path] = jax.device_put(leaf, shardings[path])  # small leaves are still on the host
    for path in missing:
        one = dtype or next(iter(dtypes.values()), jnp.float32)
        drawn = parameters.init(unflatten_dict({path: leaves[path]}, sep="/"), key, one)
        params[path] = jax.device_put(paths(drawn)[path], shardings[path])
    return unflatten_dict({path: params[path] for path in leaves}, sep="/")


def _canonical(family: Family, name: str, names) -> str | None:
    """A file's name in the modern spelling and with the base model's prefix; None if it is not in `names`."""
    modern = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))
    return next((spelled for spelled in (modern, family.prefix + modern) if spelled in names), None)


def _sources(file, family: Family, tensors: dict[str, Tensor]) -> tuple[dict[str, str], set[str]]:
    """(name in the tables -> name in the file, names of second copies of tied tensors)."""
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
        if kept != second and _digest(file, second) == _digest(file, kept):  # other values would be unexpected
            spare.add(second)
    return source, spare


def _check(file, tensors, source, spare: set[str], leaves: dict[str, Spec], allow_missing, ignored: str) -> list[str]:
    """Raises ConfigError with all that does not fit; returns our paths that are missing and may be."""
    used = spare.union(source.values())
    unexpected = [name for name in file.names if name not in used and not re.search(ignored, name)]
    lacking = {part.path: name for name, tensor in tensors.items() if name not in source for part in tensor.parts}
    # a leaf that the file has for some layers is not missing: it is damaged
    begun = {part.path for name in source.keys() & tensors.keys() for part in tensors[name].parts}
    optional = lambda path: allow_missing is not None and path not in begun and re.search(allow_missing, path)
    missing = [f"{name} (our {path})" for path, name in lacking.items() if not optional(path)]
    found = {name: tuple(file.names[source[name]][0]) for name in tensors if name in source}
    shapes = [
        f"{source[name]} {shape}, not {tensors[name].shape}"
        for name, shape in found.items()
        if shape != tensors[name].shape
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
    """Tied as the weights are: a separate head in the file is used, whatever config.json says (T5 v1.1 in v5 files).

    A file without one although config.json unties it: a T5 is tied (v5 writes it so), others miss a tensor.
    """
    stack = _last(config)
    heads = (rule.theirs for rule in family.rules(config) if str(rule.ours).endswith("language_model/kernel"))
    head = next(heads, None)
    if head is None or not stack.heads:
        return config
    in_file = {_canonical(family, name, family.aliases.keys() | family.aliases.values()): name for name in file.names}
    if head not in in_file:
        return _with_stack(config, tie_embeddings=True) if file.config["model_type"] == "t5" else config
    table = in_file.get(family.aliases[head])
    if stack.tie_embeddings and table is not None and _digest(file, in_file[head]) != _digest(file, table):
        return _with_stack(config, tie_embeddings=False)
    return config


def _digest(file, name: str) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(file.read(name)).view(np.uint8).data).digest()


def _dtypes(file, tensors: dict[str, Tensor], source: dict[str, str], dtype) -> dict[str, Any]:
    """The dtype of each leaf: `dtype`, or the widest of its tensors in the file."""
    dtypes: dict[str, Any] = {}
    for name in (name for name in tensors if name in source):
        stored = jnp.dtype(file.names[source[name]][1])
        if not jnp.issubdtype(stored, jnp.floating):
            raise ConfigError(
                f"{file.folder}: {source[name]} holds {stored}, not floating-point numbers; quantised files are not read"
            )
        for part in tensors[name].parts:
            dtypes[part.path] = dtype or jnp.promote_types(stored, dtypes.get(part.path, stored))
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


SLAB = 1 << 24  # bytes copied at once. Leaves up to this size are put together on the host, which compiles nothing


def _write_part(params: dict, part: Part, piece: np.ndarray, dtype, shape: tuple[int, ...], sharding) -> None:
    """Writes a piece into its place in our leaf of `shape`, on its devices, a slab at a time."""
    if math.prod(shape) * dtype.itemsize <= SLAB:
        params.setdefault(part.path, np.empty(shape, dtype))[part.index] = piece
        return
    lead, slab_sharding = len(part.index), sharding
    if isinstance(sharding, NamedSharding):
        # on a mesh of explicit axes JAX would not write a slab into an array
        sharding = NamedSharding(Mesh(sharding.mesh.devices, sharding.mesh.axis_names), sharding.spec)
        # the rows of a slab need not divide among devices
        slab_sharding = NamedSharding(sharding.mesh, PartitionSpec(*(None,) * (lead + 1), *sharding.spec[lead + 1 :]))
    if part.path not in params:
        params[part.path] = jax.jit(partial(jnp.zeros, shape, dtype), out_shardings=sharding)()
    rows = max(1, SLAB * len(piece) // max(piece.nbytes, 1))
    for begin in range(0, len(piece), rows):
        slab = np.ascontiguousarray(piece[begin : begin + rows], dtype)[(None,) * lead]
        start = np.array((*part.index, begin, *(0,) * (piece.ndim - 1)), np.int32)
        leaf = _slab_writer(sharding)(params[part.path], jax.device_put(slab, slab_sharding), start)
        params[part.path] = jax.block_until_ready(leaf)  # waiting slabs would fill the memory


@cache
def _slab_writer(sharding) -> Callable:
    write = lambda leaf, slab, start: jax.lax.dynamic_update_slice(leaf, slab, tuple(start))
    return jax.jit(write, donate_argnums=0, out_shardings=sharding)


# Writing


def _with_tokens(folder: str | Path, checkpoint: Checkpoint, json: dict) -> dict:
    """config.json with the checkpoint's tokens and labels."""
    tokens, labels, stack = checkpoint.tokens, checkpoint.labels, _last(checkpoint.config)
    if json["model_type"] == "marian" and tokens.start is None:
        expected = "the token that its targets begin with: Tokens(start=...)"
        raise ConfigError(f"{folder}: a Marian needs {expected}; got {tokens}")
    offset = getattr(stack.positions, "offset", 0)  # their positions begin after the pad token's number
    if offset and tokens.pad not in (None, offset - 1):
        raise ConfigError(f"{folder}: tokens.pad={tokens.pad}; the offset of model.positions makes it {offset - 1}")
    classes = _classes(checkpoint.config)
    if labels and len(labels) != classes:
        raise ConfigError(f"{folder}: {len(labels)} labels for {classes} classes of model.heads")
    return NO_TOKENS | json | write_labels(labels) | write_tokens(tokens)


def _classes(config: Config) -> int:
    """The number of classes of the first head that has classes, or 0."""
    return next((classes for head in _last(config).heads if (classes := getattr(head, "classes", None))), 0)


def _as_family(config: Config, wanted: str | None) -> tuple[str, dict]:
    """(model_type, config.json) of the first family that can express the config: what it writes is read back equal."""
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
        reasons[kind] = f"cannot express {_some(lost)}"
    if wanted is None:
        raise ConfigError(f"no family of {', '.join(FAMILIES)} can express this config; give model_type to see why")
    raise ConfigError(f"model_type={wanted!r}: {reasons[wanted]}")


NOT_IN_FILES = ("remat", "unroll", "attention_implementation", "init_std", "dropout_rate", "attention_dropout_rate")


def _lost(config: Config, again: Config) -> list[str]:
    """The fields that differ between two configs and decide what a trained model computes."""
    if isinstance(config, ModelConfig) and isinstance(again, ModelConfig):
        ours, theirs = vars(_resolved(config)), vars(_resolved(again))
        return [name for name in ours if name not in NOT_IN_FILES and ours[name] != theirs[name]]
    if isinstance(config, ModelConfig) or isinstance(again, ModelConfig):
        return [type(config).__name__]
    lost = ["share_embeddings"] if config.share_embeddings != again.share_embeddings else []
    for side in ("encoder", "decoder"):
        lost += [f"{side}.{name}" for name in _lost(getattr(config, side), getattr(again, side))]
    return lost


def _last(config: Config) -> ModelConfig:
    """The stack that has the heads."""
    return config if isinstance(config, ModelConfig) else config.decoder


def _resolved(config: ModelConfig) -> ModelConfig:
    """With defaults as numbers, and the paths of all biases as `use_bias`, so that equal models are equal values."""
    biases = [path for path in paths(models.spec(config)) if path.endswith("/bias")]
    mixers = config.mixer if isinstance(config.mixer, tuple) else (config.mixer,)
    return replace(
        config,
        num_kv_heads=config.kv_heads,
        head_width=config.head_size,
        d_ff=config.ff_width,
        use_bias=" ".join(biases),
        tie_embeddings=config.tie_embeddings or not config.heads,
        mixer=shortest_pattern([_in_file(mixer) for mixer in mixers]),
    )


def _in_file(mixer):
    """Without what calls decide and files do not hold: which tokens are global, which blocks random."""
    match mixer:
        case Longformer():
            return Longformer(mixer.window)
        case BigBird():
            return BigBird(mixer.block, mixer.random)
    return mixer


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
