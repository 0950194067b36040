"""Decoders that read images as tokens: what users of their public code reported."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import decoding
from jaxformer.errors import ConfigError
from tests.zoo import test_llava as llava

GREEDY = decoding.Sampling(temperature=0.0)


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#36002",
    "unslothai/unsloth#3783",
    right="image tokens that are more or fewer than the patches give no answer, and no wrong one",
)
@pytest.mark.parametrize("count", [1, 3, 5])
def test_another_number_of_image_tokens_than_of_patches(count):
    params = llava.random_parameters(llava.MODEL)
    tokens = jnp.array([[0] * count + [1, 2]], jnp.int32)
    inputs = {"images": llava.images_of(1)}
    assert np.isnan(llava.apply(llava.MODEL, params, tokens, inputs=inputs).logits).all()
    image = list(llava.images_of(1))
    with pytest.raises(ConfigError, match="not numbers"):
        decoding.generate(llava.MODEL, params, tokens.tolist(), 2, sources=image)


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#36002",
    right="a prompt with image tokens and no image is no answer of a blind model",
)
def test_a_forgotten_image():
    params = llava.random_parameters(llava.MODEL)
    tokens = llava.rows_of([[1, 2]])
    assert np.isnan(llava.apply(llava.MODEL, params, tokens).logits).all()
    text = llava.apply(llava.MODEL, params, tokens[:, 4:]).logits
    assert np.isfinite(text).all()


@pytest.mark.thorough
@pytest.mark.report(
    "StarsfieldAI/R1-V#91",
    right="an image token that the model itself writes is a token, and needs no image",
    hit="a text with such a token could not be read again: its logits were NaN",
)
def test_a_written_image_token():
    params = llava.random_parameters(llava.MODEL)
    cache = decoding.init_cache(llava.MODEL, 1, 16)
    inputs = {"images": llava.images_of(1)}
    _, cache = decoding.prefill(llava.MODEL, params, llava.rows_of([[1]]), cache, inputs=inputs)
    logits, _ = decoding.decode_step(llava.MODEL, params, jnp.array([[0]], jnp.int32), cache)
    again = llava.apply(llava.MODEL, params, llava.rows_of([[1, 0]]), inputs=inputs).logits[:, -1:]
    np.testing.assert_allclose(logits, again, rtol=1e-4, atol=1e-4)  # other sums of float32


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#30993",
    right="a later token does not change the logits before it, also behind an image",
)
def test_text_behind_an_image_is_causal():
    params = llava.random_parameters(llava.MODEL)
    inputs = {"images": llava.images_of(1)}
    rows = [llava.rows_of([[1, 2, last]]) for last in (5, 6)]
    one, other = (llava.apply(llava.MODEL, params, row, inputs=inputs).logits for row in rows)
    np.testing.assert_array_equal(one[:, :6], other[:, :6])
    assert np.abs(one[:, 6] - other[:, 6]).max() > 0


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#35855",
    right="padding behind a text of an image is hidden from it",
)
def test_padding():
    llava.test_padding_behind_a_text_stays_hidden()


@pytest.mark.thorough
@pytest.mark.report(
    "Blaizzy/mlx-vlm#1542",
    right="answers to prompts of several lengths in one batch are those to each prompt alone",
)
def test_prompts_of_several_lengths():
    params = llava.random_parameters(llava.MODEL)
    images = list(llava.images_of(3))
    prompts = [llava.PREFIX.prompt(text) for text in ([1], [4, 5, 6], [2, 1])]
    model = llava.MODEL
    together = decoding.generate(model, params, prompts, 4, sources=images, sampling=GREEDY)
    for prompt, image, tokens in zip(prompts, images, together, strict=True):
        alone = decoding.generate(model, params, [prompt], 4, sources=[image], sampling=GREEDY)
        assert alone == [tokens]
