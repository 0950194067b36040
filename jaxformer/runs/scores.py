"""The scores of an evaluation: the objective's over a validation split, and those of the metrics.

`evaluator` makes the function that the training loop and `Run.evaluate` call.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from etils import epath

from jaxformer import models
from jaxformer.data import batching
from jaxformer.errors import ConfigError
from jaxformer.evaluation.metric import Evaluation
from jaxformer.evaluation.perplexity import mean_scores
from jaxformer.parallel import processes
from jaxformer.params import random_key
from jaxformer.runs.batches import on_devices
from jaxformer.training.experiment import Experiment
from jaxformer.training.recipe import Recipe


def examples_scored(experiment: Experiment, count: int, whole: bool) -> int:
    """The number of examples, of `count` in a validation split, that an evaluation scores.

    They are the first ones.
    """
    limits = [experiment.final_examples]
    if not whole:
        batches = experiment.eval_batches
        limits = [
            experiment.eval_examples,
            None if batches is None else batches * experiment.batch_size,
        ]
    return min([count, *(limit for limit in limits if limit is not None)])


def evaluator(
    experiment: Experiment,
    recipe: Recipe,
    dataset: Any,
    mesh: jax.sharding.Mesh | None = None,
    folder: epath.Path | None = None,
) -> Callable:
    """(trained, final=False) -> scores over the first `eval_examples` of the validation split.

    The metrics' scores follow. With `final`, the scores are over the first `final_examples`, with
    the metrics of the end. `whole=True`: the same text without the metrics of the end. `folder` is
    the run's folder, where metrics may write. The objective gets `step`, the number of steps that
    are done, and `references`. The scores say which text was scored. The random key of a batch is
    a function of the seed and the batch's number, so it is the same at every evaluation.
    """

    @jax.jit
    def scores_of_batch(
        trained: Any, batch: dict[str, Any], number: Any, step: Any, references: Any
    ):
        key = jax.random.fold_in(jax.random.fold_in(random_key(recipe.seed), 2), number)
        return recipe.eval_loss(trained, batch, key, step, references)

    def batches(examples: int, size: int) -> Iterator[dict[str, Any]]:
        rows = processes.local_examples(mesh, size)
        validation = batching.ValidationBatches(dataset.validation, size, rows, examples)
        return (on_devices(mesh, rows, size, validation[i]) for i in range(len(validation)))

    def evaluate(
        trained: Any,
        final: bool = False,
        whole: bool = False,
        step: int = 0,
        references: Any = None,
    ) -> dict[str, Any]:
        count = len(dataset.validation)
        examples = examples_scored(experiment, count, final or whole)
        score = partial(scores_of_batch, step=np.int32(step), references=references)
        scores: dict[str, Any] = mean_scores(
            score, trained, batches(examples, experiment.batch_size)
        )
        scores |= {"examples": float(examples), "scored": part_in_words(examples, count)}
        metrics = [metric for metric in experiment.metrics if final or not only_final(metric)]
        if not metrics:
            return scores
        scored = Evaluation(
            models.evaluation(experiment.model),
            recipe.weights(trained),
            dataset,
            partial(batches, examples, experiment.batch_size // experiment.accumulation),
            experiment.activation_dtype,
            experiment.seed,
            folder,
            step,
        )
        for metric in metrics:
            scores |= new_names(metric, scores_of(metric, scored), {"step", *scores})
        return scores

    return evaluate


def part_in_words(examples: int, count: int) -> str:
    """The part of a validation split of `count` examples that was scored."""
    if examples == count:
        return f"all {count:,} examples"
    return f"the first {examples:,} of {count:,} examples"


def only_final(metric: Callable) -> bool:
    """Whether a metric scores only at the end of a run."""
    return bool(getattr(metric, "only_final", False))


def metric_name(metric: Any) -> str:
    """The name of a metric, which is a function or an object of a class."""
    return getattr(metric, "__name__", type(metric).__name__)


def new_names(metric: Callable, found: dict[str, Any], taken: Iterable[str]) -> dict[str, Any]:
    """The scores of a metric. Raises ConfigError where another score has one of their names.

    One of the two would be lost.
    """
    if both := sorted(set(found) & set(taken)):
        name = metric_name(metric)
        problem = f"metrics: {name} gives {', '.join(both)}, which an evaluation has already"
        raise ConfigError(
            f"{problem}; give it other names, such as in a function that calls it and renames them"
        )
    return found


def scores_of(metric: Callable, scored: Evaluation) -> dict[str, Any]:
    """The scores of a metric as Python's numbers, which a record needs, and texts.

    Raises ConfigError for other values.
    """
    scores = metric(scored)
    try:
        return {
            name: value if isinstance(value, str) else float(value)
            for name, value in scores.items()
        }
    except (AttributeError, TypeError, ValueError):
        raise ConfigError(
            f"metrics: {metric_name(metric)} returned {scores!r:.100};"
            " expected {name: number, or text}"
        ) from None
