"""One step of training, as a pure function."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxformer import models, parallel
from jaxformer.errors import ConfigError
from jaxformer.models.stacks.pipeline import Pipeline
from jaxformer.ops.losses import LossSums
from jaxformer.training import optimizer
from jaxformer.training.experiment import Experiment
from jaxformer.training.state import GROWTH_INTERVAL, LossScale, TrainState, rules_of, state_places

Batch = dict[str, Array]


def make_train_step(
    experiment: Experiment, axis_name: str | None = None
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]]:
    """`(state, batch) -> (state, metrics)`, to be jitted with the state donated.

    Under `jax.set_mesh` it is the step of all devices. With `axis_name` it is one copy's step under `jax.pmap`, which sums
    over that axis.

    A step whose loss or gradient is not finite changes no parameter and no optimizer state; it counts in `skipped`. A step
    whose weights sum to 0 (or less) has no mean to descend: it changes nothing but `step`, not even `skipped`, and has the
    metrics tokens 0, loss and accuracy NaN.
    Metrics: loss (nats a token), accuracy, tokens, grad_norm (before clipping), learning_rate (the one used), skipped.
    """
    experiment = staged(experiment)
    spec = models.spec(experiment.model)
    update = optimizer.build(experiment.optimizer, spec, experiment.frozen).update
    rate_of = optimizer.schedule(experiment)
    has_dropout = experiment.model.dropout_rate > 0 or experiment.model.attention_dropout_rate > 0

    def train_step(state: TrainState, batch: Batch):
        key = None
        if has_dropout:
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(experiment.seed), 1), state.step)
            key = key if axis_name is None else jax.random.fold_in(key, jax.lax.axis_index(axis_name))
        scale = 1.0 if state.loss_scale is None else state.loss_scale.value
        sums, gradients = accumulate(experiment, state.params, batch, key, scale)
        if axis_name is not None:
            sums, gradients = jax.lax.psum((sums, gradients), axis_name)
        gradients = parallel.lay(gradients, spec, rules_of(experiment))
        total = jnp.where(sums.weight > 0, sums.weight, 1)
        gradients = jax.tree.map(lambda g: g / (total * scale), gradients)
        norm = optax.tree.norm(gradients)
        finite = jnp.isfinite(norm) & jnp.isfinite(sums.loss)
        empty = finite & (sums.weight <= 0)
        if experiment.clip_norm is not None:
            shrink = jnp.minimum(1.0, experiment.clip_norm / norm)
            gradients = jax.tree.map(lambda g: g * shrink, gradients)
        rate = rate_of(state.step)

        def apply(state):
            here = in_memory(experiment, state.opt_state, jax.memory.Space.Device)
            updates, opt_state = update(gradients, here, state.params)
            params = jax.tree.map(lambda p, u: p + (rate * u).astype(p.dtype), state.params, updates)
            ema = average(experiment.ema_decay, state.ema, params)
            opt_state = in_memory(experiment, opt_state, jax.memory.Space.Host)
            return replace(state, params=params, opt_state=opt_state, ema=ema)

        # jnp.where would keep both states alive and copy the donated one
        new = jax.lax.cond(finite & ~empty, apply, lambda state: state, state)
        counters = rescale(state.loss_scale, finite), jnp.where(finite, 0, state.skipped + 1)
        before = state.loss_scale, state.skipped
        loss_scale, skipped = jax.tree.map(lambda new, old: jnp.where(empty, old, new), counters, before)
        new = replace(new, step=state.step + 1, loss_scale=loss_scale, skipped=skipped)
        metrics = {
            "loss": jnp.where(empty, jnp.nan, sums.loss / total),
            "accuracy": jnp.where(empty, jnp.nan, sums.correct / total),
            "tokens": sums.weight,
            "grad_norm": norm,
            "learning_rate": jnp.asarray(rate, jnp.float32),
            "skipped": new.skipped,
        }
        if new.loss_scale is not None:
            metrics["loss_scale"] = new.loss_scale.value
        return new, metrics

    places = lambda shapes: (
        state_places(experiment, jax.sharding.get_abstract_mesh()),
        jax.tree.map(lambda _: P(), shapes[1]),
    )
    return parallel.automatic(train_step, places)


def in_memory(experiment: Experiment, opt_state: Any, memory) -> Any:
    """The optimizer's state, with `mesh.offload` in this memory: all that is split as a parameter is."""
    if not experiment.mesh.offload:
        return opt_state
    places = state_places(experiment, jax.sharding.get_abstract_mesh()).opt_state
    return jax.tree.map(lambda a, place: a if place == P() else jax.device_put(a, memory), opt_state, places)


def accumulate(experiment: Experiment, params: Any, batch: Batch, key: Array | None, scale) -> tuple[LossSums, Any]:
    """Sums of losses and weights and the gradient of the loss sum (times `scale`), over micro-batches of the batch.

    Nothing is averaged on the way, so any cut of the batch gives the gradient of the whole, however uneven the padding.
    """

    def loss(params, batch, key):
        sums = experiment.objective(experiment, optimizer.freeze(params, experiment.frozen), batch, key)
        return sums.loss * scale, sums

    gradient = jax.grad(loss, has_aux=True)
    count = experiment.accumulation
    if count == 1:
        gradients, sums = gradient(params, batch, key)
        return sums, gradients

    def step(carry, micro):
        index, micro_batch = micro
        micro_key = None if key is None else jax.random.fold_in(key, index)
        gradients, sums = gradient(params, micro_batch, micro_key)
        return jax.tree.map(jnp.add, carry, (sums, gradients)), None

    # examples by turns, so that each device's part of the batch stays on it
    micro_batches = jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1), batch)
    start = jax.tree.map(
        lambda a: jnp.zeros(a.shape, a.dtype),
        jax.eval_shape(lambda: gradient(params, jax.tree.map(lambda x: x[0], micro_batches), key)[::-1]),
    )
    (sums, gradients), _ = jax.lax.scan(step, start, (jnp.arange(count), micro_batches))
    return sums, gradients


def average(decay: float | None, ema: Any, params: Any) -> Any:
    """ema * decay + params * (1 - decay), or None where there is no average."""
    if decay is None:
        return None
    return jax.tree.map(lambda e, p: e * decay + p * (1 - decay), ema, params)


def rescale(scale: LossScale | None, ok: Array) -> LossScale | None:
    """The next loss scale: half after an overflow, double after enough good steps. Micikevicius et al. 2017, section 3.2."""
    if scale is None:
        return None
    good = jnp.where(ok, scale.good_steps + 1, 0)
    grown = jnp.where(good >= GROWTH_INTERVAL, scale.value * 2, scale.value)
    value = jnp.where(ok, grown, jnp.maximum(scale.value / 2, 1.0))
    return LossScale(value, jnp.where(good >= GROWTH_INTERVAL, 0, good))


def make_evaluate(experiment: Experiment) -> Callable[[Any, Batch], LossSums]:
    """`(params, batch) -> LossSums` without dropout, to be jitted."""
    experiment = staged(experiment)
    return lambda params, batch: experiment.objective(experiment, params, batch, None)


def staged(experiment: Experiment) -> Experiment:
    """The experiment, its layers as a pipeline where the mesh has stages. ConfigError for a model with a stack of its own."""
    mesh, model = experiment.mesh, experiment.model
    if mesh.stage == 1:
        return experiment
    if model.stack is not None:
        raise ConfigError(f"mesh.stage={mesh.stage}: model.stack={model.stack} has no pipeline; leave one of them out")
    return replace(experiment, model=replace(model, stack=Pipeline(mesh.microbatches, mesh.repeats)))
