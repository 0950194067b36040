"""The cost of a forward pass by its parts: parameters, FLOPs and bytes.

`parts` counts them and `table` prints them. `kept_bytes` is the memory that training keeps for the
backward pass, `cache_bytes` the memory that decoding keeps.
"""

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
from jaxformer.models.stacks.remat import POLICIES
from jaxformer.params import Spec
from jaxformer.tools.planning import flops

# tokens of a text: the visible pairs of a mask are counted by their distances, in memory
LONGEST = 2**24
PARTS = ("embedding", "attention", "cross_attention", "feedforward", "shared", "norms", "heads")
SCORES = "scores and their products with values"


class Part(NamedTuple):
    """The cost of one kind of work, over all layers."""

    name: str
    parameters: int
    flops: float
    # weights, inputs and outputs of its products: the least that must be read and written
    numbers: float


def parts(config: ModelConfig | EncoderDecoder, length: int, batch: int = 1) -> list[Part]:
    """The parts of a forward pass of `batch` texts of `length` tokens, two FLOPs a multiply-add.

    Both source and target of an encoder-decoder have this length. Attention costs 4 N H FLOPs for
    each pair that the mask shows. The cost of another mixer is everything that its program computes
    besides products with parameters. Norms, activations and look-ups multiply no matrices and count
    as 0 FLOPs.
    """
    _check_sizes(length, batch)
    found = {name: Part(name, 0, 0, 0) for name in PARTS}
    tokens = batch * length
    multiplied = cost.products(config)
    for path, leaf in params.paths(models.spec(config)).items():
        name = next((word for word in reversed(path.split("/")) if word in PARTS), "norms")
        found[name] = found[name]._replace(parameters=found[name].parameters + params.count(leaf))
        size, share = multiplied.get(path, (0, 0.0))
        if size:
            # the product with a tied table belongs to the head
            user = "heads" if name == "embedding" and not leaf.contracts else name
            found[user] = found[user]._replace(
                flops=found[user].flops + 2 * size * share * tokens,
                numbers=found[user].numbers + _moved(leaf, size, tokens * share),
            )
    counted = [part for part in found.values() if part.parameters or part.flops]
    return [*counted, _mixing(config, length, batch)]


def _moved(leaf: Spec, size: int, tokens: float) -> float:
    """Numbers that products with a matrix move: its `size` weights, inputs and outputs."""
    layers = leaf.shape[0] if leaf.axes[0] == "layers" else 1
    summed = leaf.contracts or ("embed",)
    inputs = math.prod(n for axis, n in zip(leaf.axes, leaf.shape, strict=True) if axis in summed)
    return size + tokens * (layers * inputs + size / inputs)


def _check_sizes(length: int, batch: int) -> None:
    check_whole("cost: length", length)
    check_whole("cost: batch", batch)
    if length > LONGEST:
        raise ConfigError(
            f"cost: length={length:,}: expected at most {LONGEST:,} tokens, "
            "whose distances fit in memory"
        )


def _mixing(config: Any, length: int, batch: int) -> Part:
    """The cost of the exchange between positions: scores, and their products with values."""
    if isinstance(config, EncoderDecoder):
        stacks = [(config.encoder, 0), (config.decoder, config.decoder.num_layers)]
    else:
        stacks = [(config, 0)]
    flops_total = 0.0
    moved = 0.0
    for stack, cross_layers in stacks:
        if stack.mixer is None and cost.layer_runs(stack) == stack.num_layers:
            flops_total += sum(scores_by_layer(stack, length, batch))
        else:
            flops_total += _counted(stack, length, batch)
        query_width = stack.num_heads * stack.head_size
        key_width = stack.kv_heads * stack.head_size
        flops_total += 4 * batch * length**2 * query_width * cross_layers
        numbers = 2 * query_width + 2 * key_width  # query, output, key, value of a token
        moved += batch * length * numbers * (stack.num_layers + cross_layers)
    return Part(SCORES, 0, flops_total, moved)


def scores_by_layer(config: ModelConfig, length: int, batch: int = 1) -> list[float]:
    """FLOPs of each layer's scores and their products with values: 4 N H for each visible pair."""
    _check_sizes(length, batch)
    densities = [mask.density(length, length) for mask in config.masks]
    pairs = 4 * batch * length**2 * config.num_heads * config.head_size
    return [pairs * densities[i % len(densities)] for i in range(config.num_layers)]


