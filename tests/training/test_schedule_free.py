"""Schedule-Free AdamW: its algorithm in float64 NumPy, and who reads which of its points."""

import json
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
from etils import epath

from jaxformer import models, params
from jaxformer.data.tasks import Copy
from jaxformer.errors import ConfigError
from jaxformer.models import ModelConfig
from jaxformer.parallel import Mesh, block_if_simulated, make_mesh
from jaxformer.runs import loop
from jaxformer.runs.checkpoint_reader import restore_params
from jaxformer.runs.facts import what_is_averaged
from jaxformer.runs.initial import FromRun
from jaxformer.runs.run import Run
from jaxformer.runs.run_folder import RunFolder
from jaxformer.training import Checkpoints, Constant, Cosine, Experiment, ScheduleFree
from jaxformer.training.recipe import build
from jaxformer.training.schedule_free import scale_by_schedule_free
from jaxformer.training.step import (
    abstract_state,
    first_state,
    make_train_step,
    state_shardings,
)

EXPERIMENT = Experiment(
    name="free",
    model=ModelConfig(vocab_size=16, num_layers=1, d_model=16, num_heads=2, context_length=8),
    data=Copy(vocab_size=15, length=3, validation_examples=16),
    optimizer=ScheduleFree(learning_rate=1e-2, weight_decay=0.1),
    schedule=Constant(warmup=2),
    steps=4,
    batch_size=8,
    eval_every=2,
    log_every=1,
    checkpoints=Checkpoints(every=1, keep_latest=4),
)


