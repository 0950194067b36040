"""The default stack: all layers under one scan. Also what other stacks need: the pattern of mixers, its rows, its state."""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict

from jaxformer import masks
from jaxformer.errors import ConfigError
from jaxformer.models import block as blocks
from jaxformer.models.config import ModelConfig
from jaxformer.models.layer import Context, Layers, Mixer
from jaxformer.models.mixers.attention import attention
from jaxformer.ops.einsum import PRODUCT
from jaxformer.params import Tree, paths
from jaxformer.sharding import is_one_cpu, platform

# Models of more layers are scanned: the time to compile grows with the layers. So are wider models of 32 bits on CPU: each
# layer's weights are cut out of the stack, which in 16 bits costs nothing more than the cast (bench/LOG.md)
UNROLLED, WIDE = 24, 512


class Row(NamedTuple):
    """What one layer reads. Of several layers, each leaf has a leading axis."""

    layer: Any  # its number
    params: Tree
    state: Tree = None
    constants: Tree = None
    source_heads: Tree = None


def mixers(config: ModelConfig) -> tuple[Mixer, ...]:
    """The mixers of the first layers, after which the pattern of mixers and positions repeats."""
    kinds = config.mixer if isinstance(config.mixer, tuple) else (config.mixer,)
    turns = config.positions if isinstance(config.positions, tuple) else (config.positions,)

    def made(i):
        return (kinds[i % len(kinds)] or attention)(replace(config, positions=turns[i % len(turns)]))

    return tuple(map(made, range(math.lcm(len(kinds), len(turns)))))


def pattern(config: ModelConfig) -> tuple[Mixer, ...]:
    """The mixers of the first layers, after which the pattern of mixers, positions and masks repeats."""
    slots = mixers(config)
    return slots * (math.lcm(len(config.masks), len(slots)) // len(slots))


def alike(config: ModelConfig) -> bool:
    """Whether all layers have the same mixer, so that they are one stack: of parameters, drawn constants, state."""
    return not isinstance(config.mixer, tuple) or all(mixer == config.mixer[0] for mixer in config.mixer)


def _whole_pattern(config: ModelConfig) -> tuple[Mixer, ...]:
    """The `pattern`, of which all layers must be a multiple."""
    slots, L = pattern(config), config.num_layers
    if L % len(slots):
        raise ConfigError(f"model.num_layers={L} is no multiple of the pattern of {len(slots)} different layers")
    return slots


def init_state(config: ModelConfig, batch: int, length: int, dtype, ahead: int = 0) -> tuple[Tree, ...]:
    """The empty state of each layer. A mixer that rolls keeps no more tokens than its mask lets a query see, and `ahead`.

    So many tokens may be taken back. Raises NotImplementedError for a mixer that has no state, or cannot take tokens back.
    """
    slots, states = (pattern if alike(config) else _whole_pattern)(config), []
    kinds = config.mixer if isinstance(config.mixer, tuple) else (config.mixer,)
    for i in range(config.num_layers):
        slot, reach, kind = slots[i % len(slots)], masks.reach(config.masks[i % len(config.masks)]), kinds[i % len(kinds)]
        name = getattr(kind, "__name__", type(kind).__name__)
        if slot.state is None:
            decoders = "mixer=None, Linear and Performer can, under a causal mask"
            raise NotImplementedError(f"{name} cannot decode: its Mixer has no `state`; {decoders}")
        keep = length if reach is None or not slot.rolls else min(length, reach + 1 + ahead)
        states.append(slot.state(batch, keep, dtype))
        if ahead and not slot.rolls:  # sums of all tokens
            raise NotImplementedError(f"speculate: {name} cannot take tokens back: its Mixer has rolls=False")
    return tuple(states)


def unstacked(config: ModelConfig, tree: Tree) -> tuple[Tree, ...]:
    """The parameters `[L, ...]` of all layers as one tree for each layer; a tuple is already that."""
    if isinstance(tree, tuple):
        return tree
    slots, leaves = pattern(config), paths(tree)
    source_width = config.d_model if "cross_attention" in tree else None  # any: names alone are asked for
    names = [paths(blocks.spec(config, slot, source_width)).keys() for slot in slots]
    layers, used = [], dict.fromkeys(leaves, 0)
    for i in range(config.num_layers):
        own = [path for path in leaves if path in names[i % len(slots)]]
        layers.append(unflatten_dict({path: leaves[path][used[path]] for path in own}, sep="/"))
        used |= {path: used[path] + 1 for path in own}
    return tuple(layers)


def stack(config: ModelConfig, layers: Layers, x, context: Context, pick: Callable | None = None):
    """(x after all layers, `LayerOutput` of them `[L, ...]`): a scan over whole periods of the pattern, then the rest.

    `unroll=L` or JAX_DISABLE_JIT=1 give the same values. `context.layer` is the number of the first layer. `pick` makes
    of a layer's parameters and constants what the layer reads (`stacks.pipeline`).
    """
    slots = pattern(config)
    carry, outputs = (x, slots[0].memo(x)), []
    for step, rows, scanned in layer_groups(config, layers, slots, x, context, pick):
        if scanned:
            carry, output = jax.lax.scan(step, carry, rows, unroll=max(1, layers_a_step(config, x.dtype) // len(slots)))
            output = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), output)
        else:
            carry, output = step(carry, rows)
        outputs.append(output)
    return carry[0], outputs[0] if len(outputs) == 1 else jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs)


