"""A stack of layers in stages: `ModelConfig(stack=Pipeline(microbatches=8))`, mesh `stage` > 1.

Each stage has some of the layers. A batch is cut into microbatches. At any time, each stage works
on a different microbatch.

The schedule: R = `repeats` = 1 is GPipe (Huang et al. 2018, arXiv:1811.06965). R > 1 is the
circular schedule (Narayanan et al. 2021, arXiv:2104.04473, section 2.2). There are R S parts of
consecutive layers; stage s runs the parts r S + s. The step has R M + S - 1 ticks. At tick t, stage
s works on item i = t - s, which is microbatch i mod M in repeat i // M, and sends the result to the
next stage (`lax.ppermute`). An idle stage computes values that nobody reads: to skip them would
save no time, and would break collectives within the layers.

The mesh axes `stage` and `data` are manual, so that gradients are summed over `data` once and not
at every tick. Each copy of the model on `data` has M microbatches of its own. With R > 1, each
weight is sent once from the stage that stores it (`P("stage")`) to the stage that runs it, and its
gradient is sent back once.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

from jaxformer.errors import ConfigError
from jaxformer.models.config import ModelConfig
from jaxformer.models.layer import Context, LayerOutput, Layers
from jaxformer.models.stacks import layout, scan, trees
from jaxformer.params import Tree
from jaxformer.sharding import ACTIVATIONS, auto_axis_names


@dataclass(frozen=True)
class Pipeline:
    """`stacks.scan.stack` with its layers split over the mesh axis `stage` (see `pipeline`).

    The values are those of `stacks.scan.stack`, with two exceptions: the dropout key is folded with
    the microbatch, and auxiliary losses and figures of feed-forwards are means over the
    microbatches. Raises NotImplementedError for decoding, intermediates, a carry, and different
    mixers that draw constants.
    """

    microbatches: int | None = None  # number of parts of a batch; None: as many as stages
    # R: divides the bubble by R, and multiplies the communication of activations by R
    repeats: int = 1

    def __call__(self, config: ModelConfig, layers: Layers, x, context: Context):
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.shape.get("stage", 1) == 1:
            return scan.stack(config, layers, x, context)
        stages = mesh.shape["stage"]
        mixers = [kind.mixer for kind in layout.kinds(config)]
        if context.tap or layers.state is not None or mixers[0].carry(x) is not None:
            raise NotImplementedError(
                "a pipeline: no cache, intermediates or carry; mesh.stage=1 has"
            )
        if layers.constants is not None:
            constants = [layers.constants]
        else:
            constants = [mixer.constants(x.shape[1]) for mixer in mixers]
        pattern = layout.as_pattern(config.mixer)
        if any(mixer != pattern[0] for mixer in pattern) and jax.tree.leaves(constants):
            raise NotImplementedError(
                "a pipeline of different mixers draws no constants; mesh.stage=1 does"
            )
        _check_depth(config, stages, self.repeats)
        part_config = replace(config, num_layers=config.num_layers // (stages * self.repeats))
        x, (loss, stats) = pipeline(
            partial(run_part, part_config),
            (layers.params, constants[0]),
            x,
            (replace(context, shared=None, dropout_key=None, layer=None), layers.masks),
            (context.shared, context.dropout_key),
            microbatches=stages if self.microbatches is None else self.microbatches,
            repeats=self.repeats,
        )
        return x, LayerOutput(loss=loss, stats=stats)


def _check_depth(config: ModelConfig, stages: int, repeats: int) -> None:
    """Raises an error for layers that are no whole patterns in each part.

    NotImplementedError for runs of different layers, ConfigError for a wrong number of layers.
    """
    segments = layout.segments(config)
    if len(segments) > 1:
        kinds = f"{len(segments)} runs of different layers"
        raise NotImplementedError(
            f"a pipeline of {kinds}: stages need a pattern that repeats; mesh.stage=1 has any"
        )
    period = layout.period(config, segments[0])
    multiple = stages * repeats * period
    if config.num_layers % multiple:
        raise ConfigError(
            f"model.num_layers={config.num_layers}: mesh.stage={stages} x mesh.repeats={repeats} "
            f"parts of whole patterns of {period} masks and mixers take a multiple of {multiple}"
        )


def run_part(config: ModelConfig, params, pick, x, extras, shared, part, microbatch):
    """The `stage` function of `pipeline`: the layers of one part on one microbatch."""
    context, masks = extras
    weights, constants = params
    shared, key = shared
    if key is not None:
        key = jax.random.fold_in(key, microbatch)
    context = replace(context, shared=shared, dropout_key=key, layer=part * config.num_layers)
    x, output = scan.stack(config, Layers(weights, masks, None, constants), x, context, pick)
    return x, (output.loss, output.stats)


def bubble(stages: int, microbatches: int, repeats: int = 1) -> float:
    """The fraction of a step in which a stage is idle: (S - 1) / (R M + S - 1).

    Narayanan et al. 2021, section 2.2.
    """
    return (stages - 1) / (repeats * microbatches + stages - 1)


class Pipe(NamedTuple):
    """A pipeline: its stage function, its sizes, and the mesh axes of the model's copies."""

    stage: Callable
    stages: int  # S
    microbatches: int  # M, of each copy of the model
    repeats: int  # R
    # ("data",) if there are several copies of the model, each with a part of the batch; else ()
    data: tuple[str, ...]

    ticks = property(lambda self: self.repeats * self.microbatches + self.stages - 1)


