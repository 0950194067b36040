"""What a run carries from step to step, and one step as a pure function: gradients, clip, update, select."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxformer import parallel, params as parameters, sharding
from jaxformer.errors import ConfigError
from jaxformer.ops.losses import LossSums
from jaxformer.params import Tree
from jaxformer.training import rms
from jaxformer.training.experiment import Spikes
from jaxformer.training.recipe import Recipe

Batch = dict[str, Array]
Metrics = dict[str, Array]
GROWTH_INTERVAL = 2000
LARGEST_SCALE = 2.0**24  # the loss scale ends there: infinity would never come back
LEAST_DEVIATION = 1e-3  # of a mean: what varies less is a constant and its rounding, and a little more is no spike


@jax.tree_util.register_pytree_with_keys_class
class StepMetrics(dict):
    """What a step reports, {name: array}. `unit` is the name under which the weight of its loss is: tokens, images, ..."""

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


@struct.dataclass
class LossScale:
    """Dynamic loss scaling for float16: doubles after `GROWTH_INTERVAL` good steps, up to 2^24; halves on an overflow."""

    value: Any
    good_steps: Any


@struct.dataclass
class TrainState:
    """Randomness is not in here: every draw is a function of the experiment's seed and `step`."""

    step: Any  # batches consumed
    params: Any  # what trains, with what is frozen beside it
    opt_state: Any
    ema: Any = None  # averaged parameters
    loss_scale: Any = None  # LossScale, for float16
    skipped: Any = 0  # bad steps in a row, up to now
    recent: Any = None  # [2, window] losses and gradient norms of the last good steps, where `spikes` are watched for

    # what is scored and sampled from: the averaged parameters where there are any
    best = property(lambda self: self.params if self.ema is None else self.ema)


def init_state(recipe: Recipe, trained: Tree = None) -> TrainState:
    """The state before the first step, random parameters by default; run it under jit or `jax.eval_shape`."""
    if trained is None:
        trained = parameters.init(recipe.spec, parameters.random_key(recipe.seed))
    zero, ema = jnp.zeros((), jnp.int32), None if recipe.ema_decay is None else jax.tree.map(jnp.array, trained)
    scale = LossScale(jnp.float32(2.0**15), jnp.zeros_like(zero)) if recipe.precision == "float16" else None
    recent = None if recipe.spikes is None else jnp.full((2, recipe.spikes.window), jnp.nan, jnp.float32)
    return TrainState(zero, trained, recipe.optimizer.init(trained), ema, scale, jnp.zeros_like(zero), recent)


def abstract_state(recipe: Recipe, shardings: TrainState | None = None) -> TrainState:
    """The shapes and types of the state, split as `shardings` say."""
    state = jax.eval_shape(partial(init_state, recipe))

    def put(leaf, sharding):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return state if shardings is None else jax.tree.map(put, state, shardings)


def abstract_references(recipe: Recipe, mesh: jax.sharding.Mesh | None = None) -> dict[str, Tree]:
    """The shapes and types of the frozen models that a step is given, each split by its own spec."""

    def put(leaf, place):
        return jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=place)

    if mesh is None:
        return {name: parameters.abstract(spec) for name, spec in recipe.references.items()}
    return {name: jax.tree.map(put, spec, sharding.shardings(spec, mesh)) for name, spec in recipe.references.items()}


def first_state(recipe: Recipe, shardings: TrainState | None = None, trained: Tree = None) -> TrainState:
    """The state before the first step on the devices, random or from the parameters `trained`."""
    if trained is not None and shardings is not None:

        def place(leaf, sharding):
            return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

        trained = jax.tree.map(place, trained, shardings.params)  # every process has the arrays
    return jax.jit(partial(init_state, recipe), out_shardings=shardings)(trained)


