"""The run: from an experiment to a trained model, through kills, bad data and bad numbers.

Read `train`: it calls the steps below it in their order. `loop` is the training loop.
"""

import contextlib
import errno
import logging
import math
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from etils import epath

from jaxformer import config
from jaxformer.config import Source, storage
from jaxformer.data import batching
from jaxformer.errors import ConfigError
from jaxformer.parallel import processes
from jaxformer.runs import checkpoint, compilation_cache, memory
from jaxformer.runs.batches import batches_of
from jaxformer.runs.best_effort import BestEffort
from jaxformer.runs.checks import ranked, score_name, try_best, was_scored
from jaxformer.runs.comparison import digests_of
from jaxformer.runs.facts import facts
from jaxformer.runs.goodput import Goodput
from jaxformer.runs.job import Job, prepare
from jaxformer.runs.metrics import Record, open_loggers
from jaxformer.runs.profile import Profile
from jaxformer.runs.references import References, check_references, read_references
from jaxformer.runs.reporter import UNRECORDED, Console, NonFinite, Reporter, in_words
from jaxformer.runs.run_folder import RunFolder, describe
from jaxformer.runs.same_data import check_data, warn_of_order
from jaxformer.runs.setup import Setup, introduction, set_up
from jaxformer.runs.signals import Interrupted, Signals
from jaxformer.runs.start import begin
from jaxformer.training.experiment import Experiment
from jaxformer.training.step import TrainState, abstract_state, state_shardings

log = logging.getLogger("jaxformer")


@dataclass(frozen=True)
class Result:
    """How a run ended. `reports` of `train` read it."""

    folder: epath.Path
    name: str
    parameters: int
    validation: dict[str, Any]  # scores, and texts such as the unit of a score
    baseline: float | None  # unigram entropy of the validation text, nats a token
    sample: str | None


Report = Callable[[Result, Sequence[dict]], str | None]


def train(
    experiment: Experiment,
    runs: epath.PathLike = "runs",
    source: Source | None = None,
    reports: Sequence[Report] = (),
    refresh: Callable[[RunFolder], Any] | None = None,
    began: float | None = None,
    weights_of: Callable[[str], Callable] | None = None,
) -> Result:
    """Trains `experiment` in its folder under `runs`, from the newest good checkpoint if any.

    A run that was killed at any moment and started again ends with the same parameters and the same
    record as one that was not. `runs` may be gs://... too. `source` is the experiment's file; the
    folder keeps a copy. `refresh(folder)` is called after each evaluation. `reports` are called at
    the end with the result and the records; they return a line to print. `began` is the program's
    start by `time.monotonic`. `weights_of(text)` reads a text of `initial` or `references` that
    names no run of ours.

    All processes call it alike. Raises ConfigError for what the user can mend, NonFinite if numbers
    stay bad, and Interrupted after SIGTERM.
    """
    began = time.monotonic() if began is None else began
    setup = set_up(experiment, runs, source, weights_of)
    folder = setup.folder
    is_first = processes.is_first()
    other_runs = processes.first(lambda: introduction(setup))
    with contextlib.ExitStack() as stack:
        manager = stack.enter_context(open_checkpoints(setup))  # holds the run's lock
        processes.first(folder.remove_unfinished)
        compilation_cache.enable(runs)
        record = Record(folder.metrics if is_first else None)
        stack.callback(record.close)
        watchdog = stack.enter_context(processes.Watchdog(processes.step_limit()))
        watchdog.phase("the references", patience=math.inf)  # they may have to be downloaded
        references = read_references(setup.experiment, setup.mesh, runs, weights_of)
        watchdog.phase("the restore")
        state, start = restore(setup, references, manager, record, watchdog)
        # Not earlier: first parameters are on one device, and JAX cannot compute with them under
        # a mesh.
        if setup.split_mesh is not None:
            stack.enter_context(jax.set_mesh(setup.split_mesh))
        memory.keep()
        write_description(setup)
        console = open_console(setup, record)
        console.say_all([*other_runs, *facts(setup, start)])
        job = prepare(setup, references, refresh if is_first else None)
        is_finished = start >= job.steps
        watchdog.phase("the last evaluation" if is_finished else "the first evaluation")
        goodput = Goodput(folder.goodput if is_first else None, began)
        if is_finished:
            console.say(f"this run is finished: {job.steps} steps are done in {folder.path}")
            scores = job.evaluate(state.best, final=True, step=job.steps)
        else:
            try_unknown_score(setup, references, record, state)
            state, scores = loop(job, manager, state, start, record, console, watchdog, goodput)
            console.say(goodput.summary())
        watchdog.phase("the end")
        return finish(job, setup, state, scores, record, console, reports)


def open_checkpoints(setup: Setup) -> checkpoint.Manager:
    """The run's checkpoints. The run is locked while they are open."""
    folder = setup.folder
    saves = setup.experiment.checkpoints
    return checkpoint.Manager(
        folder.for_library(folder.checkpoints),
        score=score_name(setup.experiment, setup.dataset),
        every=saves.every,
        keep_latest=saves.keep_latest,
        keep_best=saves.keep_best,
    )


