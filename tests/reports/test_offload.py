"""What users of JAX and MaxText reported about activations that the host keeps."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import masks, models
from jaxformer.models import EncoderDecoder, ModelConfig
from jaxformer.models.stacks import remat
from jaxformer.tools.analysis import costs

SMALL = ModelConfig(
    vocab_size=32, num_layers=4, d_model=16, num_heads=2, context_length=16, unroll=1
)
WINDOWS = (masks.causal(), masks.causal() & masks.window(4))
PATTERNS = {
    "one kind": SMALL,
    "two masks": replace(SMALL, masks=WINDOWS),
    "two feed-forwards": replace(SMALL, feedforward=("gelu", "swiglu")),
    "a rest after the scan": replace(SMALL, num_layers=5, masks=WINDOWS),
    "unrolled": replace(SMALL, unroll=4),
}


def gradient(model, params, tokens, **options):
    def loss(params):
        return jnp.mean(jnp.square(models.apply(model, params, tokens, **options).logits))

    return jax.jit(jax.grad(loss))(params)


@pytest.mark.thorough
@pytest.mark.report(
    "jax-ml/jax#23869",
    "openxla/xla#17541",
    "AI-Hypercomputer/maxtext#4990",
    right="what a layer reads is kept by the host in each form of a stack, and not in silence here",
)
@pytest.mark.parametrize("name", PATTERNS)
def test_the_inputs_of_all_layers_leave_the_device(name):
    config = PATTERNS[name]
    full, offloaded = (
        costs.kept_bytes(replace(config, remat=word), 16) for word in ("full", "offload")
    )
    # 16 tokens of width 16 in 16 bits, for each layer
    assert full - offloaded == config.num_layers * 16 * 16 * 2


@pytest.mark.thorough
@pytest.mark.report(
    "AI-Hypercomputer/maxtext#4990",
    right="a pattern of layers compiles with kept inputs, and has the same gradient",
)
@pytest.mark.parametrize("name", PATTERNS)
def test_the_gradient_is_the_same(name):
    params = models.init(PATTERNS[name], jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, 32)
    found, expected = (
        gradient(replace(PATTERNS[name], remat=word), params, tokens)
        for word in ("offload", "full")
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.thorough
@pytest.mark.report(
    "AI-Hypercomputer/maxtext#4990",
    right="both stacks of an encoder-decoder offload, and have the same gradient",
)
def test_both_stacks_of_a_pair():
    encoder = replace(SMALL, masks=(masks.full(),), heads=())

    def pair(word):
        return EncoderDecoder(replace(encoder, remat=word), replace(SMALL, remat=word))

    params = models.init(pair("full"), jax.random.key(0))
    source, tokens = jax.random.randint(jax.random.key(1), (2, 2, 16), 0, 32)
    found, expected = (
        gradient(pair(word), params, tokens, source=source) for word in ("offload", "full")
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.thorough
@pytest.mark.report(
    "openxla/xla#46231",
    right="refused by name where the compiler may give wrong gradients without an error",
    hit="remat=offload was a scan on GPUs, too",
)
def test_a_gpu_reads_no_kept_input_in_a_scan(monkeypatch):
    monkeypatch.setattr(remat, "platform", lambda: "gpu")
    config = replace(SMALL, remat="offload")
    params = models.init(config, jax.random.key(0))
    tokens = jnp.zeros((2, 16), jnp.int32)
    with pytest.raises(NotImplementedError, match="unroll=num_layers"):
        models.apply(config, params, tokens)
    models.apply(replace(config, unroll=4), params, tokens)  # the way out
