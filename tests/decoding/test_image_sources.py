"""An encoder-decoder whose source is an image: what it decodes is what `models.apply` says, alone
and among others."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import decoding, models
from jaxformer.errors import ConfigError
from jaxformer.masks import full
from jaxformer.models import EncoderDecoder, ModelConfig, Patches

PATCHES = Patches((4, 6), (2, 2), 1)
ENCODER = ModelConfig(
    vocab_size=0,
    num_layers=2,
    d_model=16,
    num_heads=2,
    context_length=PATCHES.length,
    embedding=PATCHES,
    masks=(full(),),
    heads=(),
    init_std=0.3,
)
DECODER = ModelConfig(
    vocab_size=11, num_layers=2, d_model=16, num_heads=2, context_length=12, init_std=0.3
)
PAIR = EncoderDecoder(ENCODER, DECODER, share_embeddings=False)
PARAMS = jax.jit(partial(models.init, PAIR))(jax.random.key(0))
IMAGES = np.random.default_rng(0).normal(size=(5, 4, 6, 1)).astype(np.float32)
PROMPTS = [[1], [1, 4], [1], [2, 3, 4], [1]]
GREEDY = decoding.Sampling(temperature=0.0)
logits_of = jax.jit(partial(models.apply, PAIR))


def greedy(prompt, image, count):
    """The likeliest tokens, by `models.apply` alone: causal, so zeros behind the text do not
    matter."""
    text = list(prompt)
    for _ in range(count):
        tokens = np.zeros((1, 10), np.int32)
        tokens[0, : len(text)] = text
        text.append(
            int(
                logits_of(PARAMS, jnp.asarray(tokens), source=jnp.asarray(image[None]))
                .logits[0, len(text) - 1]
                .argmax()
            )
        )
    return text[len(prompt) :]


@pytest.mark.thorough
def test_images_are_decoded_as_apply_says():
    expected = [greedy(prompt, image, 5) for prompt, image in zip(PROMPTS, IMAGES, strict=True)]
    assert len({tuple(text) for text in expected}) > 2  # images decide
    found = decoding.generate(
        PAIR, PARAMS, PROMPTS, 5, sources=list(IMAGES), sampling=GREEDY, rows=2
    )
    assert found == expected
    assert [
        token
        for piece in decoding.stream(PAIR, PARAMS, [1], 5, source=IMAGES[0], sampling=GREEDY)
        for token in piece
    ] == expected[0]
    best = decoding.search(
        PAIR, PARAMS, PROMPTS, 5, sources=list(IMAGES), beams=decoding.Beams(beams=1), rows=2
    )
    assert [hypotheses[0].tokens for hypotheses in best] == expected
    assert (
        decoding.contrast(PAIR, PARAMS, PROMPTS, 5, sources=list(IMAGES), k=1, rows=2) == expected
    )


@pytest.mark.thorough
def test_beams_of_images_are_scored_as_apply_says():
    found = decoding.search(
        PAIR,
        PARAMS,
        PROMPTS,
        4,
        sources=list(IMAGES),
        beams=decoding.Beams(beams=3, length_penalty=0.0),
        rows=4,
    )
    tokens = [hypotheses[0].tokens for hypotheses in found]
    scores = decoding.score(PAIR, PARAMS, PROMPTS, tokens, sources=list(IMAGES), rows=2)
    for prompt, image, new, score, hypotheses in zip(
        PROMPTS, IMAGES, tokens, scores, found, strict=True
    ):
        text = jnp.array([[*prompt, *new, *[0] * (10 - len(prompt) - len(new))]])  # as above
        logs = jax.nn.log_softmax(
            logits_of(PARAMS, text, source=jnp.asarray(image[None])).logits[0]
        )
        expected = sum(float(logs[len(prompt) - 1 + i, token]) for i, token in enumerate(new))
        # float32 sums
        np.testing.assert_allclose([score.log_likelihood, hypotheses[0].score], expected, rtol=1e-4)


def test_an_image_of_another_size_is_refused():
    with pytest.raises(ConfigError, match=r"source image \(4, 4, 1\): expected \(4, 6, 1\)"):
        decoding.generate(PAIR, PARAMS, [[1]], 2, sources=[IMAGES[0][:, :4]])
    with pytest.raises(ConfigError, match=r"2 prompts need as many sources"):
        decoding.search(PAIR, PARAMS, [[1], [1]], 2, sources=list(IMAGES[:1]))
    with pytest.raises(ConfigError, match=r"images \(4, 4, 1\) where model.embedding expects"):
        models.apply(
            PAIR, PARAMS, jnp.ones((1, 2), jnp.int32), source=jnp.asarray(IMAGES[:1, :, :4])
        )
