"""Word error rates beside a count by hand, and warping beside a definition by recursion."""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxformer import models
from jaxformer.data.tokenizers import Characters
from jaxformer.errors import ConfigError
from jaxformer.evaluation.speech import (
    nearest_by_warping,
    transcribe,
    warped_distances,
    word_error_rate,
)
from jaxformer.masks import full
from jaxformer.models import EncoderDecoder, ModelConfig
from jaxformer.zoo.whisper import MelFrames


def edits(answer, reference):
    """The least number of substituted, deleted and inserted words."""

    @functools.cache
    def distance(i, j):
        if i == 0 or j == 0:
            return i + j
        same = distance(i - 1, j - 1) + (answer[i - 1] != reference[j - 1])
        return min(same, distance(i - 1, j) + 1, distance(i, j - 1) + 1)

    return distance(len(answer), len(reference))


def test_words_are_counted_over_all_texts():
    rng = np.random.default_rng(0)
    words = ["one", "two", "three", "four"]
    texts = [
        [" ".join(rng.choice(words, rng.integers(least, 7))) for _ in range(30)] for least in (0, 1)
    ]
    answers, references = texts
    pairs = [(a.split(), r.split()) for a, r in zip(answers, references, strict=True)]
    expected = 100 * sum(edits(*pair) for pair in pairs) / sum(len(r) for _, r in pairs)
    assert word_error_rate(answers, references)["wer"] == pytest.approx(expected)
    assert word_error_rate(references, references) == {"wer": 0.0}


def test_many_wrong_words_exceed_a_hundred():
    assert word_error_rate(["two three four"], ["one"])["wer"] == pytest.approx(300)


@pytest.mark.parametrize(
    ("answers", "references", "said"),
    [
        ([], [], "0 texts and 0 references"),
        (["one"], ["one", "two"], "1 texts and 2 references"),
        (["one"], [" "], "no words"),
    ],
)
def test_what_has_no_rate_is_refused(answers, references, said):
    with pytest.raises(ConfigError, match=said):
        word_error_rate(answers, references)


def warped_by_definition(x, y):
    @functools.cache
    def best(t, s):
        cost = np.linalg.norm(x[t].astype(np.float64) - y[s])
        before = [best(i, j) for i, j in ((t - 1, s), (t, s - 1), (t - 1, s - 1)) if min(i, j) >= 0]
        return cost + min(before, default=0)

    return best(len(x) - 1, len(y) - 1)


@pytest.mark.parametrize(("T", "S"), [(1, 1), (6, 9), (9, 4), (1, 5)])
def test_warping_is_that_of_the_definition(T, S):
    rng = np.random.default_rng(T)
    frames = rng.normal(size=(T, 3)).astype(np.float32)
    others = rng.normal(size=(5, S, 3)).astype(np.float32)
    expected = [warped_by_definition(frames, other) for other in others]
    # float32: differences of squares near 10, summed over at most 13 frames
    np.testing.assert_allclose(warped_distances(frames, others), expected, rtol=1e-4)


def test_speed_does_not_count():
    """A wave that stays twice as long at each frame is at distance 0."""
    rng = np.random.default_rng(0)
    frames = rng.normal(size=(7, 3))
    slow = np.repeat(frames, 2, axis=0)[None]
    other = np.repeat(rng.normal(size=(7, 3)), 2, axis=0)[None]
    near, far = warped_distances(frames, np.concatenate([slow, other]))
    assert near < 1e-5 < 1 < far


def test_the_nearest_is_found_among_those_that_lie_near():
    rng = np.random.default_rng(0)
    others = rng.normal(size=(30, 8, 3)).astype(np.float32)
    sounds = others[[4, 20]] + 0.1 * rng.normal(size=(2, 8, 3)).astype(np.float32)
    assert nearest_by_warping(sounds, others).tolist() == [4, 20]
    assert nearest_by_warping(sounds, others, among=1).tolist() == [4, 20]
    late = np.roll(others[[7]], 1, axis=1)  # far frame by frame, near when warped
    assert nearest_by_warping(late, others, among=30).tolist() == [7]


@pytest.mark.thorough
def test_sounds_are_transcribed_one_by_one_as_together():
    # tied embeddings would repeat the first token, which ends the text
    decoder = ModelConfig(7, 1, 16, 2, 9, init_std=0.5, tie_embeddings=False)
    encoder = replace(
        decoder,
        vocab_size=0,
        context_length=6,
        embedding=MelFrames(4),
        positions=None,
        masks=(full(),),
        heads=(),
    )
    model = EncoderDecoder(encoder, decoder, share_embeddings=False)
    params = models.init(model, jax.random.key(1))
    tokenizer = Characters("entow ")
    frames = np.random.default_rng(0).normal(size=(5, 12, 4)).astype(np.float16)
    together = transcribe(model, params, frames, tokenizer, 9)
    assert together == [transcribe(model, params, sound[None], tokenizer, 9)[0] for sound in frames]
    assert len(set(together)) > 1 and all(set(text) <= set("entow ") for text in together)
