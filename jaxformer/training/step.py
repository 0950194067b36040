"""One training step as a pure function: gradients, clip, update, select.

Read `train_step` first. `runs.loop` jits it and calls it once a step.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxformer import params as parameters, sharding
from jaxformer.objectives.objective import Batch
from jaxformer.ops.losses import LossSums
from jaxformer.params import Tree
from jaxformer.training import rms
from jaxformer.training.experiment import Spikes
from jaxformer.training.gradients import accumulate, clip, clip_factor  # noqa: F401
from jaxformer.training.optimizers import without_gradient
from jaxformer.training.recipe import Recipe
from jaxformer.training.state import (  # noqa: F401
    LossScale,
    TrainState,
    abstract_references,
    abstract_state,
    first_state,
    gradient_rules,
    init_state,
    state_shardings,
    state_specs,
)

Metrics = dict[str, Array]
GROWTH_INTERVAL = 2000
LARGEST_SCALE = 2.0**24  # the loss scale grows no further: it could not come back from infinity
# Share of the mean. Losses that vary less are constant up to rounding; a small rise is no spike.
LEAST_DEVIATION = 1e-3


def make_train_step(
    recipe: Recipe, axis_name: str | None = None
) -> Callable[..., tuple[TrainState, Metrics]]:
    """`train_step` of a recipe: `(state, batch, references=None) -> (state, metrics)`.

    Jit it with the state donated. `references` are the parameters of frozen models by name. Under
    `jax.set_mesh` it is the step of all devices. With `axis_name` it is the step of one device
    under `jax.pmap`, and sums over that axis.
    """
    return partial(train_step, recipe, axis_name)


@sharding.auto_axes(  # the output: the state is split like its parameters, metrics are replicated
    lambda shapes, recipe, *_: (
        state_specs(recipe, jax.sharding.get_abstract_mesh()),
        jax.tree.map(lambda _: P(), shapes[1]),
    )
)
def train_step(
    recipe: Recipe, axis_name: str | None, state: TrainState, batch: Batch, references: Tree = None
) -> tuple[TrainState, Metrics]:
    """The state after one batch, and the metrics of the step (`StepMetrics`).

    A step is bad if its loss, its gradient or a new variable is not finite, or if it is a spike.
    A bad step changes no parameter, no variable and no optimizer state, and adds 1 to `skipped`.
    After `max_skipped` bad steps in a row no step changes anything, so the state of the first bad
    step can be examined.

    A batch whose weights sum to 0 (or less) is empty and has no mean loss. Its step changes nothing
    but `step`, and its loss and metrics are NaN.
    """
    scale = 1.0 if state.loss_scale is None else state.loss_scale.value
    key = step_key(recipe, state.step)
    if axis_name is not None:
        key = jax.random.fold_in(key, jax.lax.axis_index(axis_name))

    # sums over the batch
    sums, gradients = accumulate(recipe, state.params, batch, key, scale, state.step, references)
    parts = recipe.accumulation
    if axis_name is not None:
        sums, gradients = jax.lax.psum((sums, gradients), axis_name)
        parts = parts * jax.lax.axis_size(axis_name)
    gradients = sharding.with_spec_sharding(gradients, recipe.spec, gradient_rules(recipe.mesh))

    # means
    variables = mean_variables(sums.updates, parts)
    weight = divisor(sums.weight)
    mean_gradients = jax.tree.map(lambda g: g / (weight * scale), gradients)
    gradient_rms = root_mean_squares(recipe, "gradient", mean_gradients)
    norm = optax.tree.norm(mean_gradients)
    loss_and_norm = jnp.stack([sums.loss / weight, norm]).astype(jnp.float32)

    # the new state
    verdict = judge(recipe, state, sums, norm, loss_and_norm, variables)
    # the update reads the sums directly, so no array of means or of clipped gradients is written
    factor = clip_factor(norm, recipe.clip_norm) / (weight * scale)
    rate = jnp.asarray(recipe.schedule(state.step), jnp.float32)
    new, update_rms = conditional_update(
        verdict.changes, recipe, gradients, factor, rate, state, variables
    )
    new = count(new, verdict)
    recent = remember(state.recent, loss_and_norm, verdict.changes)
    new = replace(new, step=state.step + 1, recent=recent)

    # the metrics
    metrics = mean_metrics(sums, verdict.empty) | gradient_rms | update_rms
    metrics |= {"grad_norm": norm, "learning_rate": rate, "skipped": new.skipped}
    metrics[sums.unit] = sums.weight
    if verdict.bad_variables is not None:
        metrics["bad_variables"] = verdict.bad_variables
    if new.loss_scale is not None:
        metrics["loss_scale"] = new.loss_scale.value
    return new, StepMetrics(metrics, sums.unit)


def step_key(recipe: Recipe, step: Array) -> Array:
    """The random key of a step: a function of the seed and the step's number."""
    return jax.random.fold_in(jax.random.fold_in(parameters.random_key(recipe.seed), 1), step)


