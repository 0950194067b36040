"""Layers in stages: what belongs to rows goes with its micro-batch; norms, tied tables and scores
are those of one device."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.errors import ConfigError
from jaxformer.models import ModelConfig
from jaxformer.models.config import Alibi
from jaxformer.models.stacks.pipeline import bubble
from jaxformer.parallel import Mesh, block_if_simulated, check_batch, make_mesh
from jaxformer.sharding import batch_sharding
from jaxformer.training.experiment import Experiment
from jaxformer.training.recipe import build
from jaxformer.training.step import init_state, make_train_step, state_shardings

N = 4  # rows, positions and heads: what is not by row has as many entries as the batch has rows


class Nothing:
    """Data that nobody reads."""

    def open(self, model):
        raise NotImplementedError


MODEL = ModelConfig(
    vocab_size=11,
    num_layers=2,
    d_model=8,
    num_heads=N,
    context_length=N,
    positions=Alibi(),
    init_std=0.3,
    attention_implementation="reference",
    use_bias=False,
)
STAGES = Mesh(data=1, stage=2)
EXPERIMENT = Experiment("stages", MODEL, Nothing(), batch_size=N, steps=10, clip_norm=0.1)


def batch_of():
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, 11, (N, N)), jnp.int32)
    segments = jnp.asarray([[1, 1, 2, 2], [1, 1, 1, 0], [1, 2, 2, 3], [1, 1, 1, 1]], jnp.int32)
    weights = (segments > 0).astype(jnp.float32) * jnp.asarray([1.0, 1.0, 0.0, 1.0])[:, None]
    return {
        "tokens": tokens,
        "labels": jnp.roll(tokens, -1, 1),
        "weights": weights,
        "segment_ids": segments,
    }


@pytest.fixture(scope="module")
def ran():
    """A score, a step and another score, on one device and in two stages of two micro-batches."""
    found = []
    for config in (Mesh(data=1), STAGES):
        recipe = build(replace(EXPERIMENT, mesh=config))
        mesh = make_mesh(config, jax.devices()[: config.stage])
        places, batch = state_shardings(recipe, mesh), batch_of()
        with jax.set_mesh(mesh):
            start = block_if_simulated(
                jax.jit(partial(init_state, build(EXPERIMENT)), out_shardings=places)()
            )
            batch = jax.device_put(batch, batch_sharding(mesh, batch))
            score = jax.jit(recipe.eval_loss)
            before = block_if_simulated(score(start.params, batch, jax.random.key(0)))
            after, metrics = block_if_simulated(
                jax.jit(make_train_step(recipe), out_shardings=(places, None))(start, batch)
            )
            again = block_if_simulated(score(start.params, batch, jax.random.key(0)))
            later = block_if_simulated(score(after.params, batch, jax.random.key(0)))
        found.append(
            jax.device_get(
                SimpleNamespace(
                    before=before, again=again, later=later, metrics=metrics, state=after
                ).__dict__
            )
        )
    return found


def near(many, one, tolerance=1e-4):
    for (path, leaf), other in zip(
        jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(many), strict=True
    ):
        scale = float(np.abs(leaf).max()) + 1e-9
        np.testing.assert_allclose(
            other, leaf, rtol=tolerance, atol=tolerance * scale, err_msg=jax.tree_util.keystr(path)
        )


thorough = pytest.mark.thorough


@thorough
@pytest.mark.report(
    "pytorch/torchtitan#596",
    right="the gradient norm, and so clipping, is that of all stages together",
)
def test_the_norm_is_that_of_all_stages(ran):
    one, many = ran
    np.testing.assert_allclose(many["metrics"]["grad_norm"], one["metrics"]["grad_norm"], rtol=1e-5)
    assert one["metrics"]["grad_norm"] > EXPERIMENT.clip_norm


@thorough
@pytest.mark.report(
    "uw-syfi/piper#13",
    "NVIDIA/Megatron-LM#299",
    right="a table that begins and ends the model has the gradient of both uses",
)
def test_a_tied_table_has_both_gradients(ran):
    one, many = ran
    near(many["state"].opt_state, one["state"].opt_state)
    near(many["state"].params["embedding"], one["state"].params["embedding"])


@thorough
@pytest.mark.report(
    "pytorch/torchtitan#4098",
    right="segments of packed rows go with their rows to each micro-batch",
)
def test_segments_go_with_their_rows(ran):
    one, many = ran
    np.testing.assert_allclose(many["before"].loss, one["before"].loss, rtol=1e-5)
    np.testing.assert_allclose(many["metrics"]["loss"], one["metrics"]["loss"], rtol=1e-5)


@thorough
@pytest.mark.report(
    "NVIDIA-NeMo/Automodel#3208", "pytorch/pytorch#148458",
    right="what is not by row is not cut, also where it has as many entries as the batch has rows",
)  # fmt: skip
def test_what_is_as_long_as_the_batch_is_not_cut(ran):
    """Heads with a slope each, positions and rows are four of each kind."""
    one, many = ran
    assert MODEL.num_heads == MODEL.context_length == EXPERIMENT.batch_size
    near(many["state"].params["layers"], one["state"].params["layers"])


@thorough
@pytest.mark.report(
    "deepspeedai/DeepSpeed#3649",
    "deepspeedai/DeepSpeed#3045",
    right="evaluation, step and evaluation in turn are those of one device",
)
def test_evaluations_and_steps_in_turn(ran):
    one, many = ran
    for found in ran:
        assert found["before"].loss == found["again"].loss != found["later"].loss
    np.testing.assert_allclose(many["later"].loss, one["later"].loss, rtol=1e-4)
    np.testing.assert_allclose(many["later"].weight, one["later"].weight)


@pytest.mark.report(
    "pytorch/torchtitan#784",
    "pytorch/PiPPy#795",
    right="a batch that micro-batches and stages do not divide is refused before anything runs",
)
@pytest.mark.parametrize(
    ("mesh", "size", "near"),
    [(Mesh(data=1, stage=2, microbatches=3), 8, "6 or 12"), (Mesh(data=2, stage=2), 6, "4 or 8")],
)
def test_a_batch_that_does_not_divide_is_refused(mesh, size, near):
    with pytest.raises(
        ConfigError,
        match=rf"batch_size={size} does not divide among .* stages; sizes that do: {near}$",
    ):
        check_batch(mesh, mesh.shape(mesh.data * mesh.stage), size)


@pytest.mark.report(
    "deepspeedai/DeepSpeed#794",
    right="stages idle (S - 1) / (M + S - 1) of a step: more micro-batches help",
)
def test_stages_idle_by_the_formula():
    for S, M, R in ((2, 2, 1), (4, 8, 1), (4, 8, 2)):
        # ticks with work, by stage
        work = [[t - s for t in range(R * M + S - 1) if 0 <= t - s < R * M] for s in range(S)]
        idle = 1 - len(work[0]) / (R * M + S - 1)
        assert bubble(S, M, R) == pytest.approx(idle)
