"""Reads a checkpoint from a Hugging Face folder, and writes one. The host never holds the whole model."""

import logging
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxformer import models, params as parameters
from jaxformer.decoding import filters
from jaxformer.errors import ConfigError
from jaxformer.interop import safetensors
from jaxformer.interop.huggingface import decoders, encoders, pairs, tables
from jaxformer.interop.safetensors import list_names
from jaxformer.models.config import EncoderDecoder, ModelConfig
from jaxformer.params import Spec, Tree, paths
from jaxformer.zoo.bigbird import BigBird
from jaxformer.zoo.longformer import Longformer

log = logging.getLogger("jaxformer")

Config = ModelConfig | EncoderDecoder
# without these entries transformers assumes ids that a small vocabulary does not have
NO_TOKENS = dict.fromkeys(f"{name}_token_id" for name in ("bos", "eos", "pad", "sep"))
FAMILIES: dict[str, tables.Family] = decoders.FAMILIES | encoders.FAMILIES | pairs.FAMILIES


@dataclass(frozen=True)
class Tokens:
    """The special tokens of a checkpoint; None if it has none."""

    start: int | None = None  # begins the target of an encoder-decoder
    bos: int | None = None
    eos: tuple[int, ...] = ()  # each ends a text (`stop_tokens` of `decoding.generate`)
    pad: int | None = None
    sep: int | None = None
    forced_eos: int | None = None  # transformers ends a text of maximum length with it
    forced_bos: int | None = None  # the first new token
    banned: tuple[tuple[int, ...], ...] = ()  # words of one or more tokens that are never written; a Marian's pad is one
    suppressed: tuple[int, ...] = ()  # tokens that are never written
    suppressed_first: tuple[int, ...] = ()  # tokens that are not the first new one


@dataclass(frozen=True)
class Checkpoint:
    """A model, its parameters, special tokens and class names."""

    config: Config
    params: Any
    tokens: Tokens = Tokens()
    labels: tuple[str, ...] = ()
    model_type: str | None = None  # the family that `save` writes; None: the first that can express the config
    generation: Mapping[str, Any] = field(default_factory=dict)  # the rest of generation_config.json, such as num_beams

    def decoding(self) -> dict[str, Any]:
        """The options by which this checkpoint writes: `generate(..., **checkpoint.decoding())`, also for `search`.

        They are its stop tokens, and filters for its banned, suppressed and forced tokens. `generation` is not applied, nor
        is `forced_eos`. The prompt of an encoder-decoder is `[checkpoint.tokens.start]`.
        """
        return {"stop_tokens": self.tokens.eos, "filters": token_filters(self.tokens)}


@struct.dataclass
class NotFirst:
    """A filter: removes tokens [n] where a row has no new token yet."""

    tokens: Any

    def __call__(self, logits: jax.Array, history: filters.History) -> jax.Array:
        first = (history.length == history.prompt)[:, None]
        removed = logits.at[:, jnp.asarray(self.tokens)].set(-jnp.inf, mode="drop")
        return jnp.where(first, removed, logits)


def token_filters(tokens: Tokens) -> tuple[filters.Filter, ...]:
    """The filters of `decoding.filters` that keep to a checkpoint's banned, suppressed and forced tokens."""
    stops = {(stop,) for stop in tokens.eos}
    words = [word for word in tokens.banned if word not in stops]  # transformers lets a banned stop token end a text
    words += [(token,) for token in tokens.suppressed]
    found: list[filters.Filter] = [filters.BadWords(words)] if words else []
    if tokens.suppressed_first:
        found.append(NotFirst(np.asarray(tokens.suppressed_first, np.int32)))
    if tokens.forced_bos is not None:
        found.append(filters.ForcedPrefix([tokens.forced_bos]))
    return tuple(found)


SINGLE = ("start", "bos", "pad", "sep", "forced_eos", "forced_bos")  # fields of Tokens that are one token
NAMES = {name: ("decoder_start" if name == "start" else name) + "_token_id" for name in (*SINGLE, "eos")}
LISTS = {"banned": "bad_words_ids", "suppressed": "suppress_tokens", "suppressed_first": "begin_suppress_tokens"}


