"""The job of the training loop: an experiment taken apart into the functions that the loop calls.

`runs.loop.train` calls `prepare`. The loop does not see the experiment.
"""

import logging
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax

from jaxformer import config, models, params as parameters
from jaxformer.data import batching
from jaxformer.models import cost
from jaxformer.parallel import processes
from jaxformer.runs import reproduction
from jaxformer.runs.batches import StepBatches, on_devices, step_batches
from jaxformer.runs.best_effort import BestEffort
from jaxformer.runs.checks import can_sample, evaluate_on
from jaxformer.runs.own_answers import generator_of
from jaxformer.runs.placement import Placement, place_step
from jaxformer.runs.profile import place_of_profile
from jaxformer.runs.questions import sample_text
from jaxformer.runs.references import References, with_references
from jaxformer.runs.run_folder import RunFolder
from jaxformer.runs.scores import evaluator, examples_scored
from jaxformer.runs.setup import Setup
from jaxformer.training.experiment import Experiment
from jaxformer.training.recipe import example_lengths, trained_weights
from jaxformer.training.step import TrainState

log = logging.getLogger("jaxformer")


@dataclass(frozen=True, eq=False)
class Job:
    """All that the loop needs of an experiment, its data and its devices."""

    name: str
    steps: int
    log_every: int
    eval_every: int
    save_every: int
    best: str  # the name of the score that ranks checkpoints
    # The numbers of examples that an evaluation scores, that the last one scores, and that the
    # validation split has.
    examples: tuple[int, int, int]
    max_skipped: int
    metadata: dict[str, Any]  # of every checkpoint
    batches: Callable[[int], dict[str, Any]]  # step -> this process's part of the batch
    put: Callable[[dict[str, Any]], Any]  # moves a batch onto the devices
    step: Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]
    spread: Callable[[TrainState], Any]  # turns a state into one that `step` takes
    gather: Callable[[Any], TrainState]  # the inverse of `spread`
    parameters: int  # the number of the model's parameters, without the objective's own
    evaluate: Callable[..., dict[str, Any]]
    sample: Callable[[Any], str] | None  # params -> text
    profile: str | None  # the folder for a trace of some steps
    # A batch -> the seconds of its step at the peak of all devices; None where that is unknown.
    work: Callable[[dict[str, Any]], float | None]
    refresh: Callable[[], Any]  # called after each evaluation
    explain: Callable[[TrainState, int], Any]  # keeps a bad step, and logs what is bad in it
    check: Callable[[Any, int], None]  # raises Diverged where copies of the state differ
    # (state, step) -> batch, in place of `batches` and `put`.
    batch_of_state: Callable[[Any, int], Any] | None = None
    makes_answers: bool = False  # whether the data have a `generate` of their own


def prepare(
    setup: Setup, references: References, refresh: Callable[[RunFolder], Any] | None
) -> Job:
    """The parts of an experiment that the loop needs."""
    experiment = setup.experiment
    recipe = setup.recipe
    dataset = setup.dataset
    part = processes.local_examples(setup.mesh, experiment.batch_size)
    place = place_step(recipe, setup.mesh, part, experiment.batch_size)
    step = place.step
    if references.params:
        step = with_references(step, place.spread(references.params))
    profile = None
    if experiment.profile and processes.is_first():
        profile = place_of_profile(setup.folder)
    batches = step_batches(experiment, recipe, dataset, place.mesh)
    metadata = metadata_of(setup, references)
    evaluate = evaluator(experiment, recipe, dataset, setup.mesh, setup.folder.path)
    count = len(dataset.validation)

    def batch_of_state(state: Any, step: int) -> Any:
        return place.put(batches(step, place.gather(state).params))

    def sample(trained: Any) -> str:
        return sample_text(experiment, recipe.weights(trained), dataset)

    def explain(state: TrainState, step: int) -> None:
        explain_bad_step(setup, references, place, batches, metadata, state, step)

    return Job(
        name=experiment.name,
        steps=experiment.steps,
        log_every=experiment.log_every,
        eval_every=experiment.eval_every,
        save_every=experiment.checkpoints.every,
        best=experiment.checkpoints.best,
        examples=(
            examples_scored(experiment, count, whole=False),
            examples_scored(experiment, count, whole=True),
            count,
        ),
        max_skipped=experiment.max_skipped,
        metadata=metadata,
        batches=batches,
        put=place.put,
        step=step,
        spread=place.spread,
        gather=place.gather,
        parameters=parameters.count(recipe.parts.split(recipe.spec)[0]),
        evaluate=evaluate_on(setup.mesh, experiment, evaluate, references.params),
        sample=sample if can_sample(experiment, dataset) else None,
        profile=profile,
        work=peak_time(setup),
        refresh=refresh_of(setup.folder, refresh),
        explain=BestEffort(explain),
        check=place.check,
        batch_of_state=batch_of_state if batches.reads_state else None,
        makes_answers=generator_of(experiment.data) is not None,
    )


