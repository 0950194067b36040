"""Transformers of videos: what users of their public code reported."""

import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from jaxformer import models
from jaxformer.errors import ConfigError
from jaxformer.zoo.vivit import Tubelets, over_space, over_time
from tests.zoo import test_vivit as vivits


@pytest.mark.report(
    "PKU-YuanGroup/Open-Sora-Plan#171",
    right="a sequence over space holds one moment, and a sequence over time holds one place",
)
def test_tokens_of_a_video_keep_their_place_and_moment():
    moment, place = jnp.divmod(jnp.arange(12), 4)
    tokens = jnp.stack([moment, place], axis=-1)
    videos = jnp.stack([tokens, tokens + 100])  # [B, n S, 2], n = 3, S = 4
    space, time = over_space(videos, 4), over_time(videos, 4)
    assert space.shape == (6, 4, 2) and time.shape == (8, 3, 2)
    assert (np.ptp(space[..., 0], axis=1) == 0).all()
    assert (np.ptp(time[..., 1], axis=1) == 0).all()
    np.testing.assert_array_equal(time[5, :, 0], [100, 101, 102])  # in order


@pytest.mark.thorough
@pytest.mark.report(
    "TensorAuto/OpenTau#267",
    right="a batch of n pictures is no video of n frames: the videos of a batch do not meet",
)
@pytest.mark.parametrize("frames", [2, 4])
def test_a_batch_as_large_as_a_video_has_moments(frames):
    params = vivits.random_parameters(vivits.MODEL)
    x = vivits.videos(3, frames)  # 3 is the number of moments of the model
    together = vivits.apply(vivits.MODEL, params, x).logits
    alone = [vivits.apply(vivits.MODEL, params, video[None]).logits[0] for video in x]
    np.testing.assert_allclose(together, alone, rtol=1e-5, atol=1e-5)  # other sums of float32


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#38027",
    "lucidrains/vit-pytorch#266",
    "SforAiDl/vformer#102",
    right="a model reads a video with fewer frames than it was made for",
)
def test_a_video_with_fewer_frames():
    vivits.test_a_vivit_equals_its_definition(0, 4)


@pytest.mark.thorough
@pytest.mark.report(
    "rishikksh20/ViViT-pytorch#11",
    right="a tubelet spans several frames, and each of its frames has weights of its own",
)
def test_a_tubelet_tells_its_frames_apart():
    params = vivits.random_parameters(vivits.MODEL)
    x = vivits.videos(1)
    swapped = x[:, jnp.array([1, 0, 2, 3, 4, 5])]
    found = [vivits.apply(vivits.MODEL, params, each).hidden for each in (x, swapped)]
    assert np.abs(found[0] - found[1]).max() > 0.1


@pytest.mark.report(
    "lucidrains/TimeSformer-pytorch#21",
    right="sizes that do not fit are refused in one line, before any attention is split",
)
def test_sizes_that_do_not_fit(as_users_call):
    assert jaxtyping.config.jaxtyping_disable
    with pytest.raises(ConfigError, match="expected 3 numbers"):
        Tubelets(tubelet=(16, 16))
    params = vivits.random_parameters(vivits.MODEL)
    with pytest.raises(
        ConfigError, match=r"videos \[2, 4, 9, 2\]: expected \[B, frames, 4, 9, 2\]"
    ):
        models.apply(vivits.MODEL, params, jnp.zeros((2, 4, 9, 2)))
