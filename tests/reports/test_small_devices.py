"""Few bits, new heads and newer optimizers: what users of peers reported, tried on ours."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import models, params
from jaxformer.models import ModelConfig
from jaxformer.models.adaptation import Lora
from jaxformer.ops.quantised import NF4, Int4, dequantise, quantise
from jaxformer.training import Muon, ScheduleFree, optimizers
from jaxformer.training.soap import Side, renewed
from jaxformer.training.step import TrainState

GPT = ModelConfig(13, 2, 8, 2, 8, d_ff=12)
ZEROS = jax.nn.initializers.zeros


@partial(jax.jit, static_argnums=(1,))
def back(x, form):
    codes, scales = quantise(x, form)
    return dequantise(codes, scales, form, x.shape[-1])


def adapted_tree(lora, seed=0):
    """(adapted, weights of the model, the tree that trains, with factors that are not zero)."""
    adapted = lora(models.spec(GPT))
    rng = np.random.default_rng(seed)

    def draw(spec):
        return jax.tree.map(lambda leaf: jnp.float32(rng.normal(size=leaf.shape)), spec)

    weights = draw(models.spec(GPT))
    tree = {"weights": adapted.store(weights), "factors": draw(adapted.spec["factors"])}
    return adapted, weights, tree


@pytest.mark.report(
    "huggingface/peft#2321", "huggingface/peft#1043",
    right="merged weights are those that trained: a merge is not rounded to 4 bits again",
)  # fmt: skip
@pytest.mark.report(
    "unslothai/unsloth-zoo#810",
    right=(
        "factors are added to the base beside which they trained, what 4 bits give back, not to "
        "the weights from before"
    ),
)
@pytest.mark.thorough
def test_merged_weights_are_the_base_that_trained_and_the_factors():
    adapted, weights, tree = adapted_tree(Lora(rank=2, stored=NF4()))
    merged = params.paths(jax.jit(adapted.merge)(tree))
    before = params.paths(weights)
    for path, pair in tree["factors"].items():
        stored = tree["weights"]
        for name in path.split("/"):
            stored = stored[name]
        count = before[path][0].size
        base = dequantise(stored["codes"], stored["scales"], NF4(), count)
        base = np.asarray(base, np.float64).reshape(before[path].shape)
        update = np.einsum("ldr,lrnh->ldnh", *(np.float64(pair[name]) for name in "ab"))
        # float32 sums of terms up to 50
        np.testing.assert_allclose(merged[path], base + 8 * update, rtol=1e-5, atol=1e-4)
        wrong = np.asarray(before[path]) + 8 * update
        assert np.abs(merged[path] - wrong).max() > 0.1


@pytest.mark.report(
    "bitsandbytes-foundation/bitsandbytes#1884",
    right="values behind the last whole block have a scale of their own, and no neighbour changes",
)
@pytest.mark.thorough
def test_a_count_that_blocks_do_not_divide():
    x = np.random.default_rng(0).normal(size=(1, 150)).astype(np.float32)
    x[0, 128:] *= 1e-4
    found = np.asarray(back(x, NF4()))
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found[:, :128], back(x[:, :128], NF4()))
    # the tail is small, and keeps its size
    assert np.abs(found[0, 128:] - x[0, 128:]).max() <= 0.16 * np.abs(x[0, 128:]).max()


@pytest.mark.report(
    "bitsandbytes-foundation/bitsandbytes#565",
    right="the error grows slowly with the size of a block, also above 1024",
)
@pytest.mark.thorough
def test_large_blocks_lose_no_more_than_their_scales_say():
    x = np.random.default_rng(1).normal(size=(1, 16384)).astype(np.float32)
    errors = [
        float(np.linalg.norm(np.asarray(back(x, Int4(block))) - x))
        for block in (64, 512, 1024, 4096)
    ]
    assert errors == sorted(errors)
    # the largest of 4096 normal numbers is 1.5 times that of 64
    assert errors[-1] < 1.8 * errors[0]


@pytest.mark.report(
    "huggingface/sentence-transformers#3980", "unslothai/unsloth-zoo#1087", "huggingface/peft#577",
    right="a head that trained beside the factors is part of the merged weights, all of its leaves",
)  # fmt: skip
def test_a_trained_head_is_in_the_merged_weights():
    from dataclasses import replace

    from jaxformer import masks
    from jaxformer.models import Classification

    model = replace(GPT, masks=(masks.full(),), heads=(Classification(3),))
    adapted = Lora(rank=2)(models.spec(model))
    tree = jax.tree.map(lambda leaf: np.full(leaf.shape, 0.5, np.float32), adapted.spec)
    merged = adapted.merge(tree)["heads"]["classification"]
    assert set(merged) == {"kernel", "bias", "pooler"} and set(merged["pooler"]) == {
        "kernel",
        "bias",
    }
    assert all((leaf == 0.5).all() for leaf in jax.tree.leaves(merged))


@pytest.mark.report(
    "facebookresearch/schedule_free#15", "facebookresearch/schedule_free#48",
    right="what is saved to be scored, exported and trained on is the average x, with no call",
)  # fmt: skip
@pytest.mark.report(
    "kozistr/pytorch_optimizer#363",
    right="a run with Schedule-Free is resumed: its sequence and sums are in the state",
)
def test_the_state_has_both_points_of_schedule_free():
    spec = {"w": params.Spec((3,), ("embed",), ZEROS)}
    config = ScheduleFree(weight_decay=0.0)
    transform = optimizers.build(config, spec)
    y = {"w": jnp.ones(3)}
    state = transform.init(y)
    for _ in range(3):
        updates, state = transform.update({"w": jnp.ones(3)}, state, y, rate=0.1)
        y = jax.tree.map(lambda p, u: p + 0.1 * u, y, updates)
    x = config.averaged(y, state)
    held = TrainState(step=3, params=y, opt_state=state, ema=x)
    assert held.best is x
    # z < y < x: the average lags behind
    assert (state.z["w"] < y["w"]).all() and (y["w"] < x["w"]).all()
    np.testing.assert_allclose(0.1 * state.z["w"] + 0.9 * x["w"], y["w"], rtol=1e-6)
    assert {"count", "weight_sum", "z", "mean_square"} == set(state._fields)


@pytest.mark.report(
    "HomebrewML/HeavyBall#42", "NVIDIA-NeMo/Emerging-Optimizers#300",
    right="squares follow their eigenvectors when a new basis orders these otherwise",
)  # fmt: skip
@pytest.mark.thorough
def test_the_order_of_a_new_basis_is_told_to_the_squares():
    gram = np.diag([1.0, 5.0, 3.0]).astype(np.float32)[None]
    side, order = jax.jit(renewed)(Side(gram, np.eye(3, dtype=np.float32)[None]))
    np.testing.assert_array_equal(order, [[1, 2, 0]])
    np.testing.assert_allclose(np.abs(side.basis[0]), np.eye(3)[:, [1, 2, 0]], atol=1e-6)


@pytest.mark.report(
    "MoonshotAI/Moonlight#31",
    right="a scale by shape is that of the matrix that is made orthogonal, not of the tensor",
)
@pytest.mark.thorough
@pytest.mark.parametrize("update_rms", [None, 0.2])
def test_the_scale_of_muon_is_that_of_the_matrix(update_rms):
    """[D, N, H] is a matrix [D, N H]; a wide and a tall one, and one of outputs [N, H, D]."""
    spec = {
        "wide": params.Spec((4, 4, 5), ("embed", "heads", "head"), ZEROS, ("embed",)),
        "tall": params.Spec((4, 5, 4), ("heads", "head", "embed"), ZEROS, ("heads", "head")),
    }
    transform = optimizers.build(Muon(update_rms=update_rms), spec)
    rng = np.random.default_rng(0)
    gradient = {name: rng.normal(size=leaf.shape).astype("f4") for name, leaf in spec.items()}
    updates, _ = jax.jit(transform.update)(gradient, transform.init(gradient), gradient)
    shapes = {"wide": (4, 20), "tall": (20, 4)}
    for name, (inputs, outputs) in shapes.items():
        values = np.linalg.svd(np.reshape(updates[name], (inputs, outputs)), compute_uv=False)
        scale = max(1, outputs / inputs) ** 0.5
        if update_rms is not None:
            scale = update_rms * max(inputs, outputs) ** 0.5
        # five Newton-Schulz steps bring singular values to 0.7 ... 1.2 (Jordan et al. 2024)
        assert (values / scale > 0.6).all() and (values / scale < 1.3).all(), name