def metadata_of(setup: Setup, references: References) -> dict[str, Any]:
    """The metadata of every checkpoint: which data, order, config and references it is of."""
    metadata = {
        "data_digest": setup.dataset.digest,
        "order": batching.ORDER,
        "config": config.describe(setup.experiment),
    }
    if references.digests:
        metadata["references"] = references.digests
    return metadata


def refresh_of(folder: RunFolder, refresh: Callable[[RunFolder], Any] | None) -> Callable[[], Any]:
    """() -> `refresh(folder)`, skipped while its calls took more than 5 % of the time."""
    if refresh is None:
        return lambda: None
    return partial(BestEffort(refresh, share=0.05), folder)


def peak_time(setup: Setup) -> Callable[[dict[str, Any]], float | None]:
    """(batch) -> the seconds of its step at the peak of all devices; None where it is unknown."""
    experiment = setup.experiment
    kind = jax.devices()[0].device_kind
    if kind not in cost.CHIPS or not models.is_config(experiment.model):
        return lambda batch: None
    devices = 1 if setup.mesh is None else setup.mesh.size
    seconds = cache(partial(seconds_at_peak, experiment, devices, kind))
    return lambda batch: seconds(*example_lengths(experiment, batch))


def seconds_at_peak(
    experiment: Experiment, devices: int, kind: str, length: int, source: int | None
) -> float | None:
    """The seconds that a step's FLOPs would take at the peak of all devices, which must be known.

    All positions count, also those of weight 0. Frozen weights count only where they are computed.
    """
    trained = trained_weights(experiment)
    flops_per_token = cost.training_flops(experiment.model, length, source, trained)
    flops = flops_per_token * experiment.batch_size * length
    return flops / (cost.CHIPS[kind].peak * devices)


def explain_bad_step(
    setup: Setup,
    references: References,
    place: Placement,
    batches: StepBatches,
    metadata: dict[str, Any],
    state: TrainState,
    step: int,
) -> None:
    """Keeps the bad step in RUN/bad, computes it again, and logs what is bad in it."""
    folder = setup.folder
    reproduction.keep(folder, state, step, metadata)
    batch = on_devices(place.mesh, batches.rows, batches.batch_size, batches(step, state.params))
    bad = replace(state, step=jax.numpy.full_like(state.step, step))
    result = reproduction.explain(setup.experiment, bad, batch, references.params)
    replay = f"python -m jaxformer evaluate {shlex.quote(str(folder.path))} --replay"
    lines = [
        f"step {step}: loss {result['loss']:g}, gradient norm {result['grad_norm']:g}",
        *result["found"],
        f"its examples: {batches.examples(step)}",
        f"kept in {folder.bad}; `{replay}` computes it again",
    ]
    log.error("%s", "\n  ".join(lines))