class StageInputs(NamedTuple):
    """What one stage reads in every tick."""

    params: Tree  # of its layers [L / (R S), R, ...]; without repeats [L / S, ...]
    # leaves of `extras` that are cut like x, [M, batch rows, ...]; None stands for the other leaves
    cut: Tree
    common: Tree  # other leaves of `extras`; None stands for the leaves of `cut`
    shared: Tree
    stage: Array  # the number of this stage
    copy: Array  # the number of its copy of the model


def pipeline(
    stage: Callable,
    params: Tree,
    x: Float[Array, "B ..."],
    extras: Tree = None,
    shared: Tree = None,
    *,
    microbatches: int,
    repeats: int = 1,
) -> tuple[Float[Array, "B ..."], Tree]:
    """(x after all layers, the reports of the layers `[L, ...]`); each stage runs its own layers.

    The mesh is that of `jax.set_mesh`; the schedule is at the top of this file.

    `stage(params, pick, x, extras, shared, part, microbatch) -> (x, report)` runs one part on one
    microbatch; `microbatch` counts those of all copies of the model. `pick` selects a layer's
    parameters from its `params`. Call it within the recomputed function, or the scan keeps a copy
    of the weights for each tick. Leaves of `extras` with a leading axis B are cut like x. Other
    leaves, and `shared`, go to all stages. Reports `[L / (R S), ...]` come back as means over the
    microbatches.

    Raises ConfigError if batch rows or microbatches do not divide, and for a mesh in which
    `context` or `expert` comes before `stage`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    B = len(x)
    _check_order(mesh)
    copies = mesh.shape.get("data", 1)  # a user's mesh may lack our axes
    batch_axes = tuple(
        axis for axis in ACTIVATIONS["batch"] if axis != "stage" and mesh.shape.get(axis, 1) > 1
    )
    pipe = Pipe(stage, mesh.shape["stage"], microbatches, repeats, ("data",) if copies > 1 else ())
    groups = math.prod(mesh.shape[axis] for axis in batch_axes)
    _check(B, pipe, groups)

    def by_device(leaf, *entries):
        return _constrain(
            leaf.reshape(groups, B // groups, *leaf.shape[1:]), batch_axes or None, *entries
        )

    cut, common = trees.partition(extras, lambda leaf: leaf.ndim > 0 and len(leaf) == B)
    cut = jax.tree.map(lambda leaf: _cut(by_device(leaf), microbatches, batch_axes), cut)
    operands = params, cut, common, shared
    operand_specs = P("stage"), P(None, pipe.data), P(), P()
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, operands)
    run = jax.shard_map(
        partial(run_stage, pipe, dtypes),
        in_specs=(operand_specs, P(pipe.data, "stage"), P("stage"), P(pipe.data)),
        out_specs=(P(pipe.data, "stage"), P(None, "stage")),
        axis_names={"stage", *pipe.data},
        check_vma=False,  # layers know nothing of stages: their scans start from plain zeros
    )
    y, reports = run(
        jax.tree.map(_widen, operands),
        by_device(x, "stage"),
        jnp.arange(pipe.stages),
        jnp.arange(copies),
    )
    return y.reshape(B, *y.shape[2:]), jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), reports)


def run_stage(pipe: Pipe, dtypes: Tree, operands: Tree, x: Array, stage: Array, copy: Array):
    """All ticks of one stage, within `jax.shard_map`: (its batch rows of the result, its reports).

    Reports are means over the microbatches.
    """
    params, cut, common, shared = jax.tree.map(
        lambda leaf, dtype: leaf.astype(dtype), operands, dtypes
    )
    inputs = StageInputs(_deal(params, stage[0], pipe), cut, common, shared, stage[0], copy[0])
    buffer = _cut(_enter(x, inputs.stage, pipe.stages), pipe.microbatches)
    (arrived, buffer), reports = lax.scan(
        partial(tick, pipe, inputs), (buffer[0], buffer), jnp.arange(pipe.ticks)
    )
    buffer = keep(pipe, buffer, arrived, jnp.int32(pipe.ticks))
    y = _leave(buffer, inputs.stage, pipe.stages, len(x))
    R, M = pipe.repeats, pipe.microbatches

    # [ticks, ...] -> the mean over the microbatches [R, ...]
    def mean(leaf):
        leaf = lax.dynamic_slice_in_dim(leaf, inputs.stage, R * M)
        leaf = leaf.reshape(R, M, *leaf.shape[1:]).mean(1)
        return lax.pmean(leaf, pipe.data)

    return y, jax.tree.map(mean, reports)


def tick(pipe: Pipe, inputs: StageInputs, carry: tuple[Array, Array], t: Array):
    """One microbatch through one part: ((input from the previous stage, the buffer), report)."""
    arrived, buffer = carry
    S, M, R = pipe.stages, pipe.microbatches, pipe.repeats
    buffer = keep(pipe, buffer, arrived, t)
    repeat, m = jnp.divmod(jnp.clip(t - inputs.stage, 0, R * M - 1), M)
    x = jnp.where(inputs.stage == 0, _at(buffer, t % M), arrived)
    extras = trees.combine(jax.tree.map(lambda leaf: _at(leaf, m), inputs.cut), inputs.common)
    pick = partial(jax.tree.map, (lambda leaf: _at(leaf, repeat)) if R > 1 else (lambda leaf: leaf))
    part = repeat * S + inputs.stage
    microbatch = inputs.copy * M + m
    y, report = pipe.stage(inputs.params, pick, x, extras, inputs.shared, part, microbatch)
    arrived = lax.ppermute(y, "stage", [(i, (i + 1) % S) for i in range(S)])
    return (arrived, buffer), report


def keep(pipe: Pipe, buffer: Array, arrived: Array, t: Array) -> Array:
    """Puts what arrived at stage 0 into the buffer.

    The buffer holds the input of each microbatch until that is read, and then the last stage's
    output of this microbatch.
    """
    microbatch = (t - pipe.stages) % pipe.microbatches
    x = jnp.where(t < pipe.stages, _at(buffer, microbatch), arrived)
    return lax.dynamic_update_index_in_dim(buffer, x, microbatch, 0)


def _widen(x: Array) -> Array:
    """x in float32 or wider.

    Gradients of x are summed over copies and stages in this dtype. In 16 bits, XLA's CPU compiler
    crashes.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _constrain(x: Array, *entries) -> Array:
    """x with its first axes split by `entries`, and the other axes left to the compiler.

    Returns x itself if all mesh axes are manual.
    """
    spec = P(*entries, *[P.UNCONSTRAINED] * (x.ndim - len(entries)))
    return lax.with_sharding_constraint(x, spec) if auto_axis_names() else x


