"""Log-mel frames against transformers' extractor."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest

from jaxformer.data.speech import RATE, fitted, log_mel


def sounds():
    """A quiet voice-like sound, noise, a tone, and silence."""
    rng = np.random.default_rng(0)
    time = np.arange(2 * RATE) / RATE
    harmonics = sum(np.sin(2 * np.pi * 120 * k * time) / k**2 for k in range(1, 30))
    voice = 0.1 * harmonics * np.abs(np.sin(7 * time))
    noise = 0.1 * rng.normal(size=40_001)
    tone = np.sin(0.3 * np.arange(5000))
    return [sound.astype(np.float32) for sound in (voice, noise, tone, np.zeros(3000))]


@pytest.mark.parity
@pytest.mark.filterwarnings("default")  # theirs
@pytest.mark.parametrize("bins", [80, 128])
@pytest.mark.parametrize("number", range(4))
def test_frames_are_those_of_whisper(bins, number):
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=bins)
    sound = sounds()[number]
    padded = fitted(sound, 30 * RATE)
    ours = log_mel(padded, bins)
    # NumPy, float64 inside, float32 outside
    exact = extractor._np_extract_fbank_features(padded[None], "cpu")[0].T
    np.testing.assert_allclose(ours, exact, rtol=0, atol=1e-6)
    # with torch installed, it computes in float32, whose error grows where the sound is quiet
    called = extractor(sound, sampling_rate=RATE, return_tensors="np").input_features[0].T
    error = abs(called - exact).max()
    assert abs(ours - called).max() <= error + 1e-6 and error < 1e-4
    # the level at which the issue compares: where at most 5 powers of ten below the loudest
    loud = exact > exact.max() - 5 / 4
    np.testing.assert_allclose(ours[loud], called[loud], rtol=0, atol=1e-5)
