"""An experiment as the pure functions and values that a training step needs.

`build` takes an experiment apart, once. Read it first.
"""

import functools
import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxformer import models, params, sharding
from jaxformer.config import code
from jaxformer.errors import ConfigError
from jaxformer.models.config import EncoderDecoder, Patches
from jaxformer.models.stacks.pipeline import Pipeline
from jaxformer.objectives.objective import Batch, StepContext
from jaxformer.ops.float8 import with_float8_weights
from jaxformer.ops.losses import LossSums
from jaxformer.parallel.mesh import Mesh
from jaxformer.params import Tree
from jaxformer.training import optimizers, rms
from jaxformer.training.experiment import Spikes
from jaxformer.training.micro_batches import sum_over_micro_batches
from jaxformer.training.parts import Parts, either_pattern, parts_of
from jaxformer.training.references import reference_specs

log = logging.getLogger("jaxformer")
# fields that a recipe copies from its experiment
COPIED = (
    "seed", "precision", "accumulation", "gradient_sums", "clip_norm", "ema_decay", "ema_warmup",
    "rms", "max_skipped", "spikes", "after_update",
)  # fmt: skip
# names in the record of a step or an evaluation; a metric with such a name would overwrite it
RECORDED = {
    "step", "loss", "tokens", "grad_norm", "learning_rate", "skipped", "loss_scale", "perplexity",
    "bits", "examples", "scored", "unit", "bad_variables",
}  # fmt: skip
Loss = Callable[..., LossSums]


@dataclass(frozen=True, eq=False)
class Recipe:
    """The functions and values of a training step.

    `loss` and `eval_loss` are (trained, batch, key, step=0, references=None) -> LossSums.
    `trained` is a tree that `spec` declares. `updates` of the sums are {path: new value} of its
    variables.
    """

    spec: Tree  # of the tree that trains: trained, frozen and variable leaves
    loss: Loss
    # without dropout, label smoothing and auxiliary losses; in micro-batches, like a step
    eval_loss: Loss
    parts: Parts
    optimizer: optax.GradientTransformation
    schedule: Callable[[Any], Any]  # step -> learning rate
    seed: int
    precision: str
    accumulation: int
    gradient_sums: str
    clip_norm: float | None
    ema_decay: float | None
    ema_warmup: int
    frozen: str | None
    mesh: Mesh
    max_skipped: int
    spikes: Spikes | None = None
    rms: tuple[str, ...] = ()  # kinds of root mean squares that each step reports by layer
    # {name: spec} of the frozen models that a step reads
    references: Mapping[str, Tree] = field(default_factory=dict)
    # (parameters, optimizer's state) -> the parameters to evaluate, of an optimizer that averages
    # itself; None: the parameters, or their average by `ema_decay`
    averaged: Callable[[Tree, Tree], Tree] | None = None
    after_update: Callable[[Tree], Tree] | None = None  # params -> params, after each update

    weights = property(lambda self: self.parts.weights)  # trained -> the model's parameters
    score = property(lambda self: self.eval_loss)  # an earlier name

    # whether a state has averaged parameters, which are evaluated
    has_average = property(lambda self: self.ema_decay is not None or self.averaged is not None)


def build(experiment: Any) -> Recipe:
    """The recipe of an experiment. Raises ConfigError if its parts do not fit each other."""
    mesh = experiment.mesh
    model = pipelined(experiment.model, mesh)
    dtype = jnp.dtype(experiment.activation_dtype)
    check_whole_batch(experiment)
    averaged = getattr(experiment.optimizer, "averaged", None)
    if averaged is not None and experiment.ema_decay is not None:
        name = type(experiment.optimizer).__name__
        raise ConfigError(
            f"ema_decay={experiment.ema_decay}: optimizer={name} averages the parameters itself; "
            "leave ema_decay out"
        )
    parts = parts_of(experiment, models.spec(model))
    spec, frozen = parts.spec, parts.frozen
    if experiment.after_update is not None:
        check_after_update(experiment, spec)

    objective = with_context(experiment.objective)
    reporting = rms.with_rms(model) if "activation" in experiment.rms else model

    def loss(
        trained: Tree, batch: Batch, key: Array, step: Any = 0, references: Any = None
    ) -> LossSums:
        trained = optimizers.freeze(trained, spec, frozen)
        context = parts.context(trained, key, dtype, step, references)
        weights = for_products(experiment.precision, model, parts.weights(trained))
        sums = checked(objective(reporting, weights, batch, context))
        return replace(sums, updates=parts.updates(sums.updates))

    scored = models.evaluation(model)
    scoring = with_context(
        getattr(experiment.objective, "evaluation", lambda: experiment.objective)()
    )

    def eval_loss(
        trained: Tree, batch: Batch, key: Array, step: Any = 0, references: Any = None
    ) -> LossSums:
        context = parts.context(trained, key, dtype, step, references)
        return replace(
            checked(scoring(scored, parts.weights(trained), batch, context)), updates=None
        )

    return Recipe(
        spec=spec,
        loss=loss,
        eval_loss=in_micro_batches(eval_loss, experiment.accumulation),
        parts=parts,
        frozen=frozen,
        mesh=mesh,
        optimizer=optimizers.build(experiment.optimizer, spec, frozen),
        schedule=experiment.schedule(experiment),
        references=reference_specs(experiment, models.spec(model)),
        averaged=averaged,
        **{name: getattr(experiment, name) for name in COPIED},
    )


