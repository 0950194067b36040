"""What the stack does on each platform: how many layers a step of the scan has, and what a layer
keeps for its gradient."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import models, params, sharding, zoo
from jaxformer.models import ModelConfig, blocks
from jaxformer.models.stacks import remat, scan
from jaxformer.ops import norms
from jaxformer.ops.positions import Rope
from jaxformer.parallel import Mesh, make_mesh
from jaxformer.tools.analysis.costs import kept_bytes

CONFIG = ModelConfig(
    vocab_size=16, num_layers=2, d_model=64, num_heads=4, context_length=32, unroll=1
)
LLAMA = replace(CONFIG, norm="rms_norm", feedforward="swiglu", positions=Rope(), use_bias=False)
FLOAT32 = 2e-6  # of the largest entry of the gradients, whose sums are formed in another order


def on(monkeypatch, platform):
    for module in (norms, scan, sharding):
        monkeypatch.setattr(module, "platform", lambda: platform)


@pytest.mark.parametrize(
    "platform, changes, expected",
    [
        ("cpu", {}, 12),
        ("cpu", {"d_model": 1024}, 1),
        ("cpu", {"remat": "dots"}, 1),
        ("tpu", {}, 1),
        ("gpu", {}, 12),
        ("tpu", {"unroll": 3}, 3),
        ("gpu", {"d_model": 1024}, 12),
        ("gpu", {"remat": "full"}, 1),
        ("gpu", {"num_layers": 96}, 1),
    ],
)
def test_layers_of_a_step(monkeypatch, platform, changes, expected):
    on(monkeypatch, platform)
    config = replace(CONFIG, **{"num_layers": 12, "unroll": None} | changes)
    assert scan.layers_a_step(config, jnp.dtype("float32")) == expected


SANDWICH = replace(CONFIG, block=blocks.sandwich)
QK_NORM = replace(LLAMA, mixer=zoo.qk_norm.qk_norm)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "config", [CONFIG, LLAMA, SANDWICH, QK_NORM], ids=["gpt", "llama", "sandwich", "qk_norm"]
)
def test_a_norm_computed_again_keeps_less_and_gives_the_same_gradient(monkeypatch, config):
    weights, tokens = models.init(config, jax.random.key(0)), jnp.arange(64).reshape(2, 32) % 16
    found, kept = {}, {}
    for platform in ("cpu", "tpu"):
        on(monkeypatch, platform)
        loss = lambda p: jnp.sum(jnp.sin(models.apply(config, p, tokens).logits))
        found[platform], kept[platform] = jax.jit(jax.grad(loss))(weights), kept_bytes(config, 32)
    cpu, tpu = (
        np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)]) for tree in found.values()
    )
    np.testing.assert_allclose(cpu, tpu, rtol=0, atol=FLOAT32 * np.abs(cpu).max())
    norms, stream = 2 * config.num_layers, 4 * config.d_model * 32
    assert kept["tpu"] <= kept["cpu"] - norms * stream  # at least one array of float32 of each norm


@pytest.mark.thorough
@pytest.mark.parametrize("config", [CONFIG, LLAMA], ids=["gpt", "llama"])
def test_fsdp_keeps_no_more_than_one_device(monkeypatch, config):
    """The policy that gathers weights again does not keep what an activation or a norm computes
    inside."""
    on(monkeypatch, "tpu")
    alone = kept_bytes(config, 32, 8)
    with jax.set_mesh(make_mesh(Mesh(data=1, fsdp=4), jax.devices()[:4])):
        split = kept_bytes(config, 32, 8)
    weights = params.count(models.spec(config)["layers"])
    assert split <= alone - 2 * weights  # one device keeps each weight as it was rounded to 16 bits


@pytest.mark.thorough
def test_dots_keeps_products_as_they_are_rounded():
    """In bfloat16, not the float32 sums: a layer keeps half of what it keeps in float32."""

    def of_a_layer(dtype):
        two, three = (
            kept_bytes(replace(CONFIG, remat="dots", num_layers=n), 32, 8, dtype) for n in (2, 3)
        )
        return three - two

    # the number of the layer is an integer
    assert of_a_layer("bfloat16") <= 0.51 * of_a_layer("float32")


@pytest.mark.parametrize(
    "policy, products", [(remat._save_products, 3), (jax.checkpoint_policies.nothing_saveable, 4)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dots_keeps_a_users_own_products(policy, products, dtype):
    """The product, and two of its gradient; or that of the backward pass besides."""
    x, w = jnp.ones((2, 3), dtype), jnp.ones((3, 4), dtype)
    loss = lambda x, w: jnp.sum(
        jnp.sin(jnp.sin(jax.checkpoint(lambda x, w: jnp.sin(x @ w), policy=policy)(x, w)))
    )
    assert str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, w)).count("dot_general[") == products


@pytest.mark.thorough
def test_attention_keeps_what_a_kernel_makes():
    """Ours by their name. cuDNN's operation is known by its own, which JAX may change."""
    cudnn = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    names = (cudnn._dot_product_attention_fwd_p, cudnn._dot_product_attention_fwd_p_wrapper)
    assert all(remat._save_attention(primitive) for primitive in names)
    assert not any(
        remat._save_attention(primitive)
        for primitive in (cudnn._dot_product_attention_bwd_p, jax.lax.dot_general_p)
    )
    config = replace(CONFIG, attention_implementation="blockwise")
    full, attention = (
        kept_bytes(replace(config, remat=remat), 32) for remat in ("full", "attention")
    )
    assert attention > full
