"""Stacks: what users of other projects saw go wrong with norms, activations, initial values, ties
and dropout."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import models, ops, params, zoo
from jaxformer.data.labelled import Labelled
from jaxformer.errors import ConfigError
from jaxformer.evaluation.generation import Generated
from jaxformer.evaluation.text_metrics import exact_match
from jaxformer.models import Classification, ModelConfig

CONFIG = models.ModelConfig(vocab_size=13, num_layers=3, d_model=16, num_heads=2, context_length=8)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 13, (2, 8)))


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def rms(x, eps):
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)


@pytest.mark.report(
    "huggingface/transformers#30236",
    "NVIDIA/TransformerEngine#1132",
    right="a norm gives the dtype of its input, scales in float32, and rounds once, at the end",
)
@pytest.mark.parametrize("norm", [ops.rms_norm, ops.layer_norm])
def test_norms_give_the_dtype_of_their_input_and_round_once(norm):
    x, scale = (
        jnp.asarray(normal(1, 64, 32), jnp.bfloat16),
        jnp.asarray(1 + 0.1 * normal(2, 32), jnp.float32),
    )
    out = norm(x, scale)
    assert out.dtype == jnp.bfloat16
    wide = norm(x.astype(jnp.float32), scale)
    np.testing.assert_array_equal(out, wide.astype(jnp.bfloat16))


@pytest.mark.report(
    "pytorch/pytorch#189581",
    "Lightning-AI/lightning-thunder#1713",
    right="the mean square of small bfloat16 numbers is that of float32",
)
def test_the_mean_square_of_small_numbers():
    for size in (0.058, 1e-3, 1e-8, 1e4):
        x = jnp.asarray(size * normal(3, 8, 32), jnp.bfloat16)
        out = ops.rms_norm(x, jnp.ones(32), 1e-20)
        np.testing.assert_allclose(np.asarray(out, np.float64), rms(x, 1e-20), rtol=5e-3)


@pytest.mark.report(
    "linkedin/Liger-Kernel#950",
    right="the gradient of a norm's scale is summed over tokens in float32",
)
def test_the_gradient_of_a_scale_is_summed_in_float32():
    x, g = (jnp.asarray(1 + 0.1 * normal(seed, 4096, 8), jnp.bfloat16) for seed in (4, 5))
    for norm in (ops.rms_norm, ops.layer_norm):
        loss = lambda scale, norm=norm: jnp.sum(norm(x, scale).astype(jnp.float32) * g)
        gradient = jax.grad(loss)(jnp.ones(8))
        wide = np.asarray(x, np.float64)
        if norm is ops.layer_norm:
            wide = wide - wide.mean(axis=-1, keepdims=True)
        wanted = (
            rms(wide, 1e-6 if norm is ops.rms_norm else 1e-5) * np.asarray(g, np.float64)
        ).sum(axis=0)
        np.testing.assert_allclose(gradient, wanted, rtol=2e-3, atol=0.5)


@pytest.mark.report(
    "jax-ml/jax#4428",
    "google/gemma_pytorch#33",
    "goodfire-ai/spd#624",
    "kyutai-labs/pocket-tts#278",
    right=(
        "gelu is x Phi(x), gelu_tanh its approximation, each by its own name and in no model the "
        "other"
    ),
)
def test_the_two_gelus_have_their_own_names():
    x = np.linspace(-8, 8, 321, dtype=np.float32)
    exact = np.array([0.5 * t * math.erfc(-t / math.sqrt(2)) for t in x.astype(float)])
    tanh = (
        0.5
        * x
        * (
            1
            + np.tanh(math.sqrt(2 / math.pi) * (x.astype(float) + 0.044715 * x.astype(float) ** 3))
        )
    )
    np.testing.assert_allclose(ops.feedforward.gelu(jnp.asarray(x)), exact, atol=1e-6)
    np.testing.assert_allclose(ops.feedforward.gelu_tanh(jnp.asarray(x)), tanh, atol=1e-6)
    assert zoo.PRESETS["bert_base"].feedforward == "gelu"
    assert zoo.PRESETS["gpt2_small"].feedforward == "gelu_tanh"


@pytest.mark.thorough
@pytest.mark.report(
    "paiml/entrenar#314",
    right="a table that is tied has the sum of both gradients, in one leaf of the tree",
)
def test_a_tied_table_has_the_sum_of_both_gradients():
    config, loose = CONFIG, replace(CONFIG, tie_embeddings=False)
    tied = models.init(config, jax.random.key(0))
    untied = models.init(loose, jax.random.key(0))
    head = [
        path
        for path in params.paths(models.spec(loose))
        if path not in set(params.paths(models.spec(config)))
    ]
    assert len(head) == 1
    loss = lambda model, tree: jnp.sum(jnp.sin(models.apply(model, tree, TOKENS).logits))
    table = tied["embedding"]["tokens"]
    untied = {
        **untied,
        **tied,
        "heads": jax.tree.map(
            lambda leaf: table if leaf.shape == table.shape else table.T, untied["heads"]
        ),
    }
    one, two = jax.grad(lambda t: loss(config, t))(tied), jax.grad(lambda t: loss(loose, t))(untied)
    (of_head,) = jax.tree.leaves(two["heads"])
    of_head = of_head if of_head.shape == table.shape else of_head.T
    np.testing.assert_allclose(
        one["embedding"]["tokens"], two["embedding"]["tokens"] + of_head, atol=1e-4
    )


@pytest.mark.thorough
@pytest.mark.report(
    "karpathy/minGPT#134",
    "datawhalechina/happy-llm#209",
    right=(
        "both projections into the residual stream start at std / sqrt(2 L), also behind a gate, "
        "and no other matrix"
    ),
)
@pytest.mark.parametrize("feedforward", ["gelu", "swiglu"])
def test_initial_values_of_what_is_added_to_the_stream(feedforward):
    config = replace(CONFIG, num_layers=8, d_model=64, feedforward=feedforward)
    layers = models.init(config, jax.random.key(0))["layers"]
    for path, leaf in jax.tree.leaves_with_path(layers):
        name = "/".join(str(key.key) for key in path if hasattr(key, "key"))
        if name.endswith("kernel"):
            residual = name.startswith(("attention/out", "feedforward/down"))
            wanted = 0.02 / math.sqrt(16) if residual else 0.02
            np.testing.assert_allclose(float(jnp.std(leaf)), wanted, rtol=0.05, err_msg=name)


@pytest.mark.thorough
@pytest.mark.report(
    "tensorflow/tensorflow#19081",
    right="the spread of initial values is the one that the config names, in every part",
)
def test_the_spread_of_initial_values_is_what_the_config_says():
    config = replace(CONFIG, vocab_size=500, d_model=64, context_length=300, init_std=0.5)
    tree = models.init(config, jax.random.key(0))
    for leaf in (tree["embedding"]["tokens"], tree["embedding"]["positions"]):
        np.testing.assert_allclose(float(jnp.std(leaf)), 0.5, rtol=0.05)


@pytest.mark.report(
    "huggingface/transformers#11903",
    right="tied: the head's values are the table's, and the tree has no second leaf to freeze",
)
def test_a_tied_head_has_no_leaf_of_its_own():
    names = list(params.paths(models.spec(CONFIG)))
    assert [name for name in names if "tokens" in name] == ["embedding/tokens"]
    assert not [name for name in names if name.startswith("heads")]


@pytest.mark.report(
    "obspy/obspy#1293",
    right=(
        "one head, a list, one score or a text where a tuple belongs is refused, with the tuple "
        "to write"
    ),
    hit=(
        "TypeErrors: 'Classification' object is not iterable; labels='ab' were two classes, a and b"
    ),
)
def test_one_thing_in_place_of_a_tuple_is_refused(as_users_call, tmp_path):
    sizes = dict(vocab_size=256, num_layers=1, d_model=8, num_heads=1, context_length=8)
    for heads in (Classification(2), [Classification(2)]):
        with pytest.raises(ConfigError, match=r"heads=.*expected a tuple"):
            ModelConfig(**sizes, heads=heads)
    for scores in (exact_match, (), ("bleu",)):
        with pytest.raises(ConfigError, match="expected a tuple of functions"):
            Generated(scores)
    rows = tmp_path / "a.jsonl"
    rows.write_text('{"text": "t", "label": "a"}\n')
    data = Labelled(str(rows), str(rows), labels=("a", "b"))
    object.__setattr__(data, "labels", "ab")
    with pytest.raises(ConfigError, match="labels='ab': its letters"):
        data.open(ModelConfig(**sizes, heads=(Classification(2),)))
