"""One step on a mesh of tensor x context x expert x data against one device: losses, norms,
gradients, masks, scores."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec as P

from jaxformer import sharding
from jaxformer.errors import ConfigError
from jaxformer.models import ModelConfig
from jaxformer.models.mixture import Mixture
from jaxformer.parallel import Mesh, block_if_simulated, check_batch, check_context, make_mesh
from jaxformer.parallel.mesh import AXES
from jaxformer.runs.checks import check_mesh
from jaxformer.sharding import batch_sharding
from jaxformer.training.experiment import Experiment
from jaxformer.training.optimizers import AdamW
from jaxformer.training.recipe import build
from jaxformer.training.step import (
    abstract_state,
    init_state,
    make_train_step,
    state_shardings,
    state_specs,
)
from tests.parallel import test_experts as experts

B, T, V = 4, 8, 12


class Nothing:
    """Data that nobody reads."""

    def open(self, model):
        raise NotImplementedError


MODEL = ModelConfig(
    vocab_size=V,
    num_layers=1,
    d_model=8,
    num_heads=2,
    context_length=T,
    dropout_rate=0.3,
    init_std=0.3,
    attention_implementation="reference",
    use_bias=False,
    feedforward=Mixture(2, 1, normalise=False, d_ff=8),
)
SPLIT = Mesh(data=1, tensor=2, context=2, expert=2)
EXPERIMENT = Experiment(
    "mesh",
    MODEL,
    Nothing(),
    batch_size=B,
    steps=10,
    optimizer=AdamW(learning_rate=1e-2),
    clip_norm=0.1,
    ema_decay=0.5,
)


def batch_of():
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32)
    # rows of other lengths: 1 to 7 tokens count
    weights = (np.arange(T) < rng.integers(1, T, B)[:, None]).astype(np.float32)
    return {"tokens": tokens, "labels": jnp.roll(tokens, -1, 1), "weights": jnp.asarray(weights)}


@pytest.fixture(scope="module")
def ran():
    """Two steps on one device; one on the mesh, and then one on one device: states, metrics,
    scores."""
    recipe = build(EXPERIMENT)
    step, score = jax.jit(make_train_step(recipe)), jax.jit(recipe.eval_loss)
    start, batch = jax.jit(partial(init_state, recipe))(), batch_of()
    first, metrics = step(start, batch)
    second, _ = step(first, batch)
    split = build(replace(EXPERIMENT, mesh=SPLIT))
    mesh = make_mesh(SPLIT, jax.devices())
    places = state_shardings(split, mesh)
    placed = jax.device_put(batch, batch_sharding(mesh, batch))
    with jax.set_mesh(mesh):
        many, many_metrics = block_if_simulated(
            jax.jit(make_train_step(split), out_shardings=(places, None))(
                jax.device_put(start, places), placed
            )
        )
        many_score = block_if_simulated(
            jax.jit(split.score)(jax.device_put(start, places).params, placed, jax.random.key(0))
        )
    resumed, _ = step(jax.device_get(many), batch)
    return SimpleNamespace(
        first=first,
        metrics=metrics,
        second=second,
        many=jax.device_get(many),
        many_metrics=jax.device_get(many_metrics),
        score=score(start.params, batch, jax.random.key(0)),
        many_score=many_score,
        resumed=resumed,
        batch=batch,
    )


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
    "meta-pytorch/torchtune#2420",
    "NVIDIA-NeMo/RL#3788",
    "NVIDIA/Megatron-LM#5916",
    right=(
        "the gradient norm counts replicated parameters once and split ones whole, also of experts"
    ),
)
def test_the_gradient_norm_is_that_of_one_device(ran):
    np.testing.assert_allclose(ran.many_metrics["grad_norm"], ran.metrics["grad_norm"], rtol=1e-5)
    assert ran.metrics["grad_norm"] > EXPERIMENT.clip_norm  # and so it decides the update


@thorough
@pytest.mark.report(
    "huggingface/transformers#48205",
    "huggingface/transformers#48687",
    "pytorch/pytorch#160285",
    right=(
        "gradients of experts and of their router are those of one device, neither doubled nor "
        "in part"
    ),
)
def test_moments_are_those_of_one_device(ran):
    near(ran.many.opt_state, ran.first.opt_state)  # the moments are the clipped gradients


@thorough
@pytest.mark.report(
    "pytorch/torchtitan#1842", "PrimeIntellect-ai/prime-rl#1957", "huggingface/transformers#34242",
    right="each token counts the same, however many tokens of a row count on its device",
)  # fmt: skip
def test_uneven_rows_have_the_loss_of_one_device(ran):
    np.testing.assert_allclose(ran.many_metrics["loss"], ran.metrics["loss"], rtol=1e-5)
    assert ran.many_metrics["tokens"] == ran.metrics["tokens"] == ran.batch["weights"].sum()


@thorough
@pytest.mark.report(
    "tenstorrent/tt-metal#55947", "huggingface/accelerate#114", "jax-ml/jax#15895",
    right="dropout masks are those of one device: equal on copies, different for each row",
)  # fmt: skip
def test_dropout_is_that_of_one_device(ran):
    near(ran.many.params, ran.first.params)
    recipe, same = (
        build(EXPERIMENT),
        {name: jnp.repeat(leaf[:1], B, axis=0) for name, leaf in ran.batch.items()},
    )
    losses = [float(recipe.loss(ran.first.params, same, jax.random.key(i)).loss) for i in (0, 1)]
    alone = [
        float(
            recipe.loss(
                ran.first.params, jax.tree.map(lambda leaf: leaf[:1], same), jax.random.key(0)
            ).loss
        ),
        float(recipe.eval_loss(ran.first.params, same, jax.random.key(0)).loss),
    ]
    assert (
        losses[0] != losses[1]
        and abs(losses[0] - B * alone[0]) > 1e-4
        and abs(losses[0] - alone[1]) > 1e-4
    )


@thorough
@pytest.mark.report(
    "huggingface/transformers#48167", "pytorch/torchtitan#3329", "pytorch/torchtitan#4167",
    right="a score on a mesh with `context` is that of one device, not so many times as large",
)  # fmt: skip
def test_scores_are_those_of_one_device(ran):
    np.testing.assert_allclose(ran.many_score.loss, ran.score.loss, rtol=1e-5)
    np.testing.assert_allclose(ran.many_score.weight, ran.score.weight)


@thorough
@pytest.mark.report(
    "mlcommons/algorithmic-efficiency#816", "AI-Hypercomputer/maxtext#3800", listed="third 28",
    right="a state goes on on other devices as if nothing had been",
)  # fmt: skip
def test_a_state_goes_on_elsewhere(ran):
    near(ran.resumed.params, ran.second.params)
    near(ran.resumed.ema, ran.second.ema)


@thorough
@pytest.mark.report(
    "pytorch/pytorch#55036", "AI-Hypercomputer/maxtext#73", listed="third 01",
    right="a step on a mesh is the step of one device: parameters, averages, moments, metrics",
)  # fmt: skip
def test_a_step_on_a_mesh_is_the_step_of_one_device(ran):
    near(ran.many.ema, ran.first.ema)
    for name in ("accuracy", "fraction", "learning_rate", "skipped"):
        if name in ran.metrics:
            np.testing.assert_allclose(ran.many_metrics[name], ran.metrics[name], rtol=1e-5)


@pytest.mark.report(
    "fla-org/flash-linear-attention#1093", "NVIDIA-NeMo/Speech#14137",
    right="positions that `context` does not divide stay whole: none is left out",
)  # fmt: skip
@pytest.mark.parametrize(("length", "split"), [(8, "context"), (7, None), (1, None), (10, None)])
def test_lengths_that_context_does_not_divide_stay_whole(length, split):
    mesh = make_mesh(Mesh(data=2, context=4))
    place = batch_sharding(mesh, {"tokens": jax.ShapeDtypeStruct((4, length), np.int32)})["tokens"]
    assert place.spec == P("data", split)
    covered = np.zeros((4, length), int)
    for index in set(map(str, place.devices_indices_map((4, length)).values())):
        covered[eval(index)] += 1  # slices, as they are written
    assert (covered == 1).all()


@pytest.mark.report(
    "pytorch/xla#8205",
    "huggingface/accelerate#2801",
    right="a batch that the devices do not divide is refused, with sizes that do",
)
@pytest.mark.parametrize(
    ("mesh", "size", "near"),
    [
        (Mesh(data=4), 6, "4 or 8"),
        (Mesh(data=2, fsdp=4), 3, "8"),
        (Mesh(data=1, expert=8), 20, "16 or 24"),
    ],
)
def test_a_batch_that_does_not_divide_is_refused(mesh, size, near):
    with pytest.raises(
        ConfigError, match=rf"batch_size={size} does not divide among .*; sizes that do: {near}$"
    ):
        check_batch(mesh, mesh.shape(8 if mesh != Mesh(data=4) else 4), size)


@pytest.mark.report(
    "AI-Hypercomputer/maxtext#1533",
    right="`tensor` splits heads and widths, never positions or rows of a batch",
)
def test_tensor_splits_no_rows_and_no_positions():
    mesh = make_mesh(Mesh(data=2, tensor=4))
    batch = {
        name: jax.ShapeDtypeStruct((8, 8), np.int32)
        for name in ("tokens", "segment_ids", "positions")
    }
    assert {place.spec for place in batch_sharding(mesh, batch).values()} == {P("data", None)}


@pytest.mark.report(
    "facebookresearch/fairscale#167",
    right="with zero1 the optimizer's state alone is split over the copies, a part for each",
)
def test_zero1_splits_the_state_of_the_optimizer_alone():
    recipe = build(
        replace(EXPERIMENT, model=replace(MODEL, feedforward="gelu"), mesh=Mesh(data=4, zero1=True))
    )
    mesh = AbstractMesh(tuple(4 if axis == "data" else 1 for axis in AXES), AXES)
    specs, shapes, is_leaf = (
        state_specs(recipe, mesh),
        abstract_state(recipe),
        lambda x: isinstance(x, P),
    )
    assert all(set(spec) <= {None} for spec in jax.tree.leaves(specs.params, is_leaf=is_leaf))
    pairs = zip(
        jax.tree.leaves(specs.opt_state, is_leaf=is_leaf),
        jax.tree.leaves(shapes.opt_state),
        strict=True,
    )
    split = [spec for spec, leaf in pairs if "data" in spec and leaf.ndim > 1]
    assert len(split) >= 10


@pytest.mark.report(
    "fla-org/flash-linear-attention#1092", "deepspeedai/DeepSpeed#5177",
    right="devices that cannot share a sequence are refused, with both numbers",
    hit="every device of mesh.context computed the whole sequence, in silence",
)  # fmt: skip
def test_a_context_that_does_not_divide_the_length_is_refused():
    experiment = replace(EXPERIMENT, mesh=Mesh(data=1, context=4))
    recipe = build(experiment)
    mesh = make_mesh(experiment.mesh, jax.devices()[:4])
    check_mesh(experiment, recipe, mesh)
    odd = replace(experiment, model=replace(MODEL, context_length=10))
    with pytest.raises(
        ConfigError, match=r"mesh\.context=4 does not divide the context_length of 10.*mesh\.data"
    ):
        check_mesh(odd, build(odd), mesh)
    check_context({"context": 4}, [10, 8])  # one half of a pair is split
    check_context({"context": 1}, [7])


@pytest.mark.thorough
@pytest.mark.report(
    "NVIDIA-NeMo/Automodel#1260",
    "NVIDIA/Megatron-LM#5956",
    right="each device's share of the experts' gradient is the sum over devices, taken once",
)
@pytest.mark.parametrize("axes", [{"fsdp": 8}, {"expert": 8}], ids=str)
def test_gradients_of_experts_that_are_summed_along_rings(axes, monkeypatch):
    """As over 16 devices or more, with rings of 4 and 2."""
    devices = np.arange(8).reshape(4, 2)
    along = {8: (devices.T.tolist(), devices.tolist())}
    monkeypatch.setattr(sharding, "rings", lambda size: along.get(size, (None,)))
    run = partial(experts.everything, None)
    arrays = experts.X, None, *experts.WEIGHTS
    experts.near(experts.on(axes, run, *arrays), jax.jit(run)(*arrays))
