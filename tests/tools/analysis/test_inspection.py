"""Numbers of a text against `apply`; the lens of the last layer is the model's own prediction."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxformer import models
from jaxformer.data.tokenizers import Bytes
from jaxformer.errors import ConfigError
from jaxformer.masks import full
from jaxformer.models import Classification, ModelConfig, blocks
from jaxformer.models.mixers.attention import attention
from jaxformer.tools.analysis import inspection
from jaxformer.zoo.linear_attention import Linear

CONFIG = ModelConfig(256, 3, 16, 2, context_length=32, init_std=0.3)
TEXT = "the theme of the"


def own(config):
    """A mixer of the user's: its maps are seen as the library's own are."""
    return attention(config, finish=lambda params, x, out: 2 * out)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replace(CONFIG, block=blocks.post_norm),
        replace(CONFIG, mixer=Linear()),
        replace(CONFIG, mixer=own),
    ],
)
def test_a_text_token_by_token(config):
    params = models.init(config, jax.random.key(0))
    found = inspection.inspect(config, params, Bytes(), TEXT)
    tokens = np.array([Bytes().encode(TEXT)])
    out = models.apply(config, params, jax.device_put(tokens))
    logs = np.asarray(jax.nn.log_softmax(out.logits[0]), np.float64)
    assert found.tokens == list(TEXT) and np.isnan(found.losses[0])
    # float32
    np.testing.assert_allclose(found.losses[1:], -logs[np.arange(15), tokens[0, 1:]], rtol=1e-4)
    best = [Bytes().decode([row.argmax()]) for row in logs]
    assert (
        found.lens[-1] == best == [row[0][0] for row in found.predictions] and len(found.lens) == 3
    )
    np.testing.assert_allclose(
        [row[0][1] for row in found.predictions], np.exp(logs.max(-1)), rtol=1e-4
    )
    text = inspection.table(found)
    assert len(text.splitlines()) == 18 + len(found.heads) and "mean loss" in text
    if config.mixer in (None, own):
        assert found.weights.shape == (3, 2, 16, 16) and set(found.heads) == {
            "entropy",
            "distance",
            "previous token",
            "induction",
        }
    else:
        assert found.weights is None and not found.heads


@pytest.mark.thorough
def test_what_cannot_be_inspected():
    params = models.init(CONFIG, jax.random.key(0))
    with pytest.raises(ConfigError, match="'a' is 1 tokens"):
        inspection.inspect(CONFIG, params, Bytes(), "a")
    with pytest.raises(ConfigError, match="no language model"):
        inspection.inspect(
            replace(CONFIG, masks=(full(),), heads=(Classification(3),)), params, Bytes(), TEXT
        )
    # its head predicts the token at its own place
    with pytest.raises(ConfigError, match="sees later tokens"):
        inspection.inspect(replace(CONFIG, masks=(full(),)), params, Bytes(), TEXT)
