"""Scores of parameters on a validation split, on one device or on a mesh."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxformer import sharding
from jaxformer.data import batching
from jaxformer.evaluation.perplexity import perplexity
from jaxformer.parallel import processes
from jaxformer.training.recipe import Recipe

Batch = dict[str, Any]


def on_devices(mesh: jax.sharding.Mesh | None, rows: np.ndarray | None, size: int, batch: Batch) -> dict[str, jax.Array]:
    """A batch on the device, or on those of a mesh; `rows` are what this process has of `size`, None for all."""
    if rows is not None and mesh is not None:
        return processes.global_batch(mesh, size, batch)
    return jax.device_put(batch, None if mesh is None else sharding.batch_sharding(mesh, batch))


def evaluator(
    recipe: Recipe, dataset: Any, size: int, limit: int | None = None, mesh: jax.sharding.Mesh | None = None
) -> Callable[[Any], dict[str, float]]:
    """(trained) -> scores over the validation split, or over its first `limit` batches of `size` examples.

    The random key of a batch is a function of the seed and its number, the same at every evaluation.
    """

    @jax.jit
    def score(trained: Any, batch: Batch, number: Any):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(recipe.seed), 2), number)
        return recipe.score(trained, batch, key)

    rows = processes.local_rows(mesh, size)
    batches = batching.ValidationBatches(dataset.validation, size, rows)
    count = len(batches) if limit is None else min(limit, len(batches))
    return lambda trained: perplexity(score, trained, (on_devices(mesh, rows, size, batches[i]) for i in range(count)))