def restore(
    setup: Setup, references: References, manager: checkpoint.Manager, record: Record, watchdog: Any
) -> tuple[TrainState, int]:
    """(state, steps done): the newest good checkpoint, or else the state that the run begins with.

    The state is split over the mesh, and the record goes back to the same step. Raises ConfigError
    where data or references are not those of the checkpoint's training.
    """
    mesh = setup.split_mesh
    shardings = None if mesh is None else state_shardings(setup.recipe, mesh)
    restored = manager.restore(abstract_state(setup.recipe, shardings))
    if restored is None:
        state, start = begin(setup, shardings, watchdog)
        record.rewind(start)
        memory.give_back()
        return state, start
    step, state, metadata = restored
    check_data(setup.folder, metadata, setup.dataset)
    check_references(setup.folder, metadata, references.digests)
    warn_of_order(setup.folder, metadata, setup.dataset)
    record.rewind(step)
    return state, step


def write_description(setup: Setup) -> None:
    """Writes what the run is, and its tokenizer. Logs what changed since the last start."""
    folder = setup.folder
    dataset = setup.dataset
    changes = processes.first(
        lambda: describe(folder, setup.experiment, setup.source, digests_of(dataset, folder))
    )
    for change in changes:
        log.warning("changed since the last start: %s", change)
    if dataset.tokenizer is not None:
        processes.first(lambda: dataset.tokenizer.save(folder.tokenizer))


def open_console(setup: Setup, record: Record) -> Console:
    """The console of process 0's lines; opens the user's loggers beside its record."""
    is_first = processes.is_first()
    if is_first:
        path = setup.folder.path
        description = config.describe(setup.experiment)
        record.loggers = open_loggers(setup.experiment.loggers, path, path.name, description)
    return Console(setup.experiment.steps, heard=is_first)


def try_unknown_score(
    setup: Setup, references: References, record: Record, state: TrainState
) -> None:
    """Tries the user's metrics where no earlier start shows whether they give the best's score.

    Raises ConfigError where they do not.
    """
    experiment = setup.experiment
    if setup.score_is_known or was_scored(record.lines, experiment.checkpoints.best):
        return
    try_best(experiment, setup.recipe, setup.dataset, setup.mesh, state, references.params)


class Due(NamedTuple):
    """What is due after `done` steps."""

    done: int
    evaluates: bool
    saves: bool
    is_end: bool  # the run ends or stops here, so it waits until the save is complete


def loop(
    job: Job,
    manager: Any,
    state: TrainState,
    start: int,
    record: Record,
    console: Console,
    watchdog: Any,
    goodput: Goodput,
) -> tuple[Any, dict]:
    """Does the steps from `start` to the end. Returns the last state and the last scores.

    The metrics of a step are fetched after the next one is dispatched, so the device never waits.
    """
    scores: dict[str, Any] = {}
    state = job.spread(state)
    options = dict(every=job.log_every, last=job.steps - 1, max_skipped=job.max_skipped)
    report = Reporter(record.write, console, **options)
    with (
        Signals() as signals,
        Profile(job.profile, start, console) as profile,
        batches_of(job, start, record.reached, goodput, watchdog) as next_batch,
    ):
        for step in range(start, job.steps):
            part = "recomputed" if step < record.reached else "step"
            batch = next_batch(state, step)
            goodput.lap("data" if report.is_idle() else part)
            # The first step compiles.
            watchdog.beat(step, patience=processes.LONG if step == start else 1.0)
            profile.before(step)
            with jax.transfer_guard("disallow"):  # all that a step needs is on the device already
                state, metrics = job.step(state, batch)
            goodput.lap("compile" if step == start else part)
            profile.after(step, state)
            stop = signals.after(step + 1)
            due = due_after(job, step + 1, stop)
            with explained(job, state, step, watchdog):
                report.later(step, metrics, job.work(batch))
                if due.evaluates or due.saves:
                    report.now()
            goodput.lap(part)
            if due.evaluates or due.saves:
                doing = "evaluation" if due.evaluates else "save"
                watchdog.beat(step, patience=processes.LONG, doing=doing)
                scores = evaluate_and_save(job, manager, state, due, record, console, goodput)
                report.restart_clock()
            if stop and due.done < job.steps:
                raise Interrupted(stop, due.done)
    return job.gather(state), scores


def due_after(job: Job, done: int, stop: int) -> Due:
    """What is due after `done` steps; `stop` is the signal that stops the run, 0: none."""
    is_last = done == job.steps
    is_end = is_last or bool(stop)
    return Due(
        done,
        evaluates=is_last or done % job.eval_every == 0,
        saves=is_end or saves_after(done, job.save_every),
        is_end=is_end,
    )