def mean_variables(updates: dict[str, Array] | None, parts: int) -> dict[str, Array]:
    """New values of variables by path: `updates`, a sum over parts of the batch, as a mean."""
    if not updates:
        return {}
    return updates if parts == 1 else {path: value / parts for path, value in updates.items()}


def divisor(weight: Any) -> Array:
    """The weight, or 1 if it is 0 or less: sums of an empty batch are divided by 1."""
    return jnp.where(weight > 0, weight, 1)


@dataclass(frozen=True)
class Verdict:
    """Whether a step is good, and so may change the state."""

    finite: Array  # loss, gradient norm and new variables are finite
    empty: Array  # finite, but the batch has no weight
    good: Array  # finite, no spike, and fewer than `max_skipped` bad steps came before it
    changes: Array  # good and not empty: parameters, variables and optimizer state change
    bad_variables: Array | None  # number of new variables that are not finite; None without any


def judge(
    recipe: Recipe,
    state: TrainState,
    sums: LossSums,
    norm: Array,
    loss_and_norm: Array,
    variables: dict[str, Array],
) -> Verdict:
    """The verdict on a step; see `train_step`. `loss_and_norm` [2]: mean loss and gradient norm."""
    finite = jnp.isfinite(norm) & jnp.isfinite(sums.loss)
    bad_variables = None
    if variables:
        variables_finite = jnp.stack([jnp.isfinite(value).all() for value in variables.values()])
        finite = finite & variables_finite.all()
        bad_variables = jnp.sum(~variables_finite)
    empty = finite & (sums.weight <= 0)
    spike = is_spike(recipe.spikes, state.recent, loss_and_norm)
    good = finite & ~spike & (state.skipped < recipe.max_skipped)
    return Verdict(finite, empty, good, good & ~empty, bad_variables)


def is_spike(spikes: Spikes | None, recent: Array | None, values: Array) -> Array:
    """Whether a value of `values` [2] is more than `deviations` standard deviations above its mean.

    Mean and deviation are those of `recent` [2, window]. At first these are NaN, and no step is a
    spike.
    """
    if spikes is None or recent is None:
        return jnp.bool_(False)
    mean = recent.mean(axis=1)
    deviation = jnp.maximum(recent.std(axis=1), LEAST_DEVIATION * jnp.abs(mean))
    return jnp.any((deviation > 0) & (values > mean + spikes.deviations * deviation))


@jax.named_scope("optimizer")
def conditional_update(
    changes: Array,
    recipe: Recipe,
    gradient_sums: Tree,
    factor: Array,
    rate: Array,
    state: TrainState,
    variables: dict[str, Array],
) -> tuple[TrainState, Metrics]:
    """`update` of the state if `changes`; else the same state, and root mean squares of 0."""
    apply = partial(update, recipe, gradient_sums, factor, rate, variables)
    rms_shapes = jax.eval_shape(partial(root_mean_squares, recipe, "update"), state.params)
    no_rms = jax.tree.map(jnp.zeros_like, rms_shapes)
    if sharding.platform() != "gpu" or recipe.mesh.offload:  # jnp.where refuses arrays on the host
        return jax.lax.cond(changes, apply, lambda state: (state, no_rms), state)
    # On GPU a conditional writes a second state and copies it into the donated one, while jnp.where
    # is fused into the update. On CPU jnp.where would keep both states alive. On TPU both take the
    # same memory.
    return jax.tree.map(partial(jnp.where, changes), apply(state), (state, no_rms))


