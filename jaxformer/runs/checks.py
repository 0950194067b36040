"""Checks before the first step: hosts, mesh, data, and the scores that rank checkpoints."""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from jaxformer import config, models, parallel, sharding
from jaxformer.config import Source, storage
from jaxformer.data import batching
from jaxformer.errors import ConfigError
from jaxformer.evaluation.perplexity import has_perplexity
from jaxformer.parallel import processes
from jaxformer.params import Tree
from jaxformer.runs.initial import check_initial
from jaxformer.runs.questions import asks_first_question, question_of_sample, writes_text
from jaxformer.runs.run_folder import RunFolder, compare
from jaxformer.runs.scores import evaluator, examples_scored, metric_name, new_names, only_final
from jaxformer.training.experiment import Checkpoints, Experiment
from jaxformer.training.recipe import Recipe
from jaxformer.training.step import TrainState, abstract_references, abstract_state, state_shardings

log = logging.getLogger("jaxformer")


def check(
    experiment: Experiment, recipe: Recipe, mesh: jax.sharding.Mesh | None, folder: RunFolder
) -> Any:
    """The experiment's dataset. Raises ConfigError for what would fail later in the run.

    Nothing has been written yet.
    """
    check_initial(experiment, recipe)
    check_precision(experiment.precision, jax.devices()[0])
    check_axes(recipe.spec, folder)
    check_mesh(experiment, recipe, mesh)
    dataset = open_data(experiment)
    if can_sample(experiment, dataset):
        question_of_sample(experiment, dataset)
    if dataset.digest != processes.first(lambda: dataset.digest, "the comparison of data"):
        raise ConfigError(
            "the data here are not those of process 0; give every host the same files"
        )
    return dataset


def check_hosts(experiment: Experiment, source: Source | None) -> None:
    """Raises ConfigError where the experiment here differs from that of process 0.

    Otherwise one process would wait for what another never does.
    """
    code = None if source is None else (source.text, sorted(source.imports.values()))
    here = json.loads(config.to_json([config.describe(experiment), code], default=str))
    there = processes.first(lambda: here, "the comparison of experiments")
    if here != there:
        different = "; ".join(compare(there[0], here[0])) or "its file, or one that it imports"
        advice = "give every host the same file and options"
        raise ConfigError(f"the experiment here is not that of process 0: {different}; {advice}")


def check_mesh(experiment: Experiment, recipe: Recipe, mesh: jax.sharding.Mesh | None) -> None:
    """Raises ConfigError where parameters do not divide, or a process has no part of the mesh."""
    if mesh is not None:
        state_shardings(recipe, mesh)  # raises for what does not divide
        abstract_references(recipe, mesh)
        if models.is_config(experiment.model):
            parallel.check_context(dict(mesh.shape), models.context_lengths(experiment.model))
    if jax.process_count() > 1 and (
        mesh is None or mesh.size < jax.device_count() or experiment.mesh.backend == "pmap"
    ):
        needed = (
            f"several processes need backend=jit and all of their {jax.device_count()} devices;"
            " try --mesh.data=-1"
        )
        raise ConfigError(f"mesh={experiment.mesh}: {needed}")


def check_precision(precision: str, device: Any) -> None:
    """Raises ConfigError for float8 on a chip without products of 8-bit floats.

    A CPU computes the same numbers in bfloat16, slowly; this is logged.
    """
    if precision != "float8":
        return
    if device.platform == "cpu":
        log.info("precision=float8 on a CPU: products of rounded numbers in bfloat16, not faster")
        return
    if device.platform == "tpu":
        has_kernel = device.device_kind in ("TPU7x",)
    else:
        capability = getattr(device, "compute_capability", None) or "0.0"
        has_kernel = tuple(map(int, str(capability).split("."))) >= (8, 9)
    if not has_kernel:
        raise ConfigError(
            f"precision=float8: {device.device_kind} has no products of 8-bit floats; "
            "NVIDIA has them from compute capability 8.9 (L4, H100), TPUs from TPU7x; "
            "expected precision=bfloat16"
        )


def check_axes(spec: Tree, folder: RunFolder) -> None:
    """Raises ConfigError for a parameter with an axis that no sharding rule knows.

    A typo in an axis would leave the parameter whole on each device. A run that began before this
    check existed goes on, with a warning, because its file cannot be changed.
    """
    problem = sharding.unknown_axis(spec)
    if problem is None:
        return
    if not processes.first(lambda: storage.is_file(folder.config)):
        raise ConfigError(problem)
    log.warning("%s", problem)


def open_data(experiment: Experiment):
    """The experiment's dataset, checked against its model."""
    dataset = batching.open_dataset(experiment.data, experiment.model)
    size = getattr(getattr(experiment.model, "decoder", experiment.model), "vocab_size", None)
    needed = dataset.vocab_size
    if size is not None and needed is not None and needed > size:
        raise ConfigError(
            f"model.vocab_size={size} is too small: the data have {needed} tokens;"
            f" set it to {needed}"
        )
    return dataset


