"""What a run carries from step to step, and where each part of it lies."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec

from jaxformer import parallel, params, sharding
from jaxformer.training.recipe import Recipe

GROWTH_INTERVAL = 2000


@struct.dataclass
class LossScale:
    """Dynamic loss scaling for float16: doubles after `GROWTH_INTERVAL` good steps, halves on an overflow."""

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
    skipped: Any = 0  # non-finite steps in a row, up to now

    # what is scored and sampled from: the averaged parameters where there are any
    best = property(lambda self: self.params if self.ema is None else self.ema)


def init_state(recipe: Recipe, trained: params.Tree = None) -> TrainState:
    """The state before the first step, random parameters by default; run it under jit or `jax.eval_shape`."""
    if trained is None:
        trained = params.init(recipe.spec, jax.random.key(recipe.seed))
    zero, ema = jnp.zeros((), jnp.int32), None if recipe.ema_decay is None else jax.tree.map(jnp.array, trained)
    scale = LossScale(jnp.float32(2.0**15), jnp.zeros_like(zero)) if recipe.precision == "float16" else None
    return TrainState(zero, trained, recipe.optimizer.init(trained), ema, scale, skipped=jnp.zeros_like(zero))


def first_state(recipe: Recipe, shardings: TrainState | None = None, trained: params.Tree = None) -> TrainState:
    """The state before the first step on the devices, random or from the parameters `trained`."""
    if trained is not None and shardings is not None:
        place = lambda leaf, sharding: jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])
        trained = jax.tree.map(place, trained, shardings.params)  # every process has the arrays
    return jax.jit(partial(init_state, recipe), out_shardings=shardings)(trained)


def state_specs(recipe: Recipe, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> TrainState:
    """How each leaf is split: a parameter's as the parameter is (the optimizer's over `data`, too, with ZeRO-1), others not."""
    shapes = {path: leaf.shape for path, leaf in params.paths(recipe.spec).items()}
    by_parameter = params.paths(sharding.partition_specs(recipe.spec, mesh))
    by_gradient = params.paths(sharding.partition_specs(recipe.spec, mesh, gradient_rules(recipe.mesh)))

    def split(path, leaf):
        names = path.split("/")
        tails = ("/".join(names[i:]) for i in range(len(names)))
        parameter = next((tail for tail in tails if shapes.get(tail) == leaf.shape), None)  # Adafactor's sums are smaller
        rules = by_gradient if names[0] == "opt_state" else by_parameter
        return PartitionSpec() if parameter is None else rules[parameter]

    return params.map_with_name(split, jax.eval_shape(partial(init_state, recipe)))


def gradient_rules(mesh: parallel.Mesh) -> sharding.Rules:
    """The rules by which gradients and optimizer state are split."""
    return sharding.PARAMETERS | ({"embed": (*sharding.PARAMETERS["embed"], "data")} if mesh.zero1 else {})


def state_shardings(recipe: Recipe, mesh: jax.sharding.Mesh) -> TrainState:
    """`state_specs` on devices; what the optimizer keeps of each parameter in host memory where the config asks for it."""
    host = {"memory_kind": "pinned_host"} if recipe.mesh.offload else {}

    def place(path, spec):
        kind = host if path[0].name == "opt_state" and spec != PartitionSpec() else {}
        return NamedSharding(mesh, spec, **kind)

    is_leaf = lambda x: isinstance(x, PartitionSpec)
    return jax.tree_util.tree_map_with_path(place, state_specs(recipe, mesh), is_leaf=is_leaf)