def by_hand(start, gradients, rates, b1, b2, eps, decay):
    """Algorithm 1, in float64: [(y, x)] after each step."""
    x = z = y = start.astype(np.float64)
    v, total, found = np.zeros_like(x), 0.0, []
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        g = g.astype(np.float64)
        v = b2 * v + (1 - b2) * g**2
        rate = rate * np.sqrt(1 - b2**t)
        z = z - rate * g / (np.sqrt(v) + eps) - rate * decay * y
        total += rate**2
        c = rate**2 / total if total else 0.0
        x = (1 - c) * x + c * z
        y = (1 - b1) * z + b1 * x
        found.append((y, x))
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("b1", [0.9, 0.5])
def test_the_algorithm_in_float64(b1):
    """Also with a rate of 0 at the start, and rates that differ from step to step."""
    rng = np.random.default_rng(0)
    start = {"a": rng.normal(size=(3, 4)).astype("f4"), "b": rng.normal(size=(5,)).astype("f4")}
    gradients = [
        jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype("f4"), start) for _ in range(9)
    ]
    rates = [0.0, 0.01, 0.02, 0.03, 0.03, 0.03, 0.01, 0.005, 0.03]
    config = ScheduleFree(b1=b1, b2=0.97, weight_decay=0.2)
    transform = scale_by_schedule_free(b1, 0.97, 1e-8, 0.2, {"a": True, "b": False})
    state, y = transform.init(start), start
    update = jax.jit(transform.update)
    expected = {
        name: by_hand(
            start[name], [g[name] for g in gradients], rates, b1, 0.97, 1e-8, 0.2 * (name == "a")
        )
        for name in start
    }
    for t, (gradient, rate) in enumerate(zip(gradients, rates, strict=True)):
        updates, state = update(gradient, state, y, rate=np.float32(rate))
        y = jax.tree.map(lambda p, u, rate=rate: p + np.float32(rate) * u, y, updates)
        x = config.averaged(y, state)
        for name in start:
            # float32 sums of nine steps
            np.testing.assert_allclose(y[name], expected[name][t][0], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(x[name], expected[name][t][1], rtol=1e-5, atol=1e-6)


def read(folder, state, part):
    place = epath.Path(folder) / "checkpoints"
    return params.paths(jax.device_get(restore_params(place, state.params, part=part)[1]))


@pytest.mark.thorough
def test_a_run_is_scored_resumed_and_read_by_its_average(tmp_path, capsys):
    """x is in the checkpoint: for evaluations, for a run that begins from it, and for reading. A
    run without its later checkpoints is that of a process killed before them."""
    whole = loop.train(EXPERIMENT, tmp_path)
    out = capsys.readouterr().out
    assert "scored: parameters that ScheduleFree averages\n" in out
    state = abstract_state(build(EXPERIMENT))
    y, x = read(whole.folder, state, "params"), read(whole.folder, state, "ema")
    assert any((x[path] != y[path]).any() for path in x)
    record = (whole.folder / "metrics.jsonl").read_text()
    for step in ("3", "4"):
        shutil.rmtree(whole.folder / "checkpoints" / step)
    resumed = loop.train(EXPERIMENT, tmp_path)
    assert "resuming after step 2" in capsys.readouterr().out
    assert (resumed.folder / "metrics.jsonl").read_text() == record
    for part, saved in (("params", y), ("ema", x)):
        for path, leaf in read(resumed.folder, state, part).items():
            np.testing.assert_array_equal(leaf, saved[path], err_msg=path)
    run = Run(RunFolder(epath.Path(whole.folder)), EXPERIMENT)
    for path, leaf in params.paths(run.params).items():
        np.testing.assert_array_equal(leaf, x[path])
    assert run.evaluate()["loss"] == pytest.approx(whole.validation["loss"], rel=1e-6)
    begun = FromRun(str(whole.folder))(models.spec(EXPERIMENT.model), jax.random.key(0))
    for path, leaf in params.paths(begun).items():
        np.testing.assert_array_equal(leaf, x[path])
    scores = [json.loads(line) for line in record.splitlines() if "validation" in line]
    assert scores[-1]["validation_loss"] == pytest.approx(whole.validation["loss"], rel=1e-6)


@pytest.mark.thorough
def test_eight_devices_step_as_one_does():
    """ZeRO-1 splits z and the squares; frozen leaves have neither, and stay in x."""
    made = replace(EXPERIMENT, frozen="embedding")
    tokens = np.random.default_rng(3).integers(0, 15, (8, 8)).astype(np.int32)
    batch = {
        "tokens": tokens,
        "labels": np.roll(tokens, -1, 1),
        "weights": np.ones((8, 8), np.float32),
    }
    recipe = build(made)
    step = jax.jit(make_train_step(recipe))
    one = first_state(recipe)
    start = params.paths(jax.device_get(one.params))
    for _ in range(2):
        one, metrics = step(one, batch)
    split = build(replace(made, mesh=Mesh(data=4, fsdp=2, zero1=True)))
    mesh = make_mesh(split.mesh)
    places = state_shardings(split, mesh)
    free = places.opt_state.inner_states["trained"].inner_state
    assert "data" in str(free.z["layers"]["attention"]["query"]["kernel"].spec)
    with jax.set_mesh(mesh):
        many = block_if_simulated(first_state(split, places))
        step = jax.jit(make_train_step(split), out_shardings=(places, None))
        for _ in range(2):
            many, found = block_if_simulated(step(many, batch))
    np.testing.assert_allclose(found["loss"], metrics["loss"], rtol=1e-6)
    for part in ("params", "ema"):
        leaves = params.paths(getattr(one, part))
        for path, leaf in params.paths(getattr(many, part)).items():
            # float32 sums in another order, divided by their own size
            np.testing.assert_allclose(leaf, leaves[path], atol=1e-5, err_msg=path)
            if path.startswith("embedding"):
                np.testing.assert_array_equal(leaf, start[path])


def test_two_averages_and_an_average_without_a_trace_are_refused():
    with pytest.raises(ConfigError, match="optimizer=ScheduleFree averages the parameters itself"):
        build(replace(EXPERIMENT, ema_decay=0.9))
    with pytest.raises(ConfigError, match=r"optimizer.b1=0: must be in \(0, 1\)"):
        ScheduleFree(b1=0.0)


def test_a_schedule_that_decays_is_named():
    line = what_is_averaged(replace(EXPERIMENT, schedule=Cosine(warmup=1)))
    assert line.endswith("it replaces a decay of the rate, and schedule=Cosine decays it, too")
    assert what_is_averaged(EXPERIMENT) == "scored: parameters that ScheduleFree averages"
