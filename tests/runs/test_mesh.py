"""One run, whatever it runs on: the same losses on one device and on eight, and from one mesh on to
another."""

import json
from dataclasses import replace

import chex
import jax
import numpy as np
import pytest

from jaxformer import config
from jaxformer.data.tasks import Reverse
from jaxformer.errors import ConfigError
from jaxformer.models import ModelConfig
from jaxformer.parallel import Mesh
from jaxformer.runs import loop
from jaxformer.runs.run import Run
from jaxformer.runs.run_folder import RunFolder, run_folder
from jaxformer.training import Checkpoints, Experiment
from jaxformer.zoo.reversible import Reversible

TINY = Experiment(
    name="tiny",
    model=ModelConfig(
        vocab_size=24, num_layers=2, d_model=16, num_heads=2, context_length=16, dropout_rate=0.1
    ),
    data=Reverse(),
    steps=4,
    batch_size=8,
    log_every=1,
    eval_every=2,
    checkpoints=Checkpoints(every=2, keep_latest=3),
)


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return np.array([line["loss"] for line in lines if "loss" in line])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    runs = tmp_path_factory.mktemp("alone")
    return losses(loop.train(TINY, runs).folder)


@pytest.mark.slow  # what goes on on another mesh, below, shows as much
@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(),
        Mesh(fsdp=4, tensor=2),
        Mesh(zero1=True),
        Mesh(fsdp=4, offload=True),
        Mesh(tensor=2, explicit=True),
    ],
    ids=["data", "fsdp tensor", "zero1", "fsdp offload", "tensor explicit"],
)
def test_a_mesh_trains_as_one_device_does(mesh, alone, tmp_path):
    found = losses(loop.train(replace(TINY, mesh=mesh), tmp_path).folder)
    # float32 sums in another order, amplified over a few steps of Adam
    np.testing.assert_allclose(found, alone, rtol=2e-4)


@pytest.mark.slow
def test_a_run_goes_on_on_another_mesh(alone, tmp_path, monkeypatch):
    class Stopped(Exception):
        pass

    def stop(self, step, metrics, work):
        if step == 3:  # after the checkpoint of step 2
            raise Stopped
        later(self, step, metrics, work)

    later = loop.Reporter.later
    with monkeypatch.context() as patch:
        patch.setattr(loop.Reporter, "later", stop)
        with pytest.raises(Stopped):
            loop.train(replace(TINY, mesh=Mesh(fsdp=8)), tmp_path)
    resumed = replace(TINY, mesh=Mesh(data=2, tensor=2))
    assert run_folder(resumed, tmp_path).path == run_folder(TINY, tmp_path).path
    result = loop.train(resumed, tmp_path)
    np.testing.assert_allclose(losses(result.folder), alone, rtol=2e-4)


@pytest.mark.parametrize(
    "other, text, said",
    [
        (replace(TINY, eval_every=1), "", "eval_every: 1 -> 2"),
        (TINY, "# another", "its file, or one that it imports"),
    ],
)
def test_a_host_with_another_experiment_is_refused(other, text, said, monkeypatch, tmp_path):
    """Each would wait for what the other never does, such as an evaluation."""
    monkeypatch.setattr(
        loop.processes, "first", lambda function, what: (config.describe(other), (text, []))
    )
    with pytest.raises(ConfigError, match=f"not that of process 0: {said}; give every host"):
        loop.train(TINY, tmp_path, config.Source("", "tiny.py", TINY))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(mesh=Mesh(data=16)), "do not make up 8"),
        (dict(mesh=Mesh(), batch_size=4), "batch_size=4 does not divide among 8 devices"),
        (dict(mesh=Mesh(data=1, tensor=8)), "heads=2 does not divide"),
        (
            dict(mesh=Mesh(stage=2), batch_size=12),
            "batch_size=12 does not divide among 4 devices .* in 2 micro-batches",
        ),
        (
            dict(mesh=Mesh(stage=2, data=1), model=replace(TINY.model, stack=Reversible())),
            "has no pipeline",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(changes, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        loop.train(replace(TINY, **changes), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
@pytest.mark.parametrize("explicit", [False, True])
def test_a_run_on_a_mesh_begins_with_the_parameters_of_another_run(explicit, tmp_path):
    first = replace(TINY, steps=1, schedule=lambda experiment: lambda step: 0.0, eval_batches=1)
    source = loop.train(replace(first, seed=1), tmp_path / "source")
    mesh = Mesh(fsdp=2, tensor=2, data=1, explicit=explicit)
    result = loop.train(replace(first, initial=str(source.folder), mesh=mesh), tmp_path)
    # the order of sums
    np.testing.assert_allclose(result.validation["loss"], source.validation["loss"], rtol=1e-6)


@pytest.mark.thorough
def test_a_run_of_one_device_opens_within_a_mesh(tmp_path):
    """Such as a teacher that a metric reads while its student trains on a mesh."""
    folder = RunFolder(loop.train(replace(TINY, steps=1, eval_batches=1), tmp_path).folder)
    expected = Run(folder, TINY).params
    with jax.set_mesh(jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))):
        run = Run(folder, replace(TINY, eval_batches=1))
        chex.assert_trees_all_equal(*map(jax.device_get, (run.params, expected)))
        assert run.evaluate()["loss"] > 0