def update(
    recipe: Recipe,
    gradient_sums: Tree,
    factor: Array,
    rate: Array,
    variables: dict[str, Array],
    state: TrainState,
) -> tuple[TrainState, Metrics]:
    """(the state with new parameters, variables, optimizer state and average; update rms).

    The clipped mean gradients are `gradient_sums * factor`.
    """
    gradients = jax.tree.map(lambda g: g * factor.astype(g.dtype), gradient_sums)
    opt_state = in_memory(recipe, state.opt_state, jax.memory.Space.Device)
    # an optimizer may need the rate of the step (`schedule_free`); the others do not see it
    optimizer = optax.with_extra_args_support(recipe.optimizer)
    updates, opt_state = optimizer.update(gradients, opt_state, state.params, rate=rate)
    updates = jax.tree.map(lambda p, u: (rate * u).astype(p.dtype), state.params, updates)
    params = jax.tree.map(jnp.add, state.params, updates)
    if variables:
        params = parameters.map_with_name(partial(new_value, variables), params)
    if recipe.after_update is not None:
        params = changed_after_update(recipe, params)
    ema = average(recipe, state, params, opt_state)
    opt_state = in_memory(recipe, opt_state, jax.memory.Space.Host)
    update_rms = root_mean_squares(recipe, "update", updates)
    return replace(state, params=params, opt_state=opt_state, ema=ema), update_rms


def new_value(variables: dict[str, Array], path: str, leaf: Array) -> Array:
    """The new value of the leaf at `path` if it is a variable with one, else `leaf`."""
    return variables[path].astype(leaf.dtype) if path in variables else leaf


def changed_after_update(recipe: Recipe, params: Tree) -> Tree:
    """`recipe.after_update` of the parameters. Frozen parameters and variables stay as they are."""
    assert recipe.after_update is not None
    changed = recipe.after_update(params)
    held = without_gradient(recipe.spec, recipe.frozen)

    def select(held: bool, old: Array, new: Array) -> Array:
        return old if held else new.astype(old.dtype)

    return jax.tree.map(select, held, params, changed)


def average(recipe: Recipe, state: TrainState, params: Tree, opt_state: Tree = None) -> Tree:
    """The averaged parameters after this step; None without `ema_decay`.

    An optimizer that averages makes them of its new state. Else they are
    mean + (1 - decay) (params - mean). Variables are not averaged: they have their current values.
    The decay grows up to `ema_decay`, because with a constant decay of 0.9999 the average of 300
    steps would be 97 % random start.
    """
    if recipe.averaged is not None:
        return recipe.averaged(params, opt_state)
    if recipe.ema_decay is None:
        return None
    # computed as 1 - decay: float32 would lose four digits of a decay of 0.9999
    share = jnp.maximum(
        1 - recipe.ema_decay, (recipe.ema_warmup - 1) / (recipe.ema_warmup + state.step)
    )

    def average_leaf(spec, mean, leaf):
        if not spec.trained:
            return leaf
        # not decay * mean + share * leaf: in float32 the two factors do not add up to 1, and
        # frozen parameters would shrink
        return (mean + share * (leaf - mean)).astype(mean.dtype)

    return jax.tree.map(average_leaf, recipe.spec, state.ema, params)


def average_decay(largest: float, warmup: int, step: Any) -> Any:
    """The decay of averaged parameters: min(largest, (1 + step) / (warmup + step)), step from 0."""
    return jnp.minimum(largest, (1 + step) / (warmup + step))


