"""The forward pass as StableHLO: a folder that JAX runs without this package.

    import jax, jax.export, pathlib, safetensors.flax
    forward = jax.export.deserialize(bytearray(pathlib.Path("gpt/forward.stablehlo").read_bytes()))
    logits = forward.call(safetensors.flax.load_file("gpt/model.safetensors"), tokens)

The first argument of the program is the content of model.safetensors, {path: array}. config.json
describes the other arguments, their order, the result and the model. A dimension `t` is any length
from 1 to the model's `context_length`. JAX can load a program for at least six months
(docs.jax.dev/export).

`save` is the function to read.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import unflatten_dict
from jax import Array, export

from jaxformer import models
from jaxformer.config import describe as config_description
from jaxformer.errors import ConfigError
from jaxformer.interop import safetensors
from jaxformer.models import EncoderDecoder, ModelConfig, Patches
from jaxformer.params import mismatch, paths

PROGRAM = "forward.stablehlo"
PLATFORMS = ("cpu", "tpu", "cuda", "rocm")
OPTIONAL_INPUTS = ("positions", "segment_ids", "token_types", "source_segment_ids")


def save(
    path: str | Path,
    config: ModelConfig | EncoderDecoder,
    params: Any,
    *,
    batch: int | None = None,
    length: int | None = None,
    inputs: tuple[str, ...] = (),
    platforms: tuple[str, ...] = ("cpu", "tpu", "cuda"),
    vjp_order: int = 0,
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Writes the program `forward(params, tokens, *inputs) -> logits` into the folder `path`.

    A model without heads returns hidden states. An encoder-decoder takes (tokens, source), a vision
    model images; a source may be images, too. `inputs` names further arguments of OPTIONAL_INPUTS,
    integers [B, T]. With `batch=None` the program takes any batch size, with `length=None` any
    length up to `context_length`. Attention then needs O(T^2) memory; a fixed length above 512 uses
    the blockwise kernel. The program can be differentiated `vjp_order` times. `files` are further
    files of the folder, {name: contents}. Raises ConfigError
    for parameters that do not match `config`, for unknown inputs or platforms, and for a model that
    needs fixed sizes.
    """
    _check(path, config, params, batch, length, inputs, platforms)
    leaves = paths(params)
    dtype = next(iter(leaves.values())).dtype
    arguments = _arguments(config, batch, length, inputs, dtype)
    forward = jax.jit(partial(_forward, _portable(config, length), tuple(arguments)[1:]))
    shapes = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in leaves.items()}
    fixed = batch is not None and length is not None
    exported = _export(path, forward, (shapes, *arguments.values()), platforms, fixed)
    manifest = {
        "program": PROGRAM,
        "result": _described(exported.out_avals[0]),
        "model": config_description(config),
        "arguments": {"params": "model.safetensors"}
        | {name: _described(argument) for name, argument in arguments.items()},
        "order": ["params", *arguments],
        "platforms": list(exported.platforms),
        "vjp_order": vjp_order,
        "jax": jax.__version__,
    }
    tensors = [
        (name, leaf.shape, leaf.dtype, partial(np.asarray, leaf))
        for name, leaf in sorted(leaves.items())
    ]
    serialized = bytes(exported.serialize(vjp_order=vjp_order))
    all_files = {**(files or {}), PROGRAM: serialized}
    safetensors.save_checkpoint(path, manifest, tensors, shard_bytes=2**63, files=all_files)


def _check(path, config, params, batch, length, inputs, platforms) -> None:
    """Raises ConfigError for arguments of `save` that it cannot export."""
    if wrong := mismatch(models.spec(config), params):
        raise ConfigError(f"{path}: the parameters are not those of the config: {wrong}")
    if unknown := [name for name in platforms if name not in PLATFORMS]:
        raise ConfigError(
            f"platforms={tuple(platforms)}: expected some of {', '.join(PLATFORMS)} ({unknown})"
        )
    if any(size is not None and size < 1 for size in (batch, length)):
        raise ConfigError(
            f"{path}: batch={batch}, length={length}: must be at least 1, or None for any"
        )
    reads_images = isinstance(models.last_stack(config).embedding, Patches)
    reads_source = isinstance(config, EncoderDecoder) and not isinstance(
        config.encoder.embedding, Patches
    )
    allowed = OPTIONAL_INPUTS if reads_source else OPTIONAL_INPUTS[:-1]
    if unknown := [name for name in inputs if reads_images or name not in allowed]:
        raise ConfigError(
            f"inputs={unknown}: expected some of {', '.join(allowed)}, for a model of tokens"
        )


