"""The default stack: all layers under one scan.

Other stacks use its `layer_functions`, or `inputs_of_pattern`.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.errors import ConfigError
from jaxformer.models import sublayers
from jaxformer.models.config import ModelConfig
from jaxformer.models.layer import Context, Layers
from jaxformer.models.stacks import layout
from jaxformer.models.stacks.layout import Segment
from jaxformer.models.stacks.remat import remat
from jaxformer.models.stacks.trees import LayerRun, join_parts, stack_outputs, unstack
from jaxformer.models.sublayers import Kind
from jaxformer.params import Tree
from jaxformer.sharding import is_one_cpu, platform

# A model with more layers is scanned, because the time to compile grows with the number of layers.
UNROLLED = 24
# A wider model in 32 bits on CPU is scanned too: without a scan, each layer's weights are cut out
# of the stack. In 16 bits this cut costs nothing beyond the cast (bench/LOG.md).
WIDE = 512


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
    """One call of a stack: its layers and what they read."""

    config: ModelConfig
    layers: Layers
    context: Context
    pick: Callable | None  # selects a layer's parameters and constants
    kinds: tuple[Kind, ...]  # of the first layers; the later layers repeat them
    constants: list[Tree]  # for each kind: what its mixer drew for all layers, `[L, ...]`

    def kind(self, i: int) -> Kind:
        """The sub-layers and the block of layer i."""
        return self.kinds[i % len(self.kinds)]

    def drawn(self, layers: int | slice) -> Tree:
        """The constants of a layer, or of the layers of a slice; these are of one kind."""
        first = layers if isinstance(layers, int) else layers.start
        return jax.tree.map(lambda leaf: leaf[layers], self.constants[first % len(self.kinds)])

    def context_of(self, i: int) -> Context:
        """The context with the mask of layer i."""
        return replace(self.context, mask=self.layers.masks[i % len(self.layers.masks)])

    @property
    def is_decoding(self) -> bool:
        """Whether each layer has a state, or weights of its own: then no loop cuts them out."""
        return self.layers.state is not None or isinstance(self.layers.params, tuple)

    @property
    def segments(self) -> tuple[Segment, ...]:
        return layout.segments(self.config, source_width(self.context))


def stack(config: ModelConfig, layers: Layers, x, context: Context, pick: Callable | None = None):
    """(x after all layers, the `LayerOutput` of all layers).

    Whole periods of the pattern run under a scan, then the remaining layers. `unroll=L` and
    JAX_DISABLE_JIT=1 give the same values. `context.layer` is the number of the first layer. `pick`
    selects a layer's parameters and constants (`stacks.pipeline`).
    """
    call = stack_call(config, layers, x.shape[1], context, pick)
    flow = Flow(x, first_carry(config, call.kinds, x))
    outputs = []
    for segment in call.segments:
        flow, output = run_segment(call, segment, flow)
        outputs.append(output)
    return flow.x, join_parts(outputs)


def layer_functions(config: ModelConfig, layers: Layers, x, context: Context) -> list[Callable]:
    """The layers of a stack of your own: functions `(x, carry=None) -> LayerRun`, in order.

    x `[B, T, ...]` is the stream before the first layer, and `LayerRun.hidden` is x after a layer.
    `join_layers` joins the runs. A mixer that hands a carry to the next layer finds it in `carry`,
    which is the `carry` of an earlier run; None: that of the first layer. Raises ConfigError for
    layers that do not fit together.
    """
    call = stack_call(config, layers, x.shape[1], context)
    first = first_carry(config, call.kinds, x)
    functions = []
    for segment in call.segments:
        for k, inputs in enumerate(inputs_of_rest(call, segment, 0)):
            layer = partial(run_layer_of_segment, call, segment, k)
            if not call.is_decoding:
                layer = remat(config, layer, in_scan=False)
            functions.append(partial(_run_alone, call, segment.first + k, layer, inputs, first))
    return functions


def _run_alone(
    call: StackCall, i: int, layer: Callable, inputs: LayerInputs, first: Tree, x, carry=None
) -> LayerRun:
    flow, output = layer(Flow(x, first if carry is None else carry), inputs)
    return LayerRun(flow.x, flow.carry, output, i, call.config.num_layers)


def stack_call(
    config: ModelConfig, layers: Layers, length: int, context: Context, pick: Callable | None = None
) -> StackCall:
    """The layers and what they read. Mixers draw their constants for tokens of this length."""
    kinds = layout.kinds(config, source_width(context))
    constants = [_constants(kind, layers, length) for kind in kinds]
    return StackCall(config, layers, context, pick, kinds, constants)


def source_width(context: Context) -> int | None:
    """The width of the encoder whose output the layers read."""
    return None if context.source is None else context.source.hidden.shape[-1]


def first_carry(config: ModelConfig, kinds: Sequence[Kind], x) -> Tree:
    """The carry that the first layer reads.

    Raises ConfigError if a mixer has a carry and the layers have different mixers.
    """
    mixers = layout.as_pattern(config.mixer)
    if any(mixer != mixers[0] for mixer in mixers) and any(
        kind.mixer.carry(x) is not None for kind in kinds
    ):
        raise ConfigError(
            "model.mixer: a mixer that hands a carry to the next layer is the mixer of all layers"
        )
    return kinds[0].mixer.carry(x)


def _constants(kind: Kind, layers: Layers, length: int) -> Tree:
    """What the mixer draws for all layers, `[L, ...]`, or the caller's arrays in its place."""
    drawn = kind.mixer.constants(length)
    return drawn if drawn is None or layers.constants is None else layers.constants


