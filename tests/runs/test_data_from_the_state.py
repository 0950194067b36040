"""Training batches that are made of the state: what the function gets, when, and what is
refused."""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from jaxformer import params as parameters
from jaxformer.data import batching
from jaxformer.data.mixing import Mixed
from jaxformer.data.sources import Dataset
from jaxformer.errors import ConfigError
from jaxformer.models import ModelConfig
from jaxformer.models.adaptation import Lora
from jaxformer.parallel import Mesh
from jaxformer.runs import loop
from jaxformer.runs.batches import StepBatches, batch_key
from jaxformer.runs.checkpoint_reader import restore_params
from jaxformer.runs.reporter import NonFinite, Reporter
from jaxformer.runs.reproduction import replay
from jaxformer.runs.run import Run
from jaxformer.runs.run_folder import RunFolder
from jaxformer.tools.planning.compile import abstract_batch
from jaxformer.training import Checkpoints, Experiment
from jaxformer.training.recipe import build
from jaxformer.training.step import abstract_state, first_state, make_train_step
from tests.faults.pods import Pod
from tests.joints import harness

B, T = 8, 6
MODEL = ModelConfig(vocab_size=11, num_layers=1, d_model=16, num_heads=2, context_length=T)


def next_tokens(rows):
    rows = np.asarray(rows, np.int32)
    return {
        "tokens": rows[:, :-1],
        "labels": rows[:, 1:],
        "weights": np.ones((len(rows), rows.shape[1] - 1), np.float32),
    }


def drawn(params, key, step):
    """Rows that depend on all three arguments."""
    total = sum(float(jnp.abs(leaf).sum()) for leaf in jax.tree.leaves(params))
    rows = jax.random.randint(key, (B, T + 1), 0, 11)
    return next_tokens((np.asarray(jax.device_get(rows)) + round(total * 1000) + step) % 11)


class Noted:
    """`drawn`, which notes what it is called with."""

    def __init__(self):
        self.calls = []

    def __call__(self, params, key, step):
        batch = drawn(params, key, step)
        copies = {path: np.array(leaf) for path, leaf in parameters.paths(params).items()}
        self.calls.append((step, np.array(jax.random.key_data(key)), copies, batch))
        return batch


class Data:
    """A data set whose training split is a function."""

    def __init__(self, function=drawn):
        self.function = function

    def open(self, model):
        rows = next_tokens(np.arange(4 * (T + 1)).reshape(4, T + 1) % 11)
        examples = [{name: leaf[i] for name, leaf in rows.items()} for i in range(4)]
        return Dataset(
            self.function, examples, digest="drawn 1", description="drawn", vocab_size=11
        )


TINY = Experiment(
    name="tiny", model=MODEL, data=Data(), steps=5, batch_size=B, log_every=1, eval_every=5, seed=3,
    checkpoints=Checkpoints(every=2),
)  # fmt: skip


def losses(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


@pytest.mark.thorough
def test_a_batch_is_made_of_the_parameters_before_its_step(tmp_path):
    """The witness makes each step by hand: the same function, the key of (seed, step), the step of
    the recipe."""
    noted = Noted()
    found = losses(loop.train(replace(TINY, data=Data(noted)), tmp_path).folder)
    recipe = build(TINY)
    state, step_of = first_state(recipe), jax.jit(make_train_step(recipe))
    assert [step for step, *_ in noted.calls] == list(range(TINY.steps))
    for step, key, copies, batch in noted.calls:
        assert np.array_equal(key, jax.random.key_data(batch_key(TINY.seed, step)))
        for path, leaf in parameters.paths(state.params).items():
            # float32, another program
            np.testing.assert_allclose(copies[path], leaf, rtol=1e-6, atol=1e-8)
        state, metrics = step_of(state, batch)
        np.testing.assert_allclose(found[step], metrics["loss"], rtol=1e-5)
    assert len({key.tobytes() for _, key, *_ in noted.calls}) == TINY.steps


@pytest.mark.thorough
@pytest.mark.parametrize("stop", [1, 4])
def test_a_run_that_was_killed_makes_the_same_batches(tmp_path, monkeypatch, stop):
    expected = loop.train(TINY, tmp_path / "whole").folder

    class Stopped(BaseException):
        """Nothing in the library catches it, as nothing catches SIGKILL."""

    later = Reporter.later

    def killed(self, step, *arguments):
        if step == stop:
            raise Stopped
        later(self, step, *arguments)

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(Reporter, "later", killed)
        loop.train(TINY, tmp_path / "killed")
    found = loop.train(TINY, tmp_path / "killed").folder
    assert (found / "metrics.jsonl").read_text() == (expected / "metrics.jsonl").read_text()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "changes",
    [
        {"mesh": Mesh(data=1, fsdp=8)},
        {"mesh": Mesh(data=8, backend="pmap")},
        {"accumulation": 4},
    ],
    ids=["fsdp", "pmap", "accumulation"],
)
def test_a_mesh_and_micro_batches_change_no_number(tmp_path, changes):
    """Batches that do not depend on the last bits of parameters, which another order of sums
    changes."""
    rows = lambda params, key, step: next_tokens(jax.random.randint(key, (B, T + 1), 0, 11))
    one = replace(TINY, data=Data(rows))
    expected = losses(loop.train(one, tmp_path / "one").folder)
    found = losses(loop.train(replace(one, **changes), tmp_path / "other").folder)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.thorough
