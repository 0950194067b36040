"""Gradients of intermediates against those of parameters; ablated heads against models whose heads
have no output."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import models
from jaxformer.errors import ConfigError
from jaxformer.models import ModelConfig
from jaxformer.tools.analysis import interventions

CONFIG = ModelConfig(
    vocab_size=13, num_layers=3, d_model=16, num_heads=4, context_length=12, init_std=0.3
)
TOKENS = jax.random.randint(jax.random.key(1), (2, 12), 0, 13)
LOSS = lambda output: -jnp.mean(jax.nn.log_softmax(output.logits)[..., 3])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "config", [CONFIG, replace(CONFIG, num_kv_heads=2, unroll=3)], ids=["scanned", "unrolled"]
)
def test_a_gradient_of_what_a_kernel_makes_is_that_of_the_kernel(config):
    """Of y = h W: dW = sum over tokens of h^T dy."""
    params = models.init(config, jax.random.key(0))
    names = ("layers/*/attention/out", "layers/*/residual", "embedding")
    found = interventions.gradients(config, params, TOKENS, LOSS, names)
    assert found.keys() == set(names) and found["embedding"].shape == (2, 12, 16)
    heads = models.apply(
        config, params, TOKENS, intermediates=("layers/*/attention/heads",)
    ).intermediates
    expected = jax.grad(lambda p: LOSS(models.apply(config, p, TOKENS)))(params)["layers"][
        "attention"
    ]["out"]["kernel"]
    product = jnp.einsum(
        "lbtnh,lbtd->lnhd", heads["layers/*/attention/heads"], found["layers/*/attention/out"]
    )
    np.testing.assert_allclose(product, expected, rtol=1e-4, atol=1e-7)  # float32 sums
    assert found["layers/*/residual"].shape == (3, 2, 12, 16)


@pytest.mark.thorough
def test_an_ablated_head_is_one_without_output():
    params = models.init(CONFIG, jax.random.key(0))
    found = np.asarray(interventions.head_ablation(CONFIG, params, TOKENS, LOSS))
    plain = LOSS(models.apply(CONFIG, params, TOKENS))
    for layer, head in np.ndindex(3, 4):
        kernel = params["layers"]["attention"]["out"]["kernel"].at[layer, head].set(0)
        attention = params["layers"]["attention"] | {
            "out": {**params["layers"]["attention"]["out"], "kernel": kernel}
        }
        without = params | {"layers": params["layers"] | {"attention": attention}}
        expected = LOSS(models.apply(CONFIG, without, TOKENS)) - plain
        # a difference of float32 losses
        np.testing.assert_allclose(found[layer, head], expected, atol=2e-6)


@pytest.mark.thorough
def test_the_heads_of_one_layer_are_refused():
    params = models.init(CONFIG, jax.random.key(0))
    with pytest.raises(ConfigError, match=r"layers/0/attention/heads is \[2, 12, .*all layers"):
        interventions.head_ablation(CONFIG, params, TOKENS, LOSS, name="layers/0/attention/heads")


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("function", [interventions.gradients, interventions.head_ablation])
def test_edits_of_a_caller_are_not_replaced_in_silence(function):
    params = models.init(CONFIG, jax.random.key(0))
    edits = {"embedding": lambda x, layer: x}
    names = [("embedding",)] if function is interventions.gradients else []
    with pytest.raises(TypeError, match="edits"):
        function(CONFIG, params, TOKENS, LOSS, *names, edits=edits)