def check_whole_batch(experiment: Any) -> None:
    """Raises ConfigError if a batch is cut whose rows the objective compares with each other."""
    mesh = experiment.mesh
    in_parts = experiment.accumulation > 1 or (mesh.backend == "pmap" and mesh.data != 1)
    if in_parts and getattr(experiment.objective, "whole_batch", False):
        settings = f"accumulation={experiment.accumulation}, mesh.backend={mesh.backend}"
        raise ConfigError(
            f"{settings}: this objective compares all rows of a batch; "
            "expected accumulation=1, backend=jit"
        )


def for_products(precision: str, model: Any, weights: Tree) -> Tree:
    """The model's parameters as the products of a training step read them."""
    if precision != "float8":
        return weights
    return with_float8_weights(models.spec(model), weights)


def check_after_update(experiment: Any, spec: Tree) -> None:
    """Raises ConfigError if `experiment.after_update` does not fit the tree that trains."""
    function = experiment.after_update
    name = getattr(function, "__name__", type(function).__name__)
    if experiment.adaptation is not None:
        raise ConfigError(
            f"after_update={name}: adaptation={experiment.adaptation} trains factors, not the "
            "parameters that it would change; leave one of the two out"
        )
    if getattr(experiment.optimizer, "averaged", None) is not None:
        optimizer = type(experiment.optimizer).__name__
        raise ConfigError(
            f"after_update={name}: optimizer={optimizer} evaluates an average of its own, which "
            "would not have the change; take another optimizer"
        )
    changed = jax.eval_shape(function, params.abstract(spec))
    if problem := params.mismatch(spec, changed):
        raise ConfigError(
            f"after_update={name}: parameter {problem}; expected the tree that it was given, with "
            "new values"
        )


def with_context(objective: Callable) -> Callable:
    """The objective as (model, params, batch, context) -> LossSums.

    Objectives had an older form, (model, params, batch, key, dtype). An objective with five
    positional parameters, none of them called `context`, is called in that form.
    """
    names = code.positional_names(objective)
    if len(names) != 5 or "context" in names:
        return objective
    warn_of_five(getattr(objective, "__qualname__", type(objective).__qualname__))

    def call(model: Any, params: Tree, batch: Batch, context: StepContext) -> Any:
        return objective(model, params, batch, context.key, context.dtype)

    return call


@functools.cache  # once for each name
def warn_of_five(name: str) -> None:
    form = "(model, params, batch, context), with context.key and context.dtype"
    log.warning(
        "objective %s: (model, params, batch, key, dtype) is the older form; it is now %s",
        name,
        form,
    )


def trained_weights(experiment: Any) -> Callable[[str], bool] | None:
    """path of a model's parameter -> whether it has a gradient; None if all have one or if unknown.

    Under `adaptation.Lora` matrices with factors have one: it gives the gradients of the factors.
    """
    spec = models.spec(experiment.model)
    frozen = experiment.frozen
    prefix = ""
    if experiment.adaptation is not None:
        adapted = experiment.adaptation(spec)
        if not (isinstance(adapted.spec, dict) and set(adapted.spec) == {"weights", "factors"}):
            return None
        frozen = either_pattern(adapted.frozen, frozen)
        spec = adapted.spec
        prefix = "weights/"
    if frozen is None:
        return None
    trained = {path for path in params.paths(spec) if not re.search(frozen, path)}
    names = {path.removeprefix(prefix) for path in trained}
    for path in trained:
        if path.startswith("factors/"):
            names.add(path.removeprefix("factors/").rpartition("/")[0])
    return names.__contains__