def _export(path, forward, shapes: tuple, platforms, fixed: bool) -> export.Exported:
    """The exported program. Raises ConfigError if the model needs fixed sizes and has others."""
    # On CPU a gradient fixes layouts by a custom call that XLA may remove in a later version. A
    # forward program contains no such call.
    layouts = [export.DisabledSafetyCheck.custom_call("LayoutConstraint")]
    try:
        return export.export(forward, platforms=platforms, disabled_checks=layouts)(*shapes)
    except (
        jax.errors.InconclusiveDimensionOperation,
        TypeError,  # ConcretizationTypeError is one
    ) as error:
        if fixed:
            raise
        reason = (
            "this model needs a fixed size, give length= or batch= as well "
            f"({str(error).splitlines()[0]})"
        )
        raise ConfigError(f"{path}: {reason}") from error


def _described(array: Any) -> dict[str, Any]:
    """Shape and dtype of an argument or a result; a size that is not fixed is a letter."""
    shape = [size if isinstance(size, int) else str(size) for size in array.shape]
    return {"shape": shape, "dtype": str(array.dtype)}


def _portable(config: Any, length: int | None) -> Any:
    """The config with an attention kernel that runs on every platform.

    Blockwise attention costs less than the reference above 512 tokens.
    """
    if isinstance(config, EncoderDecoder):
        encoder, decoder = (_portable(stack, length) for stack in (config.encoder, config.decoder))
        return replace(config, encoder=encoder, decoder=decoder)
    kernel = "reference" if length is None or length <= 512 else "blockwise"
    return replace(config, attention_implementation=config.attention_implementation or kernel)


def _forward(
    config, names: tuple[str, ...], leaves: dict[str, Array], first: Array, *arguments: Array
) -> Array:
    """Logits, or hidden states; `first` is tokens or images, `names` are those of `arguments`."""
    options = dict(zip(names, arguments, strict=True))
    output = models.apply(config, unflatten_dict(leaves, sep="/"), first, **options)
    return output.hidden if output.logits is None else output.logits


def _arguments(config, batch, length, inputs, dtype) -> dict[str, jax.ShapeDtypeStruct]:
    """{name: shape} of the program's arguments after the parameters, in order.

    A size that is not fixed is symbolic: `b` for the batch, `t` for the length of tokens, `s` for
    the length of a source.
    """
    stacks = {"tokens": models.last_stack(config)}
    if isinstance(config, EncoderDecoder):
        stacks["source"] = config.encoder
    limits = {
        name[0]: stack.context_length
        for name, stack in stacks.items()
        if not isinstance(stack.embedding, Patches)
    }
    constraints = []
    for letter, limit in limits.items():
        constraints += [f"{letter} <= {limit}", f"{letter} >= 1"]
    sizes = [
        "b" if batch is None else str(batch),
        *(str(length) if length else letter for letter in limits),
    ]
    b, *lengths = export.symbolic_shape(", ".join(sizes), constraints=[] if length else constraints)
    size_of = dict(zip(limits, lengths, strict=True))
    arguments = {}
    for name, stack in stacks.items():
        if isinstance(patches := stack.embedding, Patches):
            image = jax.ShapeDtypeStruct((b, *patches.image, patches.channels), dtype)
            arguments["images" if name == "tokens" else name] = image
        else:
            arguments[name] = jax.ShapeDtypeStruct((b, size_of[name[0]]), np.int32)
    for name in inputs:
        letter = "s" if name.startswith("source") else "t"
        arguments[name] = jax.ShapeDtypeStruct((b, size_of[letter]), np.int32)
    return arguments
