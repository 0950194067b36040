"""Utterances of espeak-ng: the same samples each time, other voices and speeds, and refusals."""

import builtins

import numpy as np
import pytest

from jaxformer.data import espeak
from jaxformer.data.espeak import Utterance, speak
from jaxformer.data.speech import RATE
from jaxformer.errors import ConfigError

TEXT = "seven hundred two"
# breath is noise: f2 and whisper
VOICES = ("en-us+m1", "en-us+f2", "en+whisper", "en-gb-scotland", "en-us+klatt2")


@pytest.mark.thorough
def test_utterances_are_the_same_each_time_and_a_prefix_of_a_longer_list():
    utterances = [Utterance(TEXT, voice) for voice in VOICES for _ in range(2)]
    first = speak(utterances)
    again = speak(utterances[:7])
    for one, other in zip(first, again, strict=False):
        np.testing.assert_array_equal(one, other)
    for sound in first:
        assert sound.dtype == np.float32 and sound.ndim == 1
        assert 0.05 < abs(sound).max() < 1.1  # the filter of another rate may overshoot
        assert 0.5 < len(sound) / RATE < 2.5


def test_groups_of_utterances_are_the_whole_list(monkeypatch):
    utterances = [Utterance(TEXT, speed=speed) for speed in range(150, 300, 20)]
    together = speak(utterances)
    monkeypatch.setattr(espeak, "TOGETHER", 3)
    groups = speak(utterances)
    assert [len(sound) for sound in groups] == pytest.approx(
        [len(sound) for sound in together], abs=50
    )


def test_speed_and_voice_act():
    slow, fast = speak([Utterance(TEXT, speed=120), Utterance(TEXT, speed=300)])
    assert len(slow) > 1.5 * len(fast)
    waves = speak([Utterance(TEXT, voice) for voice in VOICES])
    assert len({sound.tobytes() for sound in waves}) == len(VOICES)


def pitch(sound):
    """Hertz of the strongest peak of the autocorrelation, from 60 to 400 Hz."""
    spectrum = abs(np.fft.rfft(sound, 2 * len(sound))) ** 2
    correlation = np.fft.irfft(spectrum)
    shortest = RATE // 400
    return RATE / (shortest + correlation[shortest : RATE // 60].argmax())


def test_pitch_acts():
    low, high = speak([Utterance("nine", "en-us+m1", pitch=number) for number in (10, 90)])
    assert pitch(high) > 1.3 * pitch(low)


@pytest.mark.parametrize(
    ("utterance", "said"),
    [
        (Utterance(TEXT, "klingonese"), "no such voice"),
        (Utterance(TEXT, "en-us+f9"), "no variant 'f9'"),
        (Utterance(TEXT, "en-us+"), "no variant ''"),
        (Utterance(TEXT, speed=20), "speed=20: expected 80 to 450"),
        (Utterance(TEXT, pitch=100), "pitch=100: expected 0 to 99"),
        (Utterance("..."), "with a letter or a digit"),
        (Utterance("a\0b"), "with a letter or a digit"),
    ],
)
def test_what_espeak_would_replace_in_silence_is_refused(utterance, said):
    with pytest.raises(ConfigError, match=said):
        speak([Utterance(TEXT), utterance])


def test_nothing_is_spoken_for_nothing():
    assert speak([]) == []


def test_a_missing_package_is_one_line(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "espeakng_loader":
            raise ImportError(name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"espeakng_loader; .*pip install 'jaxformer\[speech\]'"):
        speak([Utterance(TEXT)])
