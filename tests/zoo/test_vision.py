"""LayerScale, and the heads of vision models: what they compute, and what they refuse."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import masks, models
from jaxformer.errors import ConfigError
from jaxformer.models import Classification, ModelConfig, Patches
from jaxformer.objectives import StepContext
from jaxformer.zoo import clip, dinov2, distilled, layer_scale, masked_patches
from jaxformer.zoo.clip import ImageFeatures, TextFeatures
from jaxformer.zoo.dinov2 import ClassAndPatches
from jaxformer.zoo.distilled import DistilledClassification
from jaxformer.zoo.layer_scale import LayerScale
from jaxformer.zoo.masked_autoencoder import KeptPatches, PixelDecoder
from jaxformer.zoo.masked_patches import MaskedPatches
from jaxformer.zoo.siglip import AttentionPooling, LastPosition

B, D = 2, 8
TEXT = ModelConfig(
    vocab_size=13,
    num_layers=1,
    d_model=D,
    num_heads=2,
    context_length=6,
    masks=(masks.causal(),),
    init_std=0.5,
    heads=(),
)
PATCHES = Patches((5, 4), (2, 2), 1, extra_tokens=1, unread=(1, 0))
SQUARE = Patches((4, 4), (2, 2), 1)
IMAGES = replace(TEXT, vocab_size=0, context_length=6, embedding=PATCHES, masks=(masks.full(),))
TOKENS = np.random.default_rng(0).integers(4, 13, (B, 6))
PIXELS = np.random.default_rng(0).normal(size=(B, 5, 4, 1)).astype(np.float32)


def run(config, inputs, **options):
    params = models.init(config, jax.random.key(0))
    return params, models.apply(config, params, jnp.asarray(inputs), **options)


@pytest.mark.thorough
def test_a_layer_scale_of_zero_leaves_the_stream():
    """And of one it is a pre-norm layer."""
    config = replace(IMAGES, block=LayerScale(0.0))
    params, output = run(config, PIXELS)
    none = models.apply(replace(config, num_layers=2), _twice(params), jnp.asarray(PIXELS))
    np.testing.assert_array_equal(output.hidden, none.hidden)
    scaled, output = run(replace(IMAGES, block=LayerScale(1.0)), PIXELS)
    plain = {name: tree for name, tree in scaled["layers"].items() if "layer_scale" not in name}
    expected = models.apply(IMAGES, scaled | {"layers": plain}, jnp.asarray(PIXELS))
    np.testing.assert_allclose(output.hidden, expected.hidden, rtol=0, atol=1e-6)
    with pytest.raises(ConfigError, match="initial=-1"):
        LayerScale(-1.0)


@pytest.mark.thorough
def test_stochastic_depth_drops_sublayers_of_examples_in_training_alone():
    """A sub-layer adds 0, or 1 / (1 - rate) of its output; the mean over examples is its output."""
    rate, examples = 0.25, 4000
    block = LayerScale(1.0, rate)
    config = replace(IMAGES, block=block)
    y = jnp.ones((examples, 2, 3))
    kept = np.asarray(layer_scale.drop_path(y, rate, jax.random.key(0)))
    assert (kept == kept[:, :1, :1]).all()
    assert set(np.unique(kept)) == {np.float32(0), np.float32(4 / 3)}
    assert abs(kept.mean() - 1) < 5 * (rate / (1 - rate) / examples) ** 0.5  # 5 sigma
    params, output = run(config, PIXELS)
    assert models.evaluation(config) == replace(config, block=LayerScale(1.0))
    plain = models.apply(models.evaluation(config), params, jnp.asarray(PIXELS))
    np.testing.assert_array_equal(output.hidden, plain.hidden)
    images = jnp.repeat(jnp.asarray(PIXELS[:1]), 64, axis=0)
    trained = models.apply(config, params, images, dropout_key=jax.random.key(1)).hidden
    # two sub-layers that are kept or not: four results
    assert len(np.unique(np.asarray(trained[:, 1, 0]).round(4))) == 4
    with pytest.raises(ConfigError, match="drop_path_rate=1"):
        LayerScale(1.0, 1.0)


@pytest.mark.thorough
def test_feature_maps_are_states_of_patches():
    config = replace(IMAGES, num_layers=2, block=LayerScale(1.0))
    params = models.init(config, jax.random.key(0))
    first, last = dinov2.feature_maps(config, params, jnp.asarray(PIXELS), (0, 2))
    assert first.shape == last.shape == (B, 2, 2, D)
    hidden = models.apply(config, params, jnp.asarray(PIXELS)).hidden
    np.testing.assert_allclose(last.reshape(B, 4, D), hidden[:, 2:], atol=1e-6)
    with pytest.raises(ConfigError, match=r"stages=.3, -1.: a model of 2 layers has 0 to 2"):
        dinov2.feature_maps(config, params, jnp.asarray(PIXELS), (3, 1, -1))
    with pytest.raises(ConfigError, match=r"expected models\.Patches"):
        dinov2.feature_maps(TEXT, params, jnp.asarray(PIXELS), (0,))


def _twice(params):
    layers = jax.tree.map(lambda a: jnp.concatenate([a, a]), params["layers"])
    return params | {"layers": layers}


@pytest.mark.thorough
def test_classes_of_both_tokens_and_of_the_patches():
    head = DistilledClassification(3)
    params, output = run(replace(IMAGES, heads=(head, ClassAndPatches(3))), PIXELS)
    hidden, tree = np.asarray(output.hidden), params["heads"]
    maps = tree["distilled_classification"]
    both = [
        hidden[:, i] @ maps[name]["kernel"]
        for i, name in enumerate(("class_token", "distillation_token"))
    ]
    np.testing.assert_allclose(output.logits, (both[0] + both[1]) / 2, atol=1e-5)
    np.testing.assert_allclose(
        jnp.stack(distilled.class_and_distillation(maps, output.hidden)), np.stack(both), atol=1e-5
    )
    features = np.concatenate([hidden[:, 0], hidden[:, 2:].mean(axis=1)], axis=1)
    np.testing.assert_allclose(
        output.heads["classification"], features @ tree["classification"]["kernel"], atol=1e-5
    )


@pytest.mark.thorough
def test_only_hidden_patches_are_compared():
    """And the scale and the mean of a normalised patch do not matter."""
    rng = np.random.default_rng(0)
    images, pixels = (rng.normal(size=(B, 4, 4, 1)) for _ in range(2))
    pixels = pixels.reshape(B, 4, 4)
    noise = jnp.asarray([[0.1, 0.9, 0.3, 0.7], [0.8, 0.2, 0.6, 0.4]])
    hidden = np.array([[0, 1, 0, 1], [1, 0, 1, 0]])
    encoder, plain = KeptPatches(SQUARE, 0.5), PixelDecoder(D, 1, 2, 8)

    def errors(decoder, images, pixels):
        return masked_patches.errors_of_images(encoder, decoder, images, pixels, noise)

    target = images.reshape(B, 2, 2, 2, 2).swapaxes(2, 3).reshape(B, 4, 4)
    expected = (np.square(pixels - target).mean(-1) * hidden).sum(1) / 2
    images, pixels = jnp.asarray(images, jnp.float32), jnp.asarray(pixels, jnp.float32)
    np.testing.assert_allclose(errors(plain, images, pixels), expected, rtol=1e-5)
    gradient = jax.grad(lambda pixels: errors(plain, images, pixels).sum())(pixels)
    np.testing.assert_array_equal(np.any(gradient != 0, axis=-1), hidden)
    normalised = replace(plain, normalised=True)
    moved = errors(normalised, 50 * images + 3, pixels)
    np.testing.assert_allclose(moved, errors(normalised, images, pixels), rtol=1e-4)
    assert not np.allclose(moved, errors(plain, images, pixels))


@pytest.mark.thorough
def test_the_objective_of_a_masked_autoencoder():
    """A row of weight 0 does not count, and the key chooses the patches."""
    objective, decoder = MaskedPatches(), PixelDecoder(D, 1, 2, 8)
    config = replace(IMAGES, embedding=KeptPatches(SQUARE, 0.5), context_length=3, positions=None)
    config = replace(config, heads=(decoder,))
    params = models.init(config, jax.random.key(0))
    images = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4, 4, 1)), jnp.float32)
    batch = {"images": images, "weights": jnp.asarray([1.0, 1.0, 0.0])}
    batch["images"] = images.at[2].set(jnp.nan)
    noise = jax.random.uniform(jax.random.key(5), (3, 4))
    given = batch | {"inputs": {"noise": noise}}
    sums = objective(config, params, given, StepContext(jax.random.key(1)))
    pixels = models.apply(config, params, images, inputs={"noise": noise}).logits
    of_images = masked_patches.errors_of_images(config.embedding, decoder, images, pixels, noise)
    np.testing.assert_allclose(sums.loss, of_images[:2].sum(), rtol=1e-5)
    assert sums.weight == 2 and sums.unit == "images"
    losses = [
        float(objective(config, params, batch, StepContext(jax.random.key(i))).loss)
        for i in (1, 1, 2)
    ]
    assert losses[0] == losses[1] != losses[2]
    assert set(objective.example(config, batch)) == {"images", "weights", "inputs"}
    for wrong in (
        replace(config, heads=()),
        IMAGES,
        replace(config, embedding=KeptPatches(SQUARE, 0.0)),
    ):
        with pytest.raises(ConfigError, match="objective: MaskedPatches") as caught:
            objective(wrong, params, batch, StepContext(jax.random.key(0)))
        assert "\n" not in str(caught.value)


@pytest.mark.thorough
def test_features_of_a_text_are_those_of_its_first_end():
    tokens = TOKENS.copy()
    tokens[0, [2, 4]] = 3
    tokens[1, 5] = 3
    config = replace(TEXT, heads=(TextFeatures(3), TextFeatures(name="largest")))
    _, output = run(config, tokens)
    np.testing.assert_allclose(output.logits, output.hidden[jnp.arange(B), jnp.array([2, 5])])
    largest = tokens.argmax(axis=1)
    np.testing.assert_allclose(output.heads["largest"], output.hidden[jnp.arange(B), largest])
    params = models.init(config, jax.random.key(0))
    with pytest.raises(ConfigError, match="end token among the tokens"):
        models.transformer.read(config, params, output)


@pytest.mark.thorough
def test_the_last_position_counts_even_if_it_is_padding():
    """A padded position attends to the text, as where only keys are masked."""
    config = replace(TEXT, masks=(masks.full(),), heads=(LastPosition(3),))
    segments = jnp.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    positions = jnp.arange(6)[None]
    params, output = run(config, TOKENS, segment_ids=segments, positions=positions)
    other = TOKENS.copy()
    other[0, 4] = 0  # no key
    again = models.apply(
        config, params, jnp.asarray(other), segment_ids=segments, positions=positions
    )
    np.testing.assert_array_equal(output.logits, again.logits)
    other[0, 1] = 0
    again = models.apply(
        config, params, jnp.asarray(other), segment_ids=segments, positions=positions
    )
    assert float(jnp.abs(output.logits - again.logits)[0].max()) > 1e-3


@pytest.mark.thorough
def test_padding_is_not_pooled():
    config = replace(TEXT, masks=(masks.full(),), heads=(AttentionPooling(),))
    whole, output = run(config, TOKENS[:, :4])
    padded = np.concatenate([TOKENS[:, :4], np.zeros((B, 2), int)], axis=1)
    segments = jnp.asarray(padded != 0, jnp.int32)
    again = models.apply(config, whole, jnp.asarray(padded), segment_ids=segments)
    np.testing.assert_allclose(output.logits, again.logits, atol=1e-5)


def test_similar_features_point_in_the_same_direction():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5)), jnp.float32)
    scores = clip.similarity(x, 7 * x, 10.0)
    np.testing.assert_allclose(jnp.diagonal(scores), 10.0, rtol=1e-5)
    assert float(scores.max()) <= 10.0 + 1e-4


@pytest.mark.parametrize(
    "head, said",
    [
        (ClassAndPatches(3), "a class token and patches"),
        (DistilledClassification(3), "extra_tokens=1"),
        (PixelDecoder(D, 1, 2, 8), "KeptPatches"),
    ],
)
def test_heads_of_images_refuse_tokens(head, said):
    with pytest.raises(ConfigError, match=said) as caught:
        models.spec(replace(TEXT, heads=(head,)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "build, said",
    [
        (lambda: replace(PATCHES, unread=(0, 0)), "does not divide embedding.image=.5, 4.: .1, 0."),
        (lambda: replace(PATCHES, patch=(6, 2)), "is larger than embedding.image"),
        (lambda: replace(PATCHES, extra_tokens=-1), "extra_tokens=-1"),
        (lambda: KeptPatches(PATCHES, 0.9), "ratio=0.9"),
        (lambda: ImageFeatures(0), "width=0"),
        (lambda: TextFeatures(-1), "end=-1"),
    ],
)
def test_what_cannot_be_is_refused(build, said):
    with pytest.raises(ConfigError, match=said) as caught:
        build()
    assert "\n" not in str(caught.value)


@pytest.mark.thorough
def test_the_pooled_class_token_is_position_0():
    config = replace(IMAGES, heads=(Classification(None, pooler=None, name="pooled"),))
    _, output = run(config, PIXELS)
    np.testing.assert_array_equal(output.logits, output.hidden[:, 0])
