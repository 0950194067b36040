"""Reads a checkpoint from a Hugging Face folder, and writes one."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxformer import models, params as parameters
from jaxformer.errors import ConfigError
from jaxformer.families import fused_experts
from jaxformer.families.causality import read_causality
from jaxformer.families.classes import write_labels
from jaxformer.families.family import Family
from jaxformer.families.known import FAMILIES, is_unknown, write_settings
from jaxformer.families.parts import part_of
from jaxformer.families.settings import check_layers, with_own_names
from jaxformer.families.tensors import plan
from jaxformer.families.tied_head import Config, with_stack, with_tie
from jaxformer.families.tokens import (
    LISTS,
    NAMES,
    NO_TOKENS,
    Tokens,
    read_labels,
    read_tokens,
    token_filters,
    written_tokens,
)
from jaxformer.families.unread import Recorded, check_unread, unread_dropouts
from jaxformer.families.weights import read_weights
from jaxformer.interop import safetensors
from jaxformer.interop.safetensors import list_names
from jaxformer.params import paths

log = logging.getLogger("jaxformer")


@dataclass(frozen=True)
class Checkpoint:
    """A model, its parameters, special tokens and class names."""

    config: Config
    params: Any
    tokens: Tokens = Tokens()
    labels: tuple[str, ...] = ()
    # the family that `save` writes; None: the first that can express the config
    model_type: str | None = None
    # the rest of generation_config.json, such as num_beams
    generation: Mapping[str, Any] = field(default_factory=dict)

    def decoding(self) -> dict[str, Any]:
        """The decoding options of this checkpoint: `generate(..., **checkpoint.decoding())`.

        `search` takes them, too. They are its stop tokens, and filters for its banned, suppressed
        and forced tokens. `generation` and `forced_eos` are not applied. The prompt of an
        encoder-decoder is `[checkpoint.tokens.start]`.
        """
        return {"stop_tokens": self.tokens.eos, "filters": token_filters(self.tokens)}


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
    family: Family | None = None,
    part: str | None = None,
) -> Checkpoint:
    """Reads a checkpoint from a folder or from the hub.

    The default `dtype` is that of the file; a variable, such as the bias that chooses experts, is
    not made narrower. `sharding` is one for all parameters, or a tree.
    `heads` replaces the heads of the file: `()` loads only the stack, `(Classification(3),)` is for
    a new task. `family` is one of your own, for a `model_type` that is not among `FAMILIES`, or in
    place of one that is. `part` is one of the towers of a CLIP or SigLIP, "vision" or "text".

    Raises ConfigError, before it reads weights, with a list of all tensors that are missing,
    unexpected or of another shape. The regular expressions `allow_unexpected` (for their names) and
    `allow_missing` (for ours) permit exceptions. Missing parameters are drawn from `key`. Heads of
    the file that the model does not have, such as BERT's pooler, are left out, and a warning names
    them.
    """
    file = _open(path, revision, family, part)
    family = _family(file, family)
    checkpoint = _read_settings(file, family)
    config = with_tie(file, family, checkpoint.config)
    if heads is not None:
        config = with_stack(config, heads=heads)
    params = read_weights(
        file, family, config, dtype, sharding, allow_unexpected, allow_missing, key
    )
    # the head that the labels belong to may not be loaded
    labels = checkpoint.labels if _classes(config) == len(checkpoint.labels) else ()
    return replace(checkpoint, config=config, params=params, labels=labels)


def read_config(
    path: str | Path,
    revision: str | None = None,
    family: Family | None = None,
    part: str | None = None,
) -> Config:
    """The config of the checkpoint that `load` would read, without its parameters."""
    file = _open(path, revision, family, part)
    family = _family(file, family)
    return with_tie(file, family, _read_settings(file, family).config)


def save(
    folder: str | Path,
    checkpoint: Checkpoint,
    *,
    shard_bytes: int = 2_000_000_000,
    family: Family | None = None,
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Writes a folder that transformers can open: config.json and safetensors files.

    A file has at most `shard_bytes`. A new model is `Checkpoint(config, params, Tokens(eos=(2,)))`.
    `files` are further files, {name: contents}, such as those of a tokenizer
    (`data.tokenizer_files`). `family` is one of your own, for `checkpoint.model_type`.

    Raises ConfigError if no family can express the config, if tokens or labels are missing or
    inconsistent, or if `folder` is not empty.
    """
    if family is not None and checkpoint.model_type is None:
        raise ConfigError(
            f"{folder}: a family of your own needs Checkpoint(model_type=...), "
            "which config.json will say"
        )
    families = FAMILIES if family is None else {str(checkpoint.model_type): family}
    settings = write_settings(checkpoint.config, checkpoint.model_type, families)
    family = families[settings["model_type"]]
    settings = _with_tokens(folder, checkpoint, family, settings)
    if wrong := parameters.mismatch(models.spec(checkpoint.config), checkpoint.params):
        raise ConfigError(f"{folder}: the parameters are not those of the config: {wrong}")
    generation = _write_generation(checkpoint)
    arrays = paths(checkpoint.params)
    tensors = []  # (name, shape, dtype, function that gives the array)
    for name, tensor in plan(family, checkpoint.config).items():
        dtype = np.dtype(arrays[tensor.parts[0].path].dtype if tensor.parts else np.float32)
        tensors.append((name, tensor.shape, dtype, partial(tensor.theirs, arrays)))
    for name, array in family.computed(checkpoint.config).items():
        array = array.astype(tensors[0][2])
        tensors.append((name, array.shape, array.dtype, partial(np.asarray, array)))
    # transformers 5 says dtype, older readers torch_dtype
    settings["dtype"] = settings["torch_dtype"] = min(str(dtype) for _, _, dtype, _ in tensors)
    all_files = dict(files or {})
    if generation:
        all_files[safetensors.GENERATION] = safetensors.dumps(generation).encode()
    safetensors.save_checkpoint(folder, settings, tensors, shard_bytes, all_files)


