"""Data from the model, scores and pictures of the user's own: what users of others reported, tried
here."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from etils import epath

from jaxformer import models
from jaxformer.data.sources import Dataset
from jaxformer.data.tasks import Copy
from jaxformer.errors import ConfigError
from jaxformer.models import ModelConfig
from jaxformer.parallel import Mesh
from jaxformer.params import Spec
from jaxformer.runs import checks, loop
from jaxformer.runs.batches import StepBatches
from jaxformer.runs.reporter import Reporter
from jaxformer.runs.run_folder import RunFolder
from jaxformer.training import Checkpoints, Experiment

B, T = 8, 8
MODEL = ModelConfig(vocab_size=9, num_layers=1, d_model=16, num_heads=2, context_length=T)
TASK = Copy(vocab_size=8, length=4, examples=16, validation_examples=4)
TINY = Experiment(
    name="tiny",
    model=MODEL,
    data=TASK,
    steps=4,
    batch_size=B,
    log_every=1,
    eval_every=2,
    checkpoints=Checkpoints(every=2),
)


def never(*_, **__):
    raise AssertionError("a step was made")


class Sampled:
    """Training rows drawn from the key; it notes the steps for which it was asked."""

    def __init__(self):
        self.steps = []

    def open(self, model):
        return Dataset(self.draw, TASK.open(model).validation, digest="sampled", vocab_size=9)

    def draw(self, params, key, step):
        self.steps.append(step)
        rows = np.asarray(jax.device_get(jax.random.randint(key, (B, T + 1), 0, 9)), np.int32)
        return {
            "tokens": rows[:, :-1],
            "labels": rows[:, 1:],
            "weights": np.ones((B, T), np.float32),
        }


@pytest.mark.report(
    "huggingface/trl#6533",
    "huggingface/trl#6534",
    right=(
        "a reward for each sample: an array with another number of rows is refused, and is never "
        "broadcast to all of them"
    ),
)
@pytest.mark.parametrize(
    "rewards",
    [[1.0], np.ones(B - 1), np.ones(2 * B), np.float32(1.0)],
    ids=["1", "7", "16", "number"],
)
def test_rewards_of_another_number_than_the_samples_are_refused(rewards):
    made = StepBatches(
        lambda *_: {"tokens": np.ones((B, T), np.int32), "rewards": rewards},
        B,
        0,
        lambda tree: tree,
    )
    with pytest.raises(
        ConfigError, match=r"'rewards' of a training batch has .*; expected batch_size=8 rows"
    ):
        made(0)


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/trl#3896",
    "huggingface/trl#5787",
    right=(
        "what scores samples sees all of a step's samples at once, on however many devices the "
        "step runs"
    ),
)
def test_the_samples_of_a_step_are_scored_together(tmp_path):
    data = Sampled()
    loop.train(replace(TINY, data=data, steps=2, mesh=Mesh(data=1, fsdp=8)), tmp_path)
    assert data.steps == [0, 1]  # once a step, and each batch has B rows


@pytest.mark.thorough
@pytest.mark.report(
    "unslothai/unsloth-zoo#832",
    "allenai/open-instruct#932",
    right=(
        "a run that goes on samples nothing for the steps that are done, and draws as it would "
        "have drawn"
    ),
)
def test_a_run_that_goes_on_samples_only_the_steps_that_are_left(tmp_path, monkeypatch):
    class Stopped(BaseException):
        """Nothing in the library catches it."""

    later = Reporter.later

    def stop(self, step, *arguments):
        if step == 3:
            raise Stopped
        later(self, step, *arguments)

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(Reporter, "later", stop)
        loop.train(replace(TINY, data=Sampled()), tmp_path / "killed")
    (run,) = (tmp_path / "killed").glob("tiny-*")
    # a save half-way between two checkpoints may be complete
    last = max(int(step.name) for step in (run / "checkpoints").iterdir() if step.name.isdecimal())
    assert last in (2, 3)
    again, whole = Sampled(), Sampled()
    found = loop.train(replace(TINY, data=again), tmp_path / "killed").folder / "metrics.jsonl"
    assert again.steps == list(range(last, 4))
    expected = loop.train(replace(TINY, data=whole), tmp_path / "whole").folder / "metrics.jsonl"
    assert found.read_text() == expected.read_text()


@pytest.mark.thorough
@pytest.mark.report(
    "Lightning-AI/pytorch-lightning#1391",
    "ashleve/lightning-hydra-template#130",
    right=(
        "an evaluation that only tries a metric, before the first step, gives it no folder: no "
        "picture of an untrained model"
    ),
)
def test_a_metric_that_is_only_tried_draws_nothing(tmp_path, monkeypatch):
    folders = []

    def mine(evaluation):
        folders.append(evaluation.folder)
        return {"mine": 1.0}

    monkeypatch.setattr(loop, "loop", never)
    with pytest.raises(AssertionError, match="a step was made"):
        loop.train(replace(TINY, metrics=(mine,), checkpoints=Checkpoints(best="mine")), tmp_path)
    assert folders == [None]


class Late:
    """A metric of the end alone, of which nothing is known before."""

    only_final = True

    def __call__(self, evaluation):
        return {"late": 1.0}


def mine(evaluation):
    return {"mine": 1.0}


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#33832",
    "modelscope/ms-swift#4323",
    "Lightning-AI/pytorch-lightning#20046",
    right=(
        "a rank of a score that no evaluation makes is refused before a step; the line lists the "
        "scores that there are"
    ),
    hit=(
        "beside a metric of the user's, the line did not say that the score was one of the end "
        "alone"
    ),
)
def test_a_rank_that_only_the_end_makes_is_refused_beside_a_metric_of_ones_own(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(loop, "loop", never)
    with pytest.raises(ConfigError) as raised:
        loop.train(
            replace(TINY, metrics=(mine, Late()), checkpoints=Checkpoints(best="-late")), tmp_path
        )
    line = str(raised.value)
    assert "mine" in line and "Late scores at the end alone, unless only_final=False" in line


@pytest.mark.report(
    "AI-Hypercomputer/maxtext#4133",
    right=(
        "a name of an axis that no rule has is refused on any mesh, with the names that there are"
    ),
    hit=(
        "it was taken for an axis that is not split: a typo left a matrix whole on each device, "
        "without a word"
    ),
)
@pytest.mark.parametrize("axis", ["emb", "heds", "concat_embed", "Embed", ""])
def test_an_axis_without_a_rule_is_refused(axis, tmp_path):
    spec = {"kernel": Spec((4, 4), (axis, None), jax.nn.initializers.zeros, (axis,))}
    folder = RunFolder(epath.Path(tmp_path))
    with pytest.raises(
        ConfigError,
        match=rf"parameter kernel: unknown axis '{axis}' .*expected one of embed, heads, ",
    ):
        checks.check_axes(spec, folder)
    checks.check_axes(models.spec(MODEL), folder)
