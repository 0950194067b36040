"""The default stack: all layers under one scan, and what other stacks need of it."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict

from jaxformer.errors import ConfigError
from jaxformer.models import block as blocks
from jaxformer.models.config import ModelConfig
from jaxformer.models.layer import Context, Mixer
from jaxformer.models.mixers.attention import attention
from jaxformer.params import paths

Tree = Any


def mixers(config: ModelConfig) -> tuple[Mixer, ...]:
    """The mixers of the first layers, after which the pattern of mixers and positions repeats."""
    kinds = config.mixer if isinstance(config.mixer, tuple) else (config.mixer,)
    turns = config.positions if isinstance(config.positions, tuple) else (config.positions,)
    return tuple(
        (kinds[i % len(kinds)] or attention)(replace(config, positions=turns[i % len(turns)]))
        for i in range(math.lcm(len(kinds), len(turns)))
    )


def alike(config: ModelConfig) -> bool:
    """Whether all layers have the same mixer, so that they are one stack: of parameters, drawn constants, state."""
    return not isinstance(config.mixer, tuple) or all(mixer == config.mixer[0] for mixer in config.mixer)


def stack(
    config: ModelConfig, params: Tree, x, context: Context, layer_masks, state: Tree, constants: Tree = None,
    pick=lambda row: row,
):  # fmt: skip
    """(x, `LayerOutput` of all layers `[L, ...]`): a scan over whole periods of the pattern of masks and mixers, then the rest.

    `unroll=L` or JAX_DISABLE_JIT=1 give the same values. `context.layer` is the number of the first layer; `pick` makes of
    a layer's row of `params` and `constants` what it reads.
    """
    slots, L = mixers(config), config.num_layers
    period = math.lcm(len(layer_masks), len(slots))
    slots *= period // len(slots)
    source = context.source

    def layer(i, take, carry, inputs):
        x, memo = carry
        index, layer_params, layer_state, layer_constants, layer_source = take(inputs)
        layer_params, layer_constants = pick((layer_params, layer_constants))
        key = None if context.dropout_key is None else jax.random.fold_in(context.dropout_key, index)
        layer_context = replace(
            context, mask=layer_masks[i % len(layer_masks)], dropout_key=key, state=layer_state, layer=index,
            constants=layer_constants, memo=memo, source=None if source is None else replace(source, heads=layer_source),
        )  # fmt: skip
        x, beside = blocks.block(config, slots[i], layer_params, x, layer_context)
        return (x, beside.memo), beside._replace(memo=None)

    def run(layers, carry, rows):
        outputs = []
        for one, row in zip(layers, rows, strict=False):
            carry, out = one(carry, row)
            outputs.append(out)
        return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)

    layers = [remat(config, partial(layer, i, lambda row: row)) for i in range(period)]
    scan = partial(jax.lax.scan, unroll=max(1, config.unroll // period))
    carry, read_heads = (x, slots[0].memo(x)), None if source is None else source.heads
    numbers = context.layer + jnp.arange(L)
    if not alike(config):
        if any(slot.memo(x) is not None for slot in slots):
            raise ConfigError("model.mixer: a mixer that hands a memo to the next layer is the mixer of all layers")
        rows = per_slot(config, slots, params, (numbers, state, read_heads), constants, x.shape[1])
        inputs = tuple((index, own, *rest[:1], drawn, *rest[1:]) for own, (index, *rest), drawn in rows)
        carry, outputs = scan(partial(run, layers), carry, inputs)
        return carry[0], jax.tree.map(lambda a: a.reshape(L, *a.shape[2:]), outputs)
    constants = slots[0].constants(x.shape[1]) if constants is None else constants
    inputs = numbers, params, state, constants, read_heads
    if config.unroll >= L:
        (x, _), outputs = run(layers * L, carry, unstack(inputs, L))
        return x, outputs
    if period == 1:
        carry, outputs = scan(layers[0], carry, inputs)
        return carry[0], outputs
    whole = L - L % period
    periods = jax.tree.map(lambda a: a[:whole].reshape(whole // period, period, *a.shape[1:]), inputs)
    # taken apart within what is recomputed: the loop then keeps no copy of the weights for the backward pass
    taking = [remat(config, partial(layer, i, lambda rows, i=i: unstack(rows, period)[i])) for i in range(period)]
    carry, outputs = scan(lambda carry, rows: run(taking, carry, [rows] * period), carry, periods)
    outputs = jax.tree.map(lambda a: a.reshape(whole, *a.shape[2:]), outputs)
    if whole < L:
        carry, rest = run(layers, carry, unstack(jax.tree.map(lambda a: a[whole:], inputs), L - whole))
        outputs = jax.tree.map(lambda *parts: jnp.concatenate(parts), outputs, rest)
    return carry[0], outputs


def per_slot(config: ModelConfig, slots: tuple[Mixer, ...], params: Tree, others: Tree, constants: Tree, length: int):
    """For each slot of a pattern of different mixers, (parameters, others, constants) of its layers `[L / slots, ...]`."""
    L, period = config.num_layers, len(slots)
    if L % period:
        raise ConfigError(f"model.num_layers={L} is no multiple of the pattern of {period} different layers")
    source_width = config.d_model if "cross_attention" in params else None  # any: names alone are asked for
    has = [paths(blocks.spec(config, slot, source_width)).keys() for slot in slots]
    leaves, rows = paths(params), []
    for i, slot in enumerate(slots):
        own = {}
        for path in has[i]:
            owners = [j for j in range(period) if path in has[j]]
            own[path] = leaves[path][owners.index(i) :: len(owners)]
        drawn = slot.constants(length)
        drawn = drawn if constants is None or drawn is None else constants
        rows.append((unflatten_dict(own, sep="/"), *jax.tree.map(lambda a, i=i: a[i::period], (others, drawn))))
    return rows


def unstack(tree: Tree, length: int) -> list[Tree]:
    """`[length, ...]` leaves -> `length` trees, by `lax.split`: its transpose is one concatenation, an index's a scatter."""
    leaves, structure = jax.tree.flatten(tree)
    columns = [[part.reshape(leaf.shape[1:]) for part in jax.lax.split(leaf, (1,) * length)] for leaf in leaves]
    return [jax.tree.unflatten(structure, row) for row in zip(*columns, strict=True)]


def remat(config: ModelConfig, f):
    """f, keeping for the backward pass everything ("none"), products with weights ("dots"), only its inputs ("full"), or
    beside them what attention without an n x n array gave ("attention"), which costs most to compute again.

    Weights that were gathered over devices are never kept: they are gathered again.
    """
    mesh = jax.sharding.get_abstract_mesh()
    checkpoint = partial(
        jax.checkpoint, f, prevent_cse=config.unroll >= config.num_layers
    )  # a loop keeps the passes apart
    match config.remat:
        case "none":
            gathers = not mesh.empty and mesh.shape.get("fsdp", 1) > 1
            return checkpoint(policy=_but_weights) if gathers else f
        case "dots":
            return checkpoint(policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
        case "attention":  # as the kernels name it
            return checkpoint(policy=jax.checkpoint_policies.save_only_these_names("attention"))
        case "full":
            return checkpoint()


def _but_weights(primitive, *_, call_jaxpr=None, **__) -> bool:
    """Everything but what was laid out or cast anew: gathered weights are just that, and activations cost nothing so."""
    names = [primitive.name] if call_jaxpr is None else [equation.primitive.name for equation in call_jaxpr.eqns]
    return not all(name in ("sharding_constraint", "convert_element_type", "all_gather") for name in names)