def state_specs(recipe: Recipe, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> TrainState:
    """How each leaf is split: a parameter's as the parameter is (the optimizer's over `data`, too, with ZeRO-1), others not."""
    shapes = {path: leaf.shape for path, leaf in parameters.paths(recipe.spec).items()}
    by_parameter = parameters.paths(sharding.partition_specs(recipe.spec, mesh))
    by_gradient = parameters.paths(sharding.partition_specs(recipe.spec, mesh, gradient_rules(recipe.mesh)))

    def split(path, leaf):
        names = path.split("/")
        tails = ("/".join(names[i:]) for i in range(len(names)))
        parameter = next((tail for tail in tails if shapes.get(tail) == leaf.shape), None)  # Adafactor's sums are smaller
        rules = by_gradient if names[0] == "opt_state" else by_parameter
        return P() if parameter is None else rules[parameter]

    return parameters.map_with_name(split, jax.eval_shape(partial(init_state, recipe)))


def gradient_rules(mesh: parallel.Mesh) -> sharding.Rules:
    """The rules by which gradients and optimizer state are split."""
    return sharding.PARAMETERS | ({"embed": (*sharding.PARAMETERS["embed"], "data")} if mesh.zero1 else {})


def state_shardings(recipe: Recipe, mesh: jax.sharding.Mesh) -> TrainState:
    """`state_specs` on devices; what the optimizer keeps of each parameter in host memory where the config asks for it."""
    host = {"memory_kind": "pinned_host"} if recipe.mesh.offload else {}

    def place(path, spec):
        kind = host if path[0].name == "opt_state" and spec != P() else {}
        return NamedSharding(mesh, spec, **kind)

    def is_leaf(x):
        return isinstance(x, P)

    return jax.tree_util.tree_map_with_path(place, state_specs(recipe, mesh), is_leaf=is_leaf)


def make_train_step(recipe: Recipe, axis_name: str | None = None) -> Callable[..., tuple[TrainState, Metrics]]:
    """`(state, batch, references=None) -> (state, metrics)`, to be jitted with the state donated: `train_step` of a recipe.

    `references` are the parameters of frozen models by name, where the experiment has some. Under `jax.set_mesh` it is the
    step of all devices, with `axis_name` one copy's under `jax.pmap`, summed over that axis.
    """
    return partial(train_step, recipe, axis_name)


@sharding.auto_axes(  # the state is split as its parameters are, metrics are not
    lambda shapes, recipe, *_: (state_specs(recipe, jax.sharding.get_abstract_mesh()), jax.tree.map(lambda _: P(), shapes[1]))
)
def train_step(
    recipe: Recipe, axis_name: str | None, state: TrainState, batch: Batch, references: Tree = None
) -> tuple[TrainState, Metrics]:
    """The state after one batch, and what the step reports.

    A step whose loss, gradient or new variable is not finite, or a spike, changes no parameter, no variable and no optimizer
    state; it counts in `skipped`. After `max_skipped` of them in a row no step changes anything: the state stays that of the
    first bad one. A step whose weights sum to 0 (or less) has no mean to descend: it changes nothing but `step`, and its loss
    and metrics are NaN.
    Metrics: loss (a mean), what the objective reports, the sum of weights under the name of its unit (tokens, images, ...),
    grad_norm (before clipping), learning_rate (the one used), skipped, the root mean squares that the experiment asks for,
    and with variables bad_variables, how many of their new values are not finite.
    """
    scale = 1.0 if state.loss_scale is None else state.loss_scale.value
    key = step_key(recipe, state.step)
    if axis_name is not None:
        key = jax.random.fold_in(key, jax.lax.axis_index(axis_name))
    sums, gradients = accumulate(recipe, state.params, batch, key, scale, state.step, references)
    parts = recipe.accumulation
    if axis_name is not None:
        sums, gradients = jax.lax.psum((sums, gradients), axis_name)
        parts = parts * jax.lax.axis_size(axis_name)
    variables = mean_variables(sums.updates, parts)
    gradients = sharding.with_spec_sharding(gradients, recipe.spec, gradient_rules(recipe.mesh))
    total = jnp.where(sums.weight > 0, sums.weight, 1)
    means = jax.tree.map(lambda g: g / (total * scale), gradients)
    reports, norm = root_mean_squares(recipe, "gradient", means), optax.tree.norm(means)
    # the update reads the sums themselves: no array of means or of clipped gradients is written
    factor = clip_factor(norm, recipe.clip_norm) / (total * scale)
    finite = jnp.isfinite(norm) & jnp.isfinite(sums.loss)
    are_finite = [jnp.isfinite(value).all() for value in variables.values()]
    if variables:
        finite = finite & jnp.stack(are_finite).all()
    empty = finite & (sums.weight <= 0)
    recent = jnp.stack([sums.loss / total, norm]).astype(jnp.float32)
    good = finite & ~is_spike(recipe.spikes, state.recent, recent) & (state.skipped < recipe.max_skipped)
    rate = jnp.asarray(recipe.schedule(state.step), jnp.float32)
    new, updates = conditional_update(good & ~empty, recipe, gradients, factor, rate, state, variables)
    new = replace(count(new, finite, good, empty), step=state.step + 1)
    if state.recent is not None:
        later = jnp.concatenate([state.recent[:, 1:], recent[:, None]], axis=1)
        new = replace(new, recent=jnp.where(good & ~empty, later, state.recent))

    def mean(total, weight):
        return total / jnp.where(weight > 0, weight, 1)

    metrics = {"loss": (sums.loss, sums.weight), **sums.metrics}
    metrics = {name: jnp.where(empty, jnp.nan, mean(*pair)) for name, pair in metrics.items()}
    metrics |= reports | updates | {"grad_norm": norm, "learning_rate": rate, "skipped": new.skipped}
    metrics[sums.unit] = sums.weight
    if variables:
        metrics["bad_variables"] = jnp.sum(~jnp.stack(are_finite))
    if new.loss_scale is not None:
        metrics["loss_scale"] = new.loss_scale.value
    return new, StepMetrics(metrics, sums.unit)


def step_key(recipe: Recipe, step: Array) -> Array:
    """The random key of a step: a function of the seed and its number."""
    return jax.random.fold_in(jax.random.fold_in(parameters.random_key(recipe.seed), 1), step)


def mean_variables(updates: dict[str, Array] | None, parts: int) -> dict[str, Array]:
    """New values of variables by path: the mean over the parts of a batch of which `updates` is the sum."""
    if not updates:
        return {}
    return updates if parts == 1 else {path: value / parts for path, value in updates.items()}


def conditional_update(
    good: Array, recipe: Recipe, sums: Tree, factor: Array, rate: Array, state: TrainState, variables: dict[str, Array]
) -> tuple[TrainState, Metrics]:
    """`update` of the state where `good` is True, else the state as it is and sizes of 0."""
    apply = partial(update, recipe, sums, factor, rate, variables)
    nothing = jax.tree.map(jnp.zeros_like, jax.eval_shape(partial(root_mean_squares, recipe, "update"), state.params))
    if sharding.platform() != "gpu" or recipe.mesh.offload:  # arrays on the host have no jnp.where
        return jax.lax.cond(good, apply, lambda state: (state, nothing), state)
    # A GPU's conditional writes a second state, and then copies it into the donated one. There jnp.where is a part of the
    # update; on CPU it would keep both states alive, and on TPU both ways take the same memory.
    return jax.tree.map(partial(jnp.where, good), apply(state), (state, nothing))


def is_spike(spikes: Spikes | None, recent: Array | None, values: Array) -> Array:
    """Whether one of the values [2] is far above its recent [2, window], which are NaN, and so compare false, at first."""
    if spikes is None or recent is None:
        return jnp.bool_(False)
    mean = recent.mean(axis=1)
    deviation = jnp.maximum(recent.std(axis=1), LEAST_DEVIATION * jnp.abs(mean))
    return jnp.any((deviation > 0) & (values > mean + spikes.deviations * deviation))


def clip(gradients: Tree, largest: float | None) -> tuple[Tree, Array]:
    """(the gradients, no longer than `largest`; their norm before)."""
    norm = optax.tree.norm(gradients)
    return jax.tree.map(lambda g: g * clip_factor(norm, largest), gradients), norm


def clip_factor(norm: Array, largest: float | None) -> Array:
    """What clipping multiplies gradients of that norm by: min(1, largest / norm)."""
    return jnp.minimum(1.0, jnp.inf if largest is None else largest / norm)


def update(
    recipe: Recipe, sums: Tree, factor: Array, rate: Array, variables: dict[str, Array], state: TrainState
) -> tuple[TrainState, Metrics]:
    """The state with new parameters, variables, optimizer state and average; sizes of updates.

    The gradients are `sums` times the factor.
    """
    gradients = jax.tree.map(lambda g: g * factor.astype(g.dtype), sums)
    opt_state = in_memory(recipe, state.opt_state, jax.memory.Space.Device)
    updates, opt_state = recipe.optimizer.update(gradients, opt_state, state.params)
    updates = jax.tree.map(lambda p, u: (rate * u).astype(p.dtype), state.params, updates)
    params = jax.tree.map(jnp.add, state.params, updates)
    if variables:
        params = parameters.map_with_name(partial(new_value, variables), params)
    ema = average(recipe, state, params)
    opt_state = in_memory(recipe, opt_state, jax.memory.Space.Host)
    return replace(state, params=params, opt_state=opt_state, ema=ema), root_mean_squares(recipe, "update", updates)


def new_value(variables: dict[str, Array], path: str, leaf: Array) -> Array:
    """The new value of a variable; any other leaf as it is."""
    return variables[path].astype(leaf.dtype) if path in variables else leaf


def average(recipe: Recipe, state: TrainState, params: Tree) -> Tree:
    """The averaged parameters after this step, with variables as they are now; None where the experiment has none.

    The decay grows up to `ema_decay`. With a constant decay of 0.9999 the average of 300 steps is 97 % random start.
    """
    if recipe.ema_decay is None:
        return None
    # 1 - decay, whose float32 would lose four digits of a decay of 0.9999
    share = jnp.maximum(1 - recipe.ema_decay, (recipe.ema_warmup - 1) / (recipe.ema_warmup + state.step))

    def average_leaf(spec, mean, leaf):
        if not spec.trained:
            return leaf
        # not decay * mean + share * leaf: in float32 these two do not add up to 1, and what is frozen would shrink
        return (mean + share * (leaf - mean)).astype(mean.dtype)

    return jax.tree.map(average_leaf, recipe.spec, state.ema, params)


def average_decay(largest: float, warmup: int, step: Any) -> Any:
    """The decay of averaged parameters at a step, counted from 0."""
    return jnp.minimum(largest, (1 + step) / (warmup + step))


def averaged_steps(largest: float, warmup: int, steps: int) -> int:
    """About how many of the last steps the average holds after so many steps: 1 / (1 - decay), or all."""
    decay = float(average_decay(largest, warmup, steps))
    return steps if decay == 1 else min(round(1 / (1 - decay)), steps)


def root_mean_squares(recipe: Recipe, kind: str, tree: Tree) -> Metrics:
    """Those by layer, where the experiment asks for them."""
    return rms.by_layer(kind, recipe.spec, tree) if kind in recipe.rms else {}


def in_memory(recipe: Recipe, opt_state: Tree, memory: jax.memory.Space) -> Tree:
    """The optimizer's state, with `mesh.offload` in this memory: all that is split as a parameter is."""
    if not recipe.mesh.offload:
        return opt_state
    specs = state_specs(recipe, jax.sharding.get_abstract_mesh()).opt_state
    return jax.tree.map(lambda a, spec: a if spec == P() else jax.device_put(a, memory), opt_state, specs)


def count(state: TrainState, finite: Array, good: Array, empty: Array) -> TrainState:
    """The state with its loss scale and its count of bad steps, which an empty batch leaves as they are."""
    before = state.loss_scale, state.skipped
    after = rescale(state.loss_scale, finite), jnp.where(good, 0, state.skipped + 1)
    loss_scale, skipped = jax.tree.map(lambda new, old: jnp.where(empty, old, new), after, before)
    return replace(state, loss_scale=loss_scale, skipped=skipped)


def accumulate(
    recipe: Recipe, params: Tree, batch: Batch, key: Array, scale: Any, step: Any = 0, references: Tree = None
) -> tuple[LossSums, Tree]:
    """Sums of losses and weights and the gradient of the loss sum (times `scale`), over micro-batches of the batch.

    Sums are divided once, at the end: splitting the batch does not change the gradient, however uneven the padding.
    """
    loss_of = partial(recipe.loss, step=step, references=references)
    wide, narrow = params, jnp.dtype(recipe.gradient_sums)
    if narrow.itemsize < 4:  # a gradient has the dtype of its weight, which products round to this precision anyway

        def rounds(spec):
            return spec.contracts and spec.axes[-1] != "expert"  # a router works in float32

        params = jax.tree.map(lambda spec, leaf: leaf.astype(narrow) if rounds(spec) else leaf, recipe.spec, params)

    def loss(params, batch, key):
        sums = loss_of(params, batch, key)
        return sums.loss * scale, sums

    def gradient(params, batch, key):
        gradients, sums = jax.grad(loss, has_aux=True)(params, batch, key)
        return jax.tree.map(lambda g, leaf: g.astype(leaf.dtype), gradients, wide), sums

    if recipe.accumulation > 1 or recipe.mesh.backend == "pmap":
        check_weight(loss_of, params, batch, key)
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


def check_weight(loss: Callable, params: Tree, batch: Batch, key: Array) -> None:
    """Raises ConfigError where an objective's weight is a constant, the same for a part of a batch as for the whole.

    Sums over parts would count it once for each part, and the mean loss and the gradient would be too small.
    """
    weight = constant_weight(loss, params, batch, key)
    if weight is not None and weight == constant_weight(loss, params, jax.tree.map(lambda x: jnp.repeat(x, 2, 0), batch), key):
        problem = "its weight is the same number however many rows a batch has, so a part of a batch would count as a whole one"
        raise ConfigError(f"objective: {problem}; return the sum of batch['weights'], or of what else the loss sums over")


def constant_weight(loss: Callable, params: Tree, batch: Batch, key: Array) -> str | None:
    """The program that makes the weight of a batch of this shape; None where it reads the batch."""
    closed = jax.make_jaxpr(lambda batch: jnp.asarray(loss(params, batch, key).weight))(batch)
    jaxpr = closed.jaxpr
    outputs: list[Any] = list(jaxpr.outvars)

    def is_literal(variable):
        return hasattr(variable, "val")

    needed = {variable for variable in outputs if not is_literal(variable)}
    program = [str(variable.val) for variable in outputs if is_literal(variable)]
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            needed.update(variable for variable in equation.invars if not is_literal(variable))
            program.append(f"{equation.primitive} {equation.params} {[getattr(v, 'val', v.aval) for v in equation.invars]}")
    constants = [value for variable, value in zip(jaxpr.constvars, closed.consts, strict=True) if variable in needed]
    if needed.intersection(jaxpr.invars) or any(isinstance(value, jax.core.Tracer) for value in constants):
        return None
    return "; ".join([*program, *map(str, constants)])


def rescale(scale: LossScale | None, finite: Array) -> LossScale | None:
    """The next loss scale: half after an overflow, double after enough good steps. Micikevicius et al. 2017, section 3.2."""
    if scale is None:
        return None
    good = jnp.where(finite, scale.good_steps + 1, 0)
    doubled = jnp.minimum(scale.value * 2, LARGEST_SCALE)
    grown = jnp.where(good >= GROWTH_INTERVAL, doubled, scale.value)
    value = jnp.where(finite, grown, jnp.maximum(scale.value / 2, 1.0))
    return LossScale(value, jnp.where(good >= GROWTH_INTERVAL, 0, good))