def layers_a_step(config: ModelConfig, dtype) -> int:
    """Layers of one step of the scan: `config.unroll`, or by default what is fastest.

    On GPUs and on one CPU that is no scan (but see `WIDE`): a scan copies what each layer keeps for its gradient. With
    `config.remat` it is a scan, which keeps no layer's weights. On TPUs it is one layer, which compiles soonest.
    """
    if config.unroll is not None:
        return config.unroll
    copies = platform() == "gpu" or (is_one_cpu() and (dtype.itemsize < 4 or config.d_model <= WIDE))
    chosen = config.num_layers if copies and config.num_layers <= UNROLLED and config.remat == "none" else 1
    _log_once(platform(), config.num_layers, chosen)
    return chosen


@cache
def _log_once(platform: str, layers: int, chosen: int) -> None:
    how = "one after another, without a scan" if chosen >= layers else f"a scan, {chosen} a step"
    logging.getLogger("jaxformer").info("%d layers on %s: %s", layers, platform, how)


def layer_groups(config: ModelConfig, layers: Layers, slots, x, context: Context, pick) -> Iterator[tuple]:
    """Whole periods of the pattern, to be scanned, and what remains behind them: (step, rows, whether rows are scanned).

    `step(carry, rows) -> (carry, LayerOutput of its layers)`; rows that are scanned are `[steps, ...]`.
    """
    L, period = config.num_layers, len(slots)
    contexts = [replace(context, mask=layers.masks[i % len(layers.masks)]) for i in range(period)]
    functions = [partial(run_layer, config, *slot_context, pick) for slot_context in zip(slots, contexts, strict=True)]
    each = [remat(config, function, x.dtype) for function in functions]
    heads = None if context.source is None else context.source.heads
    if isinstance(layers.params, tuple) or layers.state is not None:
        turns = [functions[i % period] for i in range(L)]
        yield partial(run_in_turn, turns), decoding_rows(config, slots, layers, x, heads), False
        return
    rows = Row(context.layer + jnp.arange(L), layers.params, None, layers.constants, heads)
    if not alike(config):
        if any(slot.memo(x) is not None for slot in slots):
            raise ConfigError("model.mixer: a mixer that hands a memo to the next layer is the mixer of all layers")
        yield partial(run_in_turn, each), rows_by_slot(config, slots, rows, x.shape[1]), True
        return
    if rows.constants is None:
        rows = rows._replace(constants=slots[0].constants(x.shape[1]))
    scanned = 0 if layers_a_step(config, x.dtype) >= L else L - L % period
    if scanned and period == 1:
        yield partial(run_in_turn, each), (rows,), True
    elif scanned:
        # each layer takes its row within what is recomputed: the loop then keeps no copy of the weights for the backward pass
        def on_row(function, i, carry, rows):
            return function(carry, unstack(rows, period)[i])

        takes = [remat(config, partial(on_row, function, i), x.dtype) for i, function in enumerate(functions)]

        def step(carry, rows):
            return run_in_turn(takes, carry, (rows,) * period)

        def cut(leaf):
            return leaf[:scanned].reshape(scanned // period, period, *leaf.shape[1:])

        yield step, jax.tree.map(cut, rows), True
    if scanned < L:
        remaining = jax.tree.map(lambda leaf: leaf[scanned:], rows)
        turns = [each[i % period] for i in range(L - scanned)]
        yield partial(run_in_turn, turns), unstack(remaining, L - scanned), False


def run_layer(config: ModelConfig, mixer: Mixer, context: Context, pick, carry, row: Row):
    """One layer: ((x, memo), Row) -> ((x, memo), LayerOutput)."""
    x, memo = carry
    params, constants = (row.params, row.constants) if pick is None else pick((row.params, row.constants))
    key = None if context.dropout_key is None else jax.random.fold_in(context.dropout_key, row.layer)
    source = None if context.source is None else replace(context.source, heads=row.source_heads)
    context = replace(
        context, dropout_key=key, state=row.state, layer=row.layer, constants=constants, memo=memo, source=source,
        tap=context.tap.in_layer(row.layer),
    )  # fmt: skip
    output = blocks.block(config, mixer, params, x, context)
    return (output.hidden, output.memo), output._replace(hidden=None, memo=None)


def decoding_rows(config: ModelConfig, slots, layers: Layers, x, heads) -> list[Row]:
    """What each layer reads in decoding: weights and a state of its own, which no loop has to cut out of a stack."""
    rows, states = [], layers.state or (None,) * config.num_layers
    for i, (params, state) in enumerate(zip(unstacked(config, layers.params), states, strict=True)):
        drawn = slots[i % len(slots)].constants(x.shape[1])
        constants = drawn if layers.constants is None or drawn is None else layers.constants
        constants = jax.tree.map(lambda leaf, i=i: leaf[i], constants)
        rows.append(Row(i, params, state, constants, None if heads is None else heads[i]))
    return rows


def run_in_turn(functions, carry, rows):
    """Layers one after another, each on its row, and their outputs stacked; states as a tuple."""
    outputs = []
    for function, row in zip(functions, rows, strict=True):
        carry, output = function(carry, row)
        outputs.append(output)
    if len({frozenset(output.intermediates) for output in outputs}) > 1:
        names = ", ".join(sorted({path for output in outputs for _, path in output.intermediates}))
        raise ConfigError(f"intermediates: {names}: not every layer computes all of these")
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(output._replace(state=None) for output in outputs))
    if outputs[0].state is None:
        return carry, stacked
    return carry, stacked._replace(state=tuple(output.state for output in outputs))


