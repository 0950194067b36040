"""The loop: one trace of the step, whatever happens between steps; what is decided by the seed
alone."""

import time
import types
from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

from jaxformer import models, params, zoo
from jaxformer.data.tasks import Reverse
from jaxformer.decoding import round_to_blocks, round_to_int8
from jaxformer.errors import ConfigError
from jaxformer.models import ModelConfig, cost
from jaxformer.models.adaptation import Lora
from jaxformer.ops.quantised import NF4
from jaxformer.runs import best_effort, checkpoint, checks, job, loop, placement
from jaxformer.runs.best_effort import BestEffort
from jaxformer.runs.run import Run, evaluator, open_run
from jaxformer.runs.run_folder import RunFolder
from jaxformer.training import AdamW, Checkpoints, Constant, Experiment
from jaxformer.training.recipe import build, example_lengths
from jaxformer.training.step import init_state, make_train_step

TINY = Experiment(
    name="tiny",
    model=ModelConfig(
        vocab_size=17, num_layers=1, d_model=16, num_heads=2, context_length=16, dropout_rate=0.1
    ),
    data=Reverse(),
    steps=5,
    batch_size=4,
    log_every=1,
    eval_every=2,
    eval_batches=1,
    checkpoints=Checkpoints(every=2),
)


@pytest.mark.thorough
def test_a_run_traces_its_step_once(tmp_path, monkeypatch):
    """Evaluations, saves and the last step change no shape, dtype or sharding of the state."""
    chex.clear_trace_counter()

    def once(recipe):
        @chex.assert_max_traces(n=1)
        def step(state, batch):
            return make_train_step(recipe)(state, batch)

        return step

    monkeypatch.setattr(placement, "make_train_step", once)
    assert loop.train(TINY, tmp_path).validation["loss"] > 0


class Moody:
    """A metric that makes its score once, when it is tried, and never again."""

    def __init__(self):
        self.calls = 0

    def __call__(self, evaluation):
        self.calls += 1
        return {"mood": 1.0} if self.calls == 1 else {}


@pytest.mark.thorough
def test_a_score_that_there_is_not_costs_no_step(tmp_path):
    """The step that could not be ranked is saved: corrected, the run ends as one without the
    mistake."""
    good = replace(TINY, checkpoints=Checkpoints(every=100))
    bad = replace(good, metrics=(Moody(),), checkpoints=Checkpoints(every=100, best="mood"))
    with pytest.raises(ConfigError, match=r"checkpoints\.best='mood'"):
        loop.train(bad, tmp_path / "a")
    (folder,) = (tmp_path / "a").glob("tiny-*")
    assert checkpoint.steps(folder / "checkpoints") == [2]
    found, expected = loop.train(good, tmp_path / "a"), loop.train(good, tmp_path / "b")
    assert found.validation == expected.validation
    records = [(each.folder / "metrics.jsonl").read_text() for each in (found, expected)]
    assert records[0] == records[1]


def test_factors_beside_random_frozen_weights_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="freezes weights that would be random; give --initial"):
        loop.train(replace(TINY, adaptation=Lora()), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.thorough
def test_a_step_keeps_the_form_of_its_state():
    recipe = build(replace(TINY, ema_decay=0.9, precision="bfloat16"))
    state = jax.eval_shape(lambda: init_state(recipe))
    row = jax.ShapeDtypeStruct((4, 16), jnp.int32)
    batch = {"tokens": row, "labels": row, "weights": jax.ShapeDtypeStruct((4, 16), jnp.float32)}
    after, metrics = jax.eval_shape(make_train_step(recipe), state, batch)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, after)
    chex.assert_shape(list(metrics.values()), ())


