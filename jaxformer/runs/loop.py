"""The run: from an experiment to a trained model, through kills, bad data and bad numbers."""

import contextlib
import errno
import logging
import math
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

import jax
from etils import epath

from jaxformer import config, models, parallel, params as parameters
from jaxformer.config import Source, storage
from jaxformer.data import batching
from jaxformer.errors import ConfigError
from jaxformer.models import cost
from jaxformer.parallel import processes
from jaxformer.runs import checkpoint, compilation_cache, memory, reproduction
from jaxformer.runs.batches import batches_of, step_batches
from jaxformer.runs.best_effort import BestEffort
from jaxformer.runs.checks import (
    can_sample,
    check,
    check_hosts,
    check_scores,
    evaluate_on,
    ranked,
    score_name,
    try_best,
    was_scored,
)
from jaxformer.runs.facts import facts
from jaxformer.runs.goodput import Goodput
from jaxformer.runs.metrics import UNRECORDED, Console, NonFinite, Record, Reporter, in_words, open_loggers
from jaxformer.runs.own_answers import generator_of
from jaxformer.runs.placement import place_step
from jaxformer.runs.profile import TRACED, end_profile, place_of_profile
from jaxformer.runs.references import Frozen, check_references, read_references, with_references
from jaxformer.runs.run import check_data, evaluator, examples_scored, on_devices, sample_text, warn_of_order
from jaxformer.runs.run_folder import RunFolder, as_it_began, describe, introduce, run_folder
from jaxformer.runs.signals import Interrupted, Signals
from jaxformer.runs.start import first_params
from jaxformer.training.experiment import Experiment
from jaxformer.training.recipe import Recipe, build, row_lengths, trained_weights
from jaxformer.training.step import TrainState, abstract_state, first_state, state_shardings

log = logging.getLogger("jaxformer")


@dataclass(frozen=True, eq=False)
class Job:
    """What the loop needs: an experiment, its data and its devices taken apart."""

    name: str
    steps: int
    log_every: int
    eval_every: int
    save_every: int
    best: str  # the score that ranks checkpoints
    examples: tuple[int, int, int]  # scored by an evaluation, and by the last one; of the whole validation split
    max_skipped: int
    metadata: dict[str, Any]  # of every checkpoint
    batches: Callable[[int], dict[str, Any]]  # step -> this process's rows
    put: Callable[[dict[str, Any]], Any]  # a batch, onto the devices
    step: Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]
    spread: Callable[[TrainState], Any]  # the state as `step` takes it
    gather: Callable[[Any], TrainState]  # back to an ordinary one
    parameters: int  # without those of the objective's own
    evaluate: Callable[..., dict[str, Any]]
    sample: Callable[[Any], str] | None  # params -> text
    profile: str | None  # where a trace of some steps goes
    work: Callable[[dict[str, Any]], float | None]  # a batch -> seconds of its step at all devices' peak, if that is known
    refresh: Callable[[], Any]  # after an evaluation
    explain: Callable[[TrainState, int], Any]  # keeps a bad step, and says what is bad in it
    check: Callable[[Any, int], None]  # raises Diverged where copies of the state differ
    batch_of_state: Callable[[Any, int], Any] | None = None  # in place of `batches` and `put`: (state, step) -> batch
    makes_answers: bool = False  # whether the data have a `generate` of their own


@dataclass(frozen=True)
class Result:
    """How a run ended. `reports` of `train` read it."""

    folder: epath.Path
    name: str
    parameters: int
    validation: dict[str, Any]  # numbers, and texts such as the signature of a score
    baseline: float | None  # unigram entropy of the validation text, nats a token
    sample: str | None


Report = Callable[[Result, Sequence[dict]], str | None]


