"""ViViT beside a second definition: NumPy in float64, one video at a time, with loops."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import models
from jaxformer.errors import ConfigError
from jaxformer.masks import causal, full
from jaxformer.models import Classification, ModelConfig, Patches
from jaxformer.ops.positions import Rope
from jaxformer.zoo.vivit import (
    Tubelets,
    central_frame,
    from_time,
    inflated,
    over_time,
    space_then_time,
    spatial_attention,
    tubelets,
)
from tests.zoo.gradients import assert_every_gradient
from tests.zoo.plain_layers import attention, gelu, normed

# 3 moments of 2 x 3 places; a tubelet has 2 frames of 2 x 3 pixels
VIDEO = Tubelets(frames=6, image=(4, 9), tubelet=(2, 2, 3), channels=2)
MODEL = ModelConfig(
    vocab_size=0,
    num_layers=2,
    d_model=16,
    num_heads=2,
    context_length=18,
    d_ff=24,
    feedforward="gelu_tanh",
    embedding=VIDEO,
    mixer=spatial_attention,
    block=space_then_time,
    heads=(Classification(5, pool="mean", pooler=None),),
    masks=(full(),),
)
apply = jax.jit(models.apply, static_argnums=0, static_argnames="intermediates")


def layer(tree, x):
    """x [n, S, D]: each moment by itself, then each place by itself, then each tubelet."""
    y = normed(tree["attention_norm"], x)
    x = x + np.stack([attention(tree["attention"], moment) for moment in y])
    y = normed(tree["temporal_norm"], x)
    places = [attention(tree["temporal"], y[:, place]) for place in range(y.shape[1])]
    x = x + np.stack(places, axis=1)
    y = normed(tree["feedforward_norm"], x)
    up, down = tree["feedforward"]["up"], tree["feedforward"]["down"]
    return x + gelu(y @ up["kernel"] + up["bias"]) @ down["kernel"] + down["bias"]


def embedded(tree, video):
    """[n, S, D]"""
    kernel, bias = tree["tubelets"]["kernel"], tree["tubelets"]["bias"]  # kernel [C, f, i, j, D]
    moments = []
    for t in range(0, len(video), 2):
        moment = []
        for line in range(0, 4, 2):
            for column in range(0, 9, 3):
                part = video[t : t + 2, line : line + 2, column : column + 3]
                moment.append(np.einsum("fijc,cfijd->d", part, kernel) + bias)
        moments.append(moment)
    x = np.array(moments)
    return x + tree["positions"][: x.shape[0] * x.shape[1]].reshape(x.shape)


def classes(tree, video):
    x = embedded(tree["embedding"], video)
    for i in range(2):
        x = layer(jax.tree.map(lambda leaf, i=i: leaf[i], tree["layers"]), x)
    pooled = normed(tree["final_norm"], x).mean(axis=(0, 1))
    head = tree["heads"]["classification"]
    return pooled @ head["kernel"] + head["bias"]


def random_parameters(model, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.4 * rng.standard_normal(leaf.shape), jnp.float32),
        models.spec(model),
    )


def videos(count, frames=6, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal((count, frames, 4, 9, 2)), jnp.float32)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("frames", [6, 4, 2])
def test_a_vivit_equals_its_definition(seed, frames):
    params = random_parameters(MODEL, seed)
    x = videos(3, frames, seed)
    found = apply(MODEL, params, x).logits
    wide = jax.tree.map(np.float64, params)
    expected = [classes(wide, video) for video in np.float64(x)]
    # float32: sums of some hundred terms near 1
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
def test_a_short_video_in_a_longer_one_keeps_its_answers():
    """Padding: `segment_ids` 0 hides the last moments, whatever stands there."""
    params = random_parameters(MODEL)
    short = videos(2, 4)
    longer = jnp.concatenate([short, jnp.full((2, 2, 4, 9, 2), 7.0)], axis=1)
    ids = jnp.broadcast_to(jnp.arange(18) < 12, (2, 18)).astype(jnp.int32)
    found = apply(MODEL, params, longer, segment_ids=ids).logits
    expected = apply(MODEL, params, short).logits
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)  # other sums of float32


@pytest.mark.thorough
def test_videos_of_one_batch_do_not_meet():
    params = random_parameters(MODEL)
    x = videos(4)
    together = apply(MODEL, params, x).logits
    alone = [apply(MODEL, params, video[None]).logits[0] for video in x]
    np.testing.assert_allclose(together, alone, rtol=1e-5, atol=1e-5)  # other sums of float32


@pytest.mark.thorough
def test_a_tubelet_sees_its_moment_and_its_place_after_one_layer():
    """A layer that reads space and then time reaches every tubelet; without one, a line of them."""
    model = replace(MODEL, num_layers=1, feedforward="relu")
    params = random_parameters(model)

    def seen(params):
        def hidden(x):
            return models.apply(model, params, x).hidden[0, 7].sum()  # moment 1, place 1

        gradient = jax.jit(jax.grad(hidden))(videos(1))[0]
        return np.abs(np.asarray(tubelets(gradient[None], VIDEO.tubelet)[0])).max(axis=1) > 0

    assert seen(params).all()
    without = {
        **params["layers"],
        "temporal": jax.tree.map(jnp.zeros_like, params["layers"]["temporal"]),
    }
    moment = np.arange(18) // 6 == 1
    np.testing.assert_array_equal(seen({**params, "layers": without}), moment)
    without = {
        **params["layers"],
        "attention": jax.tree.map(jnp.zeros_like, params["layers"]["attention"]),
    }
    place = np.arange(18) % 6 == 1
    np.testing.assert_array_equal(seen({**params, "layers": without}), place)


def test_sequences_of_places_come_back():
    x = jnp.arange(2 * 18 * 3.0).reshape(2, 18, 3)
    places = over_time(x, 6)
    np.testing.assert_array_equal(places[7], x[1, 1::6])  # the second video, the second place
    np.testing.assert_array_equal(from_time(places, 6), x)


@pytest.mark.thorough
def test_a_tubelet_of_one_frame_is_a_patch():
    image = Patches(image=(4, 9), patch=(2, 3), channels=2, class_token=False)
    sizes = dict(context_length=6, mixer=None, block=None)
    of_image = replace(MODEL, embedding=image, **sizes)
    of_video = replace(MODEL, embedding=replace(VIDEO, frames=1, tubelet=(1, 2, 3)), **sizes)
    params = random_parameters(of_image)
    tree = dict(params["embedding"])
    patches = tree.pop("patches")
    tree["tubelets"] = patches | {"kernel": patches["kernel"][:, None]}
    x = videos(3, 1)
    found = apply(of_video, {**params, "embedding": tree}, x).logits
    expected = apply(of_image, params, x[:, 0]).logits
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)  # other sums of float32


@pytest.mark.thorough
@pytest.mark.parametrize("frames", [1, 2, 3, 4])
def test_kernels_of_images_become_kernels_of_videos(frames):
    kernel = jax.random.normal(jax.random.key(0), (2, 2, 3, 16))
    x = videos(2, frames)
    of_video = lambda kernel: tubelets(x, (frames, 2, 3)) @ kernel.reshape(-1, 16)
    of_image = lambda image: tubelets(image[:, None], (1, 2, 3)) @ kernel.reshape(-1, 16)
    tolerance = dict(rtol=1e-5, atol=1e-5)  # other sums of float32
    np.testing.assert_allclose(
        of_video(central_frame(kernel, frames)), of_image(x[:, frames // 2]), **tolerance
    )
    mean = x.mean(axis=1)
    np.testing.assert_allclose(of_video(inflated(kernel, frames)), of_image(mean), **tolerance)


@pytest.mark.thorough
def test_gradients_are_finite_and_reach_every_parameter():
    params = random_parameters(MODEL)
    labels = jnp.array([0, 3, 4])

    def loss(params, dtype):
        logits = models.apply(MODEL, params, videos(3), dtype=dtype).logits
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).sum()

    assert_every_gradient(loss, params, 0.1)


@pytest.mark.thorough
def test_dropout_acts_in_training_alone():
    params = random_parameters(MODEL)
    dropping = replace(MODEL, dropout_rate=0.3, attention_dropout_rate=0.3)
    plain = apply(MODEL, params, videos(2)).logits
    key = jax.random.key(1)
    assert np.abs(apply(dropping, params, videos(2), dropout_key=key).logits - plain).max() > 0.1
    config = models.evaluation(dropping)
    np.testing.assert_array_equal(apply(config, params, videos(2), dropout_key=key).logits, plain)


@pytest.mark.thorough
def test_weights_of_space_and_of_time_can_be_read():
    params = random_parameters(MODEL)
    names = ("layers/*/attention/weights", "layers/*/temporal/weights")
    output = apply(MODEL, params, videos(4), intermediates=names)
    space, time = (output.intermediates[name] for name in names)
    assert space.shape == (2, 4 * 3, 2, 6, 6) and time.shape == (2, 4 * 6, 2, 3, 3)
    for weights in (space, time):
        np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-5)


@pytest.mark.thorough
def test_what_does_not_fit_is_refused():
    params = random_parameters(MODEL)
    for shape in [(2, 6, 4, 9, 3), (2, 3, 4, 9, 2), (2, 8, 4, 9, 2), (2, 0, 4, 9, 2), (2, 4, 9, 2)]:
        with pytest.raises(ConfigError, match="or fewer in multiples of 2"):
            apply(MODEL, params, jnp.zeros(shape))
    with pytest.raises(ConfigError, match="does not divide"):
        Tubelets(frames=7)
    with pytest.raises(ConfigError, match="at least 1"):
        Tubelets(tubelet=(2, 16, 0))
    for field, value in [
        ("embedding", Patches(image=(6, 9), patch=(1, 3), channels=2, class_token=False)),
        ("positions", Rope()),
        ("masks", (causal(),)),
    ]:
        with pytest.raises(ConfigError, match=f"model.{field}"):
            models.spec(replace(MODEL, **{field: value}))
