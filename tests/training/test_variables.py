"""What a step changes without a gradient: `Spec(trained=False)` and the `updates` of an objective
or a model."""

from dataclasses import dataclass, replace
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.nn.initializers import ones, zeros

from jaxformer import config, params, sharding
from jaxformer.errors import ConfigError
from jaxformer.models.adaptation import Lora
from jaxformer.objectives import LossSums
from jaxformer.parallel import Mesh, block_if_simulated, make_mesh, pmap
from jaxformer.params import Spec
from jaxformer.runs.reporter import Console, NonFinite, Reporter
from jaxformer.runs.reproduction import explain
from jaxformer.training import Lion, Muon, Spikes, optimizers
from jaxformer.training.recipe import build
from jaxformer.training.step import (
    StepMetrics,
    first_state,
    init_state,
    make_train_step,
    state_shardings,
)
from tests.training.rows import EXPERIMENT, Errors, batch_of

VARIABLES = "steps", "objective/mean"


@lru_cache
def step_of(experiment):
    return jax.jit(make_train_step(build(experiment)))


def run(experiment, batches):
    """(the state after these batches, the metrics of the last step)."""
    state, metrics = first_state(build(experiment)), {}
    for batch in batches:
        state, metrics = step_of(experiment)(state, batch)
    return state, metrics


def variables(state):
    return {path: np.asarray(params.paths(state.params)[path]) for path in VARIABLES}


def expected(batches):
    mean = np.zeros(8)
    for batch in batches:
        mean = 0.5 * mean + 0.5 * np.asarray(batch["x"], np.float64).mean(axis=0)
    return {"steps": len(batches), "objective/mean": mean}


def assert_same(found, wanted):
    for path in VARIABLES:
        # float32 means
        np.testing.assert_allclose(found[path], wanted[path], rtol=1e-6, atol=1e-6, err_msg=path)


@pytest.mark.thorough
@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_step_writes_the_mean_of_its_micro_batches(accumulation):
    batches = [batch_of(step) for step in range(3)]
    state, metrics = run(replace(EXPERIMENT, accumulation=accumulation), batches)
    assert_same(variables(state), expected(batches))
    assert metrics["rows"] == batches[0]["weights"].sum() and metrics.unit == "rows"
    assert metrics["bad_variables"] == 0


@pytest.mark.thorough
def test_pmap_writes_the_mean_of_its_devices():
    devices, batches = jax.devices(), [batch_of(step) for step in range(2)]
    made = replace(EXPERIMENT, mesh=Mesh(backend="pmap"))
    step = pmap.step(make_train_step(build(made), pmap.AXIS), devices)
    state = pmap.replicate(first_state(build(made)), devices)
    for batch in batches:
        state, _ = block_if_simulated(step(state, pmap.shard(batch, devices)))
    assert_same(variables(pmap.unreplicate(state)), expected(batches))
    for leaf in jax.tree.leaves(state.params):  # the copies stay equal
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[0], leaf.shape))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mesh", [Mesh(data=1, fsdp=8), Mesh(data=2, fsdp=4, explicit=True)], ids=str
)
def test_a_mesh_writes_what_one_device_does(mesh):
    made, batches = (
        replace(EXPERIMENT, mesh=mesh, accumulation=2),
        [batch_of(step) for step in range(2)],
    )
    devices, recipe = make_mesh(mesh), build(made)
    places = state_shardings(recipe, devices)
    with jax.set_mesh(devices):
        state = block_if_simulated(jax.jit(partial(init_state, recipe), out_shardings=places)())
        step = jax.jit(make_train_step(recipe), donate_argnums=0, out_shardings=(places, None))
        for batch in batches:
            batch = jax.device_put(batch, sharding.batch_sharding(devices, batch))
            state, _ = block_if_simulated(step(state, batch))
    assert_same(variables(state), expected(batches))
    assert (
        state.params["objective"]["mean"].sharding.spec == places.params["objective"]["scale"].spec
    )
    one = run(replace(EXPERIMENT, accumulation=2), batches)[0]
    for path, leaf in params.paths(one.params).items():
        np.testing.assert_allclose(
            params.paths(state.params)[path], leaf, rtol=1e-5, atol=1e-5, err_msg=path
        )


@dataclass(frozen=True)
class Poisoned(Errors):
    """A variable that is what the batch says."""

    def __call__(self, model, params, batch, context):
        sums = super().__call__(model, params, batch, context)
        return replace(sums, updates=sums.updates | {"steps": batch["poison"].mean()})


