"""What a forward pass costs, part by part: parameters, FLOPs, bytes; what training keeps and what decoding keeps."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer import models, params
from jaxformer.decoding import init_cache
from jaxformer.errors import ConfigError, check_whole
from jaxformer.models import EncoderDecoder, ModelConfig, cost
from jaxformer.models.config import Patches
from jaxformer.tools.planning import flops

LONGEST = 2**24  # tokens of a text: the pairs that a mask shows are counted by their distances
REMAT = ("none", "attention", "dots", "full")
SCORES = "scores and their products with values"


class Part(NamedTuple):
    """What one kind of work costs in all layers together."""

    name: str
    parameters: int
    flops: float
    numbers: float  # weights, inputs and outputs of its products: what is read or written at least


def parts(config: ModelConfig | EncoderDecoder, length: int, batch: int = 1) -> list[Part]:
    """The parts of a forward pass of `batch` texts of `length` tokens (of a pair: target and source), two FLOPs a multiply-add.

    Visible pairs alone are counted, 4 N H for each. For a mixer of another kind, what its program computes beside the
    products with parameters. Norms, activations and look-ups multiply no matrices and have no FLOPs here.
    """
    _check_sizes(length, batch)
    found, tokens = {name: Part(name, 0, 0, 0) for name in PARTS}, batch * length
    multiplied = cost.products(config)
    for path, leaf in params.paths(models.spec(config)).items():
        name = next((word for word in reversed(path.split("/")) if word in PARTS), "norms")
        found[name] = found[name]._replace(parameters=found[name].parameters + params.count(leaf))
        size, share = multiplied.get(path, (0, 0.0))
        if size:
            work = found["heads" if name == "embedding" and not leaf.contracts else name]  # a tied table is read by the head
            layers = leaf.shape[0] if leaf.axes[0] == "layers" else 1
            summed = leaf.contracts or ("embed",)
            inputs = math.prod(n for axis, n in zip(leaf.axes, leaf.shape, strict=True) if axis in summed)
            moved = size + tokens * share * (layers * inputs + size / inputs)
            found[work.name] = work._replace(flops=work.flops + 2 * size * share * tokens, numbers=work.numbers + moved)
    rows = [row for row in found.values() if row.parameters or row.flops]
    return [*rows, _mixing(config, length, batch)]


def _check_sizes(length: int, batch: int) -> None:
    check_whole("cost: length", length)
    check_whole("cost: batch", batch)
    if length > LONGEST:
        raise ConfigError(f"cost: length={length:,}: expected at most {LONGEST:,} tokens, whose distances fit in memory")


PARTS = ("embedding", "attention", "cross_attention", "feedforward", "shared", "norms", "heads")


def _mixing(config: Any, length: int, batch: int) -> Part:
    """The cost of the exchange between positions."""
    stacks = (config.encoder, config.decoder) if isinstance(config, EncoderDecoder) else (config,)
    total, moved = 0.0, 0.0
    for stack in stacks:
        heads, across = stack.num_heads * stack.head_size, 0
        if isinstance(config, EncoderDecoder) and stack is config.decoder:
            across = stack.num_layers
        total += sum(scores_by_layer(stack, length, batch)) if stack.mixer is None else _counted(stack, length, batch)
        total += 4 * batch * length**2 * heads * across
        kept = 2 * heads + 2 * stack.kv_heads * stack.head_size
        moved += batch * length * kept * (stack.num_layers + across)
    return Part(SCORES, 0, total, moved)


def scores_by_layer(config: ModelConfig, length: int, batch: int = 1) -> list[float]:
    """FLOPs of each layer's scores and their products with values: 4 N H for each pair that its mask shows."""
    _check_sizes(length, batch)
    densities = [mask.density(length, length) for mask in config.masks]
    pairs = 4 * batch * length**2 * config.num_heads * config.head_size
    return [pairs * densities[i % len(densities)] for i in range(config.num_layers)]


