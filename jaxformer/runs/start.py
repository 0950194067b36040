"""The state that a run starts from: reads `Experiment.initial` and checks it."""

import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from jaxformer import models, params
from jaxformer.config import storage
from jaxformer.errors import ConfigError
from jaxformer.parallel.mesh import Mesh
from jaxformer.runs import checkpoint_reader
from jaxformer.runs.continued import last_state
from jaxformer.runs.initial import FromRun
from jaxformer.runs.run_folder import RunFolder, open_experiment, runs_of
from jaxformer.runs.same_data import warn_of_tokenizer
from jaxformer.runs.setup import Setup
from jaxformer.training.optimizers import without_gradient
from jaxformer.training.recipe import Recipe, build
from jaxformer.training.references import references_of
from jaxformer.training.step import TrainState, abstract_state, first_state

log = logging.getLogger("jaxformer")


def begin(setup: Setup, shardings: Any, watchdog: Any) -> tuple[TrainState, int]:
    """(the state that a new run begins with, steps done): of first parameters, or of another run.

    The state is split as `shardings` say.
    """
    experiment = setup.experiment
    recipe = setup.recipe
    for field, folder in other_runs(experiment, setup.runs).items():
        warn_of_tokenizer(field, folder, setup.dataset.tokenizer)
    if experiment.continue_from is not None:
        watchdog.phase("the state to go on from")
        return last_state(experiment, recipe, shardings, setup.runs, setup.dataset.digest)
    watchdog.phase("the first parameters", patience=math.inf)  # they may have to be downloaded
    params = first_params(
        experiment.initial, experiment.model, recipe, setup.runs, setup.weights_of
    )
    watchdog.phase("the first state")
    return jax.block_until_ready(first_state(recipe, shardings, params)), 0


def run_named(text: str, runs: epath.PathLike) -> FromRun | None:
    """The run that a text names, as in `from_text`; None where there is none."""
    path = epath.Path(text).expanduser()
    if storage.is_dir(path / "checkpoints"):
        return FromRun(text)
    if storage.exists(path) or "/" in text:
        return None
    inside = epath.Path(runs) / text
    if storage.is_dir(inside / "checkpoints"):
        return FromRun(str(inside))
    found = [folder.path for folder in runs_of(text, runs) if storage.is_dir(folder.checkpoints)]
    return FromRun(str(found[-1])) if found else None


def from_text(text: str, runs: epath.PathLike = "runs", field: str = "initial") -> FromRun | None:
    """The run that a text names: a run's folder, its name in `runs`, or an experiment's name.

    An experiment's name means its newest run. None: the text names no run of ours.
    """
    path = epath.Path(text).expanduser()
    if (found := run_named(text, runs)) is not None:
        if found.path not in (text, str(epath.Path(runs) / text)):
            log.info("%s=%s: the newest run is %s", field, text, found.path)
        return found
    if storage.is_file(path / "config.json") or not storage.exists(path):
        return None
    raise ConfigError(
        f"{field}={text}: neither a run's folder nor one with a Hugging Face config.json"
    )


def other_runs(experiment: Any, runs: epath.PathLike) -> dict[str, RunFolder]:
    """The runs that an experiment names: those of `initial`, `continue_from` and `references`."""
    named = {"initial": experiment.initial, "continue_from": experiment.continue_from} | {
        f"references[{name!r}]": reference.initial
        for name, reference in references_of(experiment).items()
    }
    found = {}
    for field, start in named.items():
        if isinstance(start, str | os.PathLike):
            start = run_named(os.fspath(start), runs)
        if isinstance(start, FromRun):
            found[field] = RunFolder(epath.Path(start.path).expanduser())
    return found


def first_params(
    initial: Callable | str | os.PathLike | None,
    model: Any,
    recipe: Recipe,
    runs: epath.PathLike = "runs",
    weights_of: Callable[[str], Callable] | None = None,
) -> params.Tree:
    """The tree that trains, from `initial`. None: random parameters.

    Factors of an adaptation and the objective's own parameters start as declared.
    `weights_of(text)` reads a text that names no run of ours. Raises ConfigError for wrong shapes.
    """
    if initial is None:
        return None
    model_spec = models.spec(model)
    key = params.random_key(recipe.seed)
    tree = read_params("initial", initial, model, key, runs, weights_of)
    warn_of_new_frozen(recipe, model_spec, tree, key)
    if "weights" in recipe.spec and "weights" not in model_spec:
        adapted = recipe.parts.adapted
        store = None if adapted is None else adapted.store
        tree = {"weights": tree if store is None else store(tree)}
    if not isinstance(tree, Mapping):
        return tree
    added = {name: part for name, part in recipe.spec.items() if name not in tree}
    return {**tree, **params.init(added, key)}


