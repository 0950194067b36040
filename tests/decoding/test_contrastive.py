"""Contrastive search against its definition, by a forward pass for each token that is tried."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import masks, models
from jaxformer.decoding import contrast, contrastive, generate
from jaxformer.decoding.sampling import Sampling
from jaxformer.errors import ConfigError
from jaxformer.models import EncoderDecoder, LanguageModel, ModelConfig, Relative
from jaxformer.ops.positions import Rope

V = 11
GPT = ModelConfig(
    vocab_size=V, num_layers=2, d_model=16, num_heads=4, context_length=40, init_std=0.6
)
ROLLING = replace(GPT, positions=Rope(), masks=(masks.causal() & masks.window(3),), norm="rms_norm")
STACK = replace(GPT, num_layers=1, positions=Relative(8, 16), heads=(), masks=(masks.full(),))
T5 = EncoderDecoder(
    STACK,
    replace(
        STACK,
        positions=Relative(8, 16, bidirectional=False),
        heads=(LanguageModel(),),
        masks=(masks.causal(),),
    ),
)
PROMPTS, SOURCES = [[1, 2, 3, 4, 5], [7], [4] * 8], [[1, 2, 3, 4], [8, 9], [3, 1, 4]]
init, forward = jax.jit(models.init, static_argnums=0), jax.jit(models.apply, static_argnums=0)


def reference(config, params, prompt, count, k, alpha, source):
    """One row, token by token, with all hidden states computed anew for each token that is
    tried."""
    text, options = list(prompt), {} if source is None else {"source": jnp.array([source] * k)}

    def states(texts):
        rows = np.zeros((k, 24), np.int32)
        rows[:, : len(texts[0])] = texts + [texts[0]] * (k - len(texts))
        out = forward(config, params, rows, **options)
        hidden = np.asarray(out.hidden, np.float64)
        return np.asarray(jax.nn.softmax(out.logits, axis=-1)), hidden / np.linalg.norm(
            hidden, axis=-1, keepdims=True
        )

    for n in range(len(prompt), len(prompt) + count):
        p = states([text])[0][0, n - 1]
        tried = np.argsort(-p)[:k].tolist()
        _, h = states([[*text, v] for v in tried])
        scores = [
            (1 - alpha) * p[v] - alpha * max(h[i, n] @ h[i, j] for j in range(n))
            for i, v in enumerate(tried)
        ]
        text.append(tried[int(np.argmax(scores))])
    return text[len(prompt) :]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(GPT, id="gpt2", marks=pytest.mark.slow),
        pytest.param(ROLLING, id="windows"),
        pytest.param(T5, id="t5"),
    ],
)
def test_tokens_are_those_of_the_definition(config):
    params, sources = init(config, jax.random.key(3)), SOURCES if config is T5 else None
    found = contrast(config, params, PROMPTS, 10, k=4, alpha=0.5, sources=sources)
    for i, prompt in enumerate(PROMPTS):
        assert found[i] == reference(
            config, params, prompt, 10, 4, 0.5, None if sources is None else SOURCES[i]
        )
    stop = found[0][4]
    cut = [tokens[: tokens.index(stop)] if stop in tokens else tokens for tokens in found]
    assert (
        contrast(
            config, params, PROMPTS, 10, k=4, alpha=0.5, sources=sources, stop_tokens=[stop], rows=2
        )
        == cut
    )


@pytest.mark.thorough
def test_without_contrast_it_is_greedy_and_other_numbers_compile_nothing():
    params = init(GPT, jax.random.key(3))
    assert contrast(GPT, params, PROMPTS, 9, alpha=0.0) == generate(
        GPT, params, PROMPTS, 9, sampling=Sampling(temperature=0.0)
    )
    run = contrastive._run
    size = run._cache_size()
    for prompts, limit, alpha in ((PROMPTS, 10, 0.3), ([[1] * 7, [2], [3]], 12, 0.9)):
        with jax.transfer_guard("disallow"):
            contrast(GPT, params, prompts, limit, alpha=alpha, stop_tokens=[5])
    assert run._cache_size() == size


@pytest.mark.parametrize(
    "bad", [dict(k=0), dict(k=V + 1), dict(alpha=-0.1), dict(alpha=1.1), dict(alpha=float("nan"))]
)
def test_bad_settings_are_refused(bad):
    with pytest.raises(ConfigError, match="contrast"):
        contrast(GPT, None, PROMPTS, 4, **bad)
