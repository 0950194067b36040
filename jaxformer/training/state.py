"""The state of a run: its leaves, how they are split over devices, and its first value."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxformer import parallel, params as parameters, sharding
from jaxformer.params import Tree
from jaxformer.training.recipe import Recipe


@struct.dataclass
class LossScale:
    """The dynamic loss scale of float16.

    It doubles after `GROWTH_INTERVAL` good steps, up to 2^24, and halves on an overflow.
    """

    value: Any
    good_steps: Any


@struct.dataclass
class TrainState:
    """What a run carries from step to step.

    It holds no random key: every random number is a function of the experiment's seed and `step`.
    """

    step: Any  # batches consumed
    params: Any  # trained, frozen and variable leaves
    opt_state: Any
    ema: Any = None  # averaged parameters
    loss_scale: Any = None  # LossScale, for float16
    skipped: Any = 0  # bad steps in a row, up to now
    # [2, window]: losses and gradient norms of the last good steps; None without `spikes`
    recent: Any = None

    # the parameters to evaluate and to generate with: the averaged ones if there are any
    best = property(lambda self: self.params if self.ema is None else self.ema)


def init_state(recipe: Recipe, trained: Tree = None) -> TrainState:
    """The state before the first step, with random parameters unless `trained` gives them.

    Call it under `jax.jit` or `jax.eval_shape`.
    """
    if trained is None:
        trained = parameters.init(recipe.spec, parameters.random_key(recipe.seed))
    zero = jnp.zeros((), jnp.int32)
    ema = jax.tree.map(jnp.array, trained) if recipe.has_average else None
    loss_scale = None
    if recipe.precision == "float16":
        loss_scale = LossScale(jnp.float32(2.0**15), jnp.zeros_like(zero))
    recent = None
    if recipe.spikes is not None:
        recent = jnp.full((2, recipe.spikes.window), jnp.nan, jnp.float32)
    return TrainState(
        step=zero,
        params=trained,
        opt_state=recipe.optimizer.init(trained),
        ema=ema,
        loss_scale=loss_scale,
        skipped=jnp.zeros_like(zero),
        recent=recent,
    )


def abstract_state(recipe: Recipe, shardings: TrainState | None = None) -> TrainState:
    """The shapes, dtypes and shardings of the state."""
    state = jax.eval_shape(partial(init_state, recipe))

    def put(leaf, sharding):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return state if shardings is None else jax.tree.map(put, state, shardings)


def abstract_references(recipe: Recipe, mesh: jax.sharding.Mesh | None = None) -> dict[str, Tree]:
    """The shapes, dtypes and shardings of the frozen models that a step reads, by name."""

    def put(leaf, place):
        return jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=place)

    if mesh is None:
        return {name: parameters.abstract(spec) for name, spec in recipe.references.items()}
    return {
        name: jax.tree.map(put, spec, sharding.shardings(spec, mesh))
        for name, spec in recipe.references.items()
    }


def first_state(
    recipe: Recipe, shardings: TrainState | None = None, trained: Tree = None
) -> TrainState:
    """The state before the first step, on the devices; random unless `trained` gives parameters."""
    if trained is not None and shardings is not None:

        def place(leaf, sharding):
            return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

        trained = jax.tree.map(place, trained, shardings.params)  # every process has the arrays
    return jax.jit(partial(init_state, recipe), out_shardings=shardings)(trained)


def state_specs(recipe: Recipe, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> TrainState:
    """The partition spec of each leaf of the state.

    A leaf that belongs to a parameter is split like the parameter. With ZeRO-1 the optimizer's
    leaves are split over `data` as well. All other leaves are replicated.
    """
    shapes = {path: leaf.shape for path, leaf in parameters.paths(recipe.spec).items()}
    by_parameter = parameters.paths(sharding.partition_specs(recipe.spec, mesh))
    by_gradient = parameters.paths(
        sharding.partition_specs(recipe.spec, mesh, gradient_rules(recipe.mesh))
    )

    def split(path, leaf):
        names = path.split("/")
        tails = ("/".join(names[i:]) for i in range(len(names)))
        # sums of Adafactor have smaller shapes than their parameter and are replicated
        parameter = next((tail for tail in tails if shapes.get(tail) == leaf.shape), None)
        rules = by_gradient if names[0] == "opt_state" else by_parameter
        return P() if parameter is None else rules[parameter]

    return parameters.map_with_name(split, jax.eval_shape(partial(init_state, recipe)))


def gradient_rules(mesh: parallel.Mesh) -> sharding.Rules:
    """The sharding rules of gradients and optimizer state; with ZeRO-1 they use `data` too."""
    if not mesh.zero1:
        return sharding.PARAMETERS
    return sharding.PARAMETERS | {"embed": (*sharding.PARAMETERS["embed"], "data")}


def state_shardings(recipe: Recipe, mesh: jax.sharding.Mesh) -> TrainState:
    """`state_specs` on the devices of `mesh`.

    With `mesh.offload` the optimizer's leaves that belong to parameters are in host memory.
    """
    host = {"memory_kind": "pinned_host"} if recipe.mesh.offload else {}

    def place(path, spec):
        kind = host if path[0].name == "opt_state" and spec != P() else {}
        return NamedSharding(mesh, spec, **kind)

    def is_leaf(x):
        return isinstance(x, P)

    return jax.tree_util.tree_map_with_path(place, state_specs(recipe, mesh), is_leaf=is_leaf)