def test_an_adaptation_is_merged(tmp_path):
    first = loop.train(replace(TINY, steps=1), tmp_path).folder
    noted = Noted()
    saves = Checkpoints(every=1, keep_latest=2)
    tuned = replace(
        TINY,
        name="tuned",
        data=Data(noted),
        adaptation=Lora(rank=2),
        initial=str(first),
        steps=2,
        checkpoints=saves,
    )
    folder = loop.train(tuned, tmp_path).folder
    recipe = build(tuned)
    before = restore_params(folder / "checkpoints", abstract_state(recipe).params, 1)[1]
    merged = parameters.paths(recipe.weights(before))
    assert {path: leaf.shape for path, leaf in noted.calls[1][2].items()} == {
        path: leaf.shape for path, leaf in merged.items()
    }
    for path, leaf in merged.items():
        np.testing.assert_allclose(noted.calls[1][2][path], leaf, rtol=1e-6, atol=1e-7)


def changed(**others):
    """`drawn` with other arrays; of None, without that one."""

    def split(params, key, step):
        batch = drawn(params, key, step) | others
        return {name: value for name, value in batch.items() if value is not None}

    return split


@pytest.mark.parametrize(
    ("split", "said"),
    [
        (
            changed(labels=np.zeros((B - 1, T), np.int32)),
            "'labels' of a training batch has 7 rows; expected batch_size=8 rows",
        ),
        (
            changed(reward=1.0),
            "'reward' of a training batch has a number; expected batch_size=8 rows",
        ),
        (
            changed(reward=[[1], [1, 2]] * 4),
            "'reward' of a training batch is no array: its rows have several lengths",
        ),
        (changed(text=["a"] * B), "'text' of a training batch is list ['a'"),
        (
            lambda params, key, step: None,
            "the training split returned NoneType None; expected (params, key, step) -> {name",
        ),
        (
            lambda params, key, step: {},
            "the training split returned dict {}; expected (params, key, step) -> {name",
        ),
        (
            lambda params, key, step: [1, 2],
            "the training split returned list [1, 2]; expected (params, key, step) -> {name",
        ),
    ],
)
def test_a_batch_of_another_form_is_one_line(split, said):
    made = StepBatches(split, B, 0, lambda tree: tree)
    with pytest.raises(ConfigError) as raised:
        made(5, {})
    line = str(raised.value)
    assert (
        said in line
        and line.startswith("the batch of step 5 could not be made: data: ")
        and "\n" not in line
    )


@pytest.mark.thorough
def test_an_error_of_the_function_names_its_step(tmp_path):
    def fails(params, key, step):
        return drawn(params, key, step) if step < 3 else {"tokens": 1 / (step - 3)}

    with pytest.raises(
        batching.BadBatch, match=r"the batch of step 3 could not be made: ZeroDivisionError"
    ) as raised:
        loop.train(replace(TINY, data=Data(fails)), tmp_path)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    # step 2 was saved, and the run goes on
    assert losses(loop.train(replace(TINY, data=Data(drawn)), tmp_path).folder)


@pytest.mark.parametrize(
    "function", [lambda params: {}, lambda params, key: {}, lambda a, b, c, d: {}, lambda *, a: {}]
)
def test_a_function_of_other_arguments_is_refused_before_a_step(tmp_path, function):
    with pytest.raises(
        ConfigError, match=r"the training split is called as \(params, key, step\) -> .*, but "
    ):
        loop.train(replace(TINY, data=Data(function)), tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_validation_split_stays_a_sequence():
    data = SimpleNamespace(open=lambda model: Dataset([], drawn, digest=""))
    with pytest.raises(
        ConfigError, match="the validation split is a function; only the training split may be"
    ):
        batching.open_dataset(data, MODEL)


def test_what_needs_a_sequence_of_examples_refuses_in_one_line():
    dataset = Data().open(MODEL)
    with pytest.raises(
        ConfigError,
        match=r"data.sources\[0\] makes its batches of the state \(drawn\); it cannot be mixed",
    ):
        batching.open_dataset(Mixed(((1, Data()), (1, Data()))), MODEL)
    with pytest.raises(
        ConfigError, match="the training batches are made of the state; this needs a sequence"
    ):
        batching.batches(dataset.train, B, 0)
    with pytest.raises(ConfigError, match="plan: the training batches are made of the state"):
        abstract_batch(TINY)
    assert not batching.order_changed(dataset.train) and batching.unigram_entropy(dataset) is None


class Callable:
    """A sequence of examples that can be called, too, stays a sequence."""

    def __init__(self):
        self.rows = Data().open(MODEL).validation

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]

    def __call__(self, *_):
        raise AssertionError("called")


