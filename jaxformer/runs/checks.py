"""What is checked before the first step: hosts, mesh, data, and the scores that rank checkpoints."""

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
from jaxformer.runs.run import asks_first_question, evaluator, examples_scored, new_names, question_of_sample, writes_text
from jaxformer.runs.run_folder import RunFolder, compare
from jaxformer.training.experiment import Checkpoints, Experiment
from jaxformer.training.recipe import Recipe
from jaxformer.training.step import TrainState, abstract_references, abstract_state, state_shardings

log = logging.getLogger("jaxformer")


def check(experiment: Experiment, recipe: Recipe, mesh: jax.sharding.Mesh | None, folder: RunFolder) -> Any:
    """The experiment's dataset. Raises ConfigError, before anything is written, for what would fail in the run."""
    check_initial(experiment, recipe)
    check_axes(recipe.spec, folder)
    check_mesh(experiment, recipe, mesh)
    dataset = open_data(experiment)
    if can_sample(experiment, dataset):
        question_of_sample(experiment, dataset)
    if dataset.digest != processes.first(lambda: dataset.digest, "the comparison of data"):
        raise ConfigError("the data here are not those of process 0; give every host the same files")
    return dataset


def check_hosts(experiment: Experiment, source: Source | None) -> None:
    """Raises ConfigError where the experiment here is not that of process 0: one would wait for what another never does."""
    code = None if source is None else (source.text, sorted(source.imports.values()))
    here = json.loads(config.to_json([config.describe(experiment), code], default=str))
    there = processes.first(lambda: here, "the comparison of experiments")
    if here != there:
        different = "; ".join(compare(there[0], here[0])) or "its file, or one that it imports"
        advice = "give every host the same file and options"
        raise ConfigError(f"the experiment here is not that of process 0: {different}; {advice}")


def check_mesh(experiment: Experiment, recipe: Recipe, mesh: jax.sharding.Mesh | None) -> None:
    """Raises ConfigError where the parameters do not divide, or several processes have no part of the mesh."""
    if mesh is not None:
        state_shardings(recipe, mesh)  # refuses what does not divide
        abstract_references(recipe, mesh)
        if models.is_config(experiment.model):
            parallel.check_context(dict(mesh.shape), models.context_lengths(experiment.model))
    if jax.process_count() > 1 and (mesh is None or mesh.size < jax.device_count() or experiment.mesh.backend == "pmap"):
        needed = f"several processes need backend=jit and all of their {jax.device_count()} devices; try --mesh.data=-1"
        raise ConfigError(f"mesh={experiment.mesh}: {needed}")


