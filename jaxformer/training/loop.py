"""The run: from an experiment to a trained model, through kills, bad data and bad numbers."""

import contextlib
import json
import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxformer import models, parallel
from jaxformer import params as parameters
from jaxformer.analysis import figures
from jaxformer.config import ConfigError, to_dict
from jaxformer.data import batching
from jaxformer.decoding import generate
from jaxformer.evaluation.perplexity import perplexity
from jaxformer.models.config import Learned
from jaxformer.parallel import pmap, processes
from jaxformer.training import checkpoint, optimizer
from jaxformer.training.experiment import Experiment, Muon
from jaxformer.training.folder import RunFolder, claim, describe, run_folder, write_atomically
from jaxformer.training.metrics import Console, Record, Reporter, close_all, open_loggers, write_all
from jaxformer.training.signals import Interrupted, Signals
from jaxformer.training.state import TrainState, init_state, state_shardings
from jaxformer.training.step import make_evaluate, make_train_step, staged

log = logging.getLogger("jaxformer")
LONG = 10.0  # a compilation, an evaluation or a save may take this many times as long as the watchdog grants a step


@dataclass(frozen=True)
class Result:
    folder: Path
    validation: dict[str, float]
    baseline: float | None  # unigram entropy of the validation text, nats a token
    sample: str | None


def train(experiment: Experiment, runs: Path = Path("runs")) -> Result:
    """Trains `experiment` in its folder under `runs`, from the newest good checkpoint if there is one.

    A run that was killed at any moment ends, when it is started again, with the same parameters and the same record as
    one that was not. Raises ConfigError for what the user can mend, NonFinite when the numbers stay bad, Interrupted on
    SIGTERM. Several processes (`parallel.processes`) call it alike; the first one prints and writes.
    """
    folder = run_folder(experiment, runs)
    mesh = parallel.run_mesh(experiment.mesh, experiment.batch_size // experiment.accumulation)
    staged(experiment)  # refuses a stack that has no stages
    if mesh is not None:
        state_shardings(experiment, mesh)  # refuses what does not divide
    if jax.process_count() > 1 and (
        mesh is None or mesh.size < jax.device_count() or experiment.mesh.backend == "pmap"
    ):
        raise ConfigError(
            f"mesh={experiment.mesh}: several processes need backend=jit and all of their {jax.device_count()} devices; "
            "try --mesh.data=-1"
        )
    dataset = open_data(experiment)  # before anything is written: most mistakes show here
    if dataset.tokenizer is not None:
        prompt_of(experiment, dataset.tokenizer)
    if dataset.digest != processes.first(lambda: dataset.digest):
        raise ConfigError("the data here are not those of process 0; give every host the same files")
    with contextlib.ExitStack() as claimed:
        processes.first(lambda: claimed.enter_context(claim(folder)))
        use_compilation_cache(runs)
        keep_memory()
        with (
            checkpoint.open_manager(
                folder.checkpoints,
                keep_latest=experiment.checkpoints.keep_latest,
                keep_best=experiment.checkpoints.keep_best,
            ) as manager,
            contextlib.nullcontext() if mesh is None or experiment.mesh.backend == "pmap" else jax.set_mesh(mesh),
        ):
            return _run(experiment, folder, dataset, manager, mesh)


def open_data(experiment: Experiment):
    """The experiment's dataset, checked against its model."""
    dataset = batching.open_dataset(experiment.data, experiment.model.context_length)
    if dataset.vocab_size > experiment.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={experiment.model.vocab_size} is too small: the data have {dataset.vocab_size} tokens; "
            f"set --model.vocab-size={dataset.vocab_size}"
        )
    return dataset