def train(
    experiment: Experiment, runs: epath.PathLike = "runs", source: Source | None = None, reports: Sequence[Report] = (),
    refresh: Callable[[RunFolder], Any] | None = None, began: float | None = None,
    weights_of: Callable[[str], Callable] | None = None,
) -> Result:  # fmt: skip
    """Trains `experiment` in its folder under `runs` (gs://... too), from the newest good checkpoint if there is one.

    A run that was killed at any moment ends, when it is started again, with the same parameters and the same record as
    one that was not. `source` is the experiment's file, which the folder keeps. `refresh(folder)` is called after each
    evaluation, `reports` at the end with the result and the records: they return a line to print. `began` is the program's
    start by `time.monotonic`. `weights_of(text)` reads a text of `initial` or `references` that names no run of ours. All
    processes call it alike. ConfigError: for what the user can mend; NonFinite: numbers stay bad; Interrupted: SIGTERM.
    """
    began = time.monotonic() if began is None else began
    folder = run_folder(experiment, runs)
    experiment = as_it_began(folder, experiment)
    check_hosts(experiment, source)
    mesh = parallel.run_mesh(experiment.mesh, experiment.batch_size // experiment.accumulation)
    recipe = build(experiment)
    dataset = check(experiment, recipe, mesh, folder)
    known = check_scores(experiment, recipe, dataset)
    is_first = processes.is_first()
    lines = processes.first(lambda: [] if storage.is_file(folder.config) else introduce(experiment, runs))
    with contextlib.ExitStack() as stack:
        manager = stack.enter_context(open_checkpoints(experiment, folder, dataset))  # holds the run's lock
        processes.first(folder.remove_unfinished)
        compilation_cache.enable(runs)
        record = Record(folder.metrics if is_first else None)
        stack.callback(record.close)
        watchdog = stack.enter_context(processes.Watchdog(processes.step_limit()))
        watchdog.phase("the references", patience=math.inf)  # they may have to be downloaded
        frozen = read_references(experiment, mesh, runs, weights_of)

        def begin():
            watchdog.phase("the first parameters", patience=math.inf)  # they may have to be downloaded
            params = first_params(experiment.initial, experiment.model, recipe, runs, weights_of)
            watchdog.phase("the first state")
            return params

        watchdog.phase("the restore")
        state, start = restore(recipe, folder, dataset, manager, record, mesh, begin, frozen.digests)
        # not before: first parameters are on one device, and under a mesh JAX computes nothing with them
        if mesh is not None and experiment.mesh.backend == "jit":
            stack.enter_context(jax.set_mesh(mesh))
        memory.keep()
        write_description(folder, experiment, source, dataset)
        console = open_console(experiment, folder, record)
        console.say_all([*lines, *facts(experiment, recipe, dataset, start, mesh)])
        job = prepare(experiment, recipe, folder, dataset, mesh, refresh if is_first else None, frozen)
        watchdog.phase("the first evaluation" if start < job.steps else "the last evaluation")
        goodput = Goodput(folder.goodput if is_first else None, began)
        if start < job.steps:
            if not known and not was_scored(record.lines, experiment.checkpoints.best):
                try_best(experiment, recipe, dataset, mesh, state, frozen.params)
            state, scores = loop(job, manager, state, start, record, console, watchdog, goodput)
            console.say(goodput.summary())
        else:
            console.say(f"this run is finished: {job.steps} steps are done in {folder.path}")
            scores = job.evaluate(state.best, final=True, step=job.steps)
        watchdog.phase("the end")
        return finish(job, folder, dataset, state, scores, record, console, reports)


def open_checkpoints(experiment: Experiment, folder: RunFolder, dataset) -> checkpoint.Manager:
    """The run's checkpoints, and its lock while they are open."""
    saves = experiment.checkpoints
    place = folder.for_library(folder.checkpoints)
    rank = score_name(experiment, dataset)
    return checkpoint.Manager(place, score=rank, every=saves.every, keep_latest=saves.keep_latest, keep_best=saves.keep_best)


def open_console(experiment: Experiment, folder: RunFolder, record: Record) -> Console:
    """Where the lines of process 0 are printed; its record goes to the user's loggers too."""
    if processes.is_first():
        description = config.describe(experiment)
        record.loggers = open_loggers(experiment.loggers, folder.path, folder.path.name, description)
    return Console(experiment.steps, heard=processes.is_first())


def write_description(folder: RunFolder, experiment: Experiment, source: Source | None, dataset) -> None:
    """Writes what the run is, once, and its tokenizer. Logs what changed since the last start."""
    for change in processes.first(lambda: describe(folder, experiment, source, dataset.digest)):
        log.warning("changed since the last start: %s", change)
    if dataset.tokenizer is not None:
        processes.first(lambda: dataset.tokenizer.save(folder.tokenizer))


def restore(
    recipe: Recipe, folder: RunFolder, dataset, manager, record: Record, mesh, begin, digests: dict[str, str]
) -> tuple[TrainState, int]:
    """The newest good state, or that of the parameters `begin()`, on the mesh; the record goes back to the same step.

    Raises ConfigError where data or references (their `digests`) are not those that the state was trained with.
    """
    shardings = state_shardings(recipe, mesh) if mesh is not None and recipe.mesh.backend == "jit" else None
    restored = manager.restore(abstract_state(recipe, shardings))
    if restored is None:
        record.rewind(0)
        state = jax.block_until_ready(first_state(recipe, shardings, begin()))
        memory.give_back()
        return state, 0
    step, state, metadata = restored
    check_data(folder, metadata, dataset)
    check_references(folder, metadata, digests)
    warn_of_order(folder, metadata, dataset)
    record.rewind(step)
    return state, step


def prepare(
    experiment: Experiment, recipe: Recipe, folder: RunFolder, dataset, mesh, refresh: Callable | None, frozen: Frozen
) -> Job:
    """The parts of an experiment that the loop needs. Functions below this one do not see the experiment."""
    draw = None if refresh is None else partial(BestEffort(refresh, share=0.05), folder)
    size = experiment.batch_size
    rows = processes.local_rows(mesh, size)
    place = place_step(recipe, mesh, rows, size)
    step = with_references(place.step, place.spread(frozen.params)) if frozen.params else place.step
    sample, profile = lambda trained: sample_text(experiment, recipe.weights(trained), dataset), None
    if experiment.profile and processes.is_first():
        profile = place_of_profile(folder)
    kind, work = jax.devices()[0].device_kind, lambda batch: None
    if kind in cost.CHIPS and models.is_config(experiment.model):
        seconds = cache(partial(seconds_at_peak, experiment, 1 if mesh is None else mesh.size, kind))

        def work(batch):
            return seconds(*row_lengths(experiment, batch))

    metadata = {"data_digest": dataset.digest, "order": batching.ORDER, "config": config.describe(experiment)}
    if frozen.digests:
        metadata["references"] = frozen.digests
    count = len(dataset.validation)
    batches = step_batches(experiment, recipe, dataset, place.mesh)

    def batch_of_state(state: Any, step: int) -> Any:
        return place.put(batches(step, place.gather(state).params))

    def explain(state: TrainState, step: int) -> None:
        reproduction.keep(folder, state, step, metadata)
        batch = on_devices(place.mesh, rows, size, batches(step, state.params))
        bad = replace(state, step=jax.numpy.full_like(state.step, step))
        result = reproduction.explain(experiment, bad, batch, frozen.params)
        numbers = f"loss {result['loss']:g}, gradient norm {result['grad_norm']:g}"
        examples = batches.examples(step)
        replay = f"python -m jaxformer evaluate {shlex.quote(str(folder.path))} --replay"
        kept = f"kept in {folder.bad}; `{replay}` computes it again"
        log.error("%s", "\n  ".join([f"step {step}: {numbers}", *result["found"], f"its examples: {examples}", kept]))

    return Job(
        **{name: getattr(experiment, name) for name in ("name", "steps", "log_every", "eval_every", "max_skipped")},
        save_every=experiment.checkpoints.every, best=experiment.checkpoints.best,
        examples=(examples_scored(experiment, count, False), examples_scored(experiment, count, True), count),
        put=place.put, step=step, spread=place.spread, gather=place.gather,
        parameters=parameters.count(recipe.parts.split(recipe.spec)[0]),
        metadata=metadata, batches=batches, explain=BestEffort(explain), check=place.check,
        evaluate=evaluate_on(mesh, experiment, evaluator(experiment, recipe, dataset, mesh, folder.path), frozen.params),
        sample=sample if can_sample(experiment, dataset) else None,
        profile=profile, work=work, refresh=draw or (lambda: None),
        batch_of_state=batch_of_state if batches.reads_state else None,
        makes_answers=generator_of(experiment.data) is not None,
    )  # fmt: skip


def seconds_at_peak(experiment: Experiment, devices: int, kind: str, length: int, source: int | None) -> float | None:
    """What the model's FLOPs of a step would take at the peak of all devices, which must be known.

    All positions count, those of weight 0 too; of frozen weights only what is computed.
    """
    trained = trained_weights(experiment)
    flops = cost.training_flops(experiment.model, length, source, trained) * experiment.batch_size * length
    return flops / (cost.CHIPS[kind].peak * devices)


def loop(
    job: Job, manager, state: TrainState, start: int, record: Record, console: Console, watchdog, goodput: Goodput
) -> tuple[Any, dict]:  # fmt: skip
    """Steps `start` to the end. Metrics of a step are fetched after the next one is on its way, so the device never waits."""
    scores: dict[str, Any] = {}
    state = job.spread(state)
    options = dict(every=job.log_every, last=job.steps - 1, max_skipped=job.max_skipped)
    report = Reporter(record.write, console, **options)
    with (
        Signals() as signals,
        contextlib.ExitStack() as trace,
        batches_of(job, start, record.reached, goodput, watchdog) as next_batch,
    ):
        for step in range(start, job.steps):
            part = "recomputed" if step < record.reached else "step"
            batch = next_batch(state, step)
            goodput.lap("data" if report.is_idle() else part)
            watchdog.beat(step, patience=processes.LONG if step == start else 1.0)  # the first one compiles
            if job.profile is not None and step == start + TRACED[0]:
                trace.enter_context(jax.profiler.trace(job.profile))
            with jax.transfer_guard("disallow"):  # whatever a step needs is on the device already
                state, metrics = job.step(state, batch)
            goodput.lap("compile" if step == start else part)
            if job.profile is not None and step == start + TRACED[1]:
                end_profile(trace, state, console, f"profile of steps {start + TRACED[0]} to {step}: {job.profile}")
            done = step + 1
            last, stop = done == job.steps, signals.after(done)
            evaluates, saves = last or done % job.eval_every == 0, last or stop or saves_after(done, job.save_every)
            try:
                report.later(step, metrics, job.work(batch))
                if evaluates or saves:
                    report.now()
            except NonFinite as bad:
                watchdog.beat(step, patience=processes.LONG, doing="what is bad in it")
                job.explain(job.gather(state), bad.step)
                raise
            goodput.lap(part)
            if not (evaluates or saves):
                continue
            watchdog.beat(step, patience=processes.LONG, doing="evaluation" if evaluates else "save")
            memory.give_back()
            job.check(state, done)  # before anything is made of it
            rank, keep = None, partial(save, job, manager, record, done, state)
            if evaluates:
                with saved_first(keep):
                    scores, compared = evaluate(job, job.gather(state).best, done, record, console)
                    rank = ranked(compared, job.best)
                saves = saves or manager.is_among_best(rank)
                goodput.lap("evaluation")
            if saves:
                keep(rank, wait=last or bool(stop))
                if job.save_every == 1:
                    manager.wait()
                goodput.lap("save")
                goodput.save()
            report.restart_clock()
            if stop and not last:
                raise Interrupted(stop, done)
    return job.gather(state), scores


def saves_after(done: int, every: int) -> bool:
    """Whether a save starts after so many steps: at each multiple of `every`, and half-way to the next.

    A save runs beside the next steps, and counts only when it is complete. When one is killed, the one before it is half of
    `every` older, so that never more than `every` steps are done again.
    """
    return done % every in (0, every // 2)


def save(job: Job, manager, record: Record, done: int, state: TrainState, rank: float | None, wait: bool) -> None:
    """Writes the record, and begins a checkpoint after so many steps. Without its record no checkpoint: lines would be lost."""
    problem = processes.first(lambda: record_problem(record, storage.WAITS if wait else ()))
    if problem is not None:
        number, text = problem
        told = f"step {done} was not saved: its record cannot be written ({text})"
        if wait:
            good = max(manager.steps(), default=0)
            told += f"; mend that, and the same command goes on after step {good}"
            error = OSError(number, told, str(record.path))
            raise error if storage.passes(error) else checkpoint.CheckpointError(told)
        if number not in (errno.ENOSPC, errno.EDQUOT):  # on a full disk the save itself says what it needs
            log.warning("%s; earlier checkpoints are kept", told)
            return
    manager.save(done, job.gather(state), job.metadata, rank, wait=wait)


def record_problem(record: Record, waits: Sequence[float]) -> tuple[int | None, str] | None:
    """(number, words) of the error for which the file of the record lacks lines; None where it has all."""
    error = record.save(waits)
    return None if error is None else (error.errno, str(error))


@contextlib.contextmanager
def saved_first(keep: Callable) -> Iterator[None]:
    """Around an evaluation: where it fails, as a metric of the user's may, the state is kept for the corrected command."""
    try:
        yield
    except Exception as error:
        # several processes save together, and only a mistake in the experiment is one in all of them
        if isinstance(error, ConfigError) or jax.process_count() == 1:
            with contextlib.suppress(checkpoint.CheckpointError, OSError):  # which was said
                keep(None, wait=True)
        raise


def evaluate(job: Job, trained: Any, done: int, record: Record, console: Console) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the scores after `done` steps, those that the record and the ranks of checkpoints take); recorded and printed.

    At the end these two differ where an evaluation scores a part of the split: a record is of the same text throughout.
    """
    scores, (part, last, count) = job.evaluate(trained, final=done == job.steps, step=done), job.examples
    compared = scores | job.evaluate(trained, step=done) if done == job.steps and part != last else scores
    unrecorded = (*UNRECORDED, scores["unit"])
    numbers = {name: value for name, value in compared.items() if not isinstance(value, str)}
    recorded = {f"validation_{name}": numbers[name] for name in numbers if name not in unrecorded}
    record.write(done, recorded | ({"validation_examples": part} if part < count else {}))
    others = {name: value for name, value in numbers.items() if name not in ("loss", *unrecorded)}
    said = f" ({compared['scored']})" if part < count else ""
    of_tokens = {name: numbers[name] for name in ("perplexity",) if name in numbers}
    console.evaluation(done, {"validation_loss": numbers["loss"], **of_tokens, **others}, said)
    if done < job.steps:
        job.refresh()
    return scores, compared


def finish(job: Job, folder: RunFolder, dataset, state, scores, record, console, reports: Sequence[Report]) -> Result:
    """Final scores, a sample, and what `reports` make of the result."""
    baseline = None
    if dataset.tokenizer is not None:
        baseline = processes.first(lambda: batching.unigram_entropy(dataset))

    console.say(in_words(scores, baseline))
    text = None if job.sample is None else job.sample(state.best)
    result = Result(folder.path, job.name, job.parameters, scores, baseline, text)
    if not processes.is_first():
        return result
    if text is not None:
        folder.write(folder.samples / f"step-{job.steps}.txt", text)
        console.say(f"sample:\n{text}")
    folder.write(folder.result, config.to_json(asdict(result), default=str, indent=2))
    for report in reports:
        if line := BestEffort(report)(result, record.lines):
            console.say(line)
    quoted = shlex.quote(str(folder.path))
    prompt = "" if job.makes_answers else " --prompt '...'"
    generate = "" if text is None and not job.makes_answers else f"; python -m jaxformer generate {quoted}{prompt}"
    console.say(f"next: python -m jaxformer evaluate {quoted}{generate}")
    return result
