"""Parameters of objectives, frozen models and variables: what users of other trainers reported,
tried on ours."""

import re
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from jaxformer import models, params
from jaxformer.errors import ConfigError
from jaxformer.models.adaptation import Lora
from jaxformer.objectives import LossSums
from jaxformer.runs import loop, start
from jaxformer.runs.manifest import named_leaves
from jaxformer.runs.references import read_references
from jaxformer.runs.run import Run
from jaxformer.runs.run_folder import RunFolder
from jaxformer.training import Base
from jaxformer.training.optimizers import routes
from jaxformer.training.recipe import build
from jaxformer.training.step import first_state, make_train_step
from tests.training.rows import EXPERIMENT, Errors, batch_of


@dataclass(frozen=True)
class Plain:
    """Squared errors, with neither parameters nor variables of its own."""

    def __call__(self, model, params, batch, context):
        errors = jnp.square(model.apply(params, batch["x"]) - batch["y"])
        return LossSums(errors @ batch["weights"], batch["weights"].sum(), unit="rows")


def steps(experiment, count):
    recipe = build(experiment)
    step, state = jax.jit(make_train_step(recipe)), first_state(recipe)
    for i in range(count):
        state, _ = step(state, batch_of(i))
    return state


@pytest.mark.thorough
@pytest.mark.report(
    "Deci-AI/super-gradients#1647",
    "amjltc295/pytorch-golden-template#76",
    "huggingface/sentence-transformers#2872",
    "ifzhang/FairMOT#223",
    "open-mmlab/mmdetection#10560",
    right=(
        "parameters of a loss are in the optimizer, with its decay, and change with the first step"
    ),
)
def test_parameters_of_an_objective_are_in_the_optimizer():
    recipe = build(EXPERIMENT)
    assert routes(EXPERIMENT.optimizer, recipe.spec)["objective/scale"] == "AdamW"
    before, after = first_state(recipe), steps(EXPERIMENT, 1)
    assert (before.params["objective"]["scale"] != after.params["objective"]["scale"]).all()
    moments = {
        name: leaf
        for name, leaf in named_leaves(after.opt_state)
        if name.endswith("mu/objective/scale")
    }
    assert len(moments) == 1 and all((np.asarray(leaf) != 0).all() for leaf in moments.values())


@pytest.mark.thorough
@pytest.mark.report(
    "Deci-AI/super-gradients#1647",
    "huggingface/transformers#12484",
    right=(
        "parameters of a loss are in the checkpoint, and not in what is taken from it as the model"
    ),
)
def test_parameters_of_an_objective_are_saved_and_are_none_of_the_model(tmp_path):
    result = loop.train(EXPERIMENT, tmp_path)
    run = Run(RunFolder(epath.Path(result.folder)), EXPERIMENT)
    assert set(params.paths(run.checkpoint[1])) == {
        "w/kernel",
        "steps",
        "objective/scale",
        "objective/mean",
    }
    assert set(params.paths(run.params)) == {"w/kernel", "steps"} and result.parameters == 9
    assert run.evaluate()["loss"] == pytest.approx(result.validation["loss"], rel=1e-6)
    later = replace(
        EXPERIMENT, name="later", objective=Plain(), initial=str(result.folder), steps=1
    )
    assert loop.train(later, tmp_path).validation["loss"] > 0  # weights alone begin another run
    again = replace(later, name="again", objective=Errors())
    assert loop.train(again, tmp_path).parameters == 9


@pytest.mark.report(
    "amjltc295/pytorch-golden-template#76",
    right="a model whose tree cannot hold the objective's parameters is refused by name",
)
@pytest.mark.parametrize(
    ("tree", "problem"), [({"objective": 1}, "has a part 'objective'"), ([1], "is a list")]
)
def test_a_tree_that_cannot_hold_them_is_refused(tree, problem):
    leaf = params.Spec((8,), ("embed",), jax.nn.initializers.ones)

    class Odd:
        def spec(self):
            return jax.tree.map(lambda _: leaf, tree)

    with pytest.raises(
        ConfigError, match=f"objective: it has parameters, and the model's tree {problem}"
    ):
        build(replace(EXPERIMENT, model=Odd()))