@pytest.mark.thorough
def test_equal_seeds_give_equal_runs(tmp_path):
    folders = [loop.train(TINY, tmp_path / name).folder for name in ("one", "two")]
    # it was trained from Python
    with pytest.raises(ConfigError, match="no copy of its experiment"):
        open_run(folders[0])
    assert len({(folder / "metrics.jsonl").read_text() for folder in folders}) == 1
    other = loop.train(replace(TINY, seed=1), tmp_path / "one").folder
    assert (
        other != folders[0]
        and (other / "metrics.jsonl").read_text() != (folders[0] / "metrics.jsonl").read_text()
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": lambda spec: optax.adam}, "expected .spec. -> optax.GradientTransformation"),
        ({"objective": lambda *_: (jnp.ones(3), 1.0)}, "loss and weight are numbers"),
        ({"data": "text.txt"}, "data='text.txt': expected an object with open"),
        ({"schedule": lambda experiment: 0.1}, "schedule: expected .experiment. -> .step -> rate."),
        ({"initial": "runs/none"}, "runs/none"),
    ],
)
def test_parts_that_do_not_fit_are_refused_in_a_line(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message) as caught:
        loop.train(replace(TINY, **changes), tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.thorough
def test_a_function_gives_the_first_parameters(tmp_path):
    ones = lambda spec, key: jax.tree.map(lambda leaf: jnp.ones(leaf.shape), spec)
    loop.train(replace(TINY, initial=ones, schedule=lambda experiment: lambda step: 0.0), tmp_path)
    wrong = lambda spec, key: models.init(replace(TINY.model, d_model=32), key)
    with pytest.raises(ConfigError, match=r"parameter .* has shape .* expected"):
        loop.train(replace(TINY, initial=wrong, name="wrong"), tmp_path)


@pytest.mark.thorough
def test_8_bits_of_an_adaptation_are_those_of_the_merged_weights(tmp_path):
    model = replace(TINY.model, dropout_rate=0.0, init_std=0.5)
    tuned = replace(
        TINY,
        model=model,
        adaptation=Lora(rank=2),
        initial=params.init,
        optimizer=AdamW(0.1),
        schedule=Constant(),
    )
    result = loop.train(tuned, tmp_path)
    run, merged, dataset = (
        Run(RunFolder(result.folder), tuned),
        replace(tuned, adaptation=None),
        checks.open_data(tuned),
    )
    scores = run.evaluate(int8=True, stored=NF4(8))
    spec = models.spec(model)
    rounding = {
        "int8": round_to_int8(spec, run.params),
        "nf4": round_to_blocks(NF4(8), spec, run.params),
    }
    for name, rounded in rounding.items():
        expected = evaluator(merged, build(merged), dataset)(rounded, whole=True)["loss"]
        assert (
            scores[f"{name}_loss"]
            == pytest.approx(expected, rel=1e-6)
            != pytest.approx(scores["loss"], rel=1e-6)
        )
    assert scores["loss"] == pytest.approx(result.validation["loss"], rel=1e-6)


@pytest.mark.thorough
def test_the_work_of_a_step_is_that_of_all_its_positions():
    """Of a classified image one position has a label; of a masked text few have weight: all of them
    are multiplied."""
    found = job.seconds_at_peak(TINY, 2, "TPU v4", 8, None)
    assert found == cost.training_flops(TINY.model, 8) * 4 * 8 / (2 * cost.CHIPS["TPU v4"].peak)
    images = replace(TINY, model=zoo.PRESETS["vit_base"], batch_size=8)
    found = (
        job.seconds_at_peak(images, 1, "TPU v4", *example_lengths(images, {"images": None}))
        * cost.CHIPS["TPU v4"].peak
    )
    assert found == pytest.approx(8 * 6 * 17.58e9, rel=0.01)  # multiply-adds of an image
    pair = replace(TINY, model=zoo.PRESETS["t5_small"])
    # a user's data may have other names
    assert example_lengths(pair, {"my_source": None, "my_target": None}) == (
        512,
        512,
    )


@pytest.mark.thorough
def test_weights_of_hugging_face_are_a_beginning(tmp_path):
    """`initial` as the text of a folder: the first loss is that of the loaded model."""
    from jaxformer import families

    model = replace(TINY.model, dropout_rate=0.0, init_std=0.3)
    weights = models.init(model, jax.random.key(7))
    families.save(tmp_path / "weights", families.Checkpoint(model, weights))
    tuned = replace(
        TINY,
        model=model,
        initial=str(tmp_path / "weights"),
        schedule=lambda experiment: lambda step: 0.0,
    )
    once = replace(tuned, steps=1)
    run = loop.train(once, tmp_path, weights_of=families.HuggingFace)
    recipe = build(once)
    dataset = checks.open_data(tuned)
    expected = evaluator(tuned, recipe, dataset)(weights, final=True)
    assert run.validation == expected


def test_data_with_more_tokens_than_the_model_are_refused_of_a_pair_too():
    few = replace(TINY.model, vocab_size=16)
    pair = models.EncoderDecoder(encoder=replace(few, heads=()), decoder=few)
    for model, data in ((few, Reverse()), (pair, Reverse(form="pair"))):
        with pytest.raises(
            ConfigError, match="vocab_size=16 is too small: the data have 17 tokens"
        ):
            checks.open_data(replace(TINY, model=model, data=data))


@pytest.mark.parametrize("every", [1, 2, 3, 5, 8, 100])
def test_a_process_killed_in_a_save_costs_at_most_the_interval(every):
    """The save before the one that was killed is complete: Manager.save waits for it."""
    saves = [0, *(done for done in range(1, 401) if loop.saves_after(done, every))]
    assert all(
        later - earlier <= max(every, 2) for earlier, later in zip(saves, saves[2:], strict=False)
    )
    assert set(range(every, 401, every)) <= set(saves)


def test_a_report_takes_a_small_share_of_the_time(monkeypatch):
    clock = types.SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(best_effort, "time", clock)
    calls = []

    def draw():
        calls.append(clock.now)
        clock.now += 0.02

    report = BestEffort(draw, share=0.2)
    while clock.now < 0.6:
        report()
        clock.now += 0.001
    monkeypatch.undo()
    assert 0.2 * 0.6 / 0.02 <= len(calls) <= 0.2 * 0.6 / 0.02 + 1
    report = BestEffort(lambda number: time.sleep(0.001) or number)
    assert [report(number) for number in range(20)] == list(range(20))


@pytest.mark.parametrize("wrapped", [lambda draw: draw, partial])  # a partial has no name
def test_a_report_that_fails_is_dropped_with_one_warning(wrapped, caplog):
    calls = []

    def draw(number):
        calls.append(number)
        return 2 // (2 - number)

    report = BestEffort(wrapped(draw))
    assert [report(number) for number in range(5)] == [1, 2, None, None, None] and calls == [
        0,
        1,
        2,
    ]
    assert caplog.text.count("failed: ZeroDivisionError") == 1 and "draw" in caplog.text