def check_axes(spec: Tree, folder: RunFolder) -> None:
    """Raises ConfigError for a parameter with an axis that no rule knows: a typo would leave it whole on each device.

    A run that began when this was not looked at goes on, with a warning: its file cannot be another one.
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
    size, least = getattr(getattr(experiment.model, "decoder", experiment.model), "vocab_size", None), dataset.vocab_size
    if size is not None and least is not None and least > size:
        raise ConfigError(f"model.vocab_size={size} is too small: the data have {least} tokens; set it to {least}")
    return dataset


def check_scores(experiment: Experiment, recipe: Recipe, dataset) -> bool:
    """Whether an evaluation is known to make the score that ranks checkpoints, before any step.

    False where a metric of the user's may make it: no name is known before it is called. Raises ConfigError for a score that
    nothing makes, or the end alone, and for what the metrics would refuse at the end.
    """
    early: list[str] = []  # what the metrics of every evaluation make
    taken = ["step", "loss", "perplexity", "bits", "unit"]
    is_known = True
    for metric in experiment.metrics:
        names = metric.check(experiment.model, dataset) if hasattr(metric, "check") else None
        taken += new_names(metric, dict.fromkeys(names or ()), taken)
        if getattr(metric, "only_final", False):
            continue
        if names is None:
            is_known = False
        else:
            early += names
    best = experiment.checkpoints.best.removeprefix("-")
    if best == "loss":
        return True
    batch = batching.ValidationBatches(dataset.validation, experiment.batch_size)[0]
    trained, references = abstract_state(recipe).params, abstract_references(recipe)
    sums = jax.eval_shape(recipe.score, trained, batch, jax.random.key(0), 0, references)
    found = ["loss", *(("perplexity", "bits") if has_perplexity(sums) else ()), *sums.metrics, *early]
    if best == sums.unit:
        return True
    if best in found or best.rpartition("/")[0] in found:  # a metric with a value for each layer
        return True
    if not is_known:
        return False
    problem = f"checkpoints.best={experiment.checkpoints.best!r}: an evaluation here gives {', '.join(found)}"
    raise ConfigError(f"{problem}; name one, or one with a minus{scores_of_the_end(experiment)}")


def scores_of_the_end(experiment: Experiment) -> str:
    """What to say of metrics whose scores rank no checkpoint; nothing where there are none."""
    late = [_name(metric) for metric in experiment.metrics if getattr(metric, "only_final", False)]
    return f"; {', '.join(late)} scores at the end alone, unless only_final=False" if late else ""


def _name(metric: Any) -> str:
    return getattr(metric, "__name__", type(metric).__name__)


def score_name(experiment: Experiment, dataset) -> str:
    """What a checkpoint's rank is of: the score, the text, and how the metrics were made. Other ranks are not compared."""
    count, best = len(dataset.validation), experiment.checkpoints.best
    name = f"{best} of {examples_scored(experiment, count, whole=False)} examples"
    if not experiment.metrics or best.removeprefix("-") == "loss":
        return name
    described = config.to_json(config.describe(experiment)["metrics"], sort_keys=True, default=str)
    return f"{name}, metrics {hashlib.sha256(described.encode()).hexdigest()[:8]}"


def kept_in_words(saves: Checkpoints) -> str:
    """Which checkpoints a run keeps, and by which score it ranks them."""
    latest = f"every {saves.every:,} steps, of which the last {saves.keep_latest} are kept"
    if saves.keep_best == 0:
        return latest
    order = "highest" if saves.best.startswith("-") else "lowest"
    return f"{latest}, and the {saves.keep_best} of {order} {saves.best.removeprefix('-')}"


def was_scored(records: Sequence[dict], best: str) -> bool:
    """Whether an evaluation of an earlier start made this score."""
    return any(f"validation_{best.removeprefix('-')}" in record for record in records)


def try_best(experiment: Experiment, recipe: Recipe, dataset, mesh, state: TrainState, references: Tree) -> None:
    """Scores one example, which shows the names of the user's metrics. Raises ConfigError where none is `checkpoints.best`."""
    one = replace(experiment, eval_examples=1)
    evaluate = evaluate_on(mesh, experiment, evaluator(one, recipe, dataset, mesh), references)
    try:
        ranked(evaluate(state.best), experiment.checkpoints.best)
    except ConfigError as error:
        raise ConfigError(f"{error}{scores_of_the_end(experiment)}") from None


def evaluate_on(
    mesh: jax.sharding.Mesh | None, experiment: Experiment, evaluate: Callable, references: Tree = None
) -> Callable:
    """An evaluation of what the training has: under pmap, one copy, which all devices of the mesh get again."""
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
    return not asks_first_question(experiment) or len(getattr(dataset.validation, "questions", ())) > 0


def ranked(scores: dict[str, Any], best: str) -> float:
    """The number by which a checkpoint is ranked, lowest first. Raises ConfigError for a score that there is not."""
    name = best.removeprefix("-")
    if not isinstance(scores.get(name), (int, float)):
        names = ", ".join(name for name, value in scores.items() if not isinstance(value, str))
        raise ConfigError(f"checkpoints.best={best!r}: an evaluation here gives {names}; name one, or one with a minus")
    return -scores[name] if best.startswith("-") else scores[name]