@pytest.mark.thorough
@pytest.mark.report(
    "hiyouga/LlamaFactory#8459",
    "huggingface/trl#495",
    "huggingface/trl#1500",
    right=(
        "after a run with factors the reference is the merged model of that run, not the weights "
        "below its factors"
    ),
)
@pytest.mark.parametrize("references", [{"before": Base()}, {"before": "RUN"}])
def test_the_reference_of_a_second_adaptation_is_the_merged_model_of_the_first(
    references, tmp_path, monkeypatch
):
    first = replace(
        EXPERIMENT,
        objective=Plain(),
        adaptation=Lora("kernel", rank=1),
        initial=params.init,
        name="first",
    )
    result = loop.train(first, tmp_path)
    merged = Run(RunFolder(epath.Path(result.folder)), first).params
    below = params.init(models.spec(first.model), jax.random.key(0))
    assert (np.asarray(merged["w"]["kernel"]) != np.asarray(below["w"]["kernel"])).any()
    named = {
        name: str(result.folder) if value == "RUN" else value for name, value in references.items()
    }
    second = replace(first, name="second", initial=str(result.folder), references=named)
    # it was trained from Python
    monkeypatch.setattr(start, "open_experiment", lambda folder: first)
    recipe, found = build(second), read_references(second, None).params
    trained = start.first_params(second.initial, second.model, recipe, tmp_path)
    frozen = found | recipe.parts.base(trained)
    np.testing.assert_array_equal(frozen["before"]["w"]["kernel"], merged["w"]["kernel"])


@pytest.mark.report(
    "unslothai/unsloth-zoo#830",
    right="weights that train beside the factors are no frozen reference: that is refused",
)
def test_a_base_of_which_a_part_trains_is_refused():
    made = replace(EXPERIMENT, adaptation=Lora("kernel", trains="steps"), initial=params.init)
    with pytest.raises(
        ConfigError, match=re.escape("references['before']=Base(): expected frozen weights")
    ):
        build(replace(made, references={"before": Base()}))


@pytest.mark.thorough
@pytest.mark.report(
    "rosinality/stylegan2-pytorch#172",
    "lucidrains/ema-pytorch#29",
    right=(
        "averaged parameters have the running statistics of now: an average of them would lag "
        "behind"
    ),
)
def test_averages_hold_running_statistics_as_they_are():
    state = steps(replace(EXPERIMENT, ema_decay=0.99), 3)
    np.testing.assert_array_equal(state.ema["objective"]["mean"], state.params["objective"]["mean"])
    assert (
        np.asarray(state.ema["objective"]["scale"])
        != np.asarray(state.params["objective"]["scale"])
    ).any()


@pytest.mark.thorough_after(1)
@pytest.mark.report(
    "run-ai/runai#14", "mosaicml/composer#1207", "NVIDIA/DeepLearningExamples#625",
    right="running statistics are those of the whole batch, however many micro-batches it has",
)  # fmt: skip
@pytest.mark.parametrize("accumulation", [2, 8])
def test_statistics_do_not_depend_on_accumulation(accumulation):
    whole, parts = steps(EXPERIMENT, 3), steps(replace(EXPERIMENT, accumulation=accumulation), 3)
    # once a step, not once a micro-batch
    assert whole.params["steps"] == parts.params["steps"] == 3
    for name in ("mean", "scale"):
        one, other = whole.params["objective"][name], parts.params["objective"][name]
        # float32 sums in another order
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.thorough
@pytest.mark.report(
    "espnet/espnet#3283",
    "NVIDIA-NeMo/Speech#11272",
    right=(
        "one micro-batch that is not finite makes the whole step a bad one, which leaves "
        "statistics as they were"
    ),
)
def test_a_bad_micro_batch_writes_no_statistics():
    made = replace(EXPERIMENT, accumulation=4)
    recipe = build(made)
    step, state = jax.jit(make_train_step(recipe)), first_state(recipe)
    state, _ = step(state, batch_of(0))
    bad = batch_of(1)
    bad["x"][0, 0] = np.nan
    after, metrics = step(state, bad)
    assert metrics["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, after.params, state.params)
