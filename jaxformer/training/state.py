"""What a run carries from step to step."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec

from jaxformer import models, parallel
from jaxformer.params import paths
from jaxformer.training import optimizer
from jaxformer.training.experiment import Experiment


@struct.dataclass
class LossScale:
    """Dynamic loss scaling for float16: doubles after `GROWTH_INTERVAL` good steps, halves on an overflow."""

    value: Any
    good_steps: Any


GROWTH_INTERVAL = 2000


@struct.dataclass
class TrainState:
    """Randomness is not in here: every draw is a function of the experiment's seed and `step`."""

    step: Any  # batches consumed
    params: Any
    opt_state: Any
    ema: Any = None  # averaged parameters
    loss_scale: Any = None  # LossScale, for float16
    skipped: Any = 0  # non-finite steps in a row, up to now


def init_state(experiment: Experiment) -> TrainState:
    """The state before the first step. A pure function of the experiment; run it under jit or `jax.eval_shape`."""
    parameters = models.init(experiment.model, jax.random.key(experiment.seed))
    scale = None
    if experiment.precision == "float16":
        scale = LossScale(jnp.float32(2.0**15), jnp.zeros((), jnp.int32))
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=parameters,
        opt_state=optimizer.build(experiment.optimizer, models.spec(experiment.model), experiment.frozen).init(
            parameters
        ),
        ema=None if experiment.ema_decay is None else jax.tree.map(jnp.array, parameters),
        loss_scale=scale,
        skipped=jnp.zeros((), jnp.int32),
    )


def state_places(experiment: Experiment, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> TrainState:
    """How each leaf of the state is split: what belongs to a parameter as the parameter is, the rest not.

    What the optimizer keeps is split over `data`, too, where the mesh's config asks for ZeRO-1.
    """
    spec = models.spec(experiment.model)
    shapes = {path: leaf.shape for path, leaf in paths(spec).items()}
    own, optimizers = (
        paths(parallel.partition(spec, mesh, rules)) for rules in (parallel.PARAMETERS, rules_of(experiment))
    )

    def place(path, leaf):
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        tails = ("/".join(names[i:]) for i in range(len(names)))
        owner = next((tail for tail in tails if shapes.get(tail) == leaf.shape), None)  # Adafactor's sums are smaller
        return PartitionSpec() if owner is None else (optimizers if names[0] == "opt_state" else own)[owner]

    return jax.tree_util.tree_map_with_path(place, jax.eval_shape(partial(init_state, experiment)))


def rules_of(experiment: Experiment) -> parallel.Rules:
    """The rules by which gradients and optimizer state are split."""
    zero1 = {"embed": (*parallel.PARAMETERS["embed"], "data")} if experiment.mesh.zero1 else {}
    return parallel.PARAMETERS | zero1


def state_shardings(experiment: Experiment, mesh: jax.sharding.Mesh) -> TrainState:
    """`state_places` on devices; what the optimizer keeps of each parameter in host memory where the config asks for it."""
    host = {"memory_kind": "pinned_host"} if experiment.mesh.offload else {}

    def place(path, entry):
        kind = host if path[0].name == "opt_state" and entry != PartitionSpec() else {}
        return NamedSharding(mesh, entry, **kind)

    is_leaf = lambda x: isinstance(x, PartitionSpec)
    return jax.tree_util.tree_map_with_path(place, state_places(experiment, mesh), is_leaf=is_leaf)