def load(
    path: str | Path, *, heads: tuple | None = None, dtype=None, sharding: Any = None, allow_unexpected: str | None = None,
    allow_missing: str | None = None, key: jax.Array | None = None, revision: str | None = None,
) -> Checkpoint:  # fmt: skip
    """A checkpoint from a folder or from the hub.

    The default `dtype` is the file's. `sharding` is one for all parameters or a tree. `heads` replaces the heads of the file:
    `()` loads only the stack, `(Classification(3),)` is for a new task. Raises ConfigError, before it reads weights, with all
    tensors that are missing, unexpected or of another shape. The regular expressions `allow_unexpected` (their names) and
    `allow_missing` (ours) permit exceptions; missing parameters are drawn from `key`. Heads of the file that the model does
    not have, such as BERT's pooler, are left out: a warning names them.
    """
    file = safetensors.open_checkpoint(path, revision)
    checkpoint = _read_settings(file)
    family = FAMILIES[file.config["model_type"]]
    config = _with_tie(file, family, checkpoint.config)
    if heads is not None:
        config = _with_stack(config, heads=heads)
    params = _read_weights(file, family, config, dtype, sharding, allow_unexpected, allow_missing, key)
    labels = checkpoint.labels if _classes(config) == len(checkpoint.labels) else ()  # the head may not be loaded
    return replace(checkpoint, config=config, params=params, labels=labels)


def read_config(path: str | Path, revision: str | None = None) -> Config:
    """The config of the checkpoint that `load` would read, without its parameters."""
    file = safetensors.open_checkpoint(path, revision)
    checkpoint = _read_settings(file)
    return _with_tie(file, FAMILIES[_family(file)], checkpoint.config)


def differences(one: Config, other: Config) -> dict[str, tuple[Any, Any]]:
    """The fields, by name, in which two models differ in what the same weights compute, or how many."""
    fields, others = _fields(one), _fields(other)
    pairs = {name: (fields.get(name), others.get(name)) for name in fields | others}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def save(folder: str | Path, checkpoint: Checkpoint, *, shard_bytes: int = 2_000_000_000) -> None:
    """Writes config.json and safetensors files of at most `shard_bytes`, which transformers can open.

    A new model is `Checkpoint(config, params, Tokens(eos=(2,)))`. Raises ConfigError if no family can express the config, if
    tokens or labels are missing or inconsistent, and if `folder` is not empty.
    """
    settings = _with_tokens(folder, checkpoint, _write_settings(checkpoint.config, checkpoint.model_type))
    if wrong := parameters.mismatch(models.spec(checkpoint.config), checkpoint.params):
        raise ConfigError(f"{folder}: the parameters are not those of the config: {wrong}")
    generation = _write_generation(checkpoint)
    arrays, tensors = paths(checkpoint.params), []
    for name, tensor in tables.plan(FAMILIES[settings["model_type"]], checkpoint.config).items():
        dtype = np.dtype(arrays[tensor.parts[0].path].dtype if tensor.parts else np.float32)
        tensors.append((name, tensor.shape, dtype, partial(tensor.theirs, arrays)))
    settings["dtype"] = min(str(dtype) for _, _, dtype, _ in tensors)
    files = {safetensors.GENERATION: safetensors.dumps(generation).encode()} if generation else {}
    safetensors.save_checkpoint(folder, settings, tensors, shard_bytes, files)


def _read_settings(file: safetensors.Files) -> Checkpoint:
    """The checkpoint of a folder without parameters."""
    kind = _family(file)
    family = FAMILIES[kind]
    try:
        tables.check_layers(file.config, len(file.names))
        config, tokens = family.read(file.config, file.names), _read_tokens(file.generation, file.config)
        labels = _read_labels(file.config)
        read = {*NAMES.values(), *LISTS.values()}
        generation = {name: value for name, value in file.generation.items() if name not in read}
    except ConfigError as error:
        raise ConfigError(f"{file.folder}: {error}") from None
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, ZeroDivisionError) as error:
        raise ConfigError(
            f"{file.folder}/config.json: cannot be understood ({type(error).__name__}: {str(error)[:200]})"
        ) from error
    return Checkpoint(config, None, tokens, labels, kind, generation)


def _family(file: safetensors.Files) -> str:
    kind = file.config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        name = f"model_type {kind!r} (architectures {file.config.get('architectures')})"
        raise ConfigError(f"{file.folder}/config.json: {name} is not supported; expected one of {', '.join(FAMILIES)}")
    return kind


