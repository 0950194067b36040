"""Spectrograms with words: one panel a sound, red where other words were heard."""

import numpy as np
import pytest
from matplotlib.text import Text

from jaxformer.tools.analysis import figures, spectrograms


def test_a_panel_shows_a_sound_and_its_words():
    frames = np.random.default_rng(0).normal(size=(5, 20, 8)).astype(np.float16)
    spoken = ["one", "two", "three", "a $ and _", "five"]
    heard = ["one", "ten", "three", "a $ and _", ""]
    figure = spectrograms.transcripts(frames, spoken, heard, 2.0)
    assert len(figure.axes) == 5
    for axes, sound, said, text in zip(figure.axes, frames, spoken, heard, strict=True):
        (image,) = axes.get_images()
        np.testing.assert_array_equal(image.get_array(), sound.T.astype(np.float32))
        assert image.get_extent() == [0, 2.0, 0, 8] and image.origin == "lower"
        title = axes.get_title(loc="left")
        assert title == f"spoken: {said}\nheard: {text}".replace("$", r"\$")
        (drawn,) = [each for each in axes.findobj(Text) if each.get_text() == title]
        expected = spectrograms.RIGHT if said == text else spectrograms.WRONG
        assert drawn.get_color() == expected
    assert len(figures.png(lambda: figure)) > 5000


def test_every_sound_needs_its_words():
    with pytest.raises(ValueError, match="zip"):
        spectrograms.transcripts(np.zeros((2, 4, 3)), ["one"], ["one", "two"], 2.0)
