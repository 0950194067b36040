"""LoRA over a base in 4 or 8 bits: bytes of the state, gradients, meshes, resuming, folders."""

import shutil
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath

from jaxformer import families, models, params, sharding
from jaxformer.data.tasks import Copy
from jaxformer.errors import ConfigError
from jaxformer.families import peft
from jaxformer.models import ModelConfig
from jaxformer.models.adaptation import Lora
from jaxformer.models.mixture import Mixture
from jaxformer.ops.quantised import NF4, Int4, Int8
from jaxformer.parallel import Mesh, block_if_simulated, make_mesh
from jaxformer.runs import loop
from jaxformer.runs.checkpoint_reader import restore_params
from jaxformer.runs.run import Run
from jaxformer.runs.run_folder import RunFolder
from jaxformer.runs.start import first_params
from jaxformer.training import AdamW, Base, Checkpoints, Constant, Experiment
from jaxformer.training.gradients import accumulate
from jaxformer.training.recipe import build
from jaxformer.training.step import (
    abstract_state,
    first_state,
    make_train_step,
    state_shardings,
)

MODEL = ModelConfig(vocab_size=16, num_layers=2, d_model=16, num_heads=2, context_length=8)
FACTORS = "factors/"


def weights_of(spec, key):
    """Weights of a run that was there before."""
    drawn = params.init(spec, jax.random.key(11))
    return jax.tree.map(lambda leaf: leaf + 0.1, drawn)


def experiment_of(stored=None, **changes):
    fields = {
        "name": "small",
        "model": MODEL,
        "data": Copy(vocab_size=15, length=3, validation_examples=16),
        "initial": weights_of,
        "adaptation": Lora(rank=2, stored=stored),
        "optimizer": AdamW(learning_rate=1e-2, weight_decay=0.0),
        "schedule": Constant(),
        "batch_size": 8,
    }
    return Experiment(**fields | changes)


def batch_of(rows=8):
    tokens = np.random.default_rng(3).integers(0, 15, (rows, 8)).astype(np.int32)
    return {
        "tokens": tokens,
        "labels": np.roll(tokens, -1, 1),
        "weights": (tokens % 4 > 0).astype(np.float32),
    }


def first_tree(experiment):
    """The first tree, with factors that are not zero."""
    recipe = build(experiment)
    tree = first_params(experiment.initial, experiment.model, recipe)
    factors = jax.tree.map(lambda leaf: leaf + 0.05, tree["factors"])
    return recipe, tree | {"factors": factors}


def bytes_of(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("stored", "most"), [(NF4(), 0.6), (Int4(), 0.6), (Int8(), 1.1), (None, 4.0)], ids=str
)
def test_the_bytes_of_the_state(stored, most):
    """Matrices take the bytes that are said; nothing of the base has an optimizer's state."""
    model = ModelConfig(vocab_size=64, num_layers=4, d_model=256, num_heads=4, context_length=16)
    recipe = build(experiment_of(stored, model=model))
    state = abstract_state(recipe)
    leaves = params.paths(models.spec(model))
    matrices = {path for path in leaves if path.startswith("layers/") and leaves[path].contracts}
    held = {
        path: leaf
        for path, leaf in params.paths(state.params["weights"]).items()
        if any(path == matrix or path.startswith(f"{matrix}/") for matrix in matrices)
    }
    count = sum(np.prod(leaves[path].shape) for path in matrices)
    base = bytes_of(state.params["weights"])
    factors = bytes_of(state.params["factors"])
    moments = bytes_of(state.opt_state)
    print(
        f"{stored}: {count:,} values of matrices in {bytes_of(held):,} bytes,"
        f" {bytes_of(held) / count:.4f} a value; base {base:,}, factors {factors:,},"
        f" optimizer {moments:,}"
    )
    assert bytes_of(held) <= most * count
    assert moments <= 2 * factors + 64  # two moments of each factor, and counters


@pytest.mark.thorough
@pytest.mark.parametrize("stored", [NF4(), Int8(16)], ids=str)
def test_gradients_are_those_over_the_dequantised_base(stored):
    """To the last bit, for each factor; and merged weights are base + scale a b."""
    recipe, tree = first_tree(experiment_of(stored))
    plain = build(experiment_of())
    base = jax.jit(recipe.parts.adapted.base)(tree)
    wide = {"weights": base, "factors": tree["factors"]}
    key = jax.random.key(0)
    gradients = [
        jax.jit(partial(accumulate, of))(params=held, batch=batch_of(), key=key, scale=1.0)[1]
        for of, held in ((recipe, tree), (plain, wide))
    ]
    for path, leaf in params.paths(gradients[0]["factors"]).items():
        assert np.asarray(leaf).any(), path
        np.testing.assert_array_equal(
            leaf, params.paths(gradients[1]["factors"])[path], err_msg=path
        )
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(gradients[0]["weights"]))
    merged = params.paths(jax.jit(recipe.weights)(tree))
    started = params.paths(weights_of(models.spec(MODEL), None))
    gap = np.diff(stored.levels()).max() / 2
    for path, leaf in params.paths(base).items():
        # a value moves by at most half the widest gap of its block's scale
        room = gap * np.abs(started[path]).max() if path + "/codes" in held_paths(tree) else 0
        assert np.abs(np.asarray(leaf) - started[path]).max() <= room * (1 + 1e-6), path
        expected = np.asarray(leaf, np.float64)
        if path in tree["factors"]:
            a, b = (np.asarray(tree["factors"][path][name], np.float64) for name in "ab")
            expected = expected + 16 / 2 * np.einsum("ldr,lrnh->ldnh", a, b)
        np.testing.assert_allclose(merged[path], expected, rtol=1e-5, atol=1e-6, err_msg=path)