def _cut(x: Array, M: int, batch_axes: tuple[str, ...] = ()) -> Array:
    """`[devices, rows, ...]` batch rows as microbatches `[M, devices rows / M, ...]`.

    Each device keeps its rows, so nothing is exchanged.
    """
    devices, rows = x.shape[:2]
    x = jnp.moveaxis(x.reshape(devices, rows // M, M, *x.shape[2:]), 2, 0)
    return _constrain(
        x.reshape(M, devices * rows // M, *x.shape[3:]), None, batch_axes or P.UNCONSTRAINED
    )


def _enter(x: Array, s: Array, S: int) -> Array:
    """On stage 0: the batch rows of all stages `[devices, S rows, ...]`.

    Other stages have their own rows S times there, and nobody reads them.
    """
    others = [jnp.where(s == 0, lax.ppermute(x, "stage", [(j, 0)]), x) for j in range(1, S)]
    return jnp.concatenate([x, *others], axis=1)


def _leave(buffer: Array, s: Array, S: int, devices: int) -> Array:
    """The batch rows `[devices, rows, ...]` of each stage, from the microbatches on stage 0.

    The inverse of `_cut` and `_enter`.
    """
    M = len(buffer)
    x = jnp.moveaxis(buffer.reshape(M, devices, -1, *buffer.shape[2:]), 0, 2)
    x = x.reshape(devices, S, -1, *buffer.shape[2:])
    # zeros where nothing arrives
    others = [lax.ppermute(x[:, j], "stage", [(0, j)]) for j in range(1, S)]
    return sum(others, start=jnp.where(s == 0, x[:, 0], 0))


def _at(leaf, index):
    return lax.dynamic_index_in_dim(leaf, index, keepdims=False)


def _deal(params: Tree, s: Array, pipe: Pipe) -> Tree:
    """From the layers that a stage stores `[R k, ...]` to the layers that it runs `[k, R, ...]`.

    A stage stores consecutive layers, and runs the layers of the parts r S + s. Part c = d R + b is
    stored on stage d at index b. It goes to stage c mod S, index c // S. In round a of R, stage d
    sends the part at index (a + d g // S) mod R, for g = gcd(R, S). So no two stages send to the
    same stage.
    """
    S, R = pipe.stages, pipe.repeats
    g = math.gcd(R, S)
    # in each round, the part that each stage sends
    rounds = [[d * R + (a + d * g // S) % R for d in range(S)] for a in range(R)]

    def deal_leaf(leaf: Array) -> Array:
        leaf = leaf.reshape(R, -1, *leaf.shape[1:])
        out = jnp.zeros_like(leaf)
        for sent in rounds:
            stored = jnp.array([part % R for part in sent])
            round_of_stage = jnp.array(
                [next(part // S for part in sent if part % S == d) for d in range(S)]
            )
            pairs = [(d, part % S) for d, part in enumerate(sent)]
            received = lax.ppermute(_at(leaf, stored[s]), "stage", pairs)
            out = lax.dynamic_update_index_in_dim(out, received, round_of_stage[s], 0)
        return jnp.moveaxis(out, 0, 1)

    return params if R == 1 else jax.tree.map(deal_leaf, params)


def _check_order(mesh: jax.sharding.AbstractMesh) -> None:
    """Raises ConfigError for a mesh whose compilation would kill the process.

    See `parallel.mesh.AXES`.
    """
    names = list(mesh.axis_names)
    outer_axes = names[: names.index("stage")]
    inner = [axis for axis in ("context", "expert") if axis in outer_axes and mesh.shape[axis] > 1]
    if inner:
        first = [axis for axis in outer_axes if axis == "data"] + ["stage"]
        expected = first + [axis for axis in names if axis not in first]
        raise ConfigError(
            f"a mesh with the axes {', '.join(names)}: XLA cannot compile layers that are split "
            f"over {inner[0]} within stages unless stage comes first; "
            f"order the axes {', '.join(expected)}"
        )


def _check(B: int, pipe: Pipe, groups: int) -> None:
    S, M, R = pipe.stages, pipe.microbatches, pipe.repeats
    if R > 1 and M < S:
        raise ConfigError(
            f"mesh.microbatches={M}: with mesh.repeats={R} at least as many as mesh.stage={S}"
        )
    for name, parts in (("mesh.microbatches", M), ("mesh.stage", S)):
        if B % (groups * parts):
            near = max(1, B // (groups * parts)) * groups * parts
            devices = f"{groups} devices of a stage x " if groups > 1 else ""
            raise ConfigError(
                f"a batch of {B} does not divide among {devices}{name}={parts}; {near} does"
            )
