"""Spoken numbers: their words, voices that training never hears, and answers to a text."""

import numpy as np
import pytest

from experiments import speech_numbers
from jaxformer import cli

VALUES = {word: i if i < 20 else 10 * (i - 18) for i, word in enumerate(speech_numbers.WORDS)}


def value(text):
    """The number of these words."""
    total = 0
    for word in text.split():
        total = 100 * total if word == "hundred" else total + VALUES[word]
    return total


def test_words_are_read_back():
    assert [value(text) for text in speech_numbers.EVERY] == list(range(1000))
    assert speech_numbers.words(702) == "seven hundred two"
    assert speech_numbers.words(0) == "zero" and speech_numbers.words(340) == "three hundred forty"


@pytest.mark.thorough
def test_training_hears_no_voice_and_no_number_of_validation():
    data = speech_numbers.SpokenNumbers()
    train, validation = data.utterances(0, 2000), data.utterances(1, 320)
    voices = [{each.voice.partition("+")[2] for each in split} for split in (train, validation)]
    numbers = [{each.text for each in split} for split in (train, validation)]
    assert voices[1] == set(speech_numbers.UNSEEN) and not voices[0] & voices[1]
    assert len(voices[0]) > 80 and not numbers[0] & numbers[1]
    assert len(numbers[1]) > 80 and numbers[1] < set(speech_numbers.EVERY)
    free = [each.text for each in train if each.text not in speech_numbers.EVERY]
    assert 0.28 < len(free) / len(train) < 0.36  # half, without what is a number by chance
    assert max(map(len, free)) < speech_numbers.LENGTH
    assert data.utterances(0, 10) == train[:10]
    assert speech_numbers.SpokenNumbers(seed=1).utterances(0, 10) != train[:10]


def test_the_same_frames_each_time(monkeypatch, tmp_path):
    opened = []
    for folder in ("one", "two"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / folder))
        opened.append(speech_numbers.SpokenNumbers(examples=8, validation_examples=4).open(None))
    one, two = opened
    assert one.digest == two.digest
    np.testing.assert_array_equal(one.train.frames, two.train.frames)
    np.testing.assert_array_equal(one.validation.frames, two.validation.frames)
    assert one.train.frames.shape == (8, 100, speech_numbers.BINS)


@pytest.mark.thorough
def test_a_text_is_spoken_and_heard(tmp_path, capsys):
    small = ["--data.examples=8", "--data.validation-examples=4", "--metrics=()"]
    steps = ["--steps=2", "--batch-size=4", "--schedule.warmup=1", "--eval-every=2"]
    assert cli.main(["train", "speech_numbers", "--runs", str(tmp_path), *small, *steps]) == 0
    (run,) = tmp_path.glob("speech_numbers-*")
    capsys.readouterr()
    assert cli.main(["generate", str(run), "--prompt", "seven hundred two"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("says 'seven hundred two', heard: ") == len(speech_numbers.UNSEEN)
    assert (run / "heard.png").exists() and "heard.png" in printed
    assert cli.main(["generate", str(run), "--prompt", "..."]) == 2
    assert "expected a text with a letter or a digit" in capsys.readouterr().err