def saves_after(done: int, every: int) -> bool:
    """Whether a save starts after `done` steps: at each multiple of `every`, and half-way between.

    A save runs beside the next steps and counts only when it is complete. If one is killed, the
    save before it is only `every`/2 steps older, so that never more than `every` steps are done
    again.
    """
    return done % every in (0, every // 2)


@contextlib.contextmanager
def explained(job: Job, state: Any, step: int, watchdog: Any) -> Iterator[None]:
    """Around a report: if steps stay bad, keeps the bad one and logs what is bad, then raises."""
    try:
        yield
    except NonFinite as bad:
        watchdog.beat(step, patience=processes.LONG, doing="what is bad in it")
        job.explain(job.gather(state), bad.step)
        raise


def evaluate_and_save(
    job: Job,
    manager: Any,
    state: Any,
    due: Due,
    record: Record,
    console: Console,
    goodput: Goodput,
) -> dict[str, Any]:
    """Does what is due. Returns the scores; empty without an evaluation."""
    memory.give_back()
    job.check(state, due.done)  # before anything uses the state
    scores: dict[str, Any] = {}
    rank = None
    saves = due.saves
    keep = partial(save, job, manager, record, due.done, state)
    if due.evaluates:
        with saved_first(keep):
            scores, compared = evaluate(job, job.gather(state).best, due.done, record, console)
            rank = ranked(compared, job.best)
        saves = saves or manager.is_among_best(rank)
        goodput.lap("evaluation")
    if saves:
        keep(rank, wait=due.is_end)
        if job.save_every == 1:
            manager.wait()
        goodput.lap("save")
        goodput.save()
    return scores


def save(
    job: Job, manager, record: Record, done: int, state: TrainState, rank: float | None, wait: bool
) -> None:
    """Writes the record, and begins a checkpoint after `done` steps.

    If the record cannot be written there is no checkpoint, because lines would be lost.
    """
    problem = processes.first(lambda: record_problem(record, storage.WAITS if wait else ()))
    if problem is not None:
        number, text = problem
        told = f"step {done} was not saved: its record cannot be written ({text})"
        if wait:
            good = max(manager.steps(), default=0)
            told += f"; mend that, and the same command goes on after step {good}"
            error = OSError(number, told, str(record.path))
            raise error if storage.passes(error) else checkpoint.CheckpointError(told)
        # On a full disk the save itself says how much space it needs.
        if number not in (errno.ENOSPC, errno.EDQUOT):
            log.warning("%s; earlier checkpoints are kept", told)
            return
    manager.save(done, job.gather(state), job.metadata, rank, wait=wait)


def record_problem(record: Record, waits: Sequence[float]) -> tuple[int | None, str] | None:
    """(number, words) of the error that keeps lines out of the record's file; None: all are in."""
    error = record.save(waits)
    return None if error is None else (error.errno, str(error))


@contextlib.contextmanager
def saved_first(keep: Callable) -> Iterator[None]:
    """Around an evaluation: if it fails, as a user's metric may, saves the state, then raises.

    So the corrected command goes on from there.
    """
    try:
        yield
    except Exception as error:
        # Several processes save together, so all must have failed. Only a mistake in the experiment
        # fails in all of them.
        if isinstance(error, ConfigError) or jax.process_count() == 1:
            with contextlib.suppress(checkpoint.CheckpointError, OSError):  # was logged
                keep(None, wait=True)
        raise


def evaluate(
    job: Job, trained: Any, done: int, record: Record, console: Console
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Evaluates, records and prints: (the scores after `done` steps, those that are compared).

    The record and the ranks of checkpoints take the second ones. Where evaluations score a part of
    the split, the two differ at the end: a record is about the same text throughout.
    """
    is_last = done == job.steps
    examples, examples_of_last, all_examples = job.examples
    scores = job.evaluate(trained, final=is_last, step=done)
    compared = scores
    if is_last and examples != examples_of_last:
        compared = scores | job.evaluate(trained, step=done)
    numbers = {name: value for name, value in compared.items() if not isinstance(value, str)}
    unrecorded = (*UNRECORDED, scores["unit"])
    recorded = {f"validation_{name}": numbers[name] for name in numbers if name not in unrecorded}
    shown = {"validation_loss": numbers["loss"]}
    if "perplexity" in numbers:
        shown["perplexity"] = numbers["perplexity"]
    for name in numbers:
        if name not in ("loss", *unrecorded):
            shown[name] = numbers[name]
    scored = ""
    if examples < all_examples:
        recorded["validation_examples"] = examples
        scored = f" ({compared['scored']})"
    record.write(done, recorded)
    console.evaluation(done, shown, scored)
    if not is_last:
        job.refresh()
    return scores, compared


def finish(
    job: Job,
    setup: Setup,
    state: TrainState,
    scores: dict[str, Any],
    record: Record,
    console: Console,
    reports: Sequence[Report],
) -> Result:
    """Prints final scores and a sample, writes the result, and calls `reports`."""
    folder = setup.folder
    dataset = setup.dataset
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
    console.say(f"next: {next_commands(job, result)}")
    return result


def next_commands(job: Job, result: Result) -> str:
    """The commands that go on from a finished run."""
    folder = shlex.quote(str(result.folder))
    evaluate = f"python -m jaxformer evaluate {folder}"
    if job.makes_answers:
        return f"{evaluate}; python -m jaxformer generate {folder}"
    if result.sample is not None:
        return f"{evaluate}; python -m jaxformer generate {folder} --prompt '...'"
    return evaluate
