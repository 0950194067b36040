"""Sums over the micro-batches of a batch, in the memory of one of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxformer.params import Tree


def sum_over_micro_batches(
    function: Callable[[dict[str, Array], Array], Any],
    batch: dict[str, Array],
    key: Array,
    count: int,
) -> Tree:
    """sum_i function(micro-batch i, fold_in(key, i)) over `count` micro-batches."""
    # Each micro-batch takes every n-th example, so that no example moves to another device.
    micro_batches = jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1), batch)

    def add(sums: Tree, numbered: tuple[Array, dict[str, Array]]) -> tuple[Tree, None]:
        index, micro_batch = numbered
        value = function(micro_batch, jax.random.fold_in(key, index))
        return jax.tree.map(jnp.add, sums, value), None

    shapes = jax.eval_shape(lambda: function(jax.tree.map(lambda x: x[0], micro_batches), key))
    start = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    return jax.lax.scan(add, start, (jnp.arange(count), micro_batches))[0]
