"""A stack of layers run in stages: `ModelConfig(stack=Pipeline(microbatches=8))` on a mesh with `stage` > 1.

Each stage has some of the layers. A batch is cut into microbatches, and every stage works on another one at the same time.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

from jaxformer.errors import ConfigError
from jaxformer.models import block
from jaxformer.models.config import ModelConfig
from jaxformer.models.layer import Context
from jaxformer.models.stacks import scan
from jaxformer.sharding import ACTIVATIONS

Tree = Any


@dataclass(frozen=True)
class Pipeline:
    """`stacks.scan.stack`, its layers dealt out over the mesh axis `stage` as `pipeline` says.

    `microbatches` None is as many as stages; R `repeats` make the bubble R times smaller and send activations R times as
    often. Same values as `stacks.scan.stack`, which it is without stages, but for dropout, whose key is folded with the
    microbatch (other masks than one device's), and for auxiliary losses and figures of feed-forwards, which are those of
    a microbatch, in the mean. Raises ConfigError where the pattern of masks and mixers does not divide the layers of a
    stage, NotImplementedError for decoding, attention maps, a memo, and different mixers that draw constants.
    """

    microbatches: int | None = None
    repeats: int = 1

    def __call__(self, config: ModelConfig, params: Tree, x, context: Context, layer_masks, state, constants=None):
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.shape.get("stage", 1) == 1:
            return scan.stack(config, params, x, context, layer_masks, state, constants)
        slots, stages = scan.mixers(config), mesh.shape["stage"]
        if state is not None or context.return_weights or slots[0].memo(x) is not None:
            raise NotImplementedError("a pipeline has no cache, attention maps or memo; mesh.stage=1 has them")
        drawn = [slot.constants(x.shape[1]) for slot in slots] if constants is None else [constants]
        if not scan.alike(config) and jax.tree.leaves(drawn):
            raise NotImplementedError("a pipeline of different mixers draws no constants; mesh.stage=1 does")
        period, parts = math.lcm(len(layer_masks), len(slots)), stages * self.repeats
        if config.num_layers % (parts * period):
            raise ConfigError(
                f"model.num_layers={config.num_layers}: mesh.stage={stages} x mesh.repeats={self.repeats} parts of whole "
                f"patterns of {period} masks and mixers take a multiple of {parts * period}"
            )
        few = replace(config, num_layers=config.num_layers // parts)
        shared = dict(shared=context.shared, dropout_key=context.dropout_key)
        names = "positions", "slot_positions", "inputs", "real", "source"  # what has rows
        extras = {name: getattr(context, name) for name in names}, layer_masks

        def stage(layers, pick, x, extras, shared, part, microbatch):
            own, masks = extras
            if (key := shared["dropout_key"]) is not None:
                key = jax.random.fold_in(key, microbatch)
            here = replace(context, **own, shared=shared["shared"], dropout_key=key, layer=part * few.num_layers)
            x, beside = scan.stack(few, layers[0], x, here, masks, None, layers[1], pick)
            return x, (beside.loss, beside.stats)

        x, (loss, stats) = pipeline(
            stage, (params, drawn[0]), x, extras, shared, repeats=self.repeats,
            microbatches=stages if self.microbatches is None else self.microbatches,
        )  # fmt: skip
        return x, block.LayerOutput(None, None, None, loss, stats)


def bubble(stages: int, microbatches: int, repeats: int = 1) -> float:
    """The share of a step in which a stage has nothing to do: (S - 1) / (R M + S - 1). Narayanan et al. 2021, section 2.2."""
    return (stages - 1) / (repeats * microbatches + stages - 1)


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
    """x through all layers, each stage of the mesh of `jax.set_mesh` running its own; and what they report, `[L, ...]`.

    `params` are leaves `[L, ...]`; stage s of S has L / (R S) consecutive ones of them in each of R `repeats`: the parts r S
    + s. `stage(params, pick, x, extras, shared, part, microbatch) -> (x, report)` runs one part on one microbatch; `pick`
    makes of a row of its `params`, `[L / (R S), ...]`, the layer that is due (within what is recomputed, or the scan would
    keep a copy of the weights for each tick). Of `extras`, leaves with a leading axis B are cut like x, others go to all,
    as `shared` does. Reports `[L / (R S), ...]` come back as the mean over the microbatches, of all layers.

    R = 1 is GPipe (Huang et al. 2018, arXiv:1811.06965), R > 1 the circular schedule (Narayanan et al. 2021,
    arXiv:2104.04473, section 2.2): at tick t stage s works on item i = t - s, which is microbatch i mod M in repeat i // M;
    R M + S - 1 ticks, one `lax.ppermute` to the next stage each, and `bubble` is the share that is idle. Idle stages
    compute on a microbatch whose result nobody reads: to skip it would save no time and part those who exchange data.
    Beside, the batch goes to stage 0 and from it by S - 1 permutes each, of B / S rows: outside, all stages share it.

    The axis `stage` is manual, and `data` with it, for gradients to be summed over it once and not every tick; over the
    others layers may be split, by the compiler or a `jax.shard_map` of theirs. Each copy of the model on `data` has M
    microbatches of its own, whose number among all is `microbatch`; each takes every M-th row of a device.

    With R = 1 no weight moves; with R > 1 each goes once, and its gradient once back, from the stage that stores it (the
    L / S consecutive layers of `P("stage")`) to the one that runs it. The backward pass is that of the scan: a stage keeps
    of each tick what its layers keep, so activations take the memory of all M microbatches, L / S layers deep, bubble
    included. Under FSDP weights are gathered, and gradients scattered, once a tick.

    Raises ConfigError where layers, rows or microbatches do not come out even.
    """
    mesh = jax.sharding.get_abstract_mesh()
    S, M, R, B, copies = mesh.shape["stage"], microbatches, repeats, len(x), mesh.shape["data"]
    data = ("data",) if copies > 1 else ()
    over = tuple(axis for axis in ACTIVATIONS["batch"] if axis != "stage" and mesh.shape[axis] > 1)
    groups = math.prod(mesh.shape[axis] for axis in over)
    _check(params, B, S, M, R, groups)
    by_row = lambda leaf: leaf.ndim > 0 and len(leaf) == B
    rows = lambda leaf, *entries: _place(leaf.reshape(groups, B // groups, *leaf.shape[1:]), over or None, *entries)

    def run(given, x, s, d):
        s, d, local = s[0], d[0], len(x)
        params, extras, shared = jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), given, dtypes)
        params, buffer = _deal(params, s, S, R), _cut(_enter(x, s, S), M)

        def keep(buffer, arrived, t):
            """On stage 0 the buffer has, of each microbatch, the input until it is taken, then what came around."""
            slot = (t - S) % M
            return lax.dynamic_update_index_in_dim(buffer, jnp.where(t < S, _row(buffer, slot), arrived), slot, 0)

        def tick(carry, t):
            arrived, buffer = carry
            buffer = keep(buffer, arrived, t)
            r, m = jnp.divmod(jnp.clip(t - s, 0, R * M - 1), M)
            x = jnp.where(s == 0, _row(buffer, t % M), arrived)
            own = jax.tree.map(lambda leaf, cut: _row(leaf, m) if cut else leaf, extras, is_cut)
            own = jax.tree.map(lambda a, b: b if a is None else a, own, numbers, is_leaf=lambda leaf: leaf is None)
            pick = partial(jax.tree.map, (lambda leaf: _row(leaf, r)) if R > 1 else (lambda leaf: leaf))
            y, report = stage(params, pick, x, own, shared, r * S + s, d * M + m)
            return (lax.ppermute(y, "stage", [(i, (i + 1) % S) for i in range(S)]), buffer), report

        def mean(leaf):
            leaf = lax.dynamic_slice_in_dim(leaf, s, R * M).reshape(R, M, *leaf.shape[1:])
            return lax.pmean(leaf.mean(1), data)

        ticks = R * M + S - 1
        (arrived, buffer), reports = lax.scan(tick, (buffer[0], buffer), jnp.arange(ticks))
        buffer = keep(buffer, arrived, jnp.int32(ticks))
        return _leave(buffer, s, S, local), jax.tree.map(mean, reports)

    numbers = jax.tree.map(lambda leaf: None if hasattr(leaf, "ndim") else leaf, extras)  # a mask's offset stays one
    extras = jax.tree.map(lambda leaf: leaf if hasattr(leaf, "ndim") else None, extras)
    is_cut = jax.tree.map(by_row, extras)
    extras = jax.tree.map(lambda leaf: _cut(rows(leaf), M, over) if by_row(leaf) else leaf, extras)
    places = P("stage"), jax.tree.map(lambda cut: P(None, data) if cut else P(), is_cut), P()
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, (params, extras, shared))
    call = jax.shard_map(
        run, in_specs=(places, P(data, "stage"), P("stage"), P(data)), out_specs=(P(data, "stage"), P(None, "stage")),
        axis_names={"stage", *data}, check_vma=False,  # layers know nothing of stages: their scans start from plain zeros
    )  # fmt: skip
    given = jax.tree.map(_wide, (params, extras, shared))
    y, reports = call(given, rows(x, "stage"), jnp.arange(S), jnp.arange(copies))
    return y.reshape(B, *y.shape[2:]), jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), reports)


def _wide(x: Array) -> Array:
    """Gradients are summed over copies and stages in float32 or better; of 16 bits, XLA's CPU compiler dies of such a sum."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _place(x: Array, *entries) -> Array:
    """x with its first axes laid out so, the others as the compiler likes."""
    return lax.with_sharding_constraint(x, P(*entries, *[P.UNCONSTRAINED] * (x.ndim - len(entries))))


def _cut(x: Array, M: int, over: tuple[str, ...] = ()) -> Array:
    """The rows of each device `[devices, rows, ...]` as microbatches `[M, devices rows / M, ...]`, with no exchange."""
    devices, rows = x.shape[:2]
    x = jnp.moveaxis(x.reshape(devices, rows // M, M, *x.shape[2:]), 2, 0)
    return _place(x.reshape(M, devices * rows // M, *x.shape[3:]), None, over or P.UNCONSTRAINED)


def _enter(x: Array, s: Array, S: int) -> Array:
    """On stage 0 the rows of all stages `[devices, S rows, ...]`; on the others something as harmless."""
    others = [jnp.where(s == 0, lax.ppermute(x, "stage", [(j, 0)]), x) for j in range(1, S)]
    return jnp.concatenate([x, *others], axis=1)


def _leave(buffer: Array, s: Array, S: int, devices: int) -> Array:
    """To each stage its rows `[devices, rows, ...]` of the microbatches that stage 0 has: back from `_cut` and `_enter`."""
    M = len(buffer)
    x = jnp.moveaxis(buffer.reshape(M, devices, -1, *buffer.shape[2:]), 0, 2).reshape(devices, S, -1, *buffer.shape[2:])
    others = [lax.ppermute(x[:, j], "stage", [(0, j)]) for j in range(1, S)]  # zeros where nothing comes
    return sum(others, start=jnp.where(s == 0, x[:, 0], 0))


def _row(leaf, index):
    return lax.dynamic_index_in_dim(leaf, index, keepdims=False)


def _deal(params: Tree, s: Array, S: int, R: int) -> Tree:
    """From the consecutive layers that a stage stores `[R k, ...]` to those of the parts r S + s that it runs `[k, R, ...]`.

    The part c = d R + b lies on stage d in slot b and goes to stage c mod S, slot c // S. In round a of R, stage d sends
    the slot (a + d g // S) mod R, for g = gcd(R, S): then no two stages send to the same one.
    """
    if R == 1:
        return params
    g = math.gcd(R, S)
    rounds = [[d * R + (a + d * g // S) % R for d in range(S)] for a in range(R)]  # the part that each stage sends

    def deal(leaf):
        leaf = leaf.reshape(R, -1, *leaf.shape[1:])
        out = jnp.zeros_like(leaf)
        for sent in rounds:
            slots = jnp.array([part % R for part in sent])
            arrived = jnp.array([next(part // S for part in sent if part % S == d) for d in range(S)])
            pairs = [(d, part % S) for d, part in enumerate(sent)]
            one = lax.ppermute(_row(leaf, slots[s]), "stage", pairs)
            out = lax.dynamic_update_index_in_dim(out, one, arrived[s], 0)
        return jnp.moveaxis(out, 0, 1)

    return jax.tree.map(deal, params)


def _check(params: Tree, B: int, S: int, M: int, R: int, groups: int) -> None:
    if M < 1 or R < 1:
        raise ConfigError(f"mesh.microbatches={M}, mesh.repeats={R}: must be at least 1")
    if R > 1 and M < S:
        raise ConfigError(f"mesh.microbatches={M}: with mesh.repeats={R} at least as many as mesh.stage={S}")
    for leaf in jax.tree.leaves(params):
        if len(leaf) % (S * R):
            parts = f"mesh.stage={S}" + (f" x mesh.repeats={R}" if R > 1 else "")
            raise ConfigError(f"{len(leaf)} layers do not divide among {parts}; choose a divisor")
    for name, parts in (("mesh.microbatches", M), ("mesh.stage", S)):
        if B % (groups * parts):
            near = max(1, B // (groups * parts)) * groups * parts
            devices = f"{groups} devices of a stage x " if groups > 1 else ""
            raise ConfigError(f"a batch of {B} does not divide among {devices}{name}={parts}; {near} does")
