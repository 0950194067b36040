"""The bad step that ended a run: RUN/bad keeps its parameters.

The step is computed again to find where numbers stop being finite.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer import models, params as parameters
from jaxformer.data import batching
from jaxformer.errors import ConfigError
from jaxformer.parallel import processes
from jaxformer.runs import checkpoint, checkpoint_reader
from jaxformer.runs.batches import on_devices, step_batches
from jaxformer.runs.run import Run
from jaxformer.runs.run_folder import RunFolder
from jaxformer.runs.same_data import check_data
from jaxformer.training.experiment import Experiment
from jaxformer.training.recipe import Recipe, build
from jaxformer.training.step import (
    LossScale,
    TrainState,
    abstract_state,
    init_state,
    make_train_step,
    state_shardings,
    step_key,
)


def keep(folder: RunFolder, state: TrainState, step: int, metadata: dict[str, Any]) -> None:
    """Saves the state before `step` for `replay`, in place of an earlier one.

    All processes call it.
    """
    folder.for_library(folder.bad)
    # The same start ends at the same step again.
    processes.first(lambda: folder.bad.rmtree(missing_ok=True))
    scale = None if state.loss_scale is None else float(state.loss_scale.value)
    with checkpoint.Manager(folder.bad, keep_latest=1) as manager:
        manager.save(step, {"params": state.params}, metadata | {"loss_scale": scale}, wait=True)


def replay(run: Run) -> dict[str, Any]:
    """The bad step of a run, computed again: its number, its examples, and what `explain` finds.

    Raises ConfigError where the run kept no bad step.
    """
    recipe = run.recipe
    mesh = run.mesh
    experiment = run.experiment
    if not checkpoint.steps(run.folder.for_library(run.folder.bad)):
        raise ConfigError(
            f"{run.folder.path}: no bad step is kept; a run keeps one when too many in a row end it"
        )
    shardings = None if mesh is None else state_shardings(recipe, mesh)
    step, trained, metadata = checkpoint_reader.restore_params(
        run.folder.bad, abstract_state(recipe, shardings).params
    )
    dataset = batching.open_dataset(experiment.data, experiment.model)
    check_data(run.folder, metadata, dataset)
    batches = step_batches(experiment, recipe, dataset, mesh)
    references = run.references
    with run.on_mesh():
        batch = batches(step, trained)
        state = jax.jit(partial(init_state, recipe), out_shardings=shardings)(trained)
        state = replace(state, step=jnp.full_like(state.step, step))
        if state.loss_scale is not None:
            state = replace(
                state,
                loss_scale=LossScale(
                    jnp.float32(metadata["loss_scale"]), state.loss_scale.good_steps
                ),
            )
        return {
            "step": step,
            "examples": batches.examples(step),
            **explain(
                experiment, state, on_devices(mesh, None, experiment.batch_size, batch), references
            ),
        }


def explain(
    experiment: Experiment,
    state: TrainState,
    batch: dict[str, Any],
    references: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Loss and gradient norm of a step, computed again; `found` names what is not finite.

    `found` has a line for each place. It covers parameters and batch; if the batch is finite, the
    residual stream after each layer; if that is finite, the gradients; and the new values of
    variables. The state is donated.
    """
    found = [
        f"parameter {name} is not finite in {rows}"
        for name, rows in bad_rows(parameters.paths(state.params)).items()
    ]
    cause = [f"batch: {name} is not finite in {rows}" for name, rows in bad_rows(batch).items()]
    cause += out_of_vocabulary(experiment.model, batch)
    recipe = build(replace(experiment, rms=("activation", "gradient")))
    frozen = {name: references[name] for name in recipe.references} if references else None
    bad_variables = bad_rows(new_variables(recipe, state, batch, frozen))
    metrics = jax.device_get(
        jax.jit(make_train_step(recipe), donate_argnums=0)(state, batch, frozen)[1]
    )
    for kind in ("activation", "gradient"):
        of_kind = {
            name.replace(f"rms/{kind}/", ""): value
            for name, value in metrics.items()
            if f"rms/{kind}/" in name
        }
        cause = cause or [
            f"{kind} of {name} is not finite in {rows}" for name, rows in bad_rows(of_kind).items()
        ]
    found += cause
    found += [
        f"the new value of {name} is not finite in {rows}" for name, rows in bad_variables.items()
    ]
    numbers = {name: float(metrics[name]) for name in ("loss", "grad_norm")}
    if not found and np.isfinite(list(numbers.values())).all():
        found = [
            "computed again, everything is finite: a spike, or else a fault of the device or of"
            " the data source"
        ]
    return {**numbers, "found": found}


def new_variables(
    recipe: Recipe, state: TrainState, batch: dict[str, Any], references: Any
) -> dict[str, Any]:
    """New values of variables by path, for the whole batch; empty without variables."""
    if not parameters.variables(recipe.spec):
        return {}

    @jax.jit
    def updates(state, batch, references):
        key = step_key(recipe, state.step)
        return recipe.loss(state.params, batch, key, state.step, references).updates or {}

    return updates(state, batch, references)


def bad_rows(leaves: dict[str, Any]) -> dict[str, str]:
    """The leaves with numbers that are not finite, and where on their first axis these are.

    An index of the first axis is a layer, a token or an example.
    """
    floats = {
        name: leaf for name, leaf in leaves.items() if jnp.issubdtype(leaf.dtype, jnp.floating)
    }
    finite = jax.jit(
        partial(jax.tree.map, lambda leaf: jnp.isfinite(leaf).all(tuple(range(1, leaf.ndim))))
    )(floats)
    bad = {
        name: np.flatnonzero(~rows)
        for name, rows in jax.device_get(finite).items()
        if not rows.all()
    }
    return {name: rows_text(rows, leaves[name].shape) for name, rows in bad.items()}


def out_of_vocabulary(model: Any, batch: dict[str, Any]) -> list[str]:
    """A line for each of tokens, labels and source with a token that the model does not have."""
    size = models.last_stack(model).vocab_size if models.is_config(model) else None
    sizes = {"tokens": size, "labels": size}
    if isinstance(model, models.EncoderDecoder):
        sizes["source"] = model.encoder.vocab_size
    outside = jax.jit(
        lambda tokens, size: ((tokens < 0) | (tokens >= size)).any(tuple(range(1, tokens.ndim)))
    )
    lines = []
    for name, size in sizes.items():
        if (
            size
            and name in batch
            and jnp.issubdtype(batch[name].dtype, jnp.integer)
            and batch[name].ndim > 1
        ):
            rows = np.flatnonzero(jax.device_get(outside(batch[name], size)))
            if len(rows):
                lines.append(
                    f"batch: {name} outside of the vocabulary of {size} in"
                    f" {rows_text(rows, batch[name].shape)}"
                )
    return lines


def rows_text(rows: np.ndarray, shape: tuple[int, ...]) -> str:
    """Indices of a first axis in words."""
    if not shape or len(rows) == shape[0]:
        return "all of it"
    return (
        f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows[:8]))}"
        f"{', ...' * (len(rows) > 8)} of {shape[0]}"
    )
