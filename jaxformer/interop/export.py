"""The forward pass as StableHLO: a folder that runs wherever JAX does, without this package.

    import jax, jax.export, pathlib, safetensors.flax        # all that the other side needs
    forward = jax.export.deserialize(bytearray(pathlib.Path("gpt/forward.stablehlo").read_bytes()))
    logits = forward.call(safetensors.flax.load_file("gpt/model.safetensors"), tokens)

The folder holds forward.stablehlo (the program), model.safetensors (its first argument, {path: array}) and config.json (what
else it takes, what it gives, and the model's config). Parameters are an argument, so fine-tuned ones go in as well, and with
`vjp_order=1` `forward.vjp()` differentiates. JAX promises that programs can be loaded for half a year (docs.jax.dev/export).
"""

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import unflatten_dict
from jax import Array, export

from jaxformer import models
from jaxformer.config import to_dict
from jaxformer.errors import ConfigError
from jaxformer.interop import safetensors
from jaxformer.models import EncoderDecoder, ModelConfig, Patches
from jaxformer.params import paths

PROGRAM = "forward.stablehlo"
LONG = 512  # positions above which the reference attention's [B, N, T, T] is worth avoiding
FURTHER = ("positions", "segment_ids", "token_types", "source_segment_ids")


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
) -> None:
    """Writes `forward(params, tokens, *inputs) -> logits` (hidden states of a model without heads) into the folder `path`.

    A pair also takes source tokens, after the tokens; a vision model images instead. `inputs` names further [B, T]
    arrays of integers: positions, segment_ids, token_types, source_segment_ids. None leaves batch or length open, up to
    `context_length`, with attention in O(T^2) memory; a fixed length above 512 takes the blockwise kernel. `vjp_order`
    says how often the program can be differentiated. Raises ConfigError for whatever does not fit.
    """
    _check(path, config, params, batch, length, inputs, platforms, vjp_order)
    leaves, stack = paths(params), _last(config)
    arguments = _arguments(config, batch, length, inputs, next(iter(leaves.values())).dtype)
    try:
        exported = export.export(jax.jit(_forward(config, length, tuple(arguments))), platforms=platforms)(
            {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in leaves.items()}, *arguments.values()
        )
    except (jax.errors.InconclusiveDimensionOperation, TypeError) as error:  # of which ConcretizationTypeError is one
        if batch is not None and length is not None:
            raise
        why = str(error).splitlines()[0]
        raise ConfigError(f"{path}: this model needs a fixed size, give length= or batch= as well ({why})") from error
    describe = lambda a: {"shape": [d if isinstance(d, int) else str(d) for d in a.shape], "dtype": str(a.dtype)}
    manifest = {
        "program": PROGRAM,
        "arguments": {"params": "model.safetensors"} | {name: describe(a) for name, a in arguments.items()},
        "limits": {"b": None, "t": stack.context_length, "s": _first(config).context_length},
        "result": describe(exported.out_avals[0]),
        "platforms": list(exported.platforms),
        "vjp_order": vjp_order,
        "calling_convention_version": exported.calling_convention_version,
        "jax": jax.__version__,
        "model": to_dict(config),
    }
    tensors = [
        (name, leaf.shape, np.dtype(leaf.dtype), partial(np.asarray, leaf)) for name, leaf in sorted(leaves.items())
    ]
    program = exported.serialize(vjp_order=vjp_order)
    safetensors.save_checkpoint(path, manifest, tensors, shard_bytes=2**63)
    (Path(path).expanduser() / PROGRAM).write_bytes(program)


def load(path: str | Path, sharding: Any = None) -> Callable[..., Array]:
    """`forward(tokens, ...) -> logits` of an exported folder, its parameters on the device, or laid out as `sharding` says.

    Raises ConfigError for a folder that is none, or whose program this JAX or this machine's platform does not run.
    """
    checkpoint = safetensors.open_checkpoint(Path(path))
    program = checkpoint.folder / PROGRAM
    if not program.is_file():
        raise ConfigError(f"{path}: has no {PROGRAM}; expected a folder that interop.export wrote, whole")
    _need_flatbuffers()
    try:
        exported = export.deserialize(bytearray(program.read_bytes()))
    except Exception as error:
        raise ConfigError(f"{program}: cannot be read ({error}); export it again with this JAX") from error
    here = export.default_export_platform()
    if here not in exported.platforms:
        raise ConfigError(f"{path}: exported for {', '.join(exported.platforms)}; export it with platforms=({here!r},)")
    params = {name: jax.device_put(checkpoint.read(name), sharding) for name in checkpoint.names}
    wanted = {name: about for name, about in checkpoint.config["arguments"].items() if name != "params"}

    def forward(*arguments: Any) -> Array:
        _fit(wanted, checkpoint.config["limits"], arguments)
        return exported.call(params, *arguments)

    return forward


