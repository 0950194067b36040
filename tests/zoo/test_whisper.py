"""The front end of Whisper against JAX's own convolution, and its sinusoids against a file of
transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import decoding, families, models
from jaxformer.errors import ConfigError
from jaxformer.zoo import whisper
from tests import golden
from tests.families import golden_runs as runs


@pytest.mark.thorough
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("frames", [1, 2, 7, 8])
def test_a_convolution_is_that_of_jax(frames, stride):
    rng = np.random.default_rng(frames)
    x, kernel, bias = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((2, frames, 3), (3, whisper.TAPS, 5), (5,))
    )
    found = whisper.convolution(x, {"kernel": kernel, "bias": bias}, stride)
    axes = ("NWC", "IWO", "NWC")
    expected = jax.lax.conv_general_dilated(x, kernel, (stride,), [(1, 1)], dimension_numbers=axes)
    # sums of nine products of order one
    np.testing.assert_allclose(found, expected + bias[None, None], atol=1e-5)


def test_sinusoids_are_those_of_the_file():
    stored = runs.tensors(golden.folder("whisper"))["model.encoder.embed_positions.weight"]
    # transformers computes them in float32
    np.testing.assert_allclose(whisper.sinusoids(*stored.shape), stored, atol=1e-5)


@pytest.mark.thorough
def test_sounds_are_continued_one_by_one_as_together():
    checkpoint = families.load(golden.folder("whisper"))
    config, params = checkpoint.config, checkpoint.params
    bins = config.encoder.embedding.mel_bins
    sounds = np.random.default_rng(0).normal(size=(3, 20, bins)).astype(np.float32)
    greedy = decoding.Sampling(temperature=0.0)
    prompts = [[2], [2, 5], [2]]
    together = decoding.generate(config, params, prompts, 8, sources=list(sounds), sampling=greedy)
    for prompt, sound, expected in zip(prompts, sounds, together, strict=True):
        alone = decoding.generate(config, params, [prompt], 8, sources=[sound], sampling=greedy)
        assert alone == [expected]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((1, 26, 7), r"expected \[B, frames, 5\]"),
        ((1, 28, 5), "14 positions, where model.context_length=13"),
    ],
)
def test_other_frames_are_refused(shape, said):
    checkpoint = families.load(golden.folder("whisper"))
    with pytest.raises(ConfigError, match=said):
        models.apply(
            checkpoint.config, checkpoint.params, jnp.ones((1, 2), int), source=jnp.zeros(shape)
        )


def test_sounds_of_several_lengths_are_refused():
    checkpoint = families.load(golden.folder("whisper"))
    sounds = [np.zeros((20, 5), np.float32), np.zeros((18, 5), np.float32)]
    with pytest.raises(ConfigError, match="arrays of one shape"):
        decoding.generate(checkpoint.config, checkpoint.params, [[2]] * 2, 3, sources=sounds)