def rows_by_slot(config: ModelConfig, slots: tuple[Mixer, ...], rows: Row, length: int) -> tuple[Row, ...]:
    """For each layer of a pattern of different mixers, the rows `[L / slots, ...]` of the layers in its place."""
    period = len(_whole_pattern(config))
    source_width = config.d_model if "cross_attention" in rows.params else None  # any: names alone are asked for
    names = [paths(blocks.spec(config, slot, source_width)).keys() for slot in slots]
    leaves, found = paths(rows.params), []
    for i, slot in enumerate(slots):
        params = {}
        for path in names[i]:
            owners = [j for j in range(period) if path in names[j]]
            params[path] = leaves[path][owners.index(i) :: len(owners)]
        constants = slot.constants(length)
        if constants is not None and rows.constants is not None:
            constants = rows.constants
        layer, constants, heads = jax.tree.map(lambda leaf, i=i: leaf[i::period], (rows.layer, constants, rows.source_heads))
        found.append(Row(layer, unflatten_dict(params, sep="/"), None, constants, heads))
    return tuple(found)


def unstack(tree: Tree, length: int) -> list[Tree]:
    """`[length, ...]` leaves -> `length` trees, by `lax.split`: its transpose is one concatenation, an index's a scatter."""
    leaves, structure = jax.tree.flatten(tree)
    columns = [[part.reshape(leaf.shape[1:]) for part in jax.lax.split(leaf, (1,) * length)] for leaf in leaves]
    return [jax.tree.unflatten(structure, row) for row in zip(*columns, strict=True)]


