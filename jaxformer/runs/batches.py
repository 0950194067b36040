"""The batch of a step: examples in an order that the seed decides, or samples made of the state.

The loop, the search for a bad step's cause, and its replay call `StepBatches`. Nothing else makes
training batches.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxformer import sharding
from jaxformer.data import batching
from jaxformer.errors import ConfigError
from jaxformer.parallel import processes
from jaxformer.params import random_key
from jaxformer.runs.goodput import Goodput
from jaxformer.training.experiment import Experiment
from jaxformer.training.recipe import Recipe


@dataclass(frozen=True, eq=False)
class StepBatches:
    """`batches(step, trained)`: this process's part of a step's global batch, as NumPy arrays.

    `trained` is read only where the split reads the state. Other splits may be called ahead of
    the steps.
    """

    split: Any
    batch_size: int
    seed: int
    weights: Callable[[Any], Any]  # the tree that trains -> the model's parameters
    mesh: jax.sharding.Mesh | None = None  # the devices of the parameters; None: one device

    @property
    def reads_state(self) -> bool:
        """Whether the batch of a step is a function of the state before it."""
        return batching.reads_state(self.split)

    @cached_property
    def rows(self) -> np.ndarray | None:
        """The indices of this process's examples in a global batch; None: all."""
        return processes.local_examples(self.mesh, self.batch_size)

    @cached_property
    def _examples(self) -> Any:
        return batching.batches(self.split, self.batch_size, self.seed, self.rows)

    @cached_property
    def _key(self) -> Callable[[Any], jax.Array]:
        """step -> its random key, on all devices of the mesh."""
        everywhere = None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())
        return jax.jit(partial(batch_key, self.seed), out_shardings=everywhere)

    def __call__(self, step: int, trained: Any = None) -> dict[str, np.ndarray]:
        if not self.reads_state:
            return self._examples[step]
        params = self.weights(trained)
        key = self._key(np.uint32(step))
        made = batching.batch_of_state(self.split, params, key, step, self.batch_size)
        batch = {name: np.asarray(value) for name, value in sharding.on_host(made).items()}
        check_alike(batch, step)
        selection = slice(None) if self.rows is None else self.rows
        return {name: leaf[selection] for name, leaf in batch.items()}

    def examples(self, step: int) -> list[int] | str:
        """The indices of a batch's examples, or a text where it is made of the state."""
        if self.reads_state:
            return "made of the state"
        return batching.batch_indices(self.split, self.batch_size, self.seed)[step].tolist()


def step_batches(experiment: Experiment, recipe: Recipe, dataset: Any, mesh: Any) -> StepBatches:
    """The batches of an experiment's steps.

    `mesh` None: one device has the parameters, as under pmap.
    """
    weights = recipe.weights
    if experiment.adaptation is not None:
        weights = jax.jit(weights)  # one program for the products of all factors
    return StepBatches(dataset.train, experiment.batch_size, experiment.seed, weights, mesh)


@contextlib.contextmanager
def batches_of(
    job: Any, start: int, reached: int, goodput: Goodput, watchdog: Any
) -> Iterator[Callable[[Any, int], Any]]:
    """Yields (state, step) -> the step's batch: read ahead by a thread, or made of the state.

    An earlier start recorded the steps before `reached`. The time up to here counts as the start.
    """
    if job.batch_of_state is None:
        with batching.Prefetch(job.batches, start, job.steps, put=job.put) as ahead:
            goodput.lap("start")
            yield lambda state, step: next(ahead)
        return

    def make(state: Any, step: int) -> Any:
        jax.block_until_ready(state)  # else the time of the step before would count as the batch's
        goodput.lap("recomputed" if step < reached else "step")
        watchdog.phase(f"step {step} (its batch)")
        return job.batch_of_state(state, step)

    goodput.lap("start")
    yield make


def on_devices(
    mesh: jax.sharding.Mesh | None, rows: np.ndarray | None, size: int, batch: dict[str, Any]
) -> dict:
    """A batch on the device, or on those of a mesh.

    `rows`: the indices of this process's examples among `size`; None: all.
    """
    if rows is not None and mesh is not None:
        return processes.global_batch(mesh, size, batch)
    return jax.device_put(batch, None if mesh is None else sharding.batch_sharding(mesh, batch))


def batch_key(seed: int, step: Any) -> jax.Array:
    """The random key of a batch that is made of the state.

    It differs from the keys of the step (fold 1) and of evaluations (fold 2).
    """
    return jax.random.fold_in(jax.random.fold_in(random_key(seed), 3), step)


def check_alike(batch: dict[str, np.ndarray], step: int) -> None:
    """Raises ConfigError, on all processes, where one of them made a different batch.

    Otherwise each process would train on a part of its own batch.
    """
    if jax.process_count() == 1:
        return
    digest = hashlib.sha256()
    for name, leaf in sorted(batch.items()):
        digest.update(f"{name} {leaf.dtype} {leaf.shape}".encode())
        digest.update(np.ascontiguousarray(leaf).tobytes())
    digests = processes.all_gather_object(digest.hexdigest(), "the comparison of batches")
    other = next((index for index, found in enumerate(digests) if found != digests[0]), None)
    if other is not None:
        problem = f"process {other} made another batch of step {step} than process 0"
        advice = (
            "draw only from `key`; let nothing depend on the host, on time, on the order of a set"
        )
        raise ConfigError(f"data: {problem}; {advice}")