def _fit(wanted: dict[str, dict], limits: dict[str, int | None], arguments: tuple) -> None:
    """Raises ValueError in words, where jax.export says 'Error refining shapes'."""
    if len(arguments) != len(wanted):
        raise ValueError(f"got {len(arguments)} arguments; expected {', '.join(wanted)}")
    sizes: dict[Any, int] = {}
    for (name, about), array in zip(wanted.items(), arguments, strict=True):
        shape, dtype = about["shape"], about["dtype"]
        fits = len(shape) == array.ndim and str(array.dtype) == dtype
        for size, actual in zip(shape, array.shape, strict=False):
            least = 1 if size in limits else size
            most = (limits[size] or actual) if size in limits else size
            fits = fits and least <= actual <= most and sizes.setdefault(size, actual) == actual
        if not fits:
            up_to = ", ".join(f"{size} up to {limits[size]}" for size in shape if limits.get(size))
            raise ValueError(f"{name}: got {array.dtype}{list(array.shape)}; expected {dtype}{shape} {up_to}".rstrip())


def _forward(config, length: int | None, names: tuple[str, ...]) -> Callable:
    kernel = "reference" if length is None or length <= LONG else "blockwise"  # both are plain XLA, on any platform
    portable = lambda c: replace(c, attention_implementation=c.attention_implementation or kernel)
    if isinstance(config, EncoderDecoder):
        config = replace(config, encoder=portable(config.encoder), decoder=portable(config.decoder))
    else:
        config = portable(config)

    def forward(leaves: dict[str, Array], *arguments: Array) -> Array:
        given = dict(zip(names[1:], arguments[1:], strict=True))
        output = models.apply(config, unflatten_dict(leaves, sep="/"), arguments[0], **given)
        return output.hidden if output.logits is None else output.logits

    return forward


def _first(config: ModelConfig | EncoderDecoder) -> ModelConfig:
    return config.encoder if isinstance(config, EncoderDecoder) else config


def _last(config: ModelConfig | EncoderDecoder) -> ModelConfig:
    return config.decoder if isinstance(config, EncoderDecoder) else config


def _arguments(config, batch, length, inputs, dtype) -> dict[str, jax.ShapeDtypeStruct]:
    """What the program takes beside the parameters, by name, in its order."""
    pair, stack = isinstance(config, EncoderDecoder), _last(config)
    t, s = (str(length), str(length)) if length else ("t", "s")
    image = stack.embedding if isinstance(stack.embedding, Patches) else None
    limits = [] if length or image else [f"t <= {stack.context_length}", "t >= 1"]
    if pair and not length:
        limits += [f"s <= {_first(config).context_length}", "s >= 1"]
    sizes = ["b" if batch is None else str(batch), *([] if image else [t, s] if pair else [t])]
    b, *rest = export.symbolic_shape(", ".join(sizes), constraints=limits)
    whole = lambda shape: jax.ShapeDtypeStruct(shape, np.int32)
    if image:
        return {"images": jax.ShapeDtypeStruct((b, *image.image, image.channels), dtype)}
    first = {name: whole((b, size)) for name, size in zip(("tokens", "source"), rest, strict=False)}
    return first | {name: whole((b, rest[name.startswith("source")])) for name in inputs}


def _check(path, config, params, batch, length, inputs, platforms, vjp_order) -> None:
    _need_flatbuffers()
    stack = _last(config)
    leaves, given = paths(models.spec(config)), paths(params)
    wrong = [name for name, leaf in leaves.items() if name not in given or given[name].shape != leaf.shape]
    wrong += list(given.keys() - leaves.keys())
    if wrong:
        raise ConfigError(f"{path}: the parameters are not those of the config: {', '.join(sorted(wrong)[:5])}")
    if length is not None and not 1 <= length <= stack.context_length:
        raise ConfigError(f"length={length}: expected 1 to context_length={stack.context_length}")
    if batch is not None and batch < 1:
        raise ConfigError(f"batch={batch}: must be at least 1, or None for any")
    known = FURTHER if isinstance(config, EncoderDecoder) else FURTHER[:-1]
    if unknown := [name for name in inputs if name not in known or isinstance(stack.embedding, Patches)]:
        raise ConfigError(f"inputs={unknown}: expected some of {', '.join(known)}, for a model of tokens")
    if unknown := [name for name in platforms if name not in ("cpu", "tpu", "cuda", "rocm")] or not platforms:
        raise ConfigError(f"platforms={tuple(platforms)}: expected some of cpu, tpu, cuda, rocm ({unknown})")
    if vjp_order < 0:
        raise ConfigError(f"vjp_order={vjp_order}: must be 0 or more")


def _need_flatbuffers() -> None:
    if importlib.util.find_spec("flatbuffers") is None:
        raise ConfigError("jax.export needs flatbuffers, which is not installed: pip install 'jaxformer[export]'")
