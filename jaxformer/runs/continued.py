"""A run that goes on from the end of another one: `Experiment.continue_from`.

It begins with the other run's last state: parameters, averages, variables, what the optimizer
keeps, and the number of steps. Steps, schedule, batch size and data may be others.
"""

import logging
from typing import Any

from etils import epath

from jaxformer import config
from jaxformer.config import no_links
from jaxformer.errors import ConfigError
from jaxformer.runs import checkpoint_reader
from jaxformer.runs.run_folder import RunFolder, compare, named, runs_of
from jaxformer.training.experiment import Experiment
from jaxformer.training.recipe import Recipe
from jaxformer.training.step import TrainState, abstract_state

log = logging.getLogger("jaxformer")


def folder_of(text: str, runs: epath.PathLike) -> RunFolder:
    """The run that a text names: its folder, or its name in `runs`.

    An experiment's name is refused: its newest run would soon be the one that goes on. Raises
    ConfigError for a text that names no run.
    """
    if (found := named(text, runs)) is not None:
        return found
    known = [folder.path.name for folder in runs_of(text, runs)]
    advice = f"name one of its runs: {', '.join(known[-3:])}" if known else "`runs` lists all"
    raise ConfigError(f"continue_from={text}: no run's folder with checkpoints; {advice}")


def check(experiment: Experiment, runs: epath.PathLike, own: RunFolder) -> None:
    """Raises ConfigError where no step is left to do after the run of `continue_from`.

    `own` is the folder of the run that goes on. Once it has a checkpoint, it needs the other run no
    more, which may be gone by then.
    """
    if experiment.continue_from is None or checkpoint_reader.steps(own.checkpoints):
        return
    done = last_step(folder_of(experiment.continue_from, runs))
    if done >= experiment.steps:
        raise ConfigError(
            f"continue_from={experiment.continue_from}: it has done {done:,} steps, so "
            f"steps={experiment.steps} leaves none; give the number of all steps, with its own"
        )


def last_step(folder: RunFolder) -> int:
    """The step of a run's newest checkpoint. Raises ConfigError if it has none."""
    if found := checkpoint_reader.steps(folder.checkpoints):
        return found[-1]
    raise ConfigError(f"continue_from={folder.path}: it has no checkpoint yet")


def introduction(experiment: Experiment, runs: epath.PathLike) -> list[str]:
    """The line of a new run about the one that it goes on from."""
    folder = folder_of(str(experiment.continue_from), runs)
    ignore = {*config.execution_fields(experiment), "continue_from", "initial"}
    changes = compare(folder.description(), config.describe(experiment), ignore)
    return [
        f"goes on from {folder.path} after step {last_step(folder):,}, with its parameters, "
        "averages and optimizer state; other than there: " + ("; ".join(changes) or "nothing")
    ]


def last_state(
    experiment: Experiment, recipe: Recipe, shardings: Any, runs: epath.PathLike, digest: str
) -> tuple[TrainState, int]:
    """(the last state of the run that goes on, its steps). `digest` is that of the data here.

    Raises ConfigError where the state is of other parameters or of another optimizer.
    """
    folder = folder_of(str(experiment.continue_from), runs)
    no_links.check_folder(folder.checkpoints, folder.path)
    place = folder.for_library(folder.checkpoints)

    def skip(step, why):
        log.warning("%s: step %d is damaged: %s; an older one is taken", place, step, why)

    abstract = abstract_state(recipe, shardings)
    try:
        found = checkpoint_reader.newest_good(
            checkpoint_reader.resolve(place), abstract, "", None, skip
        )
    except checkpoint_reader.CheckpointError as error:
        raise ConfigError(
            f"continue_from={folder.path}: {error}; to begin with its parameters and another "
            f"optimizer, give --initial={folder.path} instead"
        ) from error
    if found is None:
        raise ConfigError(f"continue_from={folder.path}: it has no checkpoint yet")
    step, state, metadata = found
    if metadata.get("data_digest") != digest:
        log.info("the data are not those of %s", folder.path)
    return state, step