def use_compilation_cache(runs: Path) -> None:
    """Compiled programs persist beside the runs, so the second start of an experiment does not compile."""
    jax.config.update("jax_compilation_cache_dir", str((runs / ".compiled").resolve()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def keep_memory() -> None:
    """On CPU, lets the process keep freed memory instead of giving it back after every step and faulting it in again.

    XLA allocates a program's temporaries anew for each call; glibc returns such large blocks to the kernel at once. Keeping
    them took a third off the time of a small step. Elsewhere than on glibc this does nothing.
    """
    if jax.default_backend() != "cpu":
        return
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        largest = 2**31 - 1
        mallopt(-1, largest)  # M_TRIM_THRESHOLD
        mallopt(-4, 0)  # M_MMAP_MAX


def _run(experiment: Experiment, folder: RunFolder, dataset, manager, mesh) -> Result:
    first = processes.is_first()
    record = Record(folder.metrics if first else None)
    state, start = restore(experiment, folder, dataset, manager, record, mesh)
    for change in processes.first(lambda: describe(folder, experiment, dataset.digest)):
        log.warning("config differs from the one this run began with: %s", change)
    if dataset.tokenizer is not None:
        processes.first(lambda: dataset.tokenizer.save(folder.tokenizer))
    console = Console(experiment.steps, start, heard=first)
    names = experiment.loggers if first else ()
    loggers = open_loggers(names, folder.path, folder.path.name, to_dict(experiment))
    try:
        introduce(experiment, dataset, start, console)
        if mesh is not None:
            shape = " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1)
            count = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
            console.say(f"mesh: {shape} of {mesh.size} devices{count}{idle(experiment.mesh, mesh)}")
        evaluate = evaluator(experiment, dataset, None if experiment.mesh.backend == "pmap" else mesh)
        with processes.Watchdog(processes.step_limit()) as watchdog:
            if start < experiment.steps:
                write = partial(write_all, record, loggers)
                state, scores = loop(
                    experiment, dataset, manager, state, start, evaluate, write, console, mesh, watchdog
                )
            else:
                console.say(f"this run is finished: {experiment.steps} steps are done in {folder.path}")
                scores = evaluate(best_params(state))
            watchdog.beat(experiment.steps, patience=LONG)
            return finish(experiment, folder, dataset, state, scores, record, console)
    finally:
        console.close()
        record.close()
        close_all(loggers)


def restore(experiment: Experiment, folder, dataset, manager, record: Record, mesh) -> tuple[TrainState, int]:
    """The newest good state, or the first one, on the mesh; the record goes back to the same step."""
    abstract, places = jax.eval_shape(partial(init_state, experiment)), None
    if mesh is not None and experiment.mesh.backend == "jit":
        places = state_shardings(experiment, mesh)
        abstract = jax.tree.map(
            lambda a, place: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), abstract, places
        )
    restored = manager.restore(abstract)
    if restored is None:
        record.rewind(0)
        return jax.jit(partial(init_state, experiment), out_shardings=places)(), 0
    step, state, metadata = restored
    check_data(folder, metadata, dataset)
    record.rewind(step)
    return state, step


def idle(config: parallel.Mesh, mesh) -> str:
    """The pipeline's bubble in words, where there is a pipeline."""
    stages = mesh.shape["stage"]
    share = parallel.bubble(stages, config.microbatches or stages, config.repeats)
    return f"; the pipeline idles {share:.1%} of a step" if stages > 1 else ""


def check_data(folder: RunFolder, metadata: dict, dataset) -> None:
    if metadata["data_digest"] != dataset.digest:
        raise ConfigError(
            f"{folder.path}: the data changed since this run began (digest {metadata['data_digest'][:12]}, now "
            f"{dataset.digest[:12]}); restore the file, or start a new run with another --name"
        )


def introduce(experiment: Experiment, dataset, start: int, console: Console) -> None:
    spec = models.spec(experiment.model)
    console.say(
        f"{experiment.name}: {parameters.count(spec):,} parameters, {jax.devices()[0].device_kind}, {experiment.precision}"
    )
    console.say(f"data: {dataset.description}")
    if isinstance(experiment.optimizer, Muon) or experiment.frozen is not None:
        for path, route in optimizer.routes(experiment.optimizer, spec, experiment.frozen).items():
            console.say(f"  {path}: {route}")
    if start:
        console.say(f"resuming after step {start}")


def on_devices(mesh, own, size: int, batch: dict[str, Any]) -> dict[str, jax.Array]:
    """A batch on the device, or on the devices of a mesh; `own` are the rows of `size` that this process has, None for all."""
    if own is not None:
        return processes.global_batch(mesh, size, batch)
    return jax.device_put(batch, None if mesh is None else parallel.rows(mesh, batch))


def evaluator(experiment: Experiment, dataset, mesh=None) -> Callable[[Any], dict[str, float]]:
    """Scores parameters on the validation split, without label smoothing or auxiliary losses."""
    plain = replace(experiment, label_smoothing=0.0, z_loss=0.0)
    evaluate = jax.jit(make_evaluate(plain))
    size = experiment.batch_size
    own = processes.own_rows(mesh, size)
    batches = batching.validation_batches(dataset.validation, size, own)
    count = len(batches) if experiment.eval_batches is None else min(experiment.eval_batches, len(batches))

    return lambda params: perplexity(evaluate, params, (on_devices(mesh, own, size, batches[i]) for i in range(count)))


def score(experiment: Experiment, dataset, params: Any) -> dict[str, float]:
    return evaluator(experiment, dataset)(params)


def best_params(state: TrainState) -> Any:
    """What is scored and sampled from: the averaged parameters where there are any."""
    return state.params if state.ema is None else state.ema


def load_params(folder: RunFolder, experiment: Experiment, step: int | None = None) -> tuple[int, Any, dict]:
    """(step, parameters, metadata) of a run's checkpoint, the newest by default; averaged parameters where there are any."""
    abstract = jax.eval_shape(partial(init_state, experiment))
    part = "params" if abstract.ema is None else "ema"
    return checkpoint.restore_params(folder.checkpoints, abstract.params, step, part=part)


def loop(
    experiment, dataset, manager, state, start, evaluate, write, console, mesh, watchdog
) -> tuple[TrainState, dict[str, float]]:
    """Steps `start` to the end: the last state and its scores.

    Metrics of a step are fetched after the next one is on its way, so the device never waits.
    """
    scores: dict[str, float] = {}
    own = processes.own_rows(mesh, experiment.batch_size)
    source = batching.batches(dataset.train, experiment.batch_size, experiment.seed, own)
    state, step_function, put, whole = stepping(experiment, mesh, own, state)
    report = Reporter(experiment, write, console, 1 if mesh is None else mesh.size)
    with (
        Signals() as signals,
        batching.prefetch(source.__getitem__, start, experiment.steps, put=put) as batches,
    ):
        for step, batch in enumerate(batches, start):
            watchdog.beat(step, patience=LONG if step == start else 1.0)  # the first one compiles
            with jax.transfer_guard("disallow"):  # whatever a step needs is on the device already
                state, metrics = step_function(state, batch)
            report.later(step, metrics)
            done = step + 1
            last = done == experiment.steps
            validation = None
            if last or done % experiment.eval_every == 0:
                report.now()
                watchdog.beat(step, patience=LONG)
                scores = evaluate(best_params(whole(state)))
                validation = scores["loss"]
                write(done, {"validation_loss": validation, "validation_accuracy": scores["accuracy"]})
                console.log(done, {"validation_loss": validation, "perplexity": scores["perplexity"]})
                report.restart_clock()
            stop = signals.after(done)
            if last or stop or done % experiment.checkpoints.every == 0:
                report.now()
                watchdog.beat(step, patience=LONG)
                metadata = {"data_digest": dataset.digest, "config": to_dict(experiment)}
                manager.save(done, whole(state), metadata, validation, wait=last or bool(stop))
                report.restart_clock()
            if stop and not last:
                raise Interrupted(stop, done)
    return whole(state), scores


def stepping(experiment: Experiment, mesh, own, state: TrainState):
    """(the state as the steps have it, the step, where a batch goes, what makes of such a state an ordinary one)."""
    if experiment.mesh.backend == "pmap" and mesh is not None:
        devices = mesh.devices.ravel().tolist()
        step = pmap.step(make_train_step(experiment, pmap.AXIS), devices)
        return pmap.replicate(state, devices), step, partial(pmap.cut, devices=devices), pmap.first
    places = None if mesh is None else (jax.tree.map(lambda leaf: leaf.sharding, state), None)
    step = jax.jit(make_train_step(experiment), donate_argnums=0, out_shardings=places)
    return state, step, partial(on_devices, mesh, own, experiment.batch_size), lambda state: state


def finish(experiment, folder, dataset, state, scores, record, console) -> Result:
    """Final scores, a sample and the loss curve."""
    baseline = None
    if dataset.tokenizer is not None:
        baseline = processes.first(lambda: batching.unigram_entropy(dataset))
    console.say(
        f"validation loss {scores['loss']:.4f} nats a token, perplexity {scores['perplexity']:.3f}, "
        f"accuracy {scores['accuracy']:.2%}" + ("" if baseline is None else f" (unigram entropy {baseline:.4f})")
    )
    text = None
    if dataset.tokenizer is not None:
        text = sample(experiment, dataset.tokenizer, best_params(state))
    result = Result(folder.path, scores, baseline, text)
    if not processes.is_first():
        return result
    if text is not None:
        write_atomically(folder.samples / f"step-{experiment.steps}.txt", text)
        console.say(f"sample:\n{text}")
    title = f"{experiment.name}: {parameters.count(state.params):,} parameters"
    figures.loss_curve(record.lines, folder.loss_figure, title, baseline)
    write_atomically(folder.path / "result.json", json.dumps(asdict(result), default=str, indent=2))
    console.say(f"loss curve: {folder.loss_figure}")
    return result


def prompt_of(experiment: Experiment, tokenizer) -> list[int]:
    """The sample's prompt as tokens, checked before a step is spent. None starts from token 0."""
    text, config = experiment.sample.prompt, experiment.model
    prompt = [0] if text is None else tokenizer.encode(text)
    if not prompt:
        raise ConfigError("sample.prompt is empty; give at least one character, or None")
    if isinstance(config.positions, Learned) and len(prompt) >= config.context_length:
        raise ConfigError(
            f"sample.prompt is {len(prompt)} tokens, which leaves no room in {config.context_length} learned positions"
        )
    return prompt


def sample(experiment: Experiment, tokenizer, params: Any) -> str:
    """The experiment's prompt and what the model makes of it."""
    config, how = experiment.model, experiment.sample
    prompt = prompt_of(experiment, tokenizer)
    room = config.context_length - len(prompt) if isinstance(config.positions, Learned) else math.inf
    tokens = int(min(how.tokens, room))
    dtype = jax.numpy.dtype(experiment.precision)
    (out,) = generate(config, params, [prompt], tokens, how=how.how, key=jax.random.key(experiment.seed), dtype=dtype)
    return tokenizer.decode([*prompt, *out])
