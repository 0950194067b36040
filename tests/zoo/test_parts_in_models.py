"""Parts of the zoo and of families as layers of models: recomputed, scanned, in 16 bits, on meshes,
with weights and caches in 8 bits."""

import math
from dataclasses import replace
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import decoding, models, ops, params, zoo
from jaxformer.families.falcon import falcon_alibi
from jaxformer.families.qwen_moe import GatedShared
from jaxformer.families.t5 import RelativeByLayer
from jaxformer.models import Mixture, ModelConfig, Relative, blocks
from jaxformer.models.norm import one_plus_rms_norm
from jaxformer.ops.positions import Rope
from jaxformer.ops.quantised import Int8
from jaxformer.parallel import Mesh, block_if_simulated, make_mesh
from jaxformer.sharding import batch_sharding, shardings

B, T, V = 8, 16, 32
MODEL = ModelConfig(
    V,
    2,
    32,
    4,
    T,
    d_ff=16,
    positions=Rope(),
    feedforward="swiglu",
    norm="rms_norm",
    use_bias=False,
    init_std=0.2,
)
PARTS = {
    "latent_attention": dict(
        mixer=zoo.LatentAttention(rank=16, rotated=4, query_rank=8), head_width=12
    ),
    "sinks": dict(mixer=zoo.sinks.sinks),
    "qk_layer_norm": dict(mixer=zoo.qk_layer_norm.qk_layer_norm),
    "qk_model_norm": dict(mixer=zoo.qk_norm.qk_model_norm, norm=one_plus_rms_norm),
    "relative_by_layer": dict(mixer=RelativeByLayer(Relative(6, 8, False)), positions=None),
    "falcon_alibi": dict(positions=falcon_alibi),
    "parallel_norms": dict(block=blocks.parallel_norms),
    "clamped_mixture": dict(feedforward=zoo.ClampedMixture(4, 2)),
    "grouped_experts": dict(
        feedforward=zoo.GroupedExperts(8, 2, groups=4, top_groups=2, shared=16)
    ),
    "gated_shared": dict(feedforward=GatedShared(Mixture(4, 2, d_ff=16), d_ff=16)),
}
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, V, (B, T)).astype(np.int32))
BATCH = {"tokens": TOKENS, "labels": jnp.roll(TOKENS, -1, axis=1)}
# float32 sums of tens of terms in another order, through two layers, relative to the largest entry
FLOAT32 = 2e-5


def of_part(name, **changes):
    return replace(MODEL, **PARTS[name], **changes)


@lru_cache
def weights_of(name):
    return jax.jit(partial(models.init, of_part(name)))(jax.random.key(0))


def loss(config, weights, batch):
    logits = models.apply(config, weights, batch["tokens"]).logits
    sums = ops.cross_entropy(logits, batch["labels"])
    return sums.loss / sums.weight


@lru_cache
def on_one_device(name):
    step = jax.jit(jax.value_and_grad(partial(loss, of_part(name))))
    return jax.device_get(step(weights_of(name), BATCH))


