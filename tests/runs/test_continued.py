"""A run that goes on from the end of another one: the same bits as one long run."""

import contextlib
import io
import json

import jax
import numpy as np
import pytest

from jaxformer import cli
from jaxformer.runs.reporter import Reporter
from jaxformer.runs.run import open_run
from tests.joints.harness import Stopped
from tests.tiny import EXPERIMENT, furnish

pytestmark = pytest.mark.thorough  # each trains a run, some seconds long

SOURCE = EXPERIMENT.replace("Checkpoints, Experiment", "Checkpoints, Constant, Experiment").replace(
    "steps=6,", "steps=6, schedule=Constant(warmup=2), ema_decay=0.9,"
)


def train(*options):
    """(exit code, what was printed) of a training."""
    said, wrong = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(wrong):
        code = cli.main(["train", "tiny", *options])
    return code, said.getvalue() + wrong.getvalue()


@pytest.fixture
def first(tmp_path, monkeypatch):
    """The folder of a run of six steps."""
    monkeypatch.chdir(furnish(tmp_path, SOURCE))
    assert train()[0] == 0
    (folder,) = (tmp_path / "runs").iterdir()
    return folder


def runs_named(first, name):
    return [path for path in first.parent.iterdir() if path.name.startswith(f"{name}-")]


def state_of(folder):
    run = open_run(folder)
    step, tree, _ = run.checkpoint
    assert step == 12
    return [*jax.tree.leaves(tree), *jax.tree.leaves(run.params)]


def assert_same(one, other):
    for ours, theirs in zip(state_of(one), state_of(other), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_it_ends_with_the_bits_of_one_long_run(first, monkeypatch):
    """Also if it is killed, before and after its own first checkpoint."""
    assert train("--steps=12", "--name=long")[0] == 0
    options = "--steps=12", "--name=more", f"--continue-from={first}"
    later = Reporter.later
    for end in (6, 9):

        def stop(self, number, *arguments, end=end):
            if number == end:
                raise Stopped
            return later(self, number, *arguments)

        monkeypatch.setattr(Reporter, "later", stop)
        with pytest.raises(Stopped):
            train(*options)
    monkeypatch.setattr(Reporter, "later", later)
    code, said = train(*options)
    assert code == 0, said
    (more,), (long,) = runs_named(first, "more"), runs_named(first, "long")
    assert_same(more, long)
    records = [json.loads(line) for line in (more / "metrics.jsonl").read_text().splitlines()]
    whole = [json.loads(line) for line in (long / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in whole if "loss" in line}
    found = {line["step"]: line["loss"] for line in records if "loss" in line}
    assert min(found) >= 6 and found == {step: losses[step] for step in found}


def test_it_says_what_stays_and_what_changes(first):
    code, said = train("--steps=9", "--batch-size=8", f"--continue-from={first.name}")
    assert code == 0
    assert f"goes on from runs/{first.name} after step 6" in said
    assert "batch_size: 4 -> 8; steps: 6 -> 9" in said or "steps: 6 -> 9" in said
    assert "its folder: runs/tiny-" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--steps=6"], "it has done 6 steps, so steps=6 leaves none"),
        (["--continue-from=tiny", "--steps=9"], "name one of its runs: tiny-"),
        (["--continue-from=nothing", "--steps=9"], "no run's folder with checkpoints"),
        (["--optimizer=Lion()", "--steps=9"], "another optimizer, give --initial="),
        (["--model.d-model=32", "--steps=9"], "another optimizer, give --initial="),
    ],
    ids=["no step left", "an experiment", "no run", "another optimizer", "another model"],
)
def test_what_cannot_go_on_is_told(first, options, said):
    code, printed = train(f"--continue-from={first}", "--name=other", *options)
    assert code == 2 and said in printed, printed
    for folder in runs_named(first, "other"):  # nothing but a place for checkpoints
        assert not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").read_text()


def test_the_other_run_may_go_once_there_is_a_checkpoint(first, monkeypatch):
    """A run that is killed then resumes from its own, and a finished one says that it is."""
    options = "--steps=12", "--name=more", f"--continue-from={first}"
    later = Reporter.later

    def stop(self, number, *arguments):
        if number == 10:
            raise Stopped
        return later(self, number, *arguments)

    monkeypatch.setattr(Reporter, "later", stop)
    with pytest.raises(Stopped):
        train(*options)
    monkeypatch.setattr(Reporter, "later", later)
    first.rename(first.parents[1] / "elsewhere")
    for said in ("resuming after step", "this run is finished"):
        code, printed = train(*options)
        assert code == 0 and said in printed, printed


@pytest.mark.thorough
def test_it_goes_on_on_eight_devices(first):
    options = "--steps=12", f"--continue-from={first}"
    assert train(*options, "--name=one")[0] == 0
    assert train(*options, "--name=eight", "--mesh.fsdp=4", "--mesh.data=1")[0] == 0
    (one,), (eight,) = runs_named(first, "one"), runs_named(first, "eight")
    for ours, theirs in zip(state_of(one), state_of(eight), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_an_unfinished_run_is_offered(first):
    """A new run tells how to go on with one that was stopped."""
    (first / "result.json").unlink()
    _, said = train("--steps=7", "--optimizer.weight-decay=0.2")
    assert "to go on with it instead: python -m jaxformer train" in said