@pytest.mark.thorough
def test_a_sequence_that_can_be_called_is_a_sequence(tmp_path):
    assert losses(loop.train(replace(TINY, data=Data(Callable()), steps=2), tmp_path).folder)


def spoilt(params, key, step):
    batch = drawn(params, key, step)
    return batch | {"weights": np.full_like(batch["weights"], np.nan)} if step >= 2 else batch


@pytest.mark.thorough
def test_a_bad_step_is_made_again_of_the_state_that_was_kept(tmp_path, caplog):
    bad = replace(TINY, data=Data(spoilt), steps=9, max_skipped=3)
    with pytest.raises(NonFinite):
        loop.train(bad, tmp_path)
    assert (
        "batch: weights is not finite" in caplog.text
        and "its examples: made of the state" in caplog.text
    )
    (folder,) = tmp_path.glob("tiny-*")
    again = replay(Run(RunFolder(epath.Path(folder)), bad))
    assert again["step"] == 4 and again["examples"] == "made of the state"
    assert "batch: weights is not finite in all of it" in again["found"]


def test_a_batch_may_hold_arrays_of_the_device():
    """They come to the host once, whatever they lie on."""
    made = StepBatches(
        lambda params, key, step: {"x": jnp.arange(4.0) + step, "y": [1, 2, 3, 4]},
        4,
        0,
        lambda tree: tree,
    )
    batch = made(2)
    assert (
        isinstance(batch["x"], np.ndarray)
        and batch["x"].tolist() == [2, 3, 4, 5]
        and batch["y"].tolist() == [1, 2, 3, 4]
    )


def test_processes_that_make_other_batches_are_told(monkeypatch):
    """Each would train on a part of its own; a set of texts has another order in each process."""
    split = partial(lambda params, key, step: {"x": np.arange(4)})
    made = StepBatches(split, 4, 0, lambda tree: tree)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        "jaxformer.runs.batches.processes.all_gather_object", lambda value, what: [value, "another"]
    )
    with pytest.raises(
        ConfigError,
        match="process 1 made another batch of step 7 than process 0; draw only from `key`",
    ):
        made(7)
    monkeypatch.setattr(
        "jaxformer.runs.batches.processes.all_gather_object", lambda value, what: [value, value]
    )
    assert made(7)["x"].tolist() == [0, 1, 2, 3]


@pytest.mark.slow
def test_processes_sample_as_one_does(tmp_path):
    """Two real processes with four devices each decode, score and train as one with eight."""
    page = harness.read_page("data-from-the-model")["count"].replace('name="count"', 'name="tiny"')
    options = ["--steps=4", "--log-every=1", "--mesh.data=2", "--mesh.fsdp=4"]
    found = {}
    for count in (1, 2):
        folder = tmp_path / str(count)
        (folder / "experiments").mkdir(parents=True)
        (folder / "experiments" / "tiny.py").write_text(page)
        if count == 1:
            harness.train(folder, {"tiny": page}, *options)
        else:
            with Pod(2, *options, folder=folder) as pod:
                pod.finish()
        lines = harness.records(harness.run_of(folder, "tiny"))
        found[count] = [line["loss"] for line in lines if "loss" in line]
    np.testing.assert_allclose(found[2], found[1], rtol=1e-5)


@pytest.mark.slow
def test_processes_that_sample_other_batches_stop_in_one_line(tmp_path):
    page = harness.read_page("data-from-the-model")["count"].replace('name="count"', 'name="tiny"')
    page = "import jax\n" + page.replace(
        "rewards = np.array(", "rewards = jax.process_index() + np.array("
    )
    (tmp_path / "experiments").mkdir(parents=True)
    (tmp_path / "experiments" / "tiny.py").write_text(page)
    with Pod(2, "--steps=4", "--mesh.data=-1", folder=tmp_path) as pod:
        assert set(pod.codes().values()) == {2}
        assert (
            "process 1 made another batch of step 0 than process 0; draw only from `key`"
            in pod.said(0)
        )