def run_segment(call: StackCall, segment: Segment, flow):
    """The layers of a segment: whole periods of its pattern in a scan, then the others in turn."""
    config = call.config
    period = layout.period(config, segment)
    layers_per_step = layers_a_step(config, flow.x.dtype)
    is_scanned = layers_per_step < config.num_layers and not call.is_decoding
    scanned = segment.count - segment.count % period if is_scanned else 0
    outputs = []
    if scanned:
        layers = [
            remat(config, partial(run_layer_of_period, call, segment, period, k), in_scan=True)
            for k in range(period)
        ]
        step = partial(run_period, layers, segment)
        inputs = inputs_of_periods(call, segment, period, scanned)
        flow, output = jax.lax.scan(step, flow, inputs, unroll=max(1, layers_per_step // period))
        outputs.append(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), output))
    if scanned < segment.count:
        layers = [
            partial(run_layer_of_segment, call, segment, k) for k in range(scanned, segment.count)
        ]
        if not call.is_decoding:
            layers = [remat(config, layer, in_scan=False) for layer in layers]
        flow, output = run_in_turn(layers, flow, inputs_of_rest(call, segment, scanned))
        outputs.append(output)
    return flow, join_parts(outputs)


def run_layer(call: StackCall, kind: Kind, context: Context, flow, inputs: LayerInputs):
    """One layer: (Flow, LayerInputs) -> (Flow, LayerOutput)."""
    params, constants = inputs.params, inputs.constants
    if call.pick is not None:
        params, constants = call.pick((params, constants))
    key = source = None
    if context.dropout_key is not None:
        key = jax.random.fold_in(context.dropout_key, inputs.layer)
    if context.source is not None:
        source = replace(context.source, heads=inputs.source_heads)
    context = replace(
        context,
        dropout_key=key,
        state=inputs.state,
        layer=inputs.layer,
        constants=constants,
        carry=flow.carry,
        source=source,
        tap=context.tap.in_layer(inputs.layer),
    )
    output = sublayers.run(call.config, kind, params, flow.x, context)
    return Flow(output.hidden, output.carry), output._replace(hidden=None, carry=None)


def run_layer_of_segment(call: StackCall, segment: Segment, k: int, flow, inputs: LayerInputs):
    """The k-th layer of a segment."""
    i = segment.first + k
    flow, output = run_layer(call, call.kind(i), call.context_of(i), flow, inputs)
    place, _ = segment.place_of(k)
    return flow, output._replace(updates=layout.placed(output.updates, place))


