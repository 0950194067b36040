"""The setup of a run: an experiment, checked together with its data, its devices and its folder.

`runs.loop.train` calls `set_up` first, and hands the `Setup` to its later steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from etils import epath

from jaxformer import parallel
from jaxformer.config import Source, storage
from jaxformer.runs import continued
from jaxformer.runs.checks import check, check_hosts, check_scores
from jaxformer.runs.run_folder import RunFolder, as_it_began, introduce, run_folder
from jaxformer.training.experiment import Experiment
from jaxformer.training.recipe import Recipe, build


@dataclass(frozen=True, eq=False)
class Setup:
    """An experiment, and what a run of it needs to begin."""

    experiment: Experiment
    runs: epath.PathLike  # the folder of all runs
    source: Source | None  # the experiment's file
    weights_of: Callable[[str], Callable] | None  # reads weights that are no run of ours
    folder: RunFolder
    mesh: jax.sharding.Mesh | None
    recipe: Recipe
    dataset: Any
    score_is_known: bool  # whether evaluations are known to give the score that ranks checkpoints

    @property
    def split_mesh(self) -> jax.sharding.Mesh | None:
        """The mesh over which arrays are split; None: one device, or copies that pmap makes."""
        return self.mesh if self.experiment.mesh.backend == "jit" else None


def set_up(
    experiment: Experiment,
    runs: epath.PathLike,
    source: Source | None,
    weights_of: Callable[[str], Callable] | None,
) -> Setup:
    """Checks an experiment, on all processes, and writes nothing. Raises ConfigError."""
    folder = run_folder(experiment, runs)
    experiment = as_it_began(folder, experiment)
    check_hosts(experiment, source)
    continued.check(experiment, runs, folder)
    mesh = parallel.run_mesh(experiment.mesh, experiment.batch_size // experiment.accumulation)
    recipe = build(experiment)
    dataset = check(experiment, recipe, mesh, folder)
    score_is_known = check_scores(experiment, recipe, dataset)
    return Setup(
        experiment, runs, source, weights_of, folder, mesh, recipe, dataset, score_is_known
    )


def introduction(setup: Setup) -> list[str]:
    """The lines of a new run about other runs; none if the folder has begun before."""
    if storage.is_file(setup.folder.config):
        return []
    before = setup.experiment.continue_from
    if before is None:
        return introduce(setup.experiment, setup.runs)
    of_before = continued.introduction(setup.experiment, setup.runs)
    besides = continued.folder_of(before, setup.runs).path
    return [*of_before, *introduce(setup.experiment, setup.runs, besides)]
