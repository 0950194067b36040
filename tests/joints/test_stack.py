"""A stack of one's own: the page docs/your-own-stack.md, and the layers as functions."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import decoding, masks, models
from jaxformer.errors import ConfigError
from jaxformer.models import EncoderDecoder, Mixture, ModelConfig
from jaxformer.models.stacks import join_layers, layer_functions
from jaxformer.params import Spec, paths
from jaxformer.training import rms
from jaxformer.zoo import linear_attention
from tests.joints.harness import (
    answer,
    assert_resumes_to_the_same_bits,
    assert_same_on_eight_devices,
    assert_short,
    read_page,
)

PAGE = read_page("your-own-stack")
TINY = ModelConfig(
    vocab_size=13, num_layers=4, d_model=16, num_heads=2, context_length=12, init_std=0.3
)
GREEDY = decoding.Sampling(temperature=0.0)
EXPERTS = Mixture(experts=4, top_k=2, balance_loss=0.01)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 13, (2, 12)), jnp.int32)
MODELS = {
    "plain": TINY,
    "dropout": replace(TINY, dropout_rate=0.2, attention_dropout_rate=0.2),
    "windows in turn": replace(TINY, masks=(masks.causal() & masks.window(3), masks.causal())),
    "kinds in turn": replace(TINY, mixer=(linear_attention.Linear(), None)),
    "dense, then experts": replace(TINY, feedforward=("gelu", EXPERTS, EXPERTS, EXPERTS)),
    "full remat": replace(TINY, remat="full"),
    "products kept": replace(TINY, remat="dots"),
}


def in_order(config, layers, x, context):
    """Each layer once, as the default stack runs them."""
    runs, carry = [], None
    for layer in layer_functions(config, layers, x, context):
        runs.append(layer(x, carry))
        x, carry = runs[-1].hidden, runs[-1].carry
    return x, join_layers(runs)


@dataclass(frozen=True)
class Scaled:
    """Layers in order; then x times one parameter."""

    def spec(self, config):
        return {"scale": Spec((config.d_model,), ("embed",), jax.nn.initializers.ones)}

    def __call__(self, config, layers, x, context):
        x, output = in_order(config, layers, x, context)
        return x * layers.stack_params["scale"][None, None], output


def test_the_page_is_short():
    assert_short(PAGE)


@pytest.mark.thorough
def test_the_page_survives_a_kill_and_runs_on_eight_devices(tmp_path, capsys):
    folder = assert_resumes_to_the_same_bits(PAGE, tmp_path)
    assert_same_on_eight_devices(PAGE, tmp_path, whole=folder)
    assert answer(folder, "denseformer", "def ", capsys, "--tokens=4").strip()


def outputs(config, tree, wanted=("layers/*/attention/out", "layers/*/residual")):
    """Logits, states in between, losses and figures, and the gradient of all parameters."""

    def run(tree):
        output = models.apply(
            config, tree, TOKENS, dropout_key=jax.random.key(1), intermediates=wanted
        )
        loss = jnp.mean(jnp.sin(output.logits)) + (0 if output.loss is None else output.loss)
        return loss, (output.logits, output.intermediates, output.stats)

    (loss, values), gradients = jax.jit(jax.value_and_grad(run, has_aux=True))(tree)
    return loss, values, gradients


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_layers_in_order_are_the_default_stack(name):
    config = MODELS[name]
    tree = models.init(config, jax.random.key(0))
    expected = outputs(replace(config, unroll=1), tree)
    found = outputs(replace(config, stack=in_order), tree)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-6), found, expected)


@pytest.mark.thorough
def test_layers_in_order_read_a_source():
    pair = EncoderDecoder(replace(TINY, masks=(masks.full(),), heads=()), TINY)
    own = EncoderDecoder(replace(pair.encoder, stack=in_order), replace(TINY, stack=in_order))
    tree = models.init(pair, jax.random.key(0))
    logits = [
        models.apply(each, tree, TOKENS, source=TOKENS[:, ::-1]).logits for each in (pair, own)
    ]
    np.testing.assert_allclose(*logits, atol=3e-6)
    answers = [
        decoding.generate(each, tree, [[1, 2]], 6, sources=[[3, 4, 5]], sampling=GREEDY)
        for each in (pair, own)
    ]
    assert answers[0] == answers[1]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["plain", "windows in turn", "kinds in turn"])
def test_a_stack_of_ones_own_decodes(name):
    """With a cache it answers what the same tokens without a cache give."""
    config = replace(MODELS[name], stack=Scaled())
    tree = models.init(config, jax.random.key(0))
    tree["stack"]["scale"] = tree["stack"]["scale"] * jnp.linspace(0.5, 2.0, 16)
    (answer,) = decoding.generate(config, tree, [[1, 2, 3]], 6, sampling=GREEDY)
    text = jnp.asarray([[1, 2, 3, *answer]])
    logits = jax.jit(lambda tree: models.apply(config, tree, text).logits)(tree)
    assert jnp.argmax(logits[0, 2:-1], axis=-1).tolist() == answer


@pytest.mark.thorough
def test_parameters_of_a_stack_are_declared_trained_and_checked():
    config = replace(TINY, stack=Scaled())
    assert paths(models.spec(config))["stack/scale"].shape == (16,)
    tree = models.init(config, jax.random.key(0))
    slope = outputs(config, tree)[2]["stack"]["scale"]
    assert jnp.all(slope != 0)
    # what reports wrap around a stack leaves its parameters where they are
    reported = paths(models.spec(rms.with_rms(config)))
    assert reported.keys() == paths(models.spec(config)).keys()
    del tree["stack"]
    with pytest.raises(ConfigError, match="stack/scale"):
        models.apply(config, tree, TOKENS)


@pytest.mark.thorough
def test_a_stack_may_skip_and_repeat_layers():
    """A looped model: the first layer once, the middle ones twice, without the last one."""

    def looped(config, layers, x, context):
        first, *middle, _ = layer_functions(config, layers, x, context)
        runs = []
        for layer in (first, *middle, *middle):
            runs.append(layer(x))
            x = runs[-1].hidden
        return x, join_layers(runs)

    tree = models.init(TINY, jax.random.key(0))
    loss, _, slopes = outputs(replace(TINY, stack=looped), tree, ())
    assert jnp.isfinite(loss)
    kernel = slopes["layers"]["feedforward"]["up"]["kernel"]
    assert jnp.all(kernel[-1] == 0) and jnp.all(jnp.any(kernel[:-1] != 0, axis=(1, 2)))