def check_scores(experiment: Experiment, recipe: Recipe, dataset) -> bool:
    """Whether it is known, before any step, that evaluations give the score that ranks checkpoints.

    False where a metric of the user's may give it: its names are unknown before it is called.
    Raises ConfigError for a score that nothing gives, or that only the end gives, and for what the
    metrics would refuse at the end.
    """
    every_time: list[str] = []  # the scores that the metrics of every evaluation give
    taken = ["step", "loss", "perplexity", "bits", "unit"]
    is_known = True
    for metric in experiment.metrics:
        names = metric.check(experiment.model, dataset) if hasattr(metric, "check") else None
        taken += new_names(metric, dict.fromkeys(names or ()), taken)
        if only_final(metric):
            continue
        if names is None:
            is_known = False
        else:
            every_time += names
    best = experiment.checkpoints.best.removeprefix("-")
    if best == "loss":
        return True
    batch = batching.ValidationBatches(dataset.validation, experiment.batch_size)[0]
    trained = abstract_state(recipe).params
    references = abstract_references(recipe)
    sums = jax.eval_shape(recipe.eval_loss, trained, batch, jax.random.key(0), 0, references)
    found = [
        "loss",
        *(("perplexity", "bits") if has_perplexity(sums) else ()),
        *sums.metrics,
        *every_time,
    ]
    if best == sums.unit:
        return True
    if best in found or best.rpartition("/")[0] in found:  # a metric with a value for each layer
        return True
    if not is_known:
        return False
    problem = (
        f"checkpoints.best={experiment.checkpoints.best!r}: an evaluation here gives"
        f" {', '.join(found)}"
    )
    raise ConfigError(f"{problem}; name one, or one with a minus{scores_of_the_end(experiment)}")


def scores_of_the_end(experiment: Experiment) -> str:
    """Advice about metrics that score only at the end, so rank no checkpoint; may be empty."""
    late = [metric_name(metric) for metric in experiment.metrics if only_final(metric)]
    return f"; {', '.join(late)} scores at the end alone, unless only_final=False" if late else ""


def score_name(experiment: Experiment, dataset) -> str:
    """The name of what ranks a checkpoint: the score, the text, and how the metrics were made.

    Ranks of another name are not compared with it.
    """
    count = len(dataset.validation)
    best = experiment.checkpoints.best
    name = f"{best} of {examples_scored(experiment, count, whole=False)} examples"
    if not experiment.metrics or best.removeprefix("-") == "loss":
        return name
    described = config.to_json(config.describe(experiment)["metrics"], sort_keys=True, default=str)
    return f"{name}, metrics {hashlib.sha256(described.encode()).hexdigest()[:8]}"


def kept_in_words(saves: Checkpoints) -> str:
    """Which checkpoints a run keeps, and which score ranks them, in words."""
    latest = f"every {saves.every:,} steps, of which the last {saves.keep_latest} are kept"
    if saves.keep_best == 0:
        return latest
    order = "highest" if saves.best.startswith("-") else "lowest"
    return f"{latest}, and the {saves.keep_best} of {order} {saves.best.removeprefix('-')}"


def was_scored(records: Sequence[dict], best: str) -> bool:
    """Whether an evaluation of an earlier start gave this score."""
    return any(f"validation_{best.removeprefix('-')}" in record for record in records)


def try_best(
    experiment: Experiment, recipe: Recipe, dataset, mesh, state: TrainState, references: Tree
) -> None:
    """Scores one example to learn the names of the user's metrics.

    Raises ConfigError where none of them is `checkpoints.best`.
    """
    one = replace(experiment, eval_examples=1)
    evaluate = evaluate_on(mesh, experiment, evaluator(one, recipe, dataset, mesh), references)
    try:
        ranked(evaluate(state.best), experiment.checkpoints.best)
    except ConfigError as error:
        raise ConfigError(f"{error}{scores_of_the_end(experiment)}") from None


def evaluate_on(
    mesh: jax.sharding.Mesh | None,
    experiment: Experiment,
    evaluate: Callable,
    references: Tree = None,
) -> Callable:
    """An evaluation of the training's parameters.

    Under pmap it gets one copy, and places that on all devices of the mesh again.
    """
    if mesh is None or experiment.mesh.backend != "pmap":
        return partial(evaluate, references=references)
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def evaluate_copies(trained: Any, **options: Any) -> dict[str, Any]:
        with jax.set_mesh(mesh):
            trained, frozen = jax.device_put((trained, references), everywhere)
            return evaluate(trained, references=frozen, **options)

    return evaluate_copies


def can_sample(experiment: Experiment, dataset) -> bool:
    """Whether the run can end with a text that the model writes."""
    if dataset.tokenizer is None or not writes_text(experiment):
        return False
    return (
        not asks_first_question(experiment) or len(getattr(dataset.validation, "questions", ())) > 0
    )


def ranked(scores: dict[str, Any], best: str) -> float:
    """The number that ranks a checkpoint, lowest first. Raises ConfigError for a missing score."""
    name = best.removeprefix("-")
    if not isinstance(scores.get(name), (int, float)):
        names = ", ".join(name for name, value in scores.items() if not isinstance(value, str))
        raise ConfigError(
            f"checkpoints.best={best!r}: an evaluation here gives {names}; name one, or one with"
            " a minus"
        )
    return -scores[name] if best.startswith("-") else scores[name]