def warn_of_new_frozen(
    recipe: Recipe, model_spec: params.Tree, tree: params.Tree, key: jax.Array
) -> None:
    """Warns of parameters that `initial` leaves as they are drawn, and that are frozen.

    A head that the weights do not have, for example, stays random then, and the run would learn
    around it in silence.
    """
    if recipe.frozen is None or not isinstance(tree, Mapping):
        return
    in_adaptation = "weights" in recipe.spec and "weights" not in model_spec
    held = params.paths(without_gradient(recipe.spec, recipe.frozen))
    new = [
        path
        for path in drawn_paths(model_spec, tree, key)
        if held.get(f"weights/{path}" if in_adaptation else path)
    ]
    if not new:
        return
    advice = "let it train (adaptation.trains, frozen), or start from weights that have it"
    log.warning(
        "initial: %s: frozen, and as it was drawn, so it stays random; %s", ", ".join(new), advice
    )


def drawn_paths(spec: params.Tree, tree: params.Tree, key: jax.Array) -> list[str]:
    """The paths outside of layers whose leaves are the initial values of `params.init(spec, key)`.

    Constant initial values, such as zeros, do not count: trained parameters may equal them.
    """
    leaves = params.paths(tree)
    other = jax.random.fold_in(key, 1)

    @partial(jax.jit, static_argnums=0)
    def is_drawn(path, leaf, key, other):
        of_path = {path: params.paths(spec)[path]}
        value = params.init(of_path, key)[path]
        is_random = jnp.any(value != params.init(of_path, other)[path])
        # an init outside of jit may round differently
        tolerance = 1e-5 * jnp.max(jnp.abs(value))
        return is_random & jnp.all(jnp.abs(leaf - value) <= tolerance)

    return [
        path
        for path, leaf in params.paths(spec).items()
        if leaf.trained and "layers" not in leaf.axes
        if bool(is_drawn(path, leaves[path], key, other))
    ]


def read_params(
    field: str,
    initial: Callable | str | os.PathLike,
    model: Any,
    key: jax.Array,
    runs: epath.PathLike = "runs",
    weights_of: Callable[[str], Callable] | None = None,
) -> params.Tree:
    """The parameters, in float32, that the experiment's `field` names for a model.

    Raises ConfigError for wrong shapes. Shapes do not show the base of a rotation, a mask or an
    activation, so a warning names the fields that differ.
    """
    model_spec = models.spec(model)
    start = initial
    if isinstance(start, str | os.PathLike):
        text = os.fspath(start)
        start = from_text(text, runs, field)
        if start is None and weights_of is None:
            raise ConfigError(
                f"{field}={text}: no run of that name; weights of Hugging Face are"
                f" families.HuggingFace({text!r})"
            )
        start = start or weights_of(text)  # type: ignore[misc]
    try:
        found = _read(start, model_spec, key)
    except checkpoint_reader.CheckpointError as error:
        raise ConfigError(f"{field}={initial}: {error}{sizes_of(start, model)}") from error
    tree = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), found)
    if problem := params.mismatch(model_spec, tree):
        raise ConfigError(
            f"{field}={initial}: parameter {problem}; give the model the sizes and heads of those"
            f" weights{sizes_of(start, model)}"
        )
    if differing := getattr(start, "differences", lambda model: [])(model):
        log.warning(
            "%s=%s: the model differs from that of these weights in %s",
            field,
            initial,
            "; ".join(differing),
        )
    return tree


def sizes_of(start: Callable, model: Any) -> str:
    """Which options give a model the sizes of the run that it starts from; "" if it has them."""
    options = start.options(model) if isinstance(start, FromRun) else ""
    return f"; the model of that run: {options}" if options else ""


def _read(start: Callable, spec: params.Tree, key: jax.Array) -> params.Tree:
    """The parameters of `start`; a run's adaptation is merged.

    Only the run's own experiment can merge it.
    """
    if not isinstance(start, FromRun) or start.description().get("adaptation") is None:
        return start(spec, key)
    folder = RunFolder(epath.Path(start.path).expanduser())
    recipe = build(replace(open_experiment(folder), mesh=Mesh(data=1)))
    state = abstract_state(recipe)
    part = "params" if state.ema is None else "ema"
    place = folder.for_library(folder.checkpoints)
    _, tree, _ = checkpoint_reader.restore_params(place, state.params, start.step, part=part)
    return jax.device_get(recipe.weights(tree))
