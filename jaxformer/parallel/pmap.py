"""Data parallelism by `jax.pmap`: each device has a copy of everything, along a leading axis.

JAX only maintains `pmap`; a mesh with a `data` axis computes the same numbers and can do more.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

Tree = Any
AXIS = "data"


def replicate(tree: Tree, devices: list) -> Tree:
    """The tree on every device, leaves `[devices, ...]`."""
    return jax.pmap(lambda _, tree: tree, in_axes=(0, None), devices=devices)(jnp.arange(len(devices)), tree)


def first(tree: Tree) -> Tree:
    """The first device's copy."""
    return jax.tree.map(lambda leaf: leaf[0], tree)


def cut(batch: Tree, devices: list) -> Tree:
    """`[B, ...]` -> `[devices, B / devices, ...]`, a part on each."""
    sharding = NamedSharding(jax.sharding.Mesh(np.array(devices), (AXIS,)), PartitionSpec(AXIS))
    return jax.device_put(jax.tree.map(lambda leaf: leaf.reshape(len(devices), -1, *leaf.shape[1:]), batch), sharding)


def step(train_step: Callable, devices: list) -> Callable:
    """`(state, batch) -> (state, metrics)`, state and batch `[devices, ...]`, of a step that sums over `AXIS` itself."""
    return jax.pmap(train_step, axis_name=AXIS, devices=devices, donate_argnums=0, out_axes=(0, None))