def partition(tree: Tree, keep: Callable) -> tuple[Tree, Tree]:
    """The tree twice: with the leaves for which `keep(leaf)` holds, and with the others; None in place of the rest."""

    def pick(kept):
        return jax.tree.map(lambda leaf: leaf if bool(keep(leaf)) == kept else None, tree)

    return pick(True), pick(False)


def combine(tree: Tree, other: Tree) -> Tree:
    """The tree of which `partition` made these two."""
    return jax.tree.map(lambda a, b: b if a is None else a, tree, other, is_leaf=lambda leaf: leaf is None)


def remat(config: ModelConfig, f: Callable, dtype) -> Callable:
    """f, keeping for the backward pass what `ModelConfig.remat` says. Gathered weights are never kept but gathered again."""
    mesh = jax.sharding.get_abstract_mesh()
    # a loop keeps the passes apart
    checkpoint = partial(jax.checkpoint, f, prevent_cse=layers_a_step(config, dtype) >= config.num_layers)
    match config.remat:
        case "none":
            gathers = not mesh.empty and mesh.shape.get("fsdp", 1) > 1
            return checkpoint(policy=_save_all_but_cheap) if gathers else f
        case "dots":
            return checkpoint(policy=_save_products)
        case "attention":
            return checkpoint(policy=_save_attention)
        case "full":
            return checkpoint()


def _save_products(primitive, *operands, **options) -> bool:
    """Saves products with weights: those of `ops.einsum` by their name, as they are rounded, and a user's own as they are."""
    if primitive.name == "name":
        return options["name"] == PRODUCT
    if primitive.name != "dot_general":
        return False
    _, (batch, _) = options["dimension_numbers"]
    return not batch and options["preferred_element_type"] in (None, operands[0].dtype)


def _save_attention(primitive, *_, name: str = "", **__) -> bool:
    """Saves what kernels of attention make: ours name it, and cuDNN's forward pass is an operation of its own."""
    return name == "attention" if primitive.name == "name" else primitive.name.startswith("dot_product_attention_fwd")


# What costs nothing to compute again: a gathered weight is only sharded or cast anew, and the others run beside a product.
# Their float32 arrays would be most of what a layer of 16 bits keeps: the policy reaches into the functions within that
# are computed again, such as activations and norms.
_CHEAP = {
    "sharding_constraint", "all_gather", "convert_element_type", "add", "sub", "mul", "div", "neg", "exp", "log", "erf", "tanh",
    "logistic", "rsqrt", "sqrt", "square", "integer_pow", "max", "min", "select_n", "broadcast_in_dim", "reshape", "transpose",
    "squeeze", "expand_dims", "concatenate", "slice", "split", "iota", "reduce_sum", "reduce_max", "stop_gradient",
}  # fmt: skip


def _save_all_but_cheap(primitive, *operands, call_jaxpr=None, **_) -> bool:
    """Saves all but what is only sharded or cast anew, or an elementwise function of what is saved; and gathered vectors."""
    names = [primitive.name] if call_jaxpr is None else [equation.primitive.name for equation in call_jaxpr.eqns]
    of_vectors = bool(operands) and all(x.ndim <= 1 for x in operands) and "broadcast_in_dim" not in names
    return of_vectors or not all(name in _CHEAP for name in names)
