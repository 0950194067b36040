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


def state_shardings(experiment: Experiment, mesh: jax.sharding.Mesh) -> TrainState:
    """Where each leaf of the state lies: what belongs to a parameter with it, the rest on every device."""
    places = paths(parallel.shardings(models.spec(experiment.model), mesh))
    shapes = {path: leaf.shape for path, leaf in paths(models.spec(experiment.model)).items()}

    def place(path, leaf):
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        tails = ("/".join(names[i:]) for i in range(len(names)))
        own = next((tail for tail in tails if shapes.get(tail) == leaf.shape), None)  # Adafactor's sums are smaller
        return NamedSharding(mesh, PartitionSpec()) if own is None else places[own]

    return jax.tree_util.tree_map_with_path(place, jax.eval_shape(partial(init_state, experiment)))
