"""What a layer keeps for its backward pass, on devices and beside them."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import models, sharding
from jaxformer.models import ModelConfig
from jaxformer.parallel import Mesh, make_mesh
from jaxformer.tools.analysis import costs

CONFIG = ModelConfig(
    vocab_size=64, num_layers=4, d_model=32, num_heads=4, context_length=16, unroll=1
)
TOKENS = jax.random.randint(jax.random.key(1), (8, 16), 0, 64)


def gradient(config, params, tokens):
    def loss(params):
        return jnp.mean(jnp.square(models.apply(config, params, tokens).logits))

    return jax.jit(jax.grad(loss))(params)


@cache
def on_one_device():
    params = models.init(CONFIG, jax.random.key(0))
    return params, gradient(CONFIG, params, TOKENS)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(data=1, fsdp=8),
        Mesh(data=2, fsdp=2, tensor=2),
        Mesh(data=2, fsdp=2, context=2),
        Mesh(data=2, fsdp=4, explicit=True),
        Mesh(data=2, stage=2, fsdp=2),
    ],
    ids=["fsdp", "tensor", "context", "explicit", "stages"],
)
def test_inputs_in_the_memory_of_the_host_change_no_gradient(mesh):
    params, expected = on_one_device()
    config = replace(CONFIG, remat="offload")
    devices = make_mesh(mesh)
    with jax.set_mesh(devices):
        split = jax.device_put(params, sharding.shardings(models.spec(config), devices))
        batch = {"tokens": TOKENS}
        tokens = jax.device_put(batch, sharding.batch_sharding(devices, batch))["tokens"]
        found = gradient(config, split, tokens)
    # sums of some hundred terms of float32, in another order
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7),
        jax.device_get(found),
        jax.device_get(expected),
    )


@pytest.mark.thorough
def test_a_policy_of_ones_own_sees_the_input_of_a_layer():
    """Kept by its name, it is what `full` keeps."""
    policy = jax.checkpoint_policies.save_only_these_names("layer_input")
    kept = costs.kept_bytes(replace(CONFIG, remat=policy), 16)
    assert kept == costs.kept_bytes(replace(CONFIG, remat="full"), 16)
