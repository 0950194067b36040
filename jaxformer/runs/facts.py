"""The lines that a run prints before its first step."""

import math
import re

import jax

from jaxformer import models, params as parameters
from jaxformer.runs.checks import kept_in_words
from jaxformer.runs.first_warnings import first_warnings
from jaxformer.runs.setup import Setup
from jaxformer.training import optimizers
from jaxformer.training.experiment import Experiment
from jaxformer.training.recipe import Recipe
from jaxformer.training.step import averaged_steps

HEAD = re.compile(r"^(?!factors/).*?heads/([^/]+)/")  # the name of the head of a path


def facts(setup: Setup, start: int) -> list[str]:
    """Lines about parameters, data, checkpoints, references and mesh, for the start of a run.

    `start`: the number of steps that are done.
    """
    experiment = setup.experiment
    recipe = setup.recipe
    mesh = setup.mesh
    tree, own = recipe.parts.split(recipe.spec)
    adapted = recipe.parts.adapted
    if adapted is not None and adapted.store is not None:  # codes are no parameters
        tree = {**tree, "weights": models.spec(experiment.model)}
    counted = f"{parameters.count(tree):,} parameters"
    if own:
        counted += f" and {parameters.count(own):,} of the objective"
    lines = [
        f"{experiment.name}: {counted}, {jax.devices()[0].device_kind}, {experiment.precision}"
    ]
    lines.append(f"data: {setup.dataset.description}")
    lines.append(f"checkpoints: {kept_in_words(experiment.checkpoints)}")
    several = any(leaf.rate != 1 for leaf in parameters.paths(recipe.spec).values())
    if (
        several
        or hasattr(experiment.optimizer, "route")
        or experiment.frozen is not None
        or experiment.adaptation is not None
    ):
        routes = optimizers.routes(experiment.optimizer, recipe.spec, recipe.frozen)
        lines += [f"  {path}: {route}" for path, route in routes.items()]
    if recipe.frozen is not None:
        lines.append(what_trains(recipe, parameters.count([tree, own])))
    for name, spec in recipe.references.items():
        lines.append(f"reference {name}: {parameters.count(spec):,} frozen parameters")
    if experiment.ema_decay is not None:
        steps = averaged_steps(experiment.ema_decay, experiment.ema_warmup, experiment.steps)
        lines.append(
            f"scored: parameters averaged over about the last {steps:,} of"
            f" {experiment.steps:,} steps (ema_decay)"
        )
    if recipe.averaged is not None:
        lines.append(what_is_averaged(experiment))
    if mesh is not None:
        shape = " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1)
        lines.append(f"mesh: {shape} of {mesh.size} devices")
        if jax.process_count() > 1:
            lines[-1] += f" in {jax.process_count()} processes"
    if start:
        return [*lines, f"resuming after step {start}"]
    return [*lines, *first_warnings(experiment, setup.dataset)]


def what_is_averaged(experiment: Experiment) -> str:
    """One line for an optimizer that averages: its name, and a schedule that decays beside it."""
    name = type(experiment.optimizer).__name__
    schedule = type(experiment.schedule).__name__
    line = f"scored: parameters that {name} averages"
    if schedule == "Constant":
        return line
    return f"{line}; it replaces a decay of the rate, and schedule={schedule} decays it, too"


def what_trains(recipe: Recipe, total: int) -> str:
    """One line: how many of all parameters train, with which heads, and which heads are frozen."""
    held = parameters.paths(optimizers.without_gradient(recipe.spec, recipe.frozen))
    specs = parameters.paths(recipe.spec)
    count = sum(math.prod(specs[path].shape) for path, frozen in held.items() if not frozen)
    line = f"trains: {count:,} of {total:,} parameters"
    heads: dict[bool, list[str]] = {False: [], True: []}
    for path, frozen in held.items():
        if (match := HEAD.search(path)) and match[1] not in heads[frozen]:
            heads[frozen].append(match[1])
    if heads[False]:
        line += f", with the head {', '.join(heads[False])}"
    if heads[True]:
        line += f"; frozen: the head {', '.join(heads[True])}"
    return line
