"""LLaVA beside a second definition: the patches and the text put together by hand, in float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import decoding, models
from jaxformer.errors import ConfigError
from jaxformer.masks import causal, full, prefix
from jaxformer.models import Classification, Mixture, ModelConfig, Patches
from jaxformer.models.layer import Embedder
from jaxformer.zoo.llava import ImagePrefix, put_patches
from tests.zoo.gradients import assert_every_gradient
from tests.zoo.plain_layers import gelu, normed, softmax

PATCHES = Patches(image=(4, 6), patch=(2, 3), channels=2, class_token=False)
VISION = ModelConfig(
    vocab_size=0,
    num_layers=2,
    d_model=12,
    num_heads=2,
    context_length=4,
    d_ff=16,
    embedding=PATCHES,
    masks=(full(),),
    heads=(),
)
PREFIX = ImagePrefix(VISION, image_token=0)
MODEL = ModelConfig(
    vocab_size=11,
    num_layers=2,
    d_model=16,
    num_heads=2,
    context_length=24,
    d_ff=24,
    embedding=PREFIX,
)
apply = jax.jit(models.apply, static_argnums=0)


def random_parameters(model, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.3 * rng.standard_normal(leaf.shape), jnp.float32),
        models.spec(model),
    )


def images_of(count, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal((count, 4, 6, 2)), jnp.float32)


def texts_of(count, length, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(1, 11, (count, length))


def rows_of(texts):
    return jnp.array([PREFIX.prompt(text) for text in texts], jnp.int32)


def attention(tree, x, visible):
    _, heads, width = tree["query"]["kernel"].shape
    out = 0
    for n in range(heads):
        q, k, v = (
            x @ tree[name]["kernel"][:, n] + tree[name]["bias"][n]
            for name in ("query", "key", "value")
        )
        scores = np.where(visible, q @ k.T / np.sqrt(width), -np.inf)
        out = out + softmax(scores) @ v @ tree["out"]["kernel"][n]
    return out + tree["out"]["bias"]


def stack(tree, x, visible):
    """A pre-norm stack over x [T, D], layer by layer."""
    for i in range(len(tree["layers"]["attention_norm"]["scale"])):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], tree["layers"])
        y = normed(layer["attention_norm"], x)
        x = x + attention(layer["attention"], y, visible)
        y = normed(layer["feedforward_norm"], x)
        up, down = layer["feedforward"]["up"], layer["feedforward"]["down"]
        x = x + gelu(y @ up["kernel"] + up["bias"]) @ down["kernel"] + down["bias"]
    return normed(tree["final_norm"], x)


def vision_states(tree, image):
    """The output [4, 12] of the vision model for an image."""
    kernel, bias = tree["embedding"]["patches"]["kernel"], tree["embedding"]["patches"]["bias"]
    patches = [
        np.einsum("ijc,cijd->d", image[line : line + 2, column : column + 3], kernel) + bias
        for line in (0, 2)
        for column in (0, 3)
    ]
    return stack(tree, np.array(patches) + tree["embedding"]["positions"], np.ones((4, 4), bool))


def logits_of(tree, image, text):
    """Logits of all positions: the image's four, then the text's."""
    table, projector = tree["embedding"]["tokens"], tree["embedding"]["projector"]
    seen = vision_states(tree["embedding"]["vision"], image)
    projected = seen @ projector["kernel"] + projector["bias"]
    x = np.concatenate([projected, table[text]]) + tree["embedding"]["positions"][: 4 + len(text)]
    return stack(tree, x, np.tri(len(x), dtype=bool)) @ table.T


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [0, 1])
def test_a_model_equals_its_definition(seed):
    params = random_parameters(MODEL, seed)
    images, texts = images_of(3, seed), texts_of(3, 7, seed)
    found = apply(MODEL, params, rows_of(texts), inputs={"images": images}).logits
    wide = jax.tree.map(np.float64, params)
    expected = [logits_of(wide, *row) for row in zip(np.float64(images), texts, strict=True)]
    # float32: sums of some hundred terms near 1
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
def test_generation_with_a_cache_equals_reading_anew():
    """Greedy answers token by token, without a cache, are those of `generate`."""
    params = random_parameters(MODEL)
    images, texts = images_of(3), texts_of(3, 5)
    prompts = [PREFIX.prompt(texts[0]), PREFIX.prompt(texts[1][:3]), PREFIX.prompt(texts[2][:4])]
    greedy = decoding.Sampling(temperature=0.0)
    found = decoding.generate(MODEL, params, prompts, 6, sources=list(images), sampling=greedy)
    rows = [prompt + new for prompt, new in zip(prompts, found, strict=True)]
    longest = max(map(len, rows))
    tokens = jnp.array([row + [1] * (longest - len(row)) for row in rows], jnp.int32)
    likeliest = apply(MODEL, params, tokens, inputs={"images": images}).logits.argmax(axis=-1)
    for prompt, new, expected in zip(prompts, found, likeliest.tolist(), strict=True):
        first = len(prompt) - 1
        assert new == expected[first : first + 6]


@pytest.mark.thorough
def test_the_decoder_reads_the_patches_as_its_own_vectors():
    """The same hidden states as those of a decoder that is given the embeddings."""
    params = random_parameters(MODEL)
    images, tokens = images_of(2), rows_of(texts_of(2, 5))
    tree = params["embedding"]
    seen = models.apply(VISION, tree["vision"], images).hidden
    projected = seen @ tree["projector"]["kernel"] + tree["projector"]["bias"][None, None]
    given = jnp.concatenate([projected, tree["tokens"][tokens[:, 4:]]], axis=1)

    def as_given(config):
        return Embedder({"tokens": models.spec(config_of_text)["embedding"]["tokens"]}, read)

    def read(tree, x, inputs, context):
        return x

    config_of_text = replace(MODEL, embedding=models.Embedding())
    text = {name: tree[name] for name in ("tokens", "positions")}
    found = apply(MODEL, params, tokens, inputs={"images": images}).hidden
    config = replace(MODEL, embedding=as_given)
    expected = apply(config, {**params, "embedding": text}, given).hidden
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)  # other sums of float32


def test_patches_take_the_place_of_the_first_tokens():
    """Rows: an image and a text, a text, image tokens behind a text, one image token too few."""
    x = jnp.zeros((4, 5, 1))
    is_image = jnp.array([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [0, 1, 1, 0, 0], [1, 0, 1, 0, 0]]) == 1
    patches = jnp.broadcast_to(jnp.array([[[1.0], [2.0]]]), (4, 2, 1))
    found = put_patches(x, is_image, patches)[..., 0]
    np.testing.assert_array_equal(found[:3], [[1, 2, 0, 0, 0], [0] * 5, [0] * 5])
    assert np.isnan(found[3]).all()


@pytest.mark.thorough
def test_no_image_leaks_into_another_row():
    params = random_parameters(MODEL)
    images, tokens = images_of(3), rows_of(texts_of(3, 5))
    together = apply(MODEL, params, tokens, inputs={"images": images}).logits
    for i in range(3):
        one = slice(i, i + 1)
        alone = apply(MODEL, params, tokens[one], inputs={"images": images[one]}).logits[0]
        np.testing.assert_allclose(together[i], alone, rtol=1e-5, atol=1e-5)  # other sums


@pytest.mark.thorough
def test_padding_behind_a_text_stays_hidden():
    params = random_parameters(MODEL)
    images, tokens = images_of(2), rows_of(texts_of(2, 5))
    padded = jnp.pad(tokens, ((0, 0), (0, 3)), constant_values=0)
    ids = (jnp.arange(12) < 9).astype(jnp.int32)[None].repeat(2, axis=0)
    inputs = {"images": images}
    found = apply(MODEL, params, padded, inputs=inputs, segment_ids=ids).logits[:, :9]
    expected = apply(MODEL, params, tokens, inputs=inputs).logits
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)  # other sums of float32


@pytest.mark.thorough
def test_a_prefix_mask_shows_the_patches_to_each_other():
    """Under causal() the first patch sees itself alone; under prefix(4) it sees the last one."""
    params = random_parameters(MODEL)
    tokens = rows_of(texts_of(1, 3))

    def reads_last(model):
        def first(z):
            tree = params["embedding"]
            x = put_patches(tree["tokens"][tokens], tokens == 0, z)
            config = replace(model, embedding=lambda config: Embedder(own(config), lambda *a: x))
            return models.apply(config, plain, tokens).hidden[0, 0].sum()

        plain = {
            **params,
            "embedding": {k: params["embedding"][k] for k in ("tokens", "positions")},
        }
        own = lambda config: {"tokens": models.spec(MODEL)["embedding"]["tokens"]}
        return np.abs(jax.grad(first)(jnp.ones((1, 4, 16)))[0, 3]).max() > 0

    assert not reads_last(MODEL)
    assert reads_last(replace(MODEL, masks=(causal() | prefix(4),)))


@pytest.mark.thorough
def test_gradients_reach_every_parameter():
    params = random_parameters(MODEL)
    images, tokens = images_of(2), rows_of(texts_of(2, 9))

    def loss(params, dtype):
        inputs = {"images": images}
        output = models.apply(MODEL, params, tokens, inputs=inputs, dtype=dtype)
        return jax.nn.log_softmax(output.logits[:, 4:])[..., 5].sum()

    assert_every_gradient(loss, params, 0.15)


@pytest.mark.thorough
def test_dropout_of_the_vision_model_acts_in_training_alone():
    vision = replace(VISION, dropout_rate=0.5)
    model = replace(MODEL, embedding=replace(PREFIX, vision=vision))
    params = random_parameters(MODEL)
    tokens, inputs = rows_of(texts_of(1, 4)), {"images": images_of(1)}
    key = jax.random.key(0)
    plain = apply(MODEL, params, tokens, inputs=inputs).logits
    dropped = apply(model, params, tokens, inputs=inputs, dropout_key=key).logits
    assert np.abs(dropped - plain).max() > 0.01
    scored = models.evaluation(model)
    np.testing.assert_array_equal(
        apply(scored, params, tokens, inputs=inputs, dropout_key=key).logits, plain
    )


@pytest.mark.thorough
def test_what_does_not_fit_is_refused():
    params = random_parameters(MODEL)
    tokens, images = rows_of(texts_of(2, 4)), images_of(2)
    with pytest.raises(ConfigError, match="expected one image for each row"):
        models.apply(MODEL, params, tokens, inputs={"images": images[:1]})
    with pytest.raises(ConfigError, match=r"where model\.embedding expects"):
        models.apply(MODEL, params, tokens, inputs={"images": images[:, :3]})
    with pytest.raises(ConfigError, match="has heads, which nobody reads"):
        ImagePrefix(replace(VISION, heads=(Classification(3),)))
    with pytest.raises(ConfigError, match="outside the vocabulary of 11"):
        models.spec(replace(MODEL, embedding=replace(PREFIX, image_token=11)))
    with pytest.raises(ConfigError, match="image_token"):
        ImagePrefix(VISION, image_token=-1)
    sparse = replace(VISION, feedforward=Mixture(experts=2, balance_loss=0.1))
    model = replace(MODEL, embedding=replace(PREFIX, vision=sparse))
    with pytest.raises(ConfigError, match="auxiliary loss"):
        apply(model, random_parameters(model), tokens, inputs={"images": images})
    prompts = [PREFIX.prompt([1])] * 2
    with pytest.raises(ConfigError, match="expected arrays of several axes"):
        decoding.generate(MODEL, params, prompts, 1, sources=[[1, 2], [3]])
    with pytest.raises(ConfigError, match="2 prompts need as many sources"):
        decoding.generate(MODEL, params, prompts, 1, sources=list(images[:1]))


@pytest.mark.thorough
def test_every_way_of_decoding_reads_the_images():
    """Greedy answers are those of a search with one beam and of drafts, and the likeliest ones."""
    params = random_parameters(MODEL)
    images = list(images_of(2))
    prompts = [PREFIX.prompt(text) for text in ([1, 5, 1], [2, 3, 4])]
    greedy = decoding.Sampling(temperature=0.0)
    expected = decoding.generate(MODEL, params, prompts, 4, sources=images, sampling=greedy)
    beams = decoding.search(
        MODEL, params, prompts, 4, sources=images, beams=decoding.Beams(beams=1)
    )
    assert [of_prompt[0].tokens for of_prompt in beams] == expected
    for draft in (decoding.Lookup(), decoding.Draft(MODEL, params)):
        found = decoding.speculate(
            MODEL, params, prompts, 4, draft=draft, sources=images, sampling=greedy
        )
        assert found.tokens == expected
    scores = decoding.score(MODEL, params, prompts, expected, sources=images)
    assert all(each.greedy for each in scores)
