"""An experiment taken apart, once: the pure functions and values that a training step needs."""

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
from jaxformer.ops.losses import LossSums
from jaxformer.parallel.mesh import Mesh
from jaxformer.params import Tree
from jaxformer.training import optimizers, rms
from jaxformer.training.experiment import Spikes
from jaxformer.training.parts import Parts, parts_of
from jaxformer.training.references import reference_specs

log = logging.getLogger("jaxformer")
# of an experiment
COPIED = (
    "seed", "precision", "accumulation", "gradient_sums", "clip_norm", "ema_decay", "ema_warmup", "rms", "max_skipped",
    "spikes",
)  # fmt: skip
# what the record of a step or of an evaluation has by itself: a metric of that name would stand in its place
RECORDED = {
    "step", "loss", "tokens", "grad_norm", "learning_rate", "skipped", "loss_scale", "perplexity", "bits", "examples", "scored",
    "unit", "bad_variables",
}  # fmt: skip
Loss = Callable[..., LossSums]


@dataclass(frozen=True, eq=False)
class Recipe:
    """What a step needs. `loss` and `score` are (trained, batch, key, step=0, references=None) -> LossSums.

    `trained` is a tree that `spec` declares. `updates` of the sums are {path: new value} of its variables.
    """

    spec: Tree  # of what trains, with what is frozen beside it
    loss: Loss
    score: Loss  # without dropout, label smoothing and auxiliary losses; in micro-batches, as a step
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
    rms: tuple[str, ...] = ()  # of what, by layer, each step reports
    references: Mapping[str, Tree] = field(default_factory=dict)  # the spec of each frozen model that a step is given

    weights = property(lambda self: self.parts.weights)  # trained -> the model's parameters


def build(experiment: Any) -> Recipe:
    """The recipe of an experiment. Raises ConfigError where its parts do not fit each other."""
    model, mesh, dtype = pipelined(experiment.model, experiment.mesh), experiment.mesh, jnp.dtype(experiment.precision)
    in_parts = experiment.accumulation > 1 or (mesh.backend == "pmap" and mesh.data != 1)
    if in_parts and getattr(experiment.objective, "whole_batch", False):
        settings = f"accumulation={experiment.accumulation}, mesh.backend={mesh.backend}"
        raise ConfigError(f"{settings}: this objective compares all rows of a batch; expected accumulation=1, backend=jit")
    parts = parts_of(experiment, models.spec(model))
    spec, frozen = parts.spec, parts.frozen

    objective = with_context(experiment.objective)
    reporting = rms.with_rms(model) if "activation" in experiment.rms else model

    def loss(trained: Tree, batch: Batch, key: Array, step: Any = 0, references: Any = None) -> LossSums:
        trained = optimizers.freeze(trained, spec, frozen)
        context = parts.context(trained, key, dtype, step, references)
        sums = checked(objective(reporting, parts.weights(trained), batch, context))
        return replace(sums, updates=parts.updates(sums.updates))

    scored = models.evaluation(model)
    scoring = with_context(getattr(experiment.objective, "evaluation", lambda: experiment.objective)())

    def score(trained: Tree, batch: Batch, key: Array, step: Any = 0, references: Any = None) -> LossSums:
        context = parts.context(trained, key, dtype, step, references)
        return replace(checked(scoring(scored, parts.weights(trained), batch, context)), updates=None)

    return Recipe(
        spec=spec, loss=loss, score=in_micro_batches(score, experiment.accumulation), parts=parts, frozen=frozen, mesh=mesh,
        optimizer=optimizers.build(experiment.optimizer, spec, frozen), schedule=experiment.schedule(experiment),
        references=reference_specs(experiment, models.spec(model)),
        **{name: getattr(experiment, name) for name in COPIED},
    )  # fmt: skip