def _read_settings(file: safetensors.Files, family: Family) -> Checkpoint:
    """The checkpoint of a folder, without parameters."""
    try:
        check_layers(file.config, len(file.names))
        settings = Recorded(with_own_names(file.config, family.other_names))
        config = read_causality(settings, family.read(settings, file.names))
        if any(family is known for known in FAMILIES.values()):
            check_unread(settings)
            if dropouts := unread_dropouts(settings):
                log.warning(
                    "%s: config.json has %s, which are not read: answers are the same, and "
                    "training has only model.dropout_rate and model.attention_dropout_rate",
                    file.folder,
                    list_names((f"{name}={rate}" for name, rate in dropouts.items()), str),
                )
        tokens = read_tokens(file.generation, file.config)
        labels = read_labels(file.config)
    except ConfigError as error:
        raise ConfigError(f"{file.folder}: {error}") from None
    except (
        TypeError,
        ValueError,
        KeyError,
        AttributeError,
        IndexError,
        ZeroDivisionError,
    ) as error:
        raise ConfigError(
            f"{file.folder}/config.json: cannot be understood "
            f"({type(error).__name__}: {str(error)[:200]})"
        ) from error
    in_tokens = {*NAMES.values(), *LISTS.values()}
    generation = {name: value for name, value in file.generation.items() if name not in in_tokens}
    return Checkpoint(config, None, tokens, labels, file.config.get("model_type"), generation)


def _open(
    path: str | Path, revision: str | None, own: Family | None, part: str | None
) -> safetensors.Files:
    """The folder, or a part of it. A family of the user's own reads it as it is."""
    file = safetensors.open_checkpoint(path, revision)
    if own is not None and part is None:
        return file
    return fused_experts.split(part_of(file, part, FAMILIES))


def _family(file: safetensors.Files, own: Family | None) -> Family:
    """The user's own family, or the one that config.json names."""
    if own is not None:
        return own
    kind = file.config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        name = f"model_type {kind!r} (architectures {file.config.get('architectures')})"
        raise ConfigError(
            f"{file.folder}/config.json: {name} {is_unknown(kind)}, "
            "or give a family of your own: load(folder, family=...)"
        )
    return FAMILIES[kind]


def _write_generation(checkpoint: Checkpoint) -> dict[str, Any]:
    """generation_config.json; empty if config.json says everything."""
    tokens = checkpoint.tokens
    lists = {key: getattr(tokens, name) for name, key in LISTS.items() if getattr(tokens, name)}
    if not (lists or checkpoint.generation or tokens.forced_bos is not None):
        return {}
    return {**checkpoint.generation, **written_tokens(tokens), **lists}


def _with_tokens(
    folder: str | Path, checkpoint: Checkpoint, family: Family, settings: dict
) -> dict:
    """config.json with the checkpoint's tokens and labels."""
    tokens, labels = checkpoint.tokens, checkpoint.labels
    if family.needs_start and tokens.start is None:
        raise ConfigError(
            f"{folder}: a {settings['model_type']} needs the token that targets begin with, "
            f"Tokens(start=...); got {tokens}"
        )
    # in a family that writes the pad id, the first position of their table is the pad id + 1
    positions = models.last_stack(checkpoint.config).positions
    offset = getattr(positions, "offset", 0) if "pad_token_id" in settings else 0
    if offset and tokens.pad not in (None, offset - 1):
        raise ConfigError(
            f"{folder}: tokens.pad={tokens.pad}; "
            f"the offset of model.positions makes it {offset - 1}"
        )
    heads = models.last_stack(checkpoint.config).heads
    end = settings.get("eos_token_id") if heads else None  # that a head of the model reads (CLIP)
    if end is not None and tokens.eos not in ((), (end,)):
        raise ConfigError(
            f"{folder}: tokens.eos={tokens.eos}; the head of the model reads that of {end}"
        )
    classes = _classes(checkpoint.config)
    if labels and len(labels) != classes:
        raise ConfigError(f"{folder}: {len(labels)} labels for {classes} classes of model.heads")
    return NO_TOKENS | settings | write_labels(labels) | written_tokens(tokens)


def _classes(config: Config) -> int:
    """The number of classes of the first head that has classes, or 0."""
    for head in models.last_stack(config).heads:
        if classes := getattr(head, "classes", None):
            return classes
    return 0