def run_layer_of_period(
    call: StackCall, segment: Segment, period: int, k: int, flow, inputs: LayerInputs
):
    """The k-th layer of a period.

    If a place has several layers in a period, their parameters are stacked: this layer takes its
    own out. It does so within the recomputed part, so the loop keeps no copy of the weights for the
    backward pass.
    """
    n = len(segment.places)
    if period > n:
        inputs = inputs._replace(params=unstack(inputs.params, period // n)[k // n])
    return run_layer_of_segment(call, segment, k, flow, inputs)


def run_period(
    functions: Sequence[Callable],
    segment: Segment,
    flow,
    inputs: tuple[list[Tree], list[LayerInputs]],
):
    """One step of the scan: the layers of a period."""
    params, layer_inputs = inputs
    n = len(segment.places)
    return run_in_turn(
        functions,
        flow,
        [each._replace(params=params[k % n]) for k, each in enumerate(layer_inputs)],
    )


def inputs_of_periods(
    call: StackCall, segment: Segment, period: int, scanned: int
) -> tuple[list[Tree], list[LayerInputs]]:
    """What the first `scanned` layers of a segment read: (parameters by place, the rest by layer).

    Each leaf is [periods, ...]. If a place has several layers in a period, its leaves have a second
    axis for these layers: [periods, layers, ...].
    """
    layers_of_place = period // len(segment.places)  # in a period
    periods = scanned // period

    def by_period(leaf):
        leaf = leaf[: periods * layers_of_place]
        if layers_of_place == 1:
            return leaf
        return leaf.reshape(periods, layers_of_place, *leaf.shape[1:])

    params = [
        jax.tree.map(by_period, layout.place(call.layers.params, name)) for name in segment.places
    ]
    stop = segment.first + scanned
    numbers = call.context.layer + jnp.arange(segment.first, stop)
    firsts = range(segment.first, segment.first + period)
    return params, [
        LayerInputs(numbers[k::period], None, None, call.drawn(slice(i, stop, period)))
        for k, i in enumerate(firsts)
    ]


def inputs_of_pattern(config: ModelConfig, layers: Layers, length: int) -> tuple[LayerInputs, ...]:
    """The inputs of each layer of the pattern, `[L / period, ...]`, for other kinds of stacks.

    A leaf stacks all layers in the same place of the pattern. A pattern that covers the depth once
    is its own period. Raises ConfigError for a depth that is no multiple of the pattern.
    """
    L = config.num_layers
    segments = layout.segments(config)
    kinds = layout.kinds(config)
    period = L if len(segments) > 1 else layout.period(config, segments[0])
    if L % period:
        raise ConfigError(
            f"model.num_layers={L} is no multiple of the pattern of {period} different layers"
        )
    inputs = []
    for segment in segments:
        for k in range(min(segment.count, period)):
            i = segment.first + k
            name, first = segment.place_of(k)
            if len(segments) > 1:
                layers_of_place = slice(first, first + 1)
            else:
                layers_of_place = slice(first, None, period // len(segment.places))
            params = jax.tree.map(
                lambda leaf, layers_of_place=layers_of_place: leaf[layers_of_place],
                layout.place(layers.params, name),
            )
            constants = _constants(kinds[i % len(kinds)], layers, length)
            constants = jax.tree.map(lambda leaf, i=i: leaf[i::period], constants)
            inputs.append(LayerInputs(jnp.arange(i, L, period), params, None, constants))
    return tuple(inputs)


def inputs_of_rest(call: StackCall, segment: Segment, scanned: int) -> list[LayerInputs]:
    """What each layer after the `scanned` ones reads."""
    states = call.layers.state
    source_heads = None if call.context.source is None else call.context.source.heads
    inputs = []
    for k, params in enumerate(params_of_rest(call.layers.params, segment, scanned), scanned):
        i = segment.first + k
        inputs.append(
            LayerInputs(
                call.context.layer + i,
                params,
                None if states is None else states[i],
                call.drawn(i),
                None if source_heads is None else source_heads[i],
            )
        )
    return inputs


def params_of_rest(stored: Tree, segment: Segment, scanned: int) -> list[Tree]:
    """The parameters of each layer after the `scanned` ones.

    Every place has the same number of scanned layers.
    """
    if isinstance(stored, tuple):  # prepared for decoding: a tree for each layer
        return list(stored[segment.first + scanned : segment.first + segment.count])
    first = scanned // len(segment.places)
    of_places = {}
    for name in segment.places:
        leaves = jax.tree.map(lambda leaf: leaf[first:], layout.place(stored, name))
        of_places[name] = unstack(leaves, len(jax.tree.leaves(leaves)[0]))
    places = map(segment.place_of, range(scanned, segment.count))
    return [of_places[name][number - first] for name, number in places]


def run_in_turn(functions: Sequence[Callable], flow, inputs: Sequence[LayerInputs]):
    """Runs the layers one after another, and stacks their outputs."""
    outputs = []
    for function, layer_inputs in zip(functions, inputs, strict=True):
        flow, output = function(flow, layer_inputs)
        outputs.append(output)
    return flow, stack_outputs(outputs)


def layers_a_step(config: ModelConfig, dtype) -> int:
    """The number of layers in one step of the scan: `config.unroll`, or the fastest by default.

    On GPUs and on one CPU the default is no scan (except above `WIDE`), because a scan copies what
    each layer keeps for its gradient. With `config.remat` it is a scan, which keeps no layer's
    weights. On TPUs it is a scan of one layer, which compiles soonest.
    """
    if config.unroll is not None:
        return config.unroll
    cuts_cheaply = dtype.itemsize < 4 or config.d_model <= WIDE
    scan_is_slow = platform() == "gpu" or (is_one_cpu() and cuts_cheaply)
    is_unrolled = scan_is_slow and config.num_layers <= UNROLLED and config.remat == "none"
    layers_per_step = config.num_layers if is_unrolled else 1
    _log_once(platform(), config.num_layers, layers_per_step)
    return layers_per_step


@cache
def _log_once(platform: str, layers: int, layers_per_step: int) -> None:
    if layers_per_step >= layers:
        schedule = "one after another, without a scan"
    else:
        schedule = f"a scan, {layers_per_step} a step"
    logging.getLogger("jaxformer").info("%d layers on %s: %s", layers, platform, schedule)
