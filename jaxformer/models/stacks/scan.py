"""The default stack: all layers under one scan. Other stacks use its `LayerInputs`, `partition`, `combine` and `remat`."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.errors import ConfigError
from jaxformer.models import sublayers
from jaxformer.models.config import ModelConfig
from jaxformer.models.layer import Context, LayerOutput, Layers
from jaxformer.models.stacks import layout
from jaxformer.models.stacks.layout import Segment
from jaxformer.models.sublayers import Kind
from jaxformer.ops.einsum import PRODUCT
from jaxformer.params import Tree
from jaxformer.sharding import is_one_cpu, platform

# Models of more layers are scanned: the time to compile grows with the layers. So are wider models of 32 bits on CPU: each
# layer's weights are cut out of the stack, which in 16 bits costs nothing more than the cast (bench/LOG.md)
UNROLLED, WIDE = 24, 512


class LayerInputs(NamedTuple):
    """What one layer reads. For several layers, each leaf has a leading axis."""

    layer: Any  # its number
    params: Tree
    state: Tree = None
    constants: Tree = None
    source_heads: Tree = None


class Flow(NamedTuple):
    """What a layer hands to the next one."""

    x: Any  # the residual stream, [B, T, ...]
    carry: Tree  # a value of its mixer


class StackCall(NamedTuple):
    """One call of a stack: what its layers are, and what they read."""

    config: ModelConfig
    layers: Layers
    context: Context
    pick: Callable | None  # selects a layer's parameters and constants
    kinds: tuple[Kind, ...]  # of the first layers, which repeat
    constants: list[Tree]  # for each kind what its mixer drew for all layers, `[L, ...]`

    def kind(self, i: int) -> Kind:
        """What layer i is made of."""
        return self.kinds[i % len(self.kinds)]

    def drawn(self, layers: int | slice) -> Tree:
        """The constants of a layer, or of the layers of a slice, which are of one kind."""
        first = layers if isinstance(layers, int) else layers.start
        return jax.tree.map(lambda leaf: leaf[layers], self.constants[first % len(self.kinds)])

    def context_of(self, i: int) -> Context:
        """The context with the mask of layer i."""
        return replace(self.context, mask=self.layers.masks[i % len(self.layers.masks)])


def stack(config: ModelConfig, layers: Layers, x, context: Context, pick: Callable | None = None):
    """(x after all layers, `LayerOutput` of them): a scan over whole periods of the pattern, then the rest.

    `unroll=L` or JAX_DISABLE_JIT=1 give the same values. `context.layer` is the number of the first layer. `pick` selects a
    layer's parameters and constants (`stacks.pipeline`).
    """
    source_width = None if context.source is None else context.source.hidden.shape[-1]
    kinds = layout.kinds(config, source_width)
    constants = [_constants(kind, layers, x.shape[1]) for kind in kinds]
    call = StackCall(config, layers, context, pick, kinds, constants)
    flow = Flow(x, first_carry(config, kinds, x))
    if isinstance(layers.params, tuple) or layers.state is not None:
        flow, output = run_one_by_one(call, flow)
        return flow.x, output
    outputs = []
    for segment in layout.segments(config, source_width):
        flow, output = run_segment(call, segment, flow)
        outputs.append(output)
    return flow.x, joined(outputs, jnp.concatenate)


def first_carry(config: ModelConfig, kinds: Sequence[Kind], x) -> Tree:
    """What the first layer reads of a layer before it. ConfigError where mixers of other kinds would read it."""
    mixers = layout.as_pattern(config.mixer)
    if any(mixer != mixers[0] for mixer in mixers) and any(kind.mixer.carry(x) is not None for kind in kinds):
        raise ConfigError("model.mixer: a mixer that hands a carry to the next layer is the mixer of all layers")
    return kinds[0].mixer.carry(x)


def _constants(kind: Kind, layers: Layers, length: int) -> Tree:
    """What the mixer of a layer draws for all layers, `[L, ...]`, or what the caller gave in its place."""
    drawn = kind.mixer.constants(length)
    return drawn if drawn is None or layers.constants is None else layers.constants


def run_one_by_one(call: StackCall, flow):
    """Decoding: each layer has weights and a state of its own, which no loop has to cut out of a stack."""
    config, layers, source = call.config, call.layers, call.context.source
    heads = None if source is None else source.heads
    states = layers.state or (None,) * config.num_layers
    outputs = []
    for i, params in enumerate(layout.unstacked(config, layers.params)):
        inputs = LayerInputs(i, params, states[i], call.drawn(i), None if heads is None else heads[i])
        flow, output = run_layer(call, call.kind(i), call.context_of(i), flow, inputs)
        outputs.append(output)
    stacked = joined([output._replace(state=None) for output in outputs], stack_leaves)
    states = tuple(output.state for output in outputs)
    return flow, stacked if states[0] is None else stacked._replace(state=states)


def run_segment(call: StackCall, segment: Segment, flow):
    """The layers of a segment: whole periods of its pattern under a scan, the rest one after another."""
    config, dtype = call.config, flow.x.dtype
    period = layout.period(config, segment)
    together = layers_a_step(config, dtype)
    scanned = 0 if together >= config.num_layers else segment.count - segment.count % period
    outputs = []
    if scanned:
        functions = [partial(run_layer_of_period, call, segment, period, k) for k in range(period)]
        step = partial(run_period, [remat(config, function, dtype) for function in functions], segment)
        inputs = inputs_of_periods(call, segment, period, scanned)
        flow, output = jax.lax.scan(step, flow, inputs, unroll=max(1, together // period))
        outputs.append(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), output))
    if scanned < segment.count:
        each = [remat(config, partial(run_layer_of_segment, call, segment, k), dtype) for k in range(scanned, segment.count)]
        flow, output = run_in_turn(each, flow, inputs_of_rest(call, segment, scanned))
        outputs.append(output)
    return flow, joined(outputs, jnp.concatenate)


def run_layer(call: StackCall, kind: Kind, context: Context, flow, inputs: LayerInputs):
    """One layer: (Flow, LayerInputs) -> (Flow, LayerOutput)."""
    params, constants = inputs.params, inputs.constants
    if call.pick is not None:
        params, constants = call.pick((params, constants))
    key = None if context.dropout_key is None else jax.random.fold_in(context.dropout_key, inputs.layer)
    source = None if context.source is None else replace(context.source, heads=inputs.source_heads)
    context = replace(
        context, dropout_key=key, state=inputs.state, layer=inputs.layer, constants=constants, carry=flow.carry, source=source,
        tap=context.tap.in_layer(inputs.layer),
    )  # fmt: skip
    output = sublayers.run(call.config, kind, params, flow.x, context)
    return Flow(output.hidden, output.carry), output._replace(hidden=None, carry=None)


def run_layer_of_segment(call: StackCall, segment: Segment, k: int, flow, inputs: LayerInputs):
    """The k-th layer of a segment."""
    i = segment.first + k
    flow, output = run_layer(call, call.kind(i), call.context_of(i), flow, inputs)
    place, _ = segment.place_of(k)
    return flow, output._replace(updates=layout.placed(output.updates, place))


def run_layer_of_period(call: StackCall, segment: Segment, period: int, k: int, flow, inputs: LayerInputs):
    """The k-th layer of a period. A place with several layers in a period has its parameters stacked: this takes those of one.

    It does so within what is recomputed: the loop then keeps no copy of the weights for the backward pass.
    """
    n = len(segment.places)
    if period > n:
        inputs = inputs._replace(params=unstack(inputs.params, period // n)[k // n])
    return run_layer_of_segment(call, segment, k, flow, inputs)


def run_period(functions: Sequence[Callable], segment: Segment, flow, inputs: tuple[list[Tree], list[LayerInputs]]):
    """One step of the scan: the layers of a period."""
    params, layer_inputs = inputs
    n = len(segment.places)
    return run_in_turn(functions, flow, [each._replace(params=params[k % n]) for k, each in enumerate(layer_inputs)])


def inputs_of_periods(call: StackCall, segment: Segment, period: int, scanned: int) -> tuple[list[Tree], list[LayerInputs]]:
    """What the first `scanned` layers of a segment read, each leaf [periods, ...]: parameters by place, the rest by layer.

    A place with several layers in a period has a second axis, of these layers: [periods, several, ...].
    """
    several = period // len(segment.places)
    periods = scanned // period

    def cut(leaf):
        leaf = leaf[: periods * several]
        return leaf if several == 1 else leaf.reshape(periods, several, *leaf.shape[1:])

    params = [jax.tree.map(cut, layout.place(call.layers.params, name)) for name in segment.places]
    stop = segment.first + scanned
    numbers = call.context.layer + jnp.arange(segment.first, stop)
    firsts = range(segment.first, segment.first + period)
    return params, [
        LayerInputs(numbers[k::period], None, None, call.drawn(slice(i, stop, period))) for k, i in enumerate(firsts)
    ]


def inputs_of_pattern(config: ModelConfig, layers: Layers, length: int) -> tuple[LayerInputs, ...]:
    """For each layer of the pattern the inputs `[L / period, ...]` of the layers in its place: for a stack of another kind.

    A pattern that only covers the depth is its own period. Raises ConfigError for a depth that is no multiple of the pattern.
    """
    segments, kinds, L = layout.segments(config), layout.kinds(config), config.num_layers
    period = L if len(segments) > 1 else layout.period(config, segments[0])
    if L % period:
        raise ConfigError(f"model.num_layers={L} is no multiple of the pattern of {period} different layers")
    found = []
    for segment in segments:
        for k in range(min(segment.count, period)):
            i = segment.first + k
            name, first = segment.place_of(k)
            several = slice(first, first + 1) if len(segments) > 1 else slice(first, None, period // len(segment.places))
            own = jax.tree.map(lambda leaf, several=several: leaf[several], layout.place(layers.params, name))
            constants = _constants(kinds[i % len(kinds)], layers, length)
            constants = jax.tree.map(lambda leaf, i=i: leaf[i::period], constants)
            found.append(LayerInputs(jnp.arange(i, L, period), own, None, constants))
    return tuple(found)


def inputs_of_rest(call: StackCall, segment: Segment, scanned: int) -> list[LayerInputs]:
    """What each layer of a segment behind the `scanned` ones reads. Every place has the same number of scanned layers."""
    first = scanned // len(segment.places)

    def rest(name: str) -> Iterator[Tree]:
        stored = layout.place(call.layers.params, name)
        leaves = jax.tree.map(lambda leaf: leaf[first:], stored)
        return iter(unstack(leaves, len(jax.tree.leaves(stored)[0]) - first))

    params = {name: rest(name) for name in segment.places}
    inputs = []
    for k in range(scanned, segment.count):
        place, _ = segment.place_of(k)
        i = segment.first + k
        inputs.append(LayerInputs(call.context.layer + i, next(params[place]), None, call.drawn(i)))
    return inputs


def run_in_turn(functions: Sequence[Callable], flow, inputs: Sequence[LayerInputs]):
    """Layers one after another, and their outputs stacked."""
    outputs = []
    for function, layer_inputs in zip(functions, inputs, strict=True):
        flow, output = function(flow, layer_inputs)
        outputs.append(output)
    return flow, joined(outputs, stack_leaves)


def stack_leaves(leaves: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack(leaves)


def joined(outputs: Sequence[LayerOutput], combine: Callable) -> LayerOutput:
    """Outputs of layers as one: each value is `combine(values)` of the layers that report it, in their order.

    Raises ConfigError for intermediates that not every layer computes.
    """
    if len({frozenset(output.intermediates) for output in outputs}) > 1:
        names = ", ".join(sorted({path for output in outputs for _, path in output.intermediates}))
        raise ConfigError(f"intermediates: {names}: not every layer computes all of these")

    def of(name):
        return _merged([getattr(output, name) for output in outputs], combine)

    return LayerOutput(loss=of("loss"), stats=of("stats"), intermediates=of("intermediates") or {}, updates=of("updates"))


def _merged(trees: Sequence[Tree], combine: Callable) -> Tree:
    """The trees as one: dictionaries by their keys, which only some of them may have; other trees leaf by leaf."""
    trees = [tree for tree in trees if tree is not None]
    if not trees:
        return None
    if all(isinstance(tree, Mapping) for tree in trees):
        names = dict.fromkeys(name for tree in trees for name in tree)
        return {name: _merged([tree[name] for tree in trees if name in tree], combine) for name in names}
    return jax.tree.map(lambda *leaves: combine(leaves), *trees)


def layers_a_step(config: ModelConfig, dtype) -> int:
    """Layers of one step of the scan: `config.unroll`, or by default the fastest number.

    On GPUs and on one CPU that is no scan (but see `WIDE`): a scan copies what each layer keeps for its gradient. With
    `config.remat` it is a scan, which keeps no layer's weights. On TPUs it is one layer, which compiles soonest.
    """
    if config.unroll is not None:
        return config.unroll
    copies = platform() == "gpu" or (is_one_cpu() and (dtype.itemsize < 4 or config.d_model <= WIDE))
    layers_per_step = config.num_layers if copies and config.num_layers <= UNROLLED and config.remat == "none" else 1
    _log_once(platform(), config.num_layers, layers_per_step)
    return layers_per_step


@cache
def _log_once(platform: str, layers: int, layers_per_step: int) -> None:
    schedule = "one after another, without a scan" if layers_per_step >= layers else f"a scan, {layers_per_step} a step"
    logging.getLogger("jaxformer").info("%d layers on %s: %s", layers, platform, schedule)


def unstack(tree: Tree, length: int) -> list[Tree]:
    """`[length, ...]` leaves -> `length` trees, by `lax.split`: its transpose is one concatenation, an index's a scatter."""
    leaves, structure = jax.tree.flatten(tree)
    split_leaves = [
        [layer_leaf.reshape(leaf.shape[1:]) for layer_leaf in jax.lax.split(leaf, (1,) * length)] for leaf in leaves
    ]
    return [jax.tree.unflatten(structure, layer_leaves) for layer_leaves in zip(*split_leaves, strict=True)]


def partition(tree: Tree, keep: Callable) -> tuple[Tree, Tree]:
    """The tree twice: with the leaves for which `keep(leaf)` holds, and with the others. None stands for a missing leaf."""

    def pick(flag):
        return jax.tree.map(lambda leaf: leaf if bool(keep(leaf)) == flag else None, tree)

    return pick(True), pick(False)


def combine(tree: Tree, other: Tree) -> Tree:
    """The inverse of `partition`."""
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
    """Saves products with weights: those of `ops.einsum` by their name, after rounding, and a user's own."""
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
    """Saves every value except a sharded or cast copy and an elementwise function of saved values; and gathered vectors."""
    names = [primitive.name] if call_jaxpr is None else [equation.primitive.name for equation in call_jaxpr.eqns]
    of_vectors = bool(operands) and all(x.ndim <= 1 for x in operands) and "broadcast_in_dim" not in names
    return of_vectors or not all(name in _CHEAP for name in names)