@pytest.mark.thorough
def test_a_variable_that_is_not_finite_makes_a_bad_step():
    made = replace(EXPERIMENT, objective=Poisoned())
    good, bad = batch_of() | {"poison": np.ones(16)}, batch_of(1) | {"poison": np.full(16, np.nan)}
    good, bad = (jax.tree.map(lambda x: x.astype(np.float32), batch) for batch in (good, bad))
    before, _ = run(made, [good])
    after, metrics = run(made, [good, bad])
    assert (
        metrics["skipped"] == 1 and metrics["bad_variables"] == 1 and np.isfinite(metrics["loss"])
    )
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)
    jax.tree.map(np.testing.assert_array_equal, after.opt_state, before.opt_state)
    assert (
        "the new value of steps is not finite in all of it" in explain(made, before, bad)["found"]
    )
    said = []
    console = Console(9)
    console.say = said.append  # type: ignore[method-assign]
    report = Reporter(lambda *_: None, console, every=1, last=9, max_skipped=2)
    report.later(0, metrics)
    report.now()
    assert "new values of 1 variables are not finite" in said[0]
    report.later(1, StepMetrics(metrics | {"skipped": jnp.int32(2)}, "rows"))
    with pytest.raises(NonFinite, match="new values of variables were not finite"):
        report.now()


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["nan", "spike", "empty"])
def test_a_step_that_changes_nothing_leaves_variables_as_they_were(kind):
    made = replace(
        EXPERIMENT, spikes=Spikes(window=2), schedule=lambda experiment: lambda step: 1e-6
    )
    batches = [batch_of(0), batch_of(1)]
    before, _ = run(made, batches)
    bad = batch_of(2)
    match kind:
        case "nan":
            bad["y"] = bad["y"] * np.nan
        case "spike":
            bad["y"] = bad["y"] + 1e6
        case "empty":
            bad["weights"] = 0 * bad["weights"]
    after, metrics = run(made, [*batches, bad])
    assert metrics["skipped"] == (kind != "empty")
    assert_same(variables(after), variables(before))
    again, _ = run(made, [*batches, bad, batch_of(3)])
    assert_same(variables(again), expected([*batches, batch_of(3)]))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "optimizer", [EXPERIMENT.optimizer, Lion(), Muon()], ids=lambda o: type(o).__name__
)
def test_a_variable_has_no_gradient_no_optimizer_state_and_no_decay(optimizer):
    made = replace(EXPERIMENT, optimizer=optimizer, clip_norm=1e-3)
    recipe, batch = build(made), jax.device_put(batch_of())
    state = first_state(recipe)
    gradient = jax.grad(lambda tree: recipe.loss(tree, batch, jax.random.key(0)).loss)(state.params)
    assert not any(params.paths(gradient)[path].any() for path in VARIABLES)
    assert params.paths(gradient)["objective/scale"].any()
    trained = {"objective": {"scale": recipe.spec["objective"]["scale"]}, "w": recipe.spec["w"]}
    alone = jax.eval_shape(optimizers.build(optimizer, trained).init, params.abstract(trained))
    shapes = [
        sorted(leaf.shape for leaf in jax.tree.leaves(tree)) for tree in (state.opt_state, alone)
    ]
    assert shapes[0] == shapes[1] and (8,) in shapes[0]
    assert {optimizers.routes(optimizer, recipe.spec)[path] for path in VARIABLES} == {"a variable"}
    after, _ = step_of(made)(state, batch)
    assert_same(variables(after), expected([batch]))


@pytest.mark.thorough
def test_averaged_parameters_have_variables_as_they_are():
    batches = [batch_of(step) for step in range(3)]
    state, _ = run(replace(EXPERIMENT, ema_decay=0.9), batches)
    averaged = params.paths(state.ema)
    for path, value in variables(state).items():
        np.testing.assert_array_equal(averaged[path], value)
    assert (averaged["w/kernel"] != params.paths(state.params)["w/kernel"]).any()


@dataclass(frozen=True)
class Writes(Errors):
    updates: tuple = ()

    def __call__(self, model, params, batch, context):
        sums = super().__call__(model, params, batch, context)
        return replace(sums, updates={path: jnp.zeros(shape) for path, shape in self.updates})


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        (
            (("w/kernel", (8, 1)),),
            "updates: w/kernel trains, so a step may not write it; declare it with Spec",
        ),
        ((("objective/scale", (8,)),), "updates: objective/scale trains"),
        (
            (("nothing", ()),),
            "updates: nothing is no parameter; variables are objective/mean, steps",
        ),
        ((("steps", (2,)),), r"updates: steps has shape \(2,\); expected \(\)"),
    ],
)
def test_an_update_of_what_is_no_variable_is_refused_by_name(updates, message):
    recipe = build(replace(EXPERIMENT, objective=Writes(updates)))
    with pytest.raises(ConfigError, match=message) as caught:
        jax.eval_shape(
            make_train_step(recipe), jax.eval_shape(partial(init_state, recipe)), batch_of()
        )
    assert "\n" not in str(caught.value)


@dataclass(frozen=True)
class Sees(Errors):
    """Its loss is the sum of the variables."""

    def __call__(self, model, params, batch, context):
        total = sum(value.sum() for value in context.variables.values())
        weights = batch["weights"].sum()
        names = {name.replace("/", "_"): (jnp.float32(1), weights) for name in context.variables}
        return LossSums(total * weights, weights, names, {"steps": context.variables["steps"] + 1})


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("adaptation", [None, Lora("kernel")])
def test_an_objective_sees_variables_by_the_models_paths(adaptation):
    """Also under an adaptation, whose tree has them elsewhere."""
    initial = None if adaptation is None else params.init
    made = replace(EXPERIMENT, objective=Sees(), adaptation=adaptation, initial=initial)
    recipe = build(made)
    state, metrics = jax.jit(make_train_step(recipe))(first_state(recipe), batch_of())
    assert {"steps", "objective_mean"} <= set(metrics)
    tree = state.params if adaptation is None else state.params["weights"]
    assert tree["steps"] == 1 and "objective" in state.params
    assert recipe.weights(state.params)["steps"] == 1


def test_a_declared_variable_is_another_description_and_a_parameter_is_the_one_of_before():
    leaf = Spec((8,), ("embed",), zeros)
    names = {"type", "shape", "axes", "init", "contracts", "rate"}
    assert set(config.describe(leaf)) == names
    assert config.describe(replace(leaf, trained=False)) == config.describe(leaf) | {
        "trained": False
    }
    assert params.stack(replace(leaf, trained=False), 3).trained is False
    assert params.variables({"a": leaf, "b": {"c": Spec((), (), ones, trained=False)}}) == ["b/c"]
