"""Frozen models that an objective reads: whatever they are read from, on any devices, and never
others than at the start."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath

from jaxformer import config, models, params
from jaxformer.data.tasks import Reverse
from jaxformer.errors import ConfigError
from jaxformer.models import Classification, ModelConfig, adaptation
from jaxformer.models.adaptation import Lora
from jaxformer.objectives import LossSums, TokenCrossEntropy
from jaxformer.parallel import Mesh
from jaxformer.runs import checkpoint_reader, loop
from jaxformer.runs.initial import FromRun
from jaxformer.runs.references import digests, read_references
from jaxformer.runs.run import Run
from jaxformer.runs.run_folder import RunFolder
from jaxformer.training import Base, Checkpoints, Experiment, Reference
from jaxformer.training.recipe import build
from jaxformer.training.references import check_references
from jaxformer.training.step import first_state, make_train_step

MODEL = ModelConfig(
    vocab_size=17, num_layers=1, d_model=16, num_heads=2, context_length=16, init_std=0.2
)
LARGE = replace(MODEL, d_model=24, num_heads=3)


@dataclass(frozen=True)
class Distilled:
    """Cross entropy with the tokens of a frozen model's own choice, which may be another
    architecture."""

    teacher: ModelConfig = MODEL

    def __call__(self, model, params, batch, context):
        frozen = context.references["teacher"]
        logits = models.apply(
            models.evaluation(self.teacher), frozen, batch["tokens"], dtype=context.dtype
        ).logits
        return TokenCrossEntropy()(
            model, params, batch | {"labels": jnp.argmax(logits, axis=-1)}, context
        )


TINY = Experiment(
    name="student",
    model=MODEL,
    data=Reverse(),
    objective=Distilled(),
    references={"teacher": params.init},
    steps=5,
    batch_size=8,
    log_every=1,
    eval_every=2,
    checkpoints=Checkpoints(every=2, keep_latest=3),
)


def batch_of():
    tokens = jax.random.randint(jax.random.key(0), (8, 16), 0, 17)
    return {"tokens": tokens, "labels": jnp.roll(tokens, -1, 1), "weights": jnp.ones((8, 16))}


def after_a_step(experiment, references):
    recipe = build(experiment)
    return jax.jit(make_train_step(recipe))(first_state(recipe), batch_of(), references)


def leaves_saved(folder, step):
    manifest = checkpoint_reader.read_manifest(
        checkpoint_reader.resolve(folder / "checkpoints") / str(step)
    )
    return {name: leaf["fingerprint"] for name, leaf in manifest["leaves"].items()}, manifest[
        "metadata"
    ]


def test_references_decide_the_numbers_of_a_run_and_their_absence_changes_no_name():
    plain = replace(TINY, references={}, objective=TokenCrossEntropy())
    assert "references" not in config.changes(plain)
    names = {
        config.fingerprint(replace(TINY, references=value))
        for value in ({}, {"teacher": "a"}, {"teacher": "b"})
    }
    assert len(names) == 3
    assert hash(TINY) == hash(replace(TINY, references={}))  # a mapping has no hash


@pytest.mark.parametrize(
    ("references", "message"),
    [
        ("runs/base", "references=str: expected a mapping"),
        ({"a b": "runs/base"}, "references: 'a b' is no name"),
        (
            {"a": {"w": 1}},
            r"references\['a'\]=dict: expected a run's or Hugging Face folder or name",
        ),
        ({"a": Reference(3)}, r"references\['a'\]=int: expected"),
    ],
)
def test_what_is_no_reference_is_refused_in_a_line(references, message):
    with pytest.raises(ConfigError, match=message) as caught:
        check_references(references)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, "without an adaptation there is none"),
        (
            {
                "adaptation": Lora(),
                "model": replace(MODEL, heads=(Classification(3),)),
                "initial": params.init,
            },
            "weights train",
        ),
    ],
)
def test_a_base_that_is_not_frozen_is_refused(changes, problem):
    with pytest.raises(
        ConfigError,
        match=rf"references\['teacher'\]=Base\(\): expected frozen weights; .*{problem}",
    ):
        build(replace(TINY, references={"teacher": Base()}, **changes))


def plain_descent(spec):
    """An update that is the gradient: Adam makes a step of its full size of the rounding of one
    that is zero (key biases)."""
    return optax.sgd(1.0)


@pytest.mark.thorough
def test_a_reference_has_no_gradient_and_does_not_change():
    """The first step's gradient is that of a loss whose teacher is a constant."""
    made = replace(TINY, optimizer=plain_descent)
    references = read_references(made, None).params
    state, metrics = after_a_step(made, references)
    labels = jnp.argmax(
        models.apply(MODEL, references["teacher"], batch_of()["tokens"]).logits, axis=-1
    )
    plain = build(replace(made, references={}, objective=TokenCrossEntropy()))
    expected, known = jax.jit(make_train_step(plain))(
        first_state(plain), batch_of() | {"labels": labels}
    )
    np.testing.assert_allclose(metrics["loss"], known["loss"], rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state.params, expected.params
    )