def _counted(stack: ModelConfig, length: int, batch: int) -> float:
    """FLOPs of a stack's layers besides products with parameters, counted from its program."""
    if isinstance(stack.embedding, Patches):
        raise ConfigError("cost: of images, attention alone is counted (mixer=None)")
    bare = replace(stack, heads=())
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    shapes = params.abstract(models.spec(bare))
    total = flops.count(lambda p, t: models.encode(bare, p, t).hidden, shapes, tokens).flops
    a_token = sum(2 * size * share for size, share in cost.products(bare).values())
    return total - a_token * batch * length


def cache_bytes(
    config: ModelConfig | EncoderDecoder, length: int, batch: int = 1, dtype: Any = jnp.bfloat16
) -> int:
    """Bytes of the cache of `batch` texts of `length` tokens; the source of a pair not counted."""
    _check_sizes(length, batch)
    state = jax.eval_shape(lambda: init_cache(config, batch, length, dtype).layers)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def kept_bytes(config: ModelConfig, length: int, batch: int = 1, dtype: Any = jnp.bfloat16) -> int:
    """Bytes that the forward pass of a training step keeps for the backward pass.

    Parameters, and arrays in the memory of the host, are not counted. The number is exact: it is
    read from the jaxpr.
    """
    _check_sizes(length, batch)
    tokens = jnp.zeros((batch, length), jnp.int32)
    config = replace(config, context_length=max(length, config.context_length))

    def forward(p):
        return models.encode(config, p, tokens, dtype=dtype).hidden

    shapes = params.abstract(models.spec(replace(config, heads=())))
    jaxpr = jax.make_jaxpr(lambda p: jax.vjp(forward, p)[1])(shapes).jaxpr
    arguments = set(jaxpr.invars)
    residuals = {
        variable
        for variable in jaxpr.outvars
        if not hasattr(variable, "val") and variable not in arguments
    }
    arrays: list[Any] = [variable.aval for variable in residuals]
    on_device = [array for array in arrays if array.memory_space != jax.memory.Space.Host]
    return sum(array.size * array.dtype.itemsize for array in on_device)


def crossover(config: ModelConfig) -> float:
    """The length at which scores cost as much as the layers' products with parameters.

    It is 6 D for a block of 12 D^2 weights.
    """
    layer_weights = sum(
        size * share
        for path, (size, share) in cost.products(config).items()
        if path.startswith("layers/")
    )
    return 2 * layer_weights / (4 * config.num_heads * config.head_size * config.num_layers)


def table(config: ModelConfig | EncoderDecoder, length: int, batch: int = 1) -> str:
    """The parts as a table: parameters, FLOPs, their shares, bytes, and FLOPs per byte.

    Numbers have 16 bits. Below the table: the cache of decoding, the memory that training keeps,
    and the crossover.
    """
    counted = parts(config, length, batch)
    sums = [sum(getattr(part, field) for part in counted) for field in Part._fields[1:]]
    total = Part("total", *sums)
    width = max(len(part.name) for part in (*counted, total))
    lines = [
        f"{'':<{width}}  {'parameters':>15}  {'GFLOP':>12}  {'share':>6}  {'MB':>10}  "
        f"{'FLOPs/byte':>10}"
    ]
    for part in (*counted, total):
        intensity = f"{part.flops / part.numbers / 2:>10,.1f}" if part.numbers else f"{'-':>10}"
        lines.append(
            f"{part.name:<{width}}  {part.parameters:>15,}  {part.flops / 1e9:>12,.2f}  "
            f"{part.flops / total.flops:>6.1%}  {2 * part.numbers / 1e6:>10,.1f}  {intensity}"
        )
    lines.append(f"a forward pass of {batch} x {length} tokens, numbers of 16 bits")
    if isinstance(config, ModelConfig) and config.mixer is None and len(config.masks) > 1:
        layers = [f"{layer / 1e9:,.2f}" for layer in scores_by_layer(config, length, batch)]
        lines.append(f"{SCORES}, GFLOP by layer: {' '.join(layers)}")
    try:
        lines.append(f"decoding keeps {cache_bytes(config, length, batch) / 1e6:,.1f} MB")
    except NotImplementedError as error:
        lines.append(f"decoding: {error}")
    if isinstance(config, ModelConfig) and not isinstance(config.embedding, Patches):
        sizes = [
            f"{name} {kept_bytes(replace(config, remat=name), length, batch) / 1e6:,.1f} MB"
            for name in POLICIES
        ]
        lines.append(f"training keeps, by remat: {', '.join(sizes)}")
        lines.append(
            "scores of full attention cost as much as the products with parameters "
            f"at {crossover(config):,.0f} tokens"
        )
    return "\n".join(lines)