def _read_tokens(*settings: dict) -> Tokens:
    """Takes each token from the first file that has it. A negative id means no token."""
    tokens: dict[str, Any] = {}
    for name, key in NAMES.items():
        ids = next((c[key] for c in settings if c.get(key) is not None), [])
        ids = ids if isinstance(ids, list) else [ids]
        if any(type(i) is not int for i in ids) or (len(ids) > 1 and name != "eos"):
            raise ConfigError(f"config.json: {key}={ids!r}: expected a token, or null")
        ids = tuple(i for i in ids if i >= 0)
        tokens[name] = ids if name == "eos" else next(iter(ids), None)
    for name, key in LISTS.items():
        ids = next((c[key] for c in settings if c.get(key) is not None), [])
        words = ids if name == "banned" else [ids]
        if not isinstance(words, list) or any(not isinstance(word, list) for word in words):
            raise ConfigError(f"config.json: {key}={ids!r}: expected a list of {'words' if name == 'banned' else 'tokens'}")
        if any(type(token) is not int for word in words for token in word):
            raise ConfigError(f"config.json: {key}={ids!r}: expected tokens")
        # a negative id means no token
        words = [tuple(word) for word in words if word and (name != "banned" or min(word) >= 0)]
        tokens[name] = tuple(words) if name == "banned" else tuple(i for word in words for i in word if i >= 0)
    return Tokens(**tokens)


def _write_generation(checkpoint: Checkpoint) -> dict[str, Any]:
    """generation_config.json; empty where config.json says all."""
    tokens = checkpoint.tokens
    lists = {key: getattr(tokens, name) for name, key in LISTS.items() if getattr(tokens, name)}
    if not (lists or checkpoint.generation or tokens.forced_bos is not None):
        return {}
    return {**checkpoint.generation, **_written_tokens(tokens), **lists}


def _written_tokens(tokens: Tokens) -> dict[str, Any]:
    """The single tokens and the stop tokens, by their names."""
    values = {name: getattr(tokens, name) for name in SINGLE}
    values["eos"] = tokens.eos[0] if len(tokens.eos) == 1 else tokens.eos
    return {NAMES[name]: value for name, value in values.items() if value not in (None, ())}


def _read_labels(c: dict) -> tuple[str, ...]:
    """The names of the classes."""
    names = c.get("id2label") or {}
    if sorted(names) != sorted(map(str, range(len(names)))):
        raise ConfigError(f"config.json: id2label={names!r}: expected a name for each class from 0 on")
    return tuple(str(names[str(i)]) for i in range(len(names)))


def _read_weights(file, family: tables.Family, config: Config, dtype, sharding, allow_unexpected, allow_missing, key) -> Tree:
    """The parameters of the config, one after the other. The options are those of `load`."""
    tensors = tables.plan(family, config, allow_missing)
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


def _names_in_file(file, family: tables.Family, names: Collection[str]) -> dict[str, str]:
    """{name in `names`: name in the file}. Old files say gamma and beta, and may leave out the prefix."""
    source: dict[str, str] = {}
    for name in file.names:
        modern = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))
        canonical = modern if modern in names else family.prefix + modern
        if canonical in names:
            source[canonical] = name
    return source


def _sources(file, family: tables.Family, tensors: dict[str, tables.Tensor]) -> tuple[dict[str, str], set[str]]:
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


def _heads_left_out(file, family: tables.Family, tensors, used: Collection[str], ignored: str) -> list[str]:
    """Tensors of the file that belong to heads of which the model has no part."""
    module = lambda name: match.group().strip(".") if (match := re.search(family.heads, name)) else None
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
    optional = lambda path: allow_missing is not None and path not in incomplete and re.search(allow_missing, path)
    missing = [f"{name} (our {path})" for path, name in absent.items() if not optional(path)]
    pairs = [(name, file.names[name][0], tensors[table].shape) for table, name in source.items() if table in tensors]
    shapes = [f"{name} {shape}, not {expected}" for name, shape, expected in pairs if shape != expected]
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": shapes}
    if report := [f"{len(names)} {kind}: {list_names(names, str)}" for kind, names in kinds.items() if names]:
        advice = "see allow_missing, allow_unexpected and heads of interop.huggingface.load"
        if quantised := (file.config.get("quantization_config") or {}).get("quant_method"):
            advice = f"they are quantised ({quantised}), which is not read: give the model that was quantised"
        raise ConfigError(f"{file.folder}: the weights are not those of its config.json: {'; '.join(report)}; {advice}")
    planned = {part.path for tensor in tensors.values() for part in tensor.parts}
    return [path for path in leaves if path in absent or path not in planned]


def _with_stack(config: Config, **changes) -> Config:
    if isinstance(config, EncoderDecoder):
        return replace(config, decoder=replace(config.decoder, **changes))
    return replace(config, **changes)


