"""An experiment taken apart, once: the pure functions and values that a training step needs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxformer import models, params
from jaxformer.errors import ConfigError
from jaxformer.models.pipelined import Pipeline
from jaxformer.ops.losses import LossSums
from jaxformer.parallel.mesh import Mesh
from jaxformer.training import initial, optimizers

Tree = Any
Loss = Callable[[Tree, dict[str, Array], Array], LossSums]


@dataclass(frozen=True, eq=False)
class Recipe:
    """What a step needs. `loss` and `score` are (trained, batch, key) -> LossSums; `trained` is the tree that `spec` declares."""

    spec: Tree  # of what trains, with what is frozen beside it
    loss: Loss
    score: Loss  # without dropout, label smoothing and auxiliary losses
    weights: Callable[[Tree], Tree]  # trained -> the model's parameters
    initial: Callable[[Array], Tree] | None  # key -> trained, where it does not start at random
    optimizer: optax.GradientTransformation
    schedule: Callable[[Any], Any]  # step -> learning rate
    seed: int
    precision: str
    accumulation: int
    clip_norm: float | None
    ema_decay: float | None
    frozen: str | None
    mesh: Mesh


def build(experiment: Any) -> Recipe:
    """The recipe of an experiment. Raises ConfigError where its parts do not fit each other."""
    model, mesh, dtype = pipelined(experiment.model, experiment.mesh), experiment.mesh, jnp.dtype(experiment.precision)
    spec = model_spec = models.spec(model)
    weights, frozen = lambda tree: tree, experiment.frozen
    if experiment.adaptation is not None:
        adapted = experiment.adaptation(model_spec)
        spec, weights = adapted.spec, adapted.merge
        frozen = "|".join(f"({pattern})" for pattern in (adapted.frozen, frozen) if pattern) or None
    start = initial.from_text(experiment.initial) if isinstance(experiment.initial, str) else experiment.initial

    def loss(trained: Tree, batch: dict[str, Array], key: Array) -> LossSums:
        return checked(experiment.objective(model, weights(optimizers.freeze(trained, frozen)), batch, key, dtype))

    scored = models.evaluation(model)
    objective = getattr(experiment.objective, "evaluation", lambda: experiment.objective)()

    def score(trained: Tree, batch: dict[str, Array], key: Array) -> LossSums:
        return checked(objective(scored, weights(trained), batch, key, dtype))

    return Recipe(
        spec=spec,
        loss=loss,
        score=score,
        weights=weights,
        initial=None if start is None else partial(_start, start, model_spec, spec),
        optimizer=optimizers.build(experiment.optimizer, spec, frozen),
        schedule=experiment.schedule(experiment),
        seed=experiment.seed,
        precision=experiment.precision,
        accumulation=experiment.accumulation,
        clip_norm=experiment.clip_norm,
        ema_decay=experiment.ema_decay,
        frozen=frozen,
        mesh=mesh,
    )


def checked(sums: Any) -> LossSums:
    """The sums of an objective, which may leave out the metrics. Raises ConfigError for anything else."""
    if not (isinstance(sums, tuple) and len(sums) in (2, 3)):
        raise ConfigError(f"objective: returned {type(sums).__name__}; expected LossSums(loss, weight, metrics)")
    return LossSums(*sums[:2], dict(sums[2]) if len(sums) == 3 else {})


def pipelined(model: Any, mesh: Mesh) -> Any:
    """The model, its layers as a pipeline where the mesh has stages. ConfigError for a model with a stack of its own."""
    if mesh.stage == 1:
        return model
    if not isinstance(model, models.ModelConfig):
        raise ConfigError(
            f"mesh.stage={mesh.stage}: only a ModelConfig can be cut into stages, not {type(model).__name__}"
        )
    if model.stack is not None:
        raise ConfigError(f"mesh.stage={mesh.stage}: model.stack={model.stack} has no pipeline; leave one of them out")
    return replace(model, stack=Pipeline(mesh.microbatches, mesh.repeats))


def _start(start: Callable, model_spec: Tree, spec: Tree, key: Array) -> Tree:
    """The tree that trains, from what `start` makes of the model's own parameters."""
    tree = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), start(model_spec, key))
    tree = initial.checked(tree, model_spec, str(start))
    if spec is model_spec:
        return tree
    return {"weights": tree, **params.init({name: part for name, part in spec.items() if name != "weights"}, key)}
