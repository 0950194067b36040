"""The forward pass as StableHLO: a folder that JAX runs without this package.

    import jax, jax.export, pathlib, safetensors.flax
    forward = jax.export.deserialize(bytearray(pathlib.Path("gpt/forward.stablehlo").read_bytes()))
    logits = forward.call(safetensors.flax.load_file("gpt/model.safetensors"), tokens)

model.safetensors is the program's first argument, {path: array}. config.json describes the other arguments, their order, the
result and the model; `t` is a length from 1 to the model's `context_length`. JAX can load a program for at least six months
(docs.jax.dev/export).
"""

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
    path: str | Path, config: ModelConfig | EncoderDecoder, params: Any, *, batch: int | None = None, length: int | None = None,
    inputs: tuple[str, ...] = (), platforms: tuple[str, ...] = ("cpu", "tpu", "cuda"), vjp_order: int = 0,
) -> None:  # fmt: skip
    """Writes `forward(params, tokens, *inputs) -> logits` (hidden states if there are no heads) into the folder `path`.

    An encoder-decoder takes (tokens, source), a vision model images; a source may be images, too. `inputs` names more [B, T]
    arrays of integers, of OPTIONAL_INPUTS. `batch=None` and `length=None` allow any size up to `context_length`, with
    attention in O(T^2) memory; a fixed length above 512 uses the blockwise kernel. The program can be differentiated
    `vjp_order` times.
    """
    if wrong := mismatch(models.spec(config), params):
        raise ConfigError(f"{path}: the parameters are not those of the config: {wrong}")
    if unknown := [name for name in platforms if name not in PLATFORMS]:
        raise ConfigError(f"platforms={tuple(platforms)}: expected some of {', '.join(PLATFORMS)} ({unknown})")
    if any(size is not None and size < 1 for size in (batch, length)):
        raise ConfigError(f"{path}: batch={batch}, length={length}: must be at least 1, or None for any")
    reads_source = isinstance(config, EncoderDecoder) and not isinstance(config.encoder.embedding, Patches)
    allowed = OPTIONAL_INPUTS if reads_source else OPTIONAL_INPUTS[:-1]
    if unknown := [name for name in inputs if name not in allowed or isinstance(models.last_stack(config).embedding, Patches)]:
        raise ConfigError(f"inputs={unknown}: expected some of {', '.join(allowed)}, for a model of tokens")
    leaves = paths(params)
    arguments = _arguments(config, batch, length, inputs, next(iter(leaves.values())).dtype)
    forward = jax.jit(partial(_forward, _portable(config, length), tuple(arguments)[1:]))
    shapes = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in leaves.items()}
    try:
        # gradients on CPU fix layouts by this call, which XLA does not promise to keep; forward programs have none
        layouts = [export.DisabledSafetyCheck.custom_call("LayoutConstraint")]
        exported = export.export(forward, platforms=platforms, disabled_checks=layouts)(shapes, *arguments.values())
    except (jax.errors.InconclusiveDimensionOperation, TypeError) as error:  # ConcretizationTypeError is a TypeError
        if batch is not None and length is not None:
            raise
        reason = f"this model needs a fixed size, give length= or batch= as well ({str(error).splitlines()[0]})"
        raise ConfigError(f"{path}: {reason}") from error

    def shape_of(a):
        return {"shape": [d if isinstance(d, int) else str(d) for d in a.shape], "dtype": str(a.dtype)}

    manifest = {
        "program": PROGRAM, "result": shape_of(exported.out_avals[0]), "model": config_description(config),
        "arguments": {"params": "model.safetensors"} | {name: shape_of(a) for name, a in arguments.items()},
        "order": ["params", *arguments], "platforms": list(exported.platforms), "vjp_order": vjp_order, "jax": jax.__version__,
    }  # fmt: skip
    tensors = [(name, leaf.shape, leaf.dtype, partial(np.asarray, leaf)) for name, leaf in sorted(leaves.items())]
    files = {PROGRAM: bytes(exported.serialize(vjp_order=vjp_order))}
    safetensors.save_checkpoint(path, manifest, tensors, shard_bytes=2**63, files=files)


def _portable(config: Any, length: int | None) -> Any:
    """The config with an attention kernel that runs on any platform: above 512 tokens blockwise costs less."""
    if isinstance(config, EncoderDecoder):
        encoder, decoder = (_portable(stack, length) for stack in (config.encoder, config.decoder))
        return replace(config, encoder=encoder, decoder=decoder)
    kernel = "reference" if length is None or length <= 512 else "blockwise"
    return replace(config, attention_implementation=config.attention_implementation or kernel)


def _forward(config, names: tuple[str, ...], leaves: dict[str, Array], first: Array, *arguments: Array) -> Array:
    output = models.apply(config, unflatten_dict(leaves, sep="/"), first, **dict(zip(names, arguments, strict=True)))
    return output.hidden if output.logits is None else output.logits


def _arguments(config, batch, length, inputs, dtype) -> dict[str, jax.ShapeDtypeStruct]:
    """The arguments of the program after the parameters, in order."""
    stacks = {"tokens": models.last_stack(config)}
    if isinstance(config, EncoderDecoder):
        stacks["source"] = config.encoder
    lengths = {name[0]: stack.context_length for name, stack in stacks.items() if not isinstance(stack.embedding, Patches)}
    limits = [] if length else [f"{name} {limit}" for name, most in lengths.items() for limit in (f"<= {most}", ">= 1")]
    sizes = ["b" if batch is None else str(batch), *(str(length) if length else name for name in lengths)]
    b, *rest = export.symbolic_shape(", ".join(sizes), constraints=limits)
    size = dict(zip(lengths, rest, strict=True))
    arguments = {}
    for name, stack in stacks.items():
        if isinstance(patches := stack.embedding, Patches):
            image = jax.ShapeDtypeStruct((b, *patches.image, patches.channels), dtype)
            arguments["images" if name == "tokens" else name] = image
        else:
            arguments[name] = jax.ShapeDtypeStruct((b, size[name[0]]), np.int32)
    letters = {name: "s" if name.startswith("source") else "t" for name in inputs}
    return arguments | {name: jax.ShapeDtypeStruct((b, size[letter]), np.int32) for name, letter in letters.items()}