def averaged_steps(largest: float, warmup: int, steps: int) -> int:
    """About how many steps the average covers after `steps` steps: 1 / (1 - decay), or all."""
    decay = float(average_decay(largest, warmup, steps))
    return steps if decay == 1 else min(round(1 / (1 - decay)), steps)


def in_memory(recipe: Recipe, opt_state: Tree, memory: jax.memory.Space) -> Tree:
    """The optimizer's state; with `mesh.offload`, leaves that belong to parameters in `memory`."""
    if not recipe.mesh.offload:
        return opt_state
    specs = state_specs(recipe, jax.sharding.get_abstract_mesh()).opt_state
    return jax.tree.map(
        lambda a, spec: a if spec == P() else jax.device_put(a, memory), opt_state, specs
    )


def count(state: TrainState, verdict: Verdict) -> TrainState:
    """The state with its next loss scale and count of bad steps. An empty batch changes neither."""
    loss_scale = rescale(state.loss_scale, verdict.finite)
    skipped = jnp.where(verdict.good, 0, state.skipped + 1)
    select = partial(jnp.where, verdict.empty)
    return replace(
        state,
        loss_scale=jax.tree.map(select, state.loss_scale, loss_scale),
        skipped=select(state.skipped, skipped),
    )


def rescale(scale: LossScale | None, finite: Array) -> LossScale | None:
    """The next loss scale: half after an overflow, double after `GROWTH_INTERVAL` good steps.

    Micikevicius et al. 2017, section 3.2.
    """
    if scale is None:
        return None
    good = jnp.where(finite, scale.good_steps + 1, 0)
    doubled = jnp.minimum(scale.value * 2, LARGEST_SCALE)
    grown = jnp.where(good >= GROWTH_INTERVAL, doubled, scale.value)
    value = jnp.where(finite, grown, jnp.maximum(scale.value / 2, 1.0))
    return LossScale(value, jnp.where(good >= GROWTH_INTERVAL, 0, good))


def remember(recent: Array | None, loss_and_norm: Array, changes: Array) -> Array | None:
    """`recent` [2, window] with the new column `loss_and_norm` if the step changes the state."""
    if recent is None:
        return None
    shifted = jnp.concatenate([recent[:, 1:], loss_and_norm[:, None]], axis=1)
    return jnp.where(changes, shifted, recent)


def mean_metrics(sums: LossSums, empty: Array) -> Metrics:
    """The mean loss and the means of the objective's metrics; NaN for an empty batch."""
    pairs = {"loss": (sums.loss, sums.weight), **sums.metrics}
    return {
        name: jnp.where(empty, jnp.nan, total / divisor(weight))
        for name, (total, weight) in pairs.items()
    }


def root_mean_squares(recipe: Recipe, kind: str, tree: Tree) -> Metrics:
    """`rms.by_layer` of the tree if the experiment asks for this kind, else {}."""
    return rms.by_layer(kind, recipe.spec, tree) if kind in recipe.rms else {}


@jax.tree_util.register_pytree_with_keys_class
class StepMetrics(dict):
    """The metrics of a step: {name: array}. `unit` names the sum of weights: tokens, images, ...

    loss            the mean loss; then the metrics that the objective reports, as means
    tokens, ...     the sum of weights, under the name of the objective's unit
    grad_norm       the norm of the gradient before clipping
    learning_rate   the rate that this step used
    skipped         bad steps in a row
    rms/...         the root mean squares that the experiment asks for
    bad_variables   with variables: how many of their new values are not finite
    loss_scale      in float16: the scale of the next step
    """

    def __init__(self, values: Mapping[str, Any] | Iterable[tuple[str, Any]], unit: str):
        super().__init__(values)
        self.unit = unit

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        names = tuple(sorted(self))
        return [(jax.tree_util.DictKey(name), self[name]) for name in names], (names, self.unit)

    @classmethod
    def tree_unflatten(cls, names_and_unit: Any, values: Any) -> "StepMetrics":
        names, unit = names_and_unit
        return cls(zip(names, values, strict=True), unit)
