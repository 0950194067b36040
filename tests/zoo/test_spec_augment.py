"""SpecAugment against its definition: bands of random widths and places, in training alone."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.nn.initializers import ones

from jaxformer import models
from jaxformer.errors import ConfigError
from jaxformer.masks import full
from jaxformer.models import ModelConfig
from jaxformer.models.layer import Embedder
from jaxformer.params import Spec
from jaxformer.zoo.spec_augment import SpecAugment, in_a_band, without_bands
from jaxformer.zoo.whisper import MelFrames

KEYS = jax.random.split(jax.random.key(0), 4000)


def test_a_band_is_uniform_in_its_width_and_then_in_its_place():
    length, widest = 7, 3
    bands = np.asarray(jax.vmap(lambda key: in_a_band(key, length, widest))(KEYS))
    widths = bands.sum(axis=1)
    assert (np.diff(np.pad(bands, ((0, 0), (1, 1))).astype(int)) == 1).sum(axis=1).max() == 1
    for width in range(widest + 1):
        of_width = bands[widths == width]
        share = 1 / (widest + 1)
        # five standard errors of a share, and of each place's share
        assert abs(len(of_width) / len(bands) - share) < 5 * np.sqrt(share / len(bands))
        if width:
            places = length - width + 1
            counts = np.bincount(of_width.argmax(axis=1), minlength=places) / len(of_width)
            assert len(counts) == places
            assert abs(counts - 1 / places).max() < 5 * np.sqrt(1 / places / len(of_width))


@pytest.mark.parametrize(("bands", "gaps"), [(1, 0), (0, 2), (2, 1)])
def test_what_is_hidden_has_the_mean_and_the_rest_stays(bands, gaps):
    x = np.random.default_rng(0).normal(size=(11, 6)).astype(np.float32)
    hide = jax.jit(jax.vmap(lambda key: without_bands(key, jnp.asarray(x), 2, 4, bands, gaps)))
    found = np.asarray(hide(KEYS[:300]))
    hidden = found != x
    # float32 sums of 66 numbers
    np.testing.assert_allclose(found[hidden], np.broadcast_to(x.mean(), hidden.sum()), rtol=1e-4)
    columns, rows = hidden.all(axis=1), hidden.all(axis=2)
    assert (hidden == (columns[:, None, :] | rows[:, :, None])).all()
    assert columns.sum(axis=1).max() == 2 * bands and rows.sum(axis=1).max() == 4 * gaps


def model(embedding):
    return ModelConfig(
        0,
        1,
        8,
        2,
        context_length=5,
        embedding=embedding,
        positions=None,
        masks=(full(),),
        heads=(),
        tie_embeddings=False,
    )


@pytest.mark.thorough
def test_only_a_training_step_hides_and_each_spectrogram_by_itself():
    config = model(SpecAugment(MelFrames(4), bins=2, frames=3))
    plain = model(MelFrames(4))
    assert models.evaluation(config) == models.evaluation(plain)
    assert jax.tree.map(jnp.shape, models.init(config, KEYS[0])) == jax.tree.map(
        jnp.shape, models.init(plain, KEYS[0])
    )
    params = models.init(plain, KEYS[0])
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 10, 4)), jnp.float32)
    x = jnp.tile(x, (8, 1, 1))
    without_key = models.apply(config, params, x).hidden
    np.testing.assert_array_equal(without_key, models.apply(plain, params, x).hidden)
    hidden = models.apply(config, params, x, dropout_key=KEYS[1]).hidden
    assert len({row.tobytes() for row in np.asarray(hidden)}) > 4  # some may have empty bands
    np.testing.assert_array_equal(
        hidden, models.apply(config, params, x, dropout_key=KEYS[1]).hidden
    )


def test_bands_wider_than_the_spectrogram_are_refused():
    for wrong in ({"bins": 5}, {"frames": 11}):
        config = model(SpecAugment(MelFrames(4), **{"bins": 1, "frames": 1} | wrong))
        params = models.init(replace(config, embedding=MelFrames(4)), KEYS[0])
        with pytest.raises(ConfigError, match=r"source \[1, 10, 4\]: .* widest bands"):
            models.apply(config, params, jnp.zeros((1, 10, 4)), dropout_key=KEYS[1])
    assert SpecAugment(MelFrames(4)).source is None
    with pytest.raises(ConfigError, match=r"SpecAugment\.bins=-1"):
        SpecAugment(MelFrames(4), bins=-1)


@pytest.mark.thorough
def test_an_older_embedding_of_three_parameters_is_called_without_the_context():
    def older(config):
        def apply(params, x, inputs):
            return x @ params["kernel"]

        spec = {"kernel": Spec((4, 8), ("channel", "embed"), ones)}
        return Embedder(spec, apply, lambda x: x.shape[1])

    params = models.init(model(older), KEYS[0])
    x = jnp.ones((1, 5, 4))
    found = models.apply(model(SpecAugment(older, bins=1, frames=1)), params, x).hidden
    np.testing.assert_array_equal(found, models.apply(model(older), params, x).hidden)