def with_context(objective: Callable) -> Callable:
    """The objective as (model, params, batch, context) -> LossSums.

    One with five positional parameters, none of them called `context`, is called as (model, params, batch, key, dtype):
    objectives had that form before.
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
    log.warning("objective %s: (model, params, batch, key, dtype) is the older form; it is now %s", name, form)


def trained_weights(experiment: Any) -> Callable[[str], bool] | None:
    """Whether the model's parameter of a path has a gradient; None where all have one, or where it is not known.

    Under `adaptation.Lora` the matrices with factors have one: the factors' gradients are made of it.
    """
    spec, frozen, names = models.spec(experiment.model), experiment.frozen, lambda path: path
    if experiment.adaptation is not None:
        adapted = experiment.adaptation(spec)
        if not (isinstance(adapted.spec, dict) and set(adapted.spec) == {"weights", "factors"}):
            return None
        frozen = "|".join(f"({pattern})" for pattern in (adapted.frozen, frozen) if pattern) or None
        spec, names = adapted.spec, lambda path: path.removeprefix("weights/")
    if frozen is None:
        return None
    found = {names(path) for path in params.paths(spec) if not re.search(frozen, path)}
    found |= {path.removeprefix("factors/").rpartition("/")[0] for path in found if path.startswith("factors/")}
    return found.__contains__


def in_micro_batches(score: Loss, count: int) -> Loss:
    """The same sums in the memory of a micro-batch, as a training step has them. The key of each is another one."""
    if count == 1:
        return score

    @sharding.auto_axes(P())
    def scored(trained: Tree, batch: Batch, key: Array, step: Any = 0, references: Any = None) -> LossSums:
        parts = math.gcd(count, *(leaf.shape[0] for leaf in jax.tree.leaves(batch)))
        if parts == 1:
            return score(trained, batch, key, step, references)

        def add(sums: LossSums, numbered: tuple[Array, dict[str, Array]]) -> tuple[LossSums, None]:
            index, micro_batch = numbered
            inner_key = jax.random.fold_in(key, index)
            return jax.tree.map(jnp.add, sums, score(trained, micro_batch, inner_key, step, references)), None

        # each micro-batch takes every n-th example, so that each device's part of the batch stays on it
        micro_batches = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)
        first = jax.tree.map(lambda x: x[0], micro_batches)
        shapes = jax.eval_shape(lambda: score(trained, first, key, step, references))
        start = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
        return jax.lax.scan(add, start, (jnp.arange(parts), micro_batches))[0]

    return scored


def row_lengths(experiment: Any, batch: dict[str, Any]) -> tuple[int, int | None]:
    """(tokens of a row, tokens of its source) as the model reads them, or patches; None: the model has no source.

    An array that the batch does not have, as of a user's own data, counts as long as the config's `context_length`.
    """
    model, tokens, source = experiment.model, batch.get("tokens"), batch.get("source")
    length = models.last_stack(model).context_length if tokens is None else tokens.shape[-1]
    if hasattr(experiment.objective, "lengths"):  # it makes source and target of one text
        return experiment.objective.lengths(length)
    if not isinstance(model, EncoderDecoder):
        return length, None
    reads_images = isinstance(model.encoder.embedding, Patches)
    return length, model.encoder.context_length if source is None or reads_images else source.shape[-1]


def checked(sums: Any) -> LossSums:
    """The sums of an objective; of a tuple of two or three, as LossSums. Raises ConfigError for anything else."""
    if isinstance(sums, tuple) and len(sums) in (2, 3):
        sums = LossSums(*sums)
    if not isinstance(sums, LossSums):
        raise ConfigError(f"objective: returned {type(sums).__name__}; expected LossSums(loss, weight, metrics)")
    if jnp.shape(sums.loss) or jnp.shape(sums.weight):
        shapes = f"{jnp.shape(sums.loss)}, {jnp.shape(sums.weight)}"
        raise ConfigError(f"objective: shapes {shapes}; loss and weight are numbers")
    if not isinstance(sums.unit, str) or not sums.unit.isidentifier() or sums.unit in RECORDED - {"tokens", "examples"}:
        raise ConfigError(f"objective: unit={sums.unit!r}: expected a word in the plural, such as tokens, images or pairs")
    return replace(sums, metrics=checked_metrics(sums.metrics, sums.unit))


def checked_metrics(metrics: Any, unit: str = "examples") -> dict[str, tuple[Any, Any]]:
    """What an objective reports besides. Raises ConfigError for names that the record has, and for what is no pair of sums."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"objective: metrics are a {type(metrics).__name__}; expected {{name: (sum, weight)}}")
    for name, pair in metrics.items():
        if name in RECORDED or name == unit or not isinstance(name, str):
            raise ConfigError(f"objective: a metric is called {name!r}, which the record has already; give it another name")
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(jnp.ndim(part) < 2 for part in pair)):
            problem = f"objective: the metric {name} is {type(pair).__name__} {jax.tree.map(jnp.shape, pair)}"
            raise ConfigError(f"{problem}; expected (sum, weight): two numbers, or two vectors with one for each layer")
    return dict(metrics)


def pipelined(model: Any, mesh: Mesh) -> Any:
    """The model, its layers as a pipeline where the mesh has stages. ConfigError for a model with a stack of its own."""
    if mesh.stage == 1:
        return model
    if not isinstance(model, models.ModelConfig):
        raise ConfigError(f"mesh.stage={mesh.stage}: only a ModelConfig can be cut into stages, not {type(model).__name__}")
    if model.stack is not None:
        raise ConfigError(f"mesh.stage={mesh.stage}: model.stack={model.stack} has no pipeline; leave one of them out")
    return replace(model, stack=Pipeline(mesh.microbatches, mesh.repeats))