def _counted(stack: ModelConfig, length: int, batch: int) -> float:
    """FLOPs of a stack's layers that are no products with parameters, by its program."""
    if isinstance(stack.embedding, Patches):
        raise ConfigError("cost: of images, attention alone is counted (mixer=None)")
    bare = replace(stack, heads=())
    tokens, shapes = jax.ShapeDtypeStruct((batch, length), jnp.int32), params.abstract(models.spec(bare))
    total = flops.count(lambda p, t: models.encode(bare, p, t).hidden, shapes, tokens).flops
    return total - sum(2 * size * share for size, share in cost.products(bare).values()) * batch * length


def cache_bytes(config: ModelConfig | EncoderDecoder, length: int, batch: int = 1, dtype: Any = jnp.bfloat16) -> int:
    """Bytes that decoding keeps of `batch` texts of `length` tokens; a source is not counted."""
    _check_sizes(length, batch)
    state = jax.eval_shape(lambda: init_cache(config, batch, length, dtype).layers)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def kept_bytes(config: ModelConfig, length: int, batch: int = 1, dtype: Any = jnp.bfloat16) -> int:
    """What the forward pass of a training step keeps for the backward pass, without the parameters: exact, by its jaxpr."""
    _check_sizes(length, batch)
    tokens, config = jnp.zeros((batch, length), jnp.int32), replace(config, context_length=max(length, config.context_length))

    def forward(p):
        return models.encode(config, p, tokens, dtype=dtype).hidden

    jaxpr = jax.make_jaxpr(lambda p: jax.vjp(forward, p)[1])(params.abstract(models.spec(replace(config, heads=())))).jaxpr
    arguments = set(jaxpr.invars)
    kept = {variable for variable in jaxpr.outvars if not hasattr(variable, "val") and variable not in arguments}
    arrays: list[Any] = [variable.aval for variable in kept]
    return sum(array.size * array.dtype.itemsize for array in arrays)


def crossover(config: ModelConfig) -> float:
    """The length at which scores cost as much as the layers' products with parameters: 6 D of a block of 12 D^2 weights."""
    inside = sum(size * share for path, (size, share) in cost.products(config).items() if path.startswith("layers/"))
    return 2 * inside / (4 * config.num_heads * config.head_size * config.num_layers)


def table(config: ModelConfig | EncoderDecoder, length: int, batch: int = 1) -> str:
    """The parts with their shares and FLOPs a byte (of 16-bit numbers), then caches, what training keeps, and the crossover."""
    rows = parts(config, length, batch)
    rows.append(Part("total", *(sum(getattr(row, name) for row in rows) for name in Part._fields[1:])))
    width, total = max(len(row.name) for row in rows), rows[-1].flops
    lines = [f"{'':<{width}}  {'parameters':>15}  {'GFLOP':>12}  {'share':>6}  {'MB':>10}  {'FLOPs/byte':>10}"]
    for row in rows:
        intensity = f"{row.flops / row.numbers / 2:>10,.1f}" if row.numbers else f"{'-':>10}"
        lines.append(
            f"{row.name:<{width}}  {row.parameters:>15,}  {row.flops / 1e9:>12,.2f}  {row.flops / total:>6.1%}  "
            f"{2 * row.numbers / 1e6:>10,.1f}  {intensity}"
        )
    lines.append(f"a forward pass of {batch} x {length} tokens, numbers of 16 bits")
    if isinstance(config, ModelConfig) and config.mixer is None and len(config.masks) > 1:
        layers = [f"{flops / 1e9:,.2f}" for flops in scores_by_layer(config, length, batch)]
        lines.append(f"{SCORES}, GFLOP by layer: {' '.join(layers)}")
    try:
        lines.append(f"decoding keeps {cache_bytes(config, length, batch) / 1e6:,.1f} MB")
    except NotImplementedError as error:
        lines.append(f"decoding: {error}")
    if isinstance(config, ModelConfig) and not isinstance(config.embedding, Patches):
        kept = [f"{name} {kept_bytes(replace(config, remat=name), length, batch) / 1e6:,.1f} MB" for name in REMAT]
        lines.append(f"training keeps, by remat: {', '.join(kept)}")
        lines.append(
            f"scores of full attention cost as much as the products with parameters at {crossover(config):,.0f} tokens"
        )
    return "\n".join(lines)
