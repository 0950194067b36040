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
    """(step, what trains) -> this process's part of the global batch, as NumPy arrays.

    Only a split that reads the state reads `trained`, so others may be called ahead of the steps.
    """

    split: Any
    batch_size: int
    seed: int
    weights: Callable[[Any], Any]  # what trains -> the model's parameters
    mesh: jax.sharding.Mesh | None = None  # the devices of the parameters; None: one

    @property
    def reads_state(self) -> bool:
        """Whether the batch of a step is a function of the state before it."""
        return batching.reads_state(self.split)

    @cached_property
    def rows(self) -> np.ndarray | None:
        """The rows of a batch that this process has; None: all."""
        return processes.local_rows(self.mesh, self.batch_size)

    @cached_property
    def _examples(self) -> Any:
        return batching.batches(self.split, self.batch_size, self.seed, self.rows)

    @cached_property
    def _key(self) -> Callable[[Any], jax.Array]:
        """step -> its key, on all devices of the mesh."""
        everywhere = None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())
        return jax.jit(partial(batch_key, self.seed), out_shardings=everywhere)

    def __call__(self, step: int, trained: Any = None) -> dict[str, np.ndarray]:
        if not self.reads_state:
            return self._examples[step]
        params, key = self.weights(trained), self._key(np.uint32(step))
        made = batching.batch_of_state(self.split, params, key, step, self.batch_size)
        batch = {name: np.asarray(value) for name, value in sharding.on_host(made).items()}
        check_alike(batch, step)
        selection = slice(None) if self.rows is None else self.rows
        return {name: leaf[selection] for name, leaf in batch.items()}

    def examples(self, step: int) -> list[int] | str:
        """The indices of the examples in a batch; of one made of the state, what it is made of."""
        if self.reads_state:
            return "made of the state"
        return batching.batch_indices(self.split, self.batch_size, self.seed)[step].tolist()


def step_batches(experiment: Experiment, recipe: Recipe, dataset: Any, mesh: Any) -> StepBatches:
    """The batches of an experiment's steps. `mesh` None: one device has the parameters, as under pmap."""
    weights = recipe.weights
    if experiment.adaptation is not None:
        weights = jax.jit(weights)  # one program for the products of all factors
    return StepBatches(dataset.train, experiment.batch_size, experiment.seed, weights, mesh)


@contextlib.contextmanager
def batches_of(
    job: Any, start: int, reached: int, goodput: Goodput, watchdog: Any
) -> Iterator[Callable[[Any, int], Any]]:  # fmt: skip
    """Inside, (state, step) -> the batch of a step: read ahead by a thread, or made of the state.

    An earlier start had recorded the steps before `reached`. What came before is the run's start.
    """
    if job.batch_of_state is None:
        with batching.Prefetch(job.batches, start, job.steps, put=job.put) as ahead:
            goodput.lap("start")
            yield lambda state, step: next(ahead)
        return

    def make(state: Any, step: int) -> Any:
        jax.block_until_ready(state)  # the time of the step before is not that of the batch
        goodput.lap("recomputed" if step < reached else "step")
        watchdog.phase(f"step {step} (its batch)")
        return job.batch_of_state(state, step)

    goodput.lap("start")
    yield make


def batch_key(seed: int, step: Any) -> jax.Array:
    """The random key of a batch that is made of the state.

    It is another one than those of the step (1) and of evaluations (2).
    """
    return jax.random.fold_in(jax.random.fold_in(random_key(seed), 3), step)


def check_alike(batch: dict[str, np.ndarray], step: int) -> None:
    """Raises ConfigError, in all processes, where some made another batch.

    Each would train on a part of its own.
    """
    if jax.process_count() == 1:
        return
    digest = hashlib.sha256()
    for name, leaf in sorted(batch.items()):
        digest.update(f"{name} {leaf.dtype} {leaf.shape}".encode())
        digest.update(np.ascontiguousarray(leaf).tobytes())
    every = processes.all_gather_object(digest.hexdigest(), "the comparison of batches")
    other = next((index for index, found in enumerate(every) if found != every[0]), None)
    if other is not None:
        problem = f"process {other} made another batch of step {step} than process 0"
        advice = "draw only from `key`; let nothing depend on the host, on time, on the order of a set"
        raise ConfigError(f"data: {problem}; {advice}")
