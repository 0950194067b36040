"""Log-mel frames, word error rates and espeak-ng: what users of other projects reported."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.data import speech
from jaxformer.data.espeak import Utterance, speak
from jaxformer.data.speech import RATE, fitted, log_mel
from jaxformer.errors import ConfigError
from jaxformer.evaluation.speech import word_error_rate
from jaxformer.zoo.spec_augment import SpecAugment, in_a_band
from jaxformer.zoo.whisper import MelFrames
from tests.data.test_speech import wave

KEYS = jax.random.split(jax.random.key(0), 200)


@pytest.mark.report(
    "speechbrain/speechbrain#1116",
    "lhotse-speech/lhotse#648",
    "NVIDIA-NeMo/Speech#2398",
    right="no hidden band lies in padding, and padding is no part of the mean",
    hit="bands of frames were drawn over the padding too, and bands of bins changed it",
)
def test_bands_stay_out_of_padding():
    positions = jnp.array([2, 4, 6])  # of 6; each stands for two frames
    x = jnp.where(jnp.arange(12)[None, :, None] < 2 * positions[:, None, None], 3.0, 99.0)
    x = x + jnp.arange(4.0)[None, None, :]
    augment = SpecAugment(MelFrames(4), bins=2, frames=6)
    hide = jax.jit(
        jax.vmap(lambda key: augment.hide(key, x, jnp.arange(6)[None] < positions[:, None]))
    )
    found = np.asarray(hide(KEYS))
    changed = found != np.asarray(x)
    for b, count in enumerate((2 * positions).tolist()):
        assert changed[:, b, :count].any(axis=(0, 2)).all() and not changed[:, b, count:].any()
        assert found[:, b, :count].max() == 6.0  # the mean of the sound alone is 4.5


@pytest.mark.report(
    "NVIDIA-NeMo/Speech#3298",
    "NVIDIA/OpenSeq2Seq#451",
    right="a band begins anywhere, also the widest; one wider than the sound is cut",
)
def test_bands_begin_anywhere():
    bands = np.asarray(jax.vmap(lambda key: in_a_band(key, 8, 4, 8))(KEYS))
    widest = bands[bands.sum(axis=1) == 4]
    assert set(widest.argmax(axis=1)) == set(range(5))
    short = np.asarray(jax.vmap(lambda key: in_a_band(key, 8, 4, 3))(KEYS))
    assert short.sum(axis=1).max() == 3 and not short[:, 3:].any()


@pytest.mark.report(
    "linto-ai/whisper-timestamped#17",
    "jianfch/stable-ts#117",
    "ggml-org/whisper.cpp#3925",
    right="a sound too short to be reflected is refused in one line; the shortest other one works",
)
@pytest.mark.parametrize("samples", [0, 8, 144, 200])
def test_sounds_that_are_too_short(samples):
    with pytest.raises(ConfigError, match="more than 200 samples"):
        log_mel(np.zeros(samples))
    assert log_mel(wave(201)).shape == (1, 80)


@pytest.mark.report(
    "librosa/librosa#478",
    "pytorch/audio#851",
    "pytorch/audio#44",
    right="a mel filter that holds no frequency of the transform is refused, and not always 0",
)
def test_filters_between_two_frequencies():
    for bins, fft in ((128, 256), (80, 128), (200, 400)):
        with pytest.raises(ConfigError, match="take fewer bins or a longer frame"):
            speech.mel_filters(bins, fft)
    for bins, fft in ((80, 400), (128, 400), (40, 256)):
        assert (speech.mel_filters(bins, fft).max(axis=0) > 0).all()


@pytest.mark.report(
    "huggingface/transformers#48849",
    right="one sample that is not finite is refused; it would make every frame NaN",
)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_sample_that_is_not_finite(value):
    sound = wave(3000)
    sound[1234] = value
    with pytest.raises(ConfigError, match="not finite"):
        log_mel(sound)


@pytest.mark.report(
    "SeanNaren/deepspeech.pytorch#272",
    "bshall/hifigan#4",
    right="silence has finite frames: the least power is 1e-10",
)
def test_silence():
    np.testing.assert_array_equal(log_mel(np.zeros(1600)), np.full((10, 80), -1.5))


@pytest.mark.report(
    "openai/whisper#2862",
    right="the frames of a quiet sound do not depend on a loud one beside it",
)
def test_each_sound_has_its_own_floor():
    quiet = [log_mel(wave(4000, seed, loudness=1e-3)) for seed in range(2)]
    loud = log_mel(wave(4000, 2, loudness=1.0))
    again = [log_mel(wave(4000, seed, loudness=1e-3)) for seed in range(2)]
    np.testing.assert_array_equal(quiet, again)
    # 8 powers of ten are 2 after the division by 4
    for frames in (*quiet, loud):
        assert frames.min() >= frames.max() - 2


@pytest.mark.report(
    "csukuangfj/kaldifeat#116",
    "csukuangfj/kaldi-native-fbank#65",
    right="ten seconds have 1,000 frames, also without padding to whole frames",
)
@pytest.mark.parametrize(("samples", "frames"), [(160_000, 1000), (160_159, 1000), (159_999, 999)])
def test_the_number_of_frames(samples, frames):
    assert log_mel(np.zeros(samples)).shape == (frames, 80)


@pytest.mark.report(
    "NVIDIA/TensorRT-Model-Connect#1282",
    right="both ends are reflected; the frame around the end is left out before the floor is set",
)
def test_the_ends_of_a_sound():
    sound = wave(1600)
    # what is reflected is what stands there
    longer = np.concatenate([sound[200:0:-1], sound, sound[-2:-202:-1]])
    # frame i of one is around the sample of frame i + 1.25 of the other: take frames 2.5 apart
    for frame in (0, 4, 9):
        start = frame * 160 + 200
        alone = longer[start - 200 : start + 200]
        window = np.sin(np.pi * np.arange(400) / 400) ** 2
        power = abs(np.fft.rfft(alone.astype(np.float64) * window)) ** 2 @ speech.mel_filters()
        expected = np.log10(np.maximum(power, 1e-10)) / 4 + 1
        found = log_mel(sound)
        np.testing.assert_allclose(found[frame], np.maximum(expected, found.min()), atol=1e-6)
    click = np.zeros(1600)
    click[:] = 1e-4 * wave(1600)
    late = click.copy()
    late[-1] = 1.0  # only the frame around the end, and the one before it, see it
    assert log_mel(late).max() < log_mel(np.roll(late, -800)).max()


@pytest.mark.report(
    "gitmylo/audio-webui#196",
    right="16-bit samples are refused with the number to divide by, and not taken as loud",
)
@pytest.mark.usefixtures("as_users_call")
def test_whole_numbers():
    samples = (wave(3000) * 2**15).astype(np.int16)
    with pytest.raises(ConfigError, match=r"wave of int16.*divide 16-bit samples by 32,768"):
        log_mel(samples)
    np.testing.assert_allclose(log_mel(samples / 2**15), log_mel(wave(3000)), atol=0.1)


@pytest.mark.report(
    "SYSTRAN/faster-whisper#1084",
    "ggml-org/whisper.cpp#579",
    right="the sound is padded with silence, not the frames with zeros: zeros would be loud",
)
def test_what_stands_behind_a_short_sound():
    frames = log_mel(fitted(wave(8000), 16_000))
    assert frames.shape == (100, 80)
    np.testing.assert_array_equal(frames[53:], np.full((47, 80), frames.min()))
    assert frames.min() < -0.4


@pytest.mark.report(
    "jitsi/jiwer#98",
    "huggingface/transformers#23892",
    "huggingface/distil-whisper#158",
    right="an empty answer counts all words as deleted, an empty reference all as inserted",
)
def test_empty_texts():
    assert word_error_rate([""], ["one two"])["wer"] == 100
    assert word_error_rate(["", "one"], ["one", "one"])["wer"] == 50
    assert word_error_rate(["one two", "one"], ["", "one"])["wer"] == 200
    assert word_error_rate(["", "one"], ["", "one"])["wer"] == 0


@pytest.mark.report(
    "bootphon/phonemizer#136",
    right="the same text gives the same result each time",
    hit="espeak-ng keeps a state between utterances, and the noise of breath follows the clock",
)
def test_the_same_utterance_again():
    utterances = [Utterance("seven", voice) for voice in ("en-us+f2", "en-us+whisper")]
    for one, other in zip(speak(utterances), speak(utterances), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.report(
    "bootphon/phonemizer#204",
    "bootphon/phonemizer#64",
    right="the library of the package speaks, whatever espeak the machine has",
)
def test_another_espeak_on_the_machine(monkeypatch, tmp_path):
    expected = speak([Utterance("nine")])[0]
    monkeypatch.setenv("ESPEAK_DATA_PATH", str(tmp_path))
    monkeypatch.setenv("PHONEMIZER_ESPEAK_LIBRARY", str(tmp_path / "libespeak.so"))
    np.testing.assert_array_equal(speak([Utterance("nine")])[0], expected)
    assert 0.2 < len(expected) / RATE < 1.5