def in_micro_batches(eval_loss: Loss, count: int) -> Loss:
    """The sums of `eval_loss`, computed in the memory of one micro-batch, like a training step.

    Each micro-batch has its own random key.
    """
    if count == 1:
        return eval_loss

    @sharding.auto_axes(P())
    def in_turn(
        trained: Tree, batch: Batch, key: Array, step: Any = 0, references: Any = None
    ) -> LossSums:
        parts = math.gcd(count, *(leaf.shape[0] for leaf in jax.tree.leaves(batch)))
        if parts == 1:
            return eval_loss(trained, batch, key, step, references)

        return sum_over_micro_batches(
            lambda micro_batch, key: eval_loss(trained, micro_batch, key, step, references),
            batch,
            key,
            parts,
        )

    return in_turn


def example_lengths(experiment: Any, batch: dict[str, Any]) -> tuple[int, int | None]:
    """(length of an example, length of its source or None), in tokens or patches.

    The batch of a user's own data may lack `tokens` or `source`. Then the config's `context_length`
    is taken.
    """
    model = experiment.model
    tokens, source = batch.get("tokens"), batch.get("source")
    length = models.last_stack(model).context_length if tokens is None else tokens.shape[-1]
    if hasattr(experiment.objective, "lengths"):  # it makes source and target from one text
        return experiment.objective.lengths(length)
    if not isinstance(model, EncoderDecoder):
        return length, None
    if source is None or isinstance(model.encoder.embedding, Patches):
        return length, model.encoder.context_length
    return length, source.shape[-1]


def checked(sums: Any) -> LossSums:
    """The sums of an objective as LossSums, also if it returns a tuple of two or three.

    Raises ConfigError for anything else.
    """
    if isinstance(sums, tuple) and len(sums) in (2, 3):
        loss, weight, metrics = sums if len(sums) == 3 else (*sums, None)
        sums = LossSums(loss, weight, checked_metrics(metrics))
    if not isinstance(sums, LossSums):
        raise ConfigError(
            f"objective: returned {type(sums).__name__}; expected LossSums(loss, weight, metrics)"
        )
    if jnp.shape(sums.loss) or jnp.shape(sums.weight):
        shapes = f"{jnp.shape(sums.loss)}, {jnp.shape(sums.weight)}"
        raise ConfigError(f"objective: shapes {shapes}; loss and weight are numbers")
    is_word = isinstance(sums.unit, str) and sums.unit.isidentifier()
    if not is_word or sums.unit in RECORDED - {"tokens", "examples"}:
        raise ConfigError(
            f"objective: unit={sums.unit!r}: expected a word in the plural, "
            "such as tokens, images or pairs"
        )
    return replace(sums, metrics=checked_metrics(sums.metrics, sums.unit))


def checked_metrics(metrics: Any, unit: str = "examples") -> dict[str, tuple[Any, Any]]:
    """{name: (sum, weight)}: the metrics that an objective reports beside its loss.

    Raises ConfigError for a name that the record uses, and for a value that is no pair of sums.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"objective: metrics are a {type(metrics).__name__}; expected {{name: (sum, weight)}}"
        )
    for name, pair in metrics.items():
        if name in RECORDED or name == unit or not isinstance(name, str):
            raise ConfigError(
                f"objective: a metric is called {name!r}, "
                "which the record has already; give it another name"
            )
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        if not is_pair or any(jnp.ndim(value) > 1 for value in pair):
            problem = (
                f"objective: the metric {name} is {type(pair).__name__} "
                f"{jax.tree.map(jnp.shape, pair)}"
            )
            raise ConfigError(
                f"{problem}; expected (sum, weight): "
                "two numbers, or two vectors with one for each layer"
            )
    return dict(metrics)


def pipelined(model: Any, mesh: Mesh) -> Any:
    """The model; if the mesh has stages, with its layers as a pipeline.

    Raises ConfigError if the model has a stack of its own.
    """
    if mesh.stage == 1:
        return model
    if not isinstance(model, models.ModelConfig):
        raise ConfigError(
            f"mesh.stage={mesh.stage}: only a ModelConfig can be cut into stages, "
            f"not {type(model).__name__}"
        )
    if model.stack is not None:
        raise ConfigError(
            f"mesh.stage={mesh.stage}: model.stack={model.stack} has no pipeline; "
            "leave one of them out"
        )
    return replace(model, stack=Pipeline(mesh.microbatches, mesh.repeats))