def held_paths(tree):
    return set(params.paths(tree["weights"]))


@pytest.mark.thorough
def test_eight_devices_step_as_one_does():
    """Blocks are split like the inputs of a layer, and the codes never change."""
    # Adam would divide the smallest gradients by their own size, which is mostly noise
    experiment = experiment_of(NF4(), optimizer=lambda spec: optax.scale(-1.0))
    recipe, tree = first_tree(experiment)
    one, metrics = jax.jit(make_train_step(recipe))(first_state(recipe, None, tree), batch_of())
    split = build(replace(experiment, mesh=Mesh(data=2, fsdp=4), accumulation=2))
    mesh = make_mesh(split.mesh)
    places = state_shardings(split, mesh)
    codes = places.params["weights"]["layers"]["attention"]["query"]["kernel"]["codes"]
    assert codes.spec[1] == "fsdp"
    with jax.set_mesh(mesh):
        state = block_if_simulated(first_state(split, places, tree))
        step = jax.jit(make_train_step(split), out_shardings=(places, None))
        batch = jax.device_put(batch_of(), sharding.batch_sharding(mesh, batch_of()))
        many, found = block_if_simulated(step(state, batch))
    np.testing.assert_allclose(found["loss"], metrics["loss"], rtol=1e-6)
    before = params.paths(tree)
    for path, leaf in params.paths(many.params).items():
        if path.startswith(FACTORS):
            # float32 sums in another order
            np.testing.assert_allclose(leaf, params.paths(one.params)[path], atol=1e-5)
            assert (np.asarray(leaf) != before[path]).any()
        else:
            np.testing.assert_array_equal(leaf, before[path], err_msg=path)


@pytest.mark.thorough
def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    """Without its later checkpoints it is that of a process killed before them. The run's weights
    are the merged ones, also for an evaluation."""
    experiment = experiment_of(
        NF4(),
        steps=3,
        eval_every=3,
        log_every=1,
        ema_decay=0.9,
        checkpoints=Checkpoints(every=1, keep_latest=3),
    )
    whole = loop.train(experiment, tmp_path)
    recipe = build(experiment)
    state = abstract_state(recipe)
    read = partial(restore_params, whole.folder / "checkpoints", state.params, part="params")
    saved = params.paths(jax.device_get(read()[1]))
    codes = {path for path, leaf in saved.items() if leaf.dtype == np.uint8}
    assert codes and all(path.endswith("/codes") for path in codes)
    for step in ("2", "3"):
        shutil.rmtree(whole.folder / "checkpoints" / step)
    resumed = loop.train(experiment, tmp_path)
    assert resumed.folder == whole.folder and resumed.validation == whole.validation
    for path, leaf in params.paths(jax.device_get(read()[1])).items():
        np.testing.assert_array_equal(leaf, saved[path], err_msg=path)
    averaged = restore_params(whole.folder / "checkpoints", state.params, part="ema")[1]
    for path in codes:
        np.testing.assert_array_equal(params.paths(averaged)[path], saved[path])
    run = Run(RunFolder(epath.Path(whole.folder)), experiment)
    jax.tree.map(np.testing.assert_array_equal, run.params, recipe.weights(averaged))
    assert params.mismatch(models.spec(MODEL), run.params) is None
    assert run.evaluate()["loss"] == pytest.approx(whole.validation["loss"], rel=1e-5)


@pytest.mark.thorough
def test_the_factors_travel_as_a_folder_of_peft(tmp_path):
    """The adapter beside the base that trained (the dequantised one) is the merged model."""
    from tests import golden

    checkpoint = families.load(golden.folder("llama_gqa"))
    model = checkpoint.config
    experiment = experiment_of(NF4(), model=model, initial=lambda *_: checkpoint.params)
    recipe, tree = first_tree(experiment)
    base = recipe.parts.adapted.base(tree)
    peft.save(tmp_path / "a", checkpoint, peft.Adapter(2, 16.0, tree["factors"]))
    adapter = peft.load(tmp_path / "a", checkpoint)
    found = params.paths(adapter.merged(base))
    for path, leaf in params.paths(recipe.weights(tree)).items():
        # sums of two products, in another order
        np.testing.assert_allclose(found[path], leaf, atol=1e-5, err_msg=path)


def test_what_is_stored_and_what_is_not():
    """Matrices alone; routers, tables, norms and all that trains stay as they are."""
    model = replace(MODEL, feedforward=Mixture(experts=4, top_k=2), tie_embeddings=False)
    adapted = Lora(rank=2, stored=Int4(32), trains="out/kernel")(models.spec(model))
    specs = params.paths(adapted.spec["weights"])
    stored = {path.removesuffix("/codes") for path in specs if path.endswith("/codes")}
    names = {path.split("/")[-2] for path in stored}
    assert names == {"query", "key", "value", "up", "gate", "down"}
    up = specs["layers/feedforward/up/kernel/codes"]
    # an expert has blocks of its own
    assert up.shape[:2] == (2, 4) and up.axes == ("layers", "expert", "embed", None)
    assert up.dtype == jnp.uint8
    with pytest.raises(ConfigError, match=r"adaptation.stored='nf4': no format of blocks"):
        Lora(stored="nf4")(models.spec(MODEL))
    frozen = experiment_of(NF4(), references={"before": Base()})
    assert build(frozen).parts.adapted.base is not None
