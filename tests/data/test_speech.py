"""Log-mel frames beside a second definition in float64, other sample rates, and the cache."""

import numpy as np
import pytest

from jaxformer.data import speech
from jaxformer.data.tokenizers import Characters
from jaxformer.errors import ConfigError


def wave(samples, seed=0, loudness=0.3):
    """Noise whose loudness goes up and down, with two tones."""
    rng = np.random.default_rng(seed)
    time = np.arange(samples) / speech.RATE
    tones = np.sin(2 * np.pi * 440 * time) + 0.3 * np.sin(2 * np.pi * 2900 * time)
    noise = rng.normal(size=samples) * np.exp(-3 * np.sin(9 * time) ** 2)
    return (loudness * (tones + 0.2 * noise)).astype(np.float32)


def hertz_of(mel):
    """Slaney's scale: 15 mels to 1,000 Hz, then 27 mels are a factor of 6.4."""
    return mel * 1000 / 15 if mel <= 15 else 1000 * np.exp((mel - 15) * np.log(6.4) / 27)


def filters_by_definition(bins, fft, rate):
    highest = 15 + 27 * np.log(rate / 2000) / np.log(6.4)
    corners = [hertz_of(highest * i / (bins + 1)) for i in range(bins + 2)]
    filters = np.zeros((fft // 2 + 1, bins))
    for k in range(fft // 2 + 1):
        for j in range(bins):
            left, middle, right = corners[j : j + 3]
            frequency = k * rate / fft
            if left < frequency <= middle:
                filters[k, j] = (frequency - left) / (middle - left)
            elif middle < frequency < right:
                filters[k, j] = (right - frequency) / (right - middle)
            filters[k, j] *= 2 / (right - left)
    return filters


def log_mel_by_definition(wave, bins, fft, hop, rate):
    """Sums of cosines and sines instead of a fast transform; an index is reflected by itself."""
    n = len(wave)
    filters = filters_by_definition(bins, fft, rate)
    window = np.sin(np.pi * np.arange(fft) / fft) ** 2
    angles = 2 * np.pi * np.outer(np.arange(fft // 2 + 1), np.arange(fft)) / fft
    logarithms = []
    for frame in range(n // hop):
        indices = np.abs(np.arange(fft) + frame * hop - fft // 2)
        indices = n - 1 - np.abs(n - 1 - indices)
        windowed = wave[indices].astype(np.float64) * window
        power = (np.cos(angles) @ windowed) ** 2 + (np.sin(angles) @ windowed) ** 2
        logarithms.append(np.log10(np.maximum(power @ filters, 1e-10)))
    logarithms = np.stack(logarithms)
    return np.maximum(logarithms, logarithms.max() - 8) / 4 + 1


@pytest.mark.parametrize(
    ("samples", "bins", "fft", "hop", "rate"),
    [
        (3200, 80, 400, 160, 16_000),  # Whisper's
        (3333, 128, 400, 160, 16_000),  # of its third version
        (3200, 40, 400, 320, 16_000),
        (2500, 20, 256, 100, 8000),
        (2001, 20, 301, 111, 22_050),  # odd
    ],
)
def test_frames_are_those_of_the_definition(samples, bins, fft, hop, rate):
    sound = wave(samples, samples)
    found = speech.log_mel(sound, bins, fft, hop, rate)
    assert found.shape == (samples // hop, bins) and found.dtype == np.float32
    expected = log_mel_by_definition(sound, bins, fft, hop, rate)
    # computed in float64, rounded to float32: half a unit in the last place of numbers near 1
    np.testing.assert_allclose(found, expected, rtol=0, atol=3e-7)


def test_a_filter_has_area_one_and_filters_overlap():
    filters = speech.mel_filters(40, 4000, 16_000)
    # the sum over frequencies 4 Hz apart is the integral up to the corners' rounding
    np.testing.assert_allclose(4 * filters.sum(axis=0), 1, rtol=0.02)
    centres = filters.argmax(axis=0) * 4
    assert (np.diff(centres) > 0).all()
    # equal steps in mel: equal steps in hertz below 1,000, equal ratios above
    low, high = centres[centres < 900], centres[centres > 1300]
    assert np.ptp(np.diff(low)) <= 8  # twice the grid
    np.testing.assert_allclose(
        high[1:] / high[:-1], (high[-1] / high[0]) ** (1 / (len(high) - 1)), rtol=0.01
    )


def test_a_tone_is_loudest_in_its_filter():
    filters = speech.mel_filters()
    time = np.arange(16_000) / 16_000
    for hertz in (300, 1000, 2500, 6000):
        frames = speech.log_mel(np.sin(2 * np.pi * hertz * time))
        nearest = filters[round(hertz * 400 / 16_000)].argmax()
        assert abs(int(frames[50].argmax()) - int(nearest)) <= 1


def test_a_shift_by_a_hop_shifts_the_frames():
    sound = wave(8000)
    late = np.concatenate([np.zeros(160, np.float32), sound])
    # frames that see no edge; both waves have the same largest power
    np.testing.assert_allclose(
        speech.log_mel(late)[3:48], speech.log_mel(sound)[2:47], rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("factor", [0.5, 0.1])
def test_loudness_adds_a_constant(factor):
    sound = wave(8000)
    softer = speech.log_mel(sound.astype(np.float64) * factor)
    expected = speech.log_mel(sound) + 2 * np.log10(factor) / 4
    np.testing.assert_allclose(softer, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("sound", "options", "said"),
    [
        (np.zeros(200), {}, "more than 200 samples"),
        (np.zeros((2, 3000)), {}, "one channel"),
        (np.zeros(3000), {"hop": 0}, "hop=0"),
        (np.zeros(3000), {"bins": 200}, "filters lie between two frequencies"),
        (np.zeros(3000), {"bins": 0}, "bins=0"),
    ],
)
def test_what_has_no_frames_is_refused(sound, options, said):
    with pytest.raises(ConfigError, match=said):
        speech.log_mel(sound, **options)


@pytest.mark.parametrize(("rate", "new"), [(22_050, 16_000), (8000, 16_000), (48_000, 16_000)])
def test_a_tone_keeps_its_pitch_at_another_rate(rate, new):
    for hertz in (200, 3000):
        tone = np.sin(2 * np.pi * hertz * np.arange(rate) / rate)
        found = speech.resampled(tone, rate, new)
        assert found.shape == (new,) and found.dtype == np.float32
        expected = np.sin(2 * np.pi * hertz * np.arange(new) / new)
        middle = slice(new // 10, -new // 10)
        # the ripple of the filter in its pass band
        np.testing.assert_allclose(found[middle], expected[middle], atol=0.01)


def test_what_a_lower_rate_cannot_hold_is_removed():
    """10,500 Hz would sound as 5,500 Hz at 16,000 samples a second."""
    tone = np.sin(2 * np.pi * 10_500 * np.arange(22_050) / 22_050)
    assert abs(speech.resampled(tone, 22_050)[1000:-1000]).max() < 0.01


def test_a_wave_fits_its_length():
    assert speech.fitted(np.ones(3), 5).tolist() == [1, 1, 1, 0, 0]
    assert speech.fitted(np.ones(7), 5).tolist() == [1] * 5


def transcripts(texts=("one", "two two", "")):
    frames = np.random.default_rng(0).normal(size=(len(texts), 6, 4)).astype(np.float16)
    return speech.Transcripts(frames, list(texts), Characters("entow "), 9)


def test_an_example_is_a_sound_and_its_words_between_ends():
    sounds = transcripts()
    batch = sounds.take_rows(np.array([1, 0, 2]))
    end, letters = 6, sounds.tokenizer.encode
    assert batch["source"].dtype == np.float32
    np.testing.assert_array_equal(batch["source"], sounds.frames[[1, 0, 2]])
    for row, text in enumerate(("two two", "one", "")):
        n = len(text) + 1
        assert batch["tokens"][row, :n].tolist() == [end, *letters(text)]
        assert batch["labels"][row, :n].tolist() == [*letters(text), end]
        assert batch["weights"][row].tolist() == [1] * n + [0] * (9 - n)
    for name, array in sounds[1].items():
        np.testing.assert_array_equal(array, batch[name][0])
    question = sounds.questions[1]
    assert question.prompt == [end] and question.reference == "two two"
    np.testing.assert_array_equal(question.source, batch["source"][0])


def test_words_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="'two two two' has 12 tokens with its end"):
        transcripts(["one", "two two two"])
    with pytest.raises(ConfigError, match="1 sounds, 2 texts"):
        speech.Transcripts(np.zeros((1, 2, 3)), ["one", "two"], Characters("entow "), 9)


def test_the_first_sounds_are_for_training():
    frames = np.arange(24.0).reshape(4, 3, 2)
    texts = ["one", "two", "not", "ten"]
    tokenizer = Characters("entow")
    dataset = speech.dataset_of_sounds(frames, texts, 3, tokenizer, 4, "key")
    assert (dataset.train.texts, dataset.validation.texts) == (texts[:3], texts[3:])
    np.testing.assert_array_equal(dataset.validation.frames, frames[3:])
    assert dataset.vocab_size == 6
    others = [
        speech.dataset_of_sounds(frames, texts, 2, tokenizer, 4, "key"),
        speech.dataset_of_sounds(frames, texts, 3, tokenizer, 4, "another key"),
        speech.dataset_of_sounds(frames, texts, 3, Characters("entowz"), 4, "key"),
    ]
    assert len({each.digest for each in [dataset, *others]}) == 4


def test_sounds_are_made_once(tmp_path):
    made = []

    def make():
        made.append(1)
        return np.arange(12, dtype=np.float16).reshape(3, 4)

    for _ in range(2):
        np.testing.assert_array_equal(speech.kept("key", make, str(tmp_path)), make())
    assert len(made) == 3  # one for the cache, two to compare
    speech.kept("other key", make, str(tmp_path))
    assert len(made) == 4 and len(list(tmp_path.glob("speech-*.npy"))) == 2


@pytest.mark.parametrize("damage", ["cut", "flipped", "other"])
def test_a_damaged_file_is_made_anew(damage, tmp_path, caplog):
    def make():
        return np.arange(100.0)

    speech.kept("key", make, str(tmp_path))
    (file,) = tmp_path.glob("speech-*.npy")
    raw = bytearray(file.read_bytes())
    raw[200] ^= 1
    new = {"cut": raw[:300], "flipped": raw, "other": b"no array"}[damage]
    file.write_bytes(bytes(new))
    np.testing.assert_array_equal(speech.kept("key", make, str(tmp_path)), make())
    assert "is damaged" in caplog.text
    caplog.clear()
    np.testing.assert_array_equal(speech.kept("key", make, str(tmp_path)), make())
    assert not caplog.text


def test_a_cache_that_cannot_be_written_gives_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    found = speech.kept("key", lambda: np.ones(3), str(tmp_path / "file"))
    assert found.tolist() == [1, 1, 1] and "not kept" in caplog.text
