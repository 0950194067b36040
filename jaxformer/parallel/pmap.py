"""Data parallelism by `jax.pmap`: a copy of the state on each device, and a leading device axis.

JAX maintains `jax.pmap`, but no longer develops it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxformer.params import Tree

AXIS = "data"


def replicate(tree: Tree, devices: list) -> Tree:
    """A copy on each device, as one tree with leaves `[devices, ...]`."""
    return jax.pmap(lambda _, tree: tree, in_axes=(0, None), devices=devices)(
        jnp.arange(len(devices)), tree
    )


def unreplicate(tree: Tree) -> Tree:
    """The first device's copy."""
    return jax.tree.map(lambda leaf: leaf[0], tree)


def shard(batch: Tree, devices: list) -> Tree:
    """`[B, ...]` -> `[devices, B / devices, ...]`, one part on each device."""
    place = NamedSharding(jax.sharding.Mesh(np.array(devices), (AXIS,)), PartitionSpec(AXIS))
    return jax.device_put(
        jax.tree.map(lambda leaf: leaf.reshape(len(devices), -1, *leaf.shape[1:]), batch), place
    )


def step(train_step: Callable, devices: list) -> Callable:
    """`train_step` on all devices: `(state, batch, ...) -> (state, metrics)`.

    Everything except the metrics is `[devices, ...]`. `train_step` sums over `AXIS`. The state is
    donated; arguments after the batch, the parameters of frozen models, are not.
    """
    return jax.pmap(
        train_step, axis_name=AXIS, devices=devices, donate_argnums=0, out_axes=(0, None)
    )