def _with_tie(file, family: tables.Family, config: Config) -> Config:
    """The config, tied or not as the weights are."""
    # A separate head in the file is used even if config.json ties it (T5 v1.1 written by transformers 5). If config.json
    # unties the head and the file has none, a T5 is tied (transformers 5 writes it so) and other models miss a tensor.
    stack, rules = models.last_stack(config), family.rules(config)
    head = next((rule.theirs for rule in rules if str(rule.ours).endswith("language_model/kernel")), None)
    if head is None or not stack.heads:
        return config
    names = _names_in_file(file, family, family.aliases.keys() | family.aliases.values())
    if head not in names:
        return _with_stack(config, tie_embeddings=True) if file.config["model_type"] == "t5" else config
    first = family.aliases[head]
    tables_in_file = [first, *(alias for alias, name in family.aliases.items() if name == first and alias != head)]
    table = next((names[name] for name in tables_in_file if name in names), None)
    if stack.tie_embeddings and table is not None and not np.array_equal(file.read(names[head]), file.read(table)):
        return _with_stack(config, tie_embeddings=False)
    return config


def _dtypes(file, tensors: dict[str, tables.Tensor], source: dict[str, str], dtype) -> dict[str, Any]:
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


def _with_tokens(folder: str | Path, checkpoint: Checkpoint, settings: dict) -> dict:
    """config.json with the checkpoint's tokens and labels."""
    tokens, labels, stack = checkpoint.tokens, checkpoint.labels, models.last_stack(checkpoint.config)
    if settings["model_type"] == "marian" and tokens.start is None:
        raise ConfigError(f"{folder}: a Marian needs the token that targets begin with, Tokens(start=...); got {tokens}")
    offset = getattr(stack.positions, "offset", 0)  # their first position is the pad id + 1
    if offset and tokens.pad not in (None, offset - 1):
        raise ConfigError(f"{folder}: tokens.pad={tokens.pad}; the offset of model.positions makes it {offset - 1}")
    classes = _classes(checkpoint.config)
    if labels and len(labels) != classes:
        raise ConfigError(f"{folder}: {len(labels)} labels for {classes} classes of model.heads")
    return NO_TOKENS | settings | tables.write_labels(labels) | _written_tokens(tokens)


def _classes(config: Config) -> int:
    """The number of classes of the first head that has classes, or 0."""
    return next((classes for head in models.last_stack(config).heads if (classes := getattr(head, "classes", None))), 0)


def _write_settings(config: Config, model_type: str | None) -> dict:
    """config.json of the first family that can express the config: it reads the same config from its file."""
    if model_type is not None and model_type not in FAMILIES:
        raise ConfigError(f"model_type={model_type!r}: expected one of {', '.join(FAMILIES)}")
    reason = ""
    for kind in FAMILIES if model_type is None else [model_type]:
        family = FAMILIES[kind]
        try:
            settings = family.write(config) | {"model_type": kind}
            copy = family.read(settings, tables.plan(family, config))
        except (ConfigError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
            reason = f"cannot express this config ({error})"
            continue
        if kind == "t5":  # `load` reads from the weights whether a T5 is tied
            copy = _with_stack(copy, tie_embeddings=models.last_stack(config).tie_embeddings)
        fields, read = _fields(config), _fields(copy)
        differences = [name for name in fields | read if fields.get(name, ...) != read.get(name, ...)]
        if not differences:
            return settings
        reason = f"cannot express {list_names(differences, str)}"
    if model_type is None:
        raise ConfigError(f"no family of {', '.join(FAMILIES)} can express this config; give model_type to see why")
    raise ConfigError(f"model_type={model_type!r}: {reason}")


def _fields(config: Config) -> dict[str, Any]:
    """The fields that change what a trained model computes, equal for equal models; without what each call decides."""
    if isinstance(config, EncoderDecoder):
        sides = {"encoder": _fields(config.encoder), "decoder": _fields(config.decoder)}
        return flatten_dict(sides, sep=".") | {"share_embeddings": config.share_embeddings}
    biases = [path for path in paths(models.spec(config)) if path.endswith("/bias")]
    mixers = config.mixer if isinstance(config.mixer, tuple) else (config.mixer,)
    fields = vars(config) | {
        "num_kv_heads": config.kv_heads, "head_width": config.head_size, "d_ff": config.ff_width, "use_bias": biases,
        "tie_embeddings": config.tie_embeddings or not config.heads, "attention_scale": config.score_scale,
        "mup": config.tie_embeddings and isinstance(config.init_std, models.MuP),  # divides logits
        "mixer": tables.shortest_pattern([_mixer_in_file(mixer) for mixer in mixers]),
    }  # fmt: skip
    ignored = ("remat", "unroll", "attention_implementation", "init_std", "dropout_rate", "attention_dropout_rate")
    return {name: value for name, value in fields.items() if name not in ignored}


def _mixer_in_file(mixer):
    """The mixer without what files do not say: global tokens and random blocks."""
    fields = {Longformer: ("window",), BigBird: ("block", "random")}.get(type(mixer))
    return mixer if fields is None else tuple(getattr(mixer, field) for field in fields)