@pytest.mark.thorough
def test_the_base_of_an_adaptation_is_its_frozen_weights():
    made = replace(
        TINY,
        references={"teacher": Base()},
        adaptation=Lora(),
        initial=params.init,
        optimizer=plain_descent,
    )
    state, metrics = after_a_step(made, None)
    weights = first_state(build(made)).params["weights"]
    other, known = after_a_step(
        replace(made, references={"teacher": params.init}), {"teacher": weights}
    )
    np.testing.assert_allclose(metrics["loss"], known["loss"], rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state.params, other.params
    )


@pytest.mark.thorough
def test_a_reference_of_another_architecture_is_read_and_split_by_its_own_spec():
    made = replace(
        TINY, references={"teacher": Reference(params.init, LARGE)}, objective=Distilled(LARGE)
    )
    mesh = Mesh(data=1, fsdp=8)
    from jaxformer.parallel import make_mesh

    (one,) = read_references(made, None).params.values()
    (split,) = read_references(replace(made, mesh=mesh), make_mesh(mesh)).params.values()
    assert params.mismatch(models.spec(LARGE), one) is None
    kernel = split["layers"]["attention"]["query"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // 8
    assert digests({"teacher": one}) == digests({"teacher": split})
    changed = jax.tree.map(lambda leaf: leaf.at[(0,) * leaf.ndim].multiply(1 + 1e-6), one)
    assert digests({"teacher": changed}) != digests({"teacher": one})
    with pytest.raises(ConfigError, match=r"references\['teacher'\]=.*: parameter .* has shape"):
        read_references(replace(made, references={"teacher": lambda spec, key: one}), None)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    return loop.train(
        replace(TINY, name="teacher", references={}, objective=TokenCrossEntropy()), runs
    ).folder


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [Mesh(data=1), Mesh(data=4, backend="pmap")], ids=str)
def test_a_run_is_resumed_with_the_same_reference_alone(
    teacher, mesh, tmp_path, capsys, monkeypatch
):
    made = replace(TINY, references={"teacher": str(teacher)}, mesh=mesh)
    whole = loop.train(made, tmp_path / "whole")
    saved, metadata = leaves_saved(whole.folder, 5)
    assert not [name for name in saved if "teacher" in name or "reference" in name]
    assert list(metadata["references"]) == ["teacher"]
    assert "reference teacher: " in capsys.readouterr().out

    class Stopped(BaseException):
        pass

    def stop(self, step, *arguments):
        if step == 3:
            raise Stopped
        later(self, step, *arguments)

    later = loop.Reporter.later
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(loop.Reporter, "later", stop)
        loop.train(made, tmp_path / "killed")
    (folder,) = (tmp_path / "killed").glob("student-*")
    another = FromRun(str(teacher), step=2)
    with monkeypatch.context() as patch:
        patch.setattr("jaxformer.runs.start.from_text", lambda *_: another)
        with pytest.raises(
            ConfigError, match=r"references\['teacher'\] is another model than when this run began"
        ) as caught:
            loop.train(made, tmp_path / "killed")
        assert "\n" not in str(caught.value)
    assert loop.train(made, tmp_path / "killed").folder == folder
    assert leaves_saved(folder, 5)[0] == saved
    record = (folder / "metrics.jsonl").read_text()
    assert record == (whole.folder / "metrics.jsonl").read_text()
    run = Run(RunFolder(epath.Path(folder)), made)
    assert run.evaluate()["loss"] == pytest.approx(whole.validation["loss"], rel=1e-6)


@pytest.mark.thorough
def test_an_adapted_run_with_its_base_scores_as_in_training(teacher, tmp_path):
    made = replace(
        TINY, references={"teacher": Base()}, adaptation=Lora(rank=2), initial=str(teacher)
    )
    result = loop.train(made, tmp_path)
    scores = Run(RunFolder(result.folder), made).evaluate(int8=True)
    assert scores["loss"] == pytest.approx(result.validation["loss"], rel=1e-5)
    assert scores["int8_loss"] != scores["loss"]
    base = FromRun(str(teacher))(models.spec(MODEL), jax.random.key(0))
    run = Run(RunFolder(result.folder), made)
    jax.tree.map(np.testing.assert_array_equal, run.references["teacher"], base)
    assert adaptation.lora(models.spec(MODEL), "query/kernel$", 2)  # what trains is beside it


@pytest.mark.thorough
def test_the_objective_of_an_evaluation_knows_the_step(tmp_path):
    @dataclass(frozen=True)
    class Steps:
        def __call__(self, model, params, batch, context):
            weights = batch["weights"].sum()
            loss = TokenCrossEntropy()(model, params, batch, context).loss
            return LossSums(loss, weights, {"at": (context.step * weights, weights)})

    result = loop.train(replace(TINY, references={}, objective=Steps(), steps=4), tmp_path)
    lines = [
        line
        for line in (result.folder / "metrics.jsonl").read_text().splitlines()
        if "validation" in line
    ]
    assert [
        f'"validation_at": {step}.0' in line for step, line in zip((2, 4), lines, strict=True)
    ] == [True, True]
    assert result.validation["at"] == 4
