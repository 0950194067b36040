"""Products in 8 bits, weights in 4, and what is computed again: what users of peers reported."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import decoding, models
from jaxformer.data.tasks import Reverse
from jaxformer.models import ModelConfig
from jaxformer.models.adaptation import Lora
from jaxformer.ops.float8 import OPERAND, in_float8
from jaxformer.ops.positions import Rope
from jaxformer.ops.quantised import NF4, Int4
from jaxformer.ops.stored_weight import BlockWeight
from jaxformer.parallel import Mesh, block_if_simulated, make_mesh
from jaxformer.sharding import shardings
from jaxformer.training import Experiment
from jaxformer.training.recipe import build
from jaxformer.training.step import init_state, make_train_step

MODEL = ModelConfig(
    vocab_size=24, num_layers=2, d_model=16, num_heads=2, context_length=16, positions=Rope()
)
TINY = Experiment(
    name="tiny", model=MODEL, data=Reverse(), batch_size=8, precision="float8", steps=20
)
TOKENS = jax.random.randint(jax.random.key(1), (8, 16), 0, 24)
BATCH = {"tokens": TOKENS, "labels": jnp.roll(TOKENS, -1, 1), "weights": jnp.ones((8, 16))}


def losses(experiment, steps, batch=BATCH):
    recipe = build(experiment)
    step = jax.jit(make_train_step(recipe))
    state = jax.jit(lambda: init_state(recipe))()
    found = []
    for _ in range(steps):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
        assert float(metrics["grad_norm"]) < 100
    return found


@pytest.mark.report(
    "pytorch/ao#3356",
    right="LoRA with products in 8 bits: factors of zeros have a scale, and no loss is NaN",
)  # fmt: skip
@pytest.mark.thorough
def test_factors_that_start_at_zero_train_in_eight_bits():
    adapted = replace(TINY, adaptation=Lora(rank=2, trains=r"^heads/"))
    found = losses(adapted, 6)
    assert np.isfinite(found).all()
    assert found[-1] < found[0]


@pytest.mark.report(
    "NVIDIA/TransformerEngine#962", "lucidrains/rotary-embedding-torch#24",
    right="a model with rotations trains in 8 bits: scores and rotations are not rounded",
)  # fmt: skip
@pytest.mark.report(
    "pytorch/torchtitan#865",
    right="products that are computed again in the backward pass have the same scales",
)
@pytest.mark.thorough
def test_rotations_and_layers_computed_again_train_in_eight_bits():
    found = losses(TINY, 8)
    again = losses(replace(TINY, model=replace(MODEL, remat="full", unroll=1)), 8)
    assert found[-1] < found[0]
    # the same operations in other fusions; a value near a half may round the other way
    np.testing.assert_allclose(found, again, rtol=2e-2)


@pytest.mark.report(
    "pytorch/torchtitan#3109",
    right="the scale of a tensor that devices share is that of the whole, not of a shard",
)
def test_the_scale_of_a_split_tensor_is_that_of_the_whole():
    x = jnp.ones((8, 16)).at[5, 9].set(300.0)
    whole = in_float8(x, OPERAND)
    with jax.set_mesh(make_mesh(Mesh(fsdp=4, tensor=2))):
        split = jax.device_put(
            x, jax.NamedSharding(jax.sharding.get_mesh(), jax.P("fsdp", "tensor"))
        )
        found = block_if_simulated(jax.jit(in_float8, static_argnums=1)(split, OPERAND))
    for a, b in zip(found, whole, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.thorough
@pytest.mark.report(
    "AI-Hypercomputer/maxtext#498",
    right="a model that trained in 8 bits writes and is scored; its checkpoint has plain weights",
)
def test_what_trained_in_eight_bits_is_scored_with_plain_weights():
    recipe = build(TINY)
    state = jax.jit(lambda: init_state(recipe))()
    score = jax.jit(recipe.eval_loss)
    found = score(state.params, BATCH, jax.random.key(0))
    plain = jax.jit(build(replace(TINY, precision="bfloat16")).eval_loss)
    np.testing.assert_array_equal(found.loss, plain(state.params, BATCH, jax.random.key(0)).loss)
    assert TINY.activation_dtype == "bfloat16"
    assert jax.tree.structure(state.params) == jax.tree.structure(recipe.spec)


@pytest.mark.thorough
@pytest.mark.report(
    "pytorch/torchchat#1362", "huggingface/optimum-executorch#151",
    right="a matrix whose inputs are no multiple of a block is stored in blocks, not left out",
)  # fmt: skip
@pytest.mark.report(
    "vllm-project/vllm-ascend#16100", "vllm-project/vllm-ascend#12201",
    right="an odd number of blocks, and a last block with padding, keep their scales",
)  # fmt: skip
@pytest.mark.report(
    "microsoft/onnxruntime-genai#1690",
    right="a table that is also the head is stored once, in few bits, for both uses",
)
@pytest.mark.parametrize("form", [Int4(6), NF4(48)], ids=str)
def test_every_matrix_is_stored_in_blocks_however_its_sizes_divide(form):
    model = replace(MODEL, d_ff=22)
    weights = models.init(model, jax.random.key(0))
    small = decoding.quantize(model, weights, form)

    def is_stored(leaf):
        return isinstance(leaf, BlockWeight)

    leaves = jax.tree.leaves(small, is_leaf=is_stored)
    assert "heads" not in weights  # the table is the head
    stored = [leaf for leaf in leaves if is_stored(leaf)]
    assert len(stored) == 1 + 2 * 6
    run = jax.jit(lambda tree: models.apply(model, tree, TOKENS).logits)
    rounded = decoding.round_to_blocks(form, models.spec(model), weights)
    np.testing.assert_allclose(run(small), run(rounded), atol=1e-5)


@pytest.mark.report(
    "vllm-project/vllm#31099", "sgl-project/sglang#17300", "vllm-project/vllm#44763",
    right="weights in blocks are read on a mesh that splits no block evenly",
)  # fmt: skip
@pytest.mark.thorough
def test_weights_in_blocks_are_read_on_any_mesh():
    weights = models.init(MODEL, jax.random.key(0))
    small = decoding.quantize(MODEL, weights, NF4(6))
    expected = jax.jit(lambda tree: models.apply(MODEL, tree, TOKENS).logits)(small)
    mesh = make_mesh(Mesh(data=2, tensor=2, fsdp=2))
    with jax.set_mesh(mesh):
        split = jax.device_put(weights, shardings(models.spec(MODEL), mesh))
        stored = decoding.quantize(MODEL, split, NF4(6))
        found = jax.jit(lambda tree: models.apply(MODEL, tree, TOKENS).logits)(stored)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.report(
    "AI-Hypercomputer/maxtext#3924",
    right="remat=full keeps the input of a layer alone, and no policy means no remat",
)
@pytest.mark.report(
    "AI-Hypercomputer/maxtext#489", "jax-ml/jax#26374", "NVIDIA/TransformerEngine#542",
    right="what attention reads and gives can be kept, by a word or by a policy of one's own",
)  # fmt: skip
@pytest.mark.thorough
def test_a_policy_keeps_what_it_names():
    from jaxformer.tools.analysis.costs import kept_bytes

    model = replace(MODEL, attention_implementation="blockwise", unroll=1, positions=None)
    own = jax.checkpoint_policies.save_only_these_names("query", "key", "value")
    policies = ("full", own, "qkv", "dots", "none")
    kept = [kept_bytes(replace(model, remat=policy), 16, 4, jnp.float32) for policy in policies]
    assert kept == sorted(kept)
    assert kept[1] - kept[0] == 2 * 3 * 4 * 16 * 16 * 4  # layers x (query, key, value)
    assert kept[2] > kept[1]  # and what the kernel gives
