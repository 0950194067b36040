"""One step of training, as a pure function: gradients, clip, update, select."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxformer import sharding
from jaxformer.ops.losses import LossSums
from jaxformer.params import Tree
from jaxformer.training.recipe import Recipe
from jaxformer.training.state import GROWTH_INTERVAL, LossScale, TrainState, gradient_rules, state_specs

Batch = dict[str, Array]
Metrics = dict[str, Array]


def make_train_step(recipe: Recipe, axis_name: str | None = None) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """`(state, batch) -> (state, metrics)`, to be jitted with the state donated: `train_step` of a recipe.

    Under `jax.set_mesh` it is the step of all devices. With `axis_name` it is one copy's step under `jax.pmap`, which sums
    over that axis.
    """
    return partial(train_step, recipe, axis_name)


@sharding.auto_axes(  # the state is split as its parameters are, metrics are not
    lambda shapes, recipe, *_: (state_specs(recipe, jax.sharding.get_abstract_mesh()), jax.tree.map(lambda _: P(), shapes[1]))
)
def train_step(recipe: Recipe, axis_name: str | None, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """The state after one batch, and what the step reports.

    A step whose loss or gradient is not finite changes no parameter and no optimizer state; it counts in `skipped`. A step
    whose weights sum to 0 (or less) has no mean to descend: it changes nothing but `step`, not even `skipped`, and its loss
    and metrics are NaN.
    Metrics: loss (nats a token), what the objective reports, tokens (sum of weights), grad_norm (before clipping),
    learning_rate (the one used), skipped.
    """
    scale = 1.0 if state.loss_scale is None else state.loss_scale.value
    key = step_key(recipe.seed, state.step, axis_name)
    sums, gradients = accumulate(recipe, state.params, batch, key, scale)
    if axis_name is not None:
        sums, gradients = jax.lax.psum((sums, gradients), axis_name)
    gradients = sharding.with_spec_sharding(gradients, recipe.spec, gradient_rules(recipe.mesh))
    total = jnp.where(sums.weight > 0, sums.weight, 1)
    gradients, norm = clip(jax.tree.map(lambda g: g / (total * scale), gradients), recipe.clip_norm)
    finite = jnp.isfinite(norm) & jnp.isfinite(sums.loss)
    empty = finite & (sums.weight <= 0)
    rate = jnp.asarray(recipe.schedule(state.step), jnp.float32)
    # jnp.where would keep both states alive and copy the donated one
    new = jax.lax.cond(finite & ~empty, partial(update, recipe, gradients, rate), lambda state: state, state)
    new = replace(count(new, finite, empty), step=state.step + 1)
    mean = lambda total, weight: total / jnp.where(weight > 0, weight, 1)
    metrics = {"loss": (sums.loss, sums.weight), **sums.metrics}
    metrics = {name: jnp.where(empty, jnp.nan, mean(*pair)) for name, pair in metrics.items()}
    metrics |= {"tokens": sums.weight, "grad_norm": norm, "learning_rate": rate, "skipped": new.skipped}
    if new.loss_scale is not None:
        metrics["loss_scale"] = new.loss_scale.value
    return new, metrics


def step_key(seed: int, step: Array, axis_name: str | None = None) -> Array:
    """The random key of a step: a function of (seed, step), and of the device under pmap."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 1), step)
    return key if axis_name is None else jax.random.fold_in(key, jax.lax.axis_index(axis_name))


def clip(gradients: Tree, largest: float | None) -> tuple[Tree, Array]:
    """(the gradients, no longer than `largest`; their norm before)."""
    norm = optax.tree.norm(gradients)
    if largest is None:
        return gradients, norm
    shrink = jnp.minimum(1.0, largest / norm)
    return jax.tree.map(lambda g: g * shrink, gradients), norm


def update(recipe: Recipe, gradients: Tree, rate: Array, state: TrainState) -> TrainState:
    """The state with new parameters, optimizer state and average, ema * decay + params * (1 - decay)."""
    opt_state = in_memory(recipe, state.opt_state, jax.memory.Space.Device)
    updates, opt_state = recipe.optimizer.update(gradients, opt_state, state.params)
    params = jax.tree.map(lambda p, u: p + (rate * u).astype(p.dtype), state.params, updates)
    decay = recipe.ema_decay
    ema = None if decay is None else jax.tree.map(lambda e, p: e * decay + p * (1 - decay), state.ema, params)
    opt_state = in_memory(recipe, opt_state, jax.memory.Space.Host)
    return replace(state, params=params, opt_state=opt_state, ema=ema)


def in_memory(recipe: Recipe, opt_state: Tree, memory: jax.memory.Space) -> Tree:
    """The optimizer's state, with `mesh.offload` in this memory: all that is split as a parameter is."""
    if not recipe.mesh.offload:
        return opt_state
    specs = state_specs(recipe, jax.sharding.get_abstract_mesh()).opt_state
    return jax.tree.map(lambda a, spec: a if spec == P() else jax.device_put(a, memory), opt_state, specs)


def count(state: TrainState, finite: Array, empty: Array) -> TrainState:
    """The state with its loss scale and its count of skipped steps, which an empty batch leaves as they are."""
    before = state.loss_scale, state.skipped
    after = rescale(state.loss_scale, finite), jnp.where(finite, 0, state.skipped + 1)
    loss_scale, skipped = jax.tree.map(lambda new, old: jnp.where(empty, old, new), after, before)
    return replace(state, loss_scale=loss_scale, skipped=skipped)


def accumulate(recipe: Recipe, params: Tree, batch: Batch, key: Array, scale) -> tuple[LossSums, Tree]:
    """Sums of losses and weights and the gradient of the loss sum (times `scale`), over micro-batches of the batch.

    Sums are divided once, at the end: splitting the batch does not change the gradient, however uneven the padding.
    """

    def loss(params, batch, key):
        sums = recipe.loss(params, batch, key)
        return sums.loss * scale, sums

    gradient = jax.grad(loss, has_aux=True)
    if recipe.accumulation == 1:
        gradients, sums = gradient(params, batch, key)
        return sums, gradients

    def add(carry, micro):
        index, micro_batch = micro
        gradients, sums = gradient(params, micro_batch, jax.random.fold_in(key, index))
        return jax.tree.map(jnp.add, carry, (sums, gradients)), None

    # each micro-batch takes every n-th example, so that each device's part of the batch stays on it
    micro_batches = jax.tree.map(lambda x: x.reshape(-1, recipe.accumulation, *x.shape[1:]).swapaxes(0, 1), batch)
    shapes = jax.eval_shape(lambda: gradient(params, jax.tree.map(lambda x: x[0], micro_batches), key)[::-1])
    start = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    (sums, gradients), _ = jax.lax.scan(add, start, (jnp.arange(recipe.accumulation), micro_batches))
    return sums, gradients


def rescale(scale: LossScale | None, finite: Array) -> LossScale | None:
    """The next loss scale: half after an overflow, double after enough good steps. Micikevicius et al. 2017, section 3.2."""
    if scale is None:
        return None
    good = jnp.where(finite, scale.good_steps + 1, 0)
    grown = jnp.where(good >= GROWTH_INTERVAL, scale.value * 2, scale.value)
    value = jnp.where(finite, grown, jnp.maximum(scale.value / 2, 1.0))
    return LossScale(value, jnp.where(good >= GROWTH_INTERVAL, 0, good))
