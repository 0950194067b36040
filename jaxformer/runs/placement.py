"""How a run's step is placed on devices: on one, split over a mesh, or copied by pmap."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxformer.parallel import pmap
from jaxformer.runs import replicas
from jaxformer.runs.batches import on_devices
from jaxformer.training.recipe import Recipe
from jaxformer.training.step import TrainState, make_train_step, state_shardings


class Placement(NamedTuple):
    """The step of all devices, and what it takes."""

    # The devices over which arrays are split; None: one device, or copies that pmap makes.
    mesh: jax.sharding.Mesh | None
    step: Callable[..., tuple[Any, dict[str, jax.Array]]]  # (state, batch) -> (state, metrics)
    put: Callable[[dict[str, Any]], Any]  # moves a batch onto the devices
    spread: Callable[[Any], Any]  # turns an ordinary tree into one that `step` takes
    gather: Callable[[Any], TrainState]  # the inverse of `spread`
    check: Callable[[Any, int], None]  # raises Diverged where copies of the state differ


def place_step(
    recipe: Recipe, mesh: jax.sharding.Mesh | None, rows: np.ndarray | None, batch_size: int
) -> Placement:
    """The placement of a recipe's step.

    `rows`: the indices of this process's examples in a batch; None: all.
    """
    put = partial(on_devices, mesh, rows, batch_size)
    if mesh is None:
        step = jax.jit(make_train_step(recipe), donate_argnums=0)
        return Placement(None, step, put, as_it_is, as_it_is, replicas.has_no_copies)
    if recipe.mesh.backend == "pmap":
        devices = mesh.devices.ravel().tolist()
        step = pmap.step(make_train_step(recipe, pmap.AXIS), devices)
        spread = partial(pmap.replicate, devices=devices)
        return Placement(
            None,
            step,
            partial(pmap.shard, devices=devices),
            spread,
            pmap.unreplicate,
            replicas.check_pmapped,
        )
    places = state_shardings(recipe, mesh), None
    step = jax.jit(make_train_step(recipe), donate_argnums=0, out_shardings=places)
    return Placement(mesh, step, put, as_it_is, as_it_is, partial(replicas.check, mesh))


def as_it_is(tree: Any) -> Any:
    """The same tree: nothing has to be copied."""
    return tree