def check(found, expected, tolerance=FLOAT32):
    for path, leaf in params.paths(expected).items():
        size = np.abs(leaf).max()
        np.testing.assert_allclose(
            params.paths(found)[path], leaf, rtol=0, atol=tolerance * (size + 1e-3), err_msg=path
        )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "changes",
    [
        dict(remat="full", unroll=1),
        pytest.param(dict(remat="dots", unroll=2), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", PARTS)
def test_recomputed_and_scanned_layers_have_the_same_gradient(name, changes):
    step = jax.jit(jax.value_and_grad(partial(loss, of_part(name, **changes))))
    value, gradient = step(weights_of(name), BATCH)
    expected, of_one = on_one_device(name)
    assert value == pytest.approx(expected, rel=FLOAT32)
    check(gradient, of_one)


MESHES = [
    pytest.param(dict(fsdp=2, tensor=2, expert=2), True, id="fsdp tensor expert, explicit"),
    pytest.param(dict(data=2, context=2), False, id="data context", marks=pytest.mark.slow),
    pytest.param(dict(data=2, context=2), True, id="context, explicit", marks=pytest.mark.slow),
    pytest.param(dict(fsdp=4, expert=2), False, id="fsdp expert", marks=pytest.mark.slow),
]


@pytest.mark.thorough
@pytest.mark.parametrize("axes, explicit", MESHES)
@pytest.mark.parametrize("name", PARTS)
def test_a_mesh_gives_the_loss_and_gradient_of_one_device(name, axes, explicit):
    config = of_part(name)
    expected, of_one = on_one_device(name)  # before a mesh is set: it keeps its arrays
    mesh = make_mesh(
        Mesh(**{"data": 1} | axes, explicit=explicit), jax.devices()[: math.prod(axes.values())]
    )
    places = shardings(models.spec(config), mesh)
    with jax.set_mesh(mesh):
        step = jax.jit(jax.value_and_grad(partial(loss, config)), out_shardings=(None, places))
        weights = jax.device_put(weights_of(name), places)
        batch = jax.device_put(BATCH, batch_sharding(mesh, BATCH))
        value, gradient = block_if_simulated(step(weights, batch))
    assert value == pytest.approx(expected, rel=FLOAT32)
    check(jax.device_get(gradient), of_one)


@pytest.mark.thorough
@pytest.mark.parametrize("name", PARTS)
def test_16_bits_are_near_32_bits(name):
    apply = jax.jit(partial(models.apply, of_part(name)))
    exact = apply(weights_of(name), TOKENS).logits
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), weights_of(name))
    found = apply(narrow, TOKENS).logits
    # eight bits of mantissa; a choice between experts that is near a tie may fall otherwise
    error = jnp.sqrt(jnp.mean(jnp.square(found - exact), axis=-1)) / jnp.std(exact)
    assert jnp.median(error) < 0.03


def in_eight_bit_blocks(config, weights):
    return decoding.quantize(config, weights, Int8())


@pytest.mark.thorough
@pytest.mark.parametrize(
    "prepare, cache_dtype",
    [
        (decoding.prepare, jnp.float32),
        (decoding.quantize, jnp.int8),
        (in_eight_bit_blocks, jnp.float32),
        pytest.param(decoding.quantize, jnp.float32, marks=pytest.mark.slow),
        pytest.param(decoding.prepare, jnp.int8, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", PARTS)
def test_weights_and_caches_in_8_bits_decode_nearly_the_same(name, prepare, cache_dtype):
    """The prompt is read at once, then each token alone. 8 bits err by 1/254 of the largest."""
    config = of_part(name)
    expected = models.apply(config, weights_of(name), TOKENS[:2]).logits
    prepared = prepare(config, weights_of(name))
    cache = decoding.init_cache(config, 2, T, cache_dtype)
    step = jax.jit(lambda p, tokens, cache: models.apply(config, p, tokens, cache=cache))
    output = step(prepared, TOKENS[:2, :8], cache)
    found = [output.logits]
    for i in range(8, T):
        output = step(prepared, TOKENS[:2, i : i + 1], output.cache)
        found.append(output.logits)
    found = jnp.concatenate(found, axis=1)
    error = jnp.sqrt(jnp.mean(jnp.square(found - expected), axis=-1)) / jnp.std(expected)
    is_exact = prepare is decoding.prepare and cache_dtype == jnp.float32
    assert jnp.median(error) < (FLOAT32 if is_exact else 0.03)


@pytest.mark.thorough
def test_a_latent_may_be_read_and_replaced():
    config = of_part("latent_attention")
    names = ("layers/*/attention/latent", "layers/*/attention/weights", "layers/0/attention/query")
    output = models.apply(config, weights_of("latent_attention"), TOKENS, intermediates=names)
    latent, weights, query = (output.intermediates[name] for name in names)
    assert latent.shape == (2, B, T, 1, 20) and query.shape == (B, T, 4, 12)
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-5)
    without = models.apply(
        config,
        weights_of("latent_attention"),
        TOKENS,
        edits={"layers/1/attention/latent": lambda latent, _: 0 * latent},
    )
    assert not np.allclose(without.logits, output.logits)
