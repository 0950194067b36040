"""Hourglass beside a second definition in NumPy, float64; no token sees a later one."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxformer import decoding, models, params as parameters
from jaxformer.errors import ConfigError
from jaxformer.masks import causal, full, window
from jaxformer.models import ModelConfig
from jaxformer.zoo.hourglass import Hourglass, groups, has_token
from jaxformer.zoo.value_residual import value_residual
from tests.zoo.plain_layers import gelu, normed, softmax

MODEL = ModelConfig(
    vocab_size=11,
    num_layers=4,
    d_model=8,
    num_heads=2,
    context_length=16,
    feedforward="gelu_tanh",
    stack=Hourglass(shorten=3),
    init_std=0.4,
)
FULL = replace(MODEL, masks=(full(),))
apply = jax.jit(models.apply, static_argnums=0)


def random_parameters(model, seed=0):
    """No bias is zero, and the maps of groups are no copies."""
    rng = np.random.default_rng(seed)
    tree = models.init(model, jax.random.key(seed))
    return jax.tree.map(lambda x: x + jnp.asarray(rng.normal(0, 0.2, x.shape), x.dtype), tree)


def texts(T, count=2, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(11, size=(count, T)), jnp.int32)


def plain_attention(tree, x, is_causal):
    T, (_, heads, width) = len(x), tree["query"]["kernel"].shape
    out = 0
    for n in range(heads):
        q, k, v = (
            x @ tree[name]["kernel"][:, n] + tree[name]["bias"][n]
            for name in ("query", "key", "value")
        )
        scores = q @ k.T / math.sqrt(width)
        if is_causal:
            scores = np.where(np.tril(np.ones((T, T))) > 0, scores, -np.inf)
        out = out + softmax(scores) @ v @ tree["out"]["kernel"][n]
    return out + tree["out"]["bias"]


def plain_layer(tree, x, is_causal):
    x = x + plain_attention(tree["attention"], normed(tree["attention_norm"], x), is_causal)
    up, down = tree["feedforward"]["up"], tree["feedforward"]["down"]
    hidden = gelu(normed(tree["feedforward_norm"], x) @ up["kernel"] + up["bias"])
    return x + hidden @ down["kernel"] + down["bias"]


def plain(model, tree, text):
    """The last hidden states of one text."""
    tree = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)
    is_causal, k, T = model.masks == (causal(),), model.stack.shorten, len(text)
    layers = [jax.tree.map(lambda leaf, i=i: leaf[i], tree["layers"]) for i in range(4)]
    x = tree["embedding"]["tokens"][text] + tree["embedding"]["positions"][:T]
    x = plain_layer(layers[0], x, is_causal)
    first = k - 1 if is_causal else 0
    y = []
    for j in range(math.ceil(T / k)):
        places = [j * k - first + i for i in range(k)]
        vectors = [x[p] if 0 <= p < T else np.zeros(8) for p in places]
        kernel = tree["stack"]["shorten"]["kernel"]
        y.append(sum(vector @ kernel[i] for i, vector in enumerate(vectors)))
    y = np.array(y)
    for layer in layers[1:3]:
        y = plain_layer(layer, y, is_causal)
    kernel = tree["stack"]["lengthen"]["kernel"]
    x = x + np.array([y[t // k] @ kernel[:, t % k] for t in range(T)])
    return normed(tree["final_norm"], plain_layer(layers[3], x, is_causal))


@pytest.mark.thorough
@pytest.mark.parametrize("model", [MODEL, FULL], ids=["causal", "full"])
@pytest.mark.parametrize("T", [7, 12])
def test_it_equals_its_definition(model, T):
    tree, tokens = random_parameters(model), texts(T)
    found = apply(model, tree, tokens).hidden
    for row, text in zip(found, np.asarray(tokens), strict=True):
        np.testing.assert_allclose(row, plain(model, tree, text), atol=2e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("k", [1, 2, 5])
def test_no_token_sees_a_later_one(k):
    model = replace(MODEL, stack=Hourglass(shorten=k))
    tree, tokens = random_parameters(model), texts(13, 1)
    changed = jnp.stack([tokens[0].at[i].add(1) % 11 for i in range(13)])
    found = apply(model, tree, jnp.concatenate([tokens, changed])).logits
    differs = np.asarray((found[1:] != found[:1]).any(axis=-1))  # [changed token, position]
    assert not np.tril(differs, -1).any() and differs.diagonal().all()


@pytest.mark.thorough
@settings(deadline=None, max_examples=30)
@given(st.integers(1, 20), st.integers(1, 7), st.booleans())
def test_each_token_is_in_one_group(T, k, is_causal):
    x = jnp.arange(1.0, T + 1)[None]
    found = np.asarray(groups(x, k, is_causal))[0]
    assert found.shape == (math.ceil(T / k), k)
    for j, group in enumerate(found):
        last = j * k if is_causal else j * k + k - 1
        expected = [p + 1 if 0 <= p < T else 0 for p in range(last - k + 1, last + 1)]
        assert group.tolist() == expected


@pytest.mark.thorough
@pytest.mark.parametrize("model", [MODEL, FULL], ids=["causal", "full"])
def test_padding_is_hidden(model):
    tree, tokens = random_parameters(model), texts(13)
    ids = jnp.asarray(np.arange(13) < 8, jnp.int32)[None] * jnp.ones((2, 1), jnp.int32)
    padded = apply(model, tree, tokens, segment_ids=ids).hidden[:, :8]
    alone = apply(model, tree, tokens[:, :8]).hidden
    # other sums of float32
    np.testing.assert_allclose(padded, alone, atol=1e-5)
    assert has_token(ids > 0, 3, False).tolist()[0] == [True, True, True, False, False]


@pytest.mark.thorough
def test_two_texts_in_a_row_give_nan_and_not_a_mixture():
    tree, tokens = random_parameters(MODEL), texts(12)
    ids = jnp.asarray([[1] * 6 + [2] * 6, [1] * 12])
    found = apply(MODEL, tree, tokens, segment_ids=ids).logits
    assert jnp.isnan(found[0]).any() and jnp.isfinite(found[1]).all()


@pytest.mark.thorough
def test_only_layers_of_all_tokens_may_have_a_window():
    local = causal() & window(2)
    outside = replace(MODEL, masks=(local, causal(), causal(), local))
    assert jnp.isfinite(apply(outside, random_parameters(outside), texts(9)).logits).all()
    inside = replace(MODEL, masks=(local,))
    with pytest.raises(NotImplementedError, match="Hourglass"):
        models.apply(inside, random_parameters(inside), texts(9))


@pytest.mark.thorough
def test_a_new_map_is_a_mean_and_a_copy():
    tree = models.init(MODEL, jax.random.key(0))["stack"]
    assert (tree["shorten"]["kernel"].sum(axis=0) == jnp.eye(8)).all()
    assert (tree["lengthen"]["kernel"] == jnp.eye(8)[:, None]).all()
    assert parameters.count(models.spec(MODEL)["stack"]) == 2 * 3 * 8 * 8


@pytest.mark.thorough
def test_gradients_and_bfloat16():
    tree, tokens = random_parameters(MODEL), texts(10)

    @jax.jit
    def loss(tree):
        return jnp.square(models.apply(MODEL, tree, tokens).logits).mean()

    gradient = jax.grad(loss)(tree)
    assert all((abs(leaf).max() > 0) for leaf in jax.tree.leaves(gradient["stack"]))
    low = jax.jit(lambda tree: models.apply(MODEL, tree, tokens, dtype=jnp.bfloat16).logits)(tree)
    exact = apply(MODEL, tree, tokens).logits
    # bfloat16 keeps 8 bits; the error grows over some ten products
    assert jnp.abs(low - exact).mean() < 0.05 * jnp.abs(exact).mean()


@pytest.mark.thorough
def test_the_doors():
    with pytest.raises(ConfigError, match="leaves no middle layer"):
        models.spec(replace(MODEL, num_layers=2))
    with pytest.raises(ConfigError, match=r"Hourglass\.shorten=0"):
        Hourglass(shorten=0)
    tree = random_parameters(MODEL)
    with pytest.raises(NotImplementedError, match="no intermediates"):
        models.apply(MODEL, tree, texts(6), intermediates=("layers/*/residual",))
    with pytest.raises(NotImplementedError, match="no cache"):
        decoding.generate(MODEL, tree, [[1, 2]], 2)
    carrying = replace(MODEL, mixer=value_residual)
    with pytest.raises(NotImplementedError, match="hands a value to the next layer"):
        models.apply(carrying, random_parameters(carrying), texts(6))
