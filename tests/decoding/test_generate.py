"""Decoding equals the forward pass, whatever the model, the mask and the padding."""

import sys
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import decoding, masks, models, params
from jaxformer.decoding import Sampling, sampling
from jaxformer.errors import ConfigError
from jaxformer.models import EncoderDecoder, LanguageModel, Learned, ModelConfig, Relative, Sinusoidal
from jaxformer.ops.positions import NTK, LongRoPE, Rope

V = 19
GPT = ModelConfig(vocab_size=V, num_layers=3, d_model=24, num_heads=4, context_length=24, init_std=0.4)
FAMILIES = {
    "gpt2": GPT,
    "gpt3": replace(GPT, masks=(masks.causal(), masks.causal() & masks.window(3))),
    "prefix": replace(GPT, masks=(masks.causal() | masks.prefix(3),)),
    "llama": replace(
        GPT,
        norm="rms_norm",
        feedforward="swiglu",
        positions=Rope(),
        use_bias=False,
        tie_embeddings=False,
        num_kv_heads=2,
    ),
    "vaswani": replace(GPT, norm_placement="post", positions=Sinusoidal(), feedforward="relu"),
}


apply = jax.jit(models.apply, static_argnums=0)


def make(name):
    config = FAMILIES[name]
    return config, models.init(config, jax.random.key(3))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("pieces", [(4, 1, 1, 1, 1, 1), (1,) * 9, (3, 2, 4)])
def test_cached_pieces_equal_the_forward_pass(name, pieces):
    config, parameters = make(name)
    if name == "prefix" and pieces[0] < 3:
        pytest.skip("a prefix is seen whole or not at all: tokens before its end need it to be there")
    tokens = jax.random.randint(jax.random.key(0), (2, sum(pieces)), 0, V)
    whole = apply(config, parameters, tokens).logits
    cache = decoding.init_cache(config, 2, 12)  # more room than tokens: empty slots must stay unseen
    start = 0
    for length in pieces:
        out = apply(config, parameters, tokens[:, start : start + length], cache=cache)
        # the same float32 products, summed over more (masked) keys
        np.testing.assert_allclose(out.logits, whole[:, start : start + length], rtol=1e-5, atol=1e-5)
        cache, start = out.cache, start + length
    assert int(cache.length) == start


def test_a_decoding_step_is_compiled_once(monkeypatch):
    """A cache keeps its form from step to step; `generate` traces anew for other lengths alone, and its loop once."""
    chex.clear_trace_counter()
    config, parameters = make("llama")

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(tokens, cache):
        return models.apply(config, parameters, tokens, cache=cache).cache

    cache = decoding.init_cache(config, 2, 6)
    for token in range(6):
        cache = step(jnp.full((2, 1), token), cache)
    module = sys.modules["jaxformer.decoding.generate"]
    once = chex.assert_max_traces(n=1)(module._generate.__wrapped__)
    monkeypatch.setattr(module, "_generate", jax.jit(once, static_argnums=range(5)))
    for prompts in ([[1, 2], [3]], [[4], [5, 6]]):
        decoding.generate(config, parameters, prompts, 4)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n == "gpt3" else ()) for n in FAMILIES])
def test_greedy_generation_equals_repeated_forward_passes_for_ragged_prompts(name):
    config, parameters = make(name)
    # tokens before the end of a prefix need it to be there
    prompts = [[1, 2, 3, 4, 5], [7, 8, 9] if name == "prefix" else [7], [4] * 8]
    together = decoding.generate(config, parameters, prompts, 10, how=Sampling(temperature=0.0))
    for prompt, out in zip(prompts, together, strict=True):
        # causal, so one forward pass over the result shows what was likeliest at every step
        logits = apply(config, parameters, jnp.array([prompt + out])).logits[0]
        assert jnp.argmax(logits[len(prompt) - 1 : -1], axis=-1).tolist() == out


@pytest.mark.parametrize("scaling", [NTK(4.0, 8), LongRoPE((1.0,) * 3, (2.0,) * 3, 8)])
def test_ragged_prompts_are_not_turned_by_the_longest_row(scaling):
    """A row beside a longer one would have other logits than alone."""
    config = replace(GPT, positions=Rope(scaling=scaling))
    params = models.init(config, jax.random.key(0))
    with pytest.raises(ConfigError, match="by the longest one"):
        decoding.generate(config, params, [[1, 2], [3]], 7)
    assert len(decoding.generate(config, params, [[1, 2], [3]], 6)) == 2  # within the original length
    assert len(decoding.generate(config, params, [[1, 2], [3, 4]], 7)) == 2


@pytest.mark.parametrize("slots", [9, 12, 40])
def test_random_masks_do_not_depend_on_the_slots_of_a_cache(slots):
    drawn = (
        masks.causal() & (masks.random_blocks(1, 2, seed=5) | masks.window(0)),
        masks.causal() & masks.bigbird(2, 1, 0),
    )
    config = replace(GPT, masks=drawn)
    parameters, tokens = models.init(config, jax.random.key(3)), jax.random.randint(jax.random.key(0), (2, 9), 0, V)
    whole, cache = apply(config, parameters, tokens).logits, decoding.init_cache(config, 2, slots)
    for i in range(9):
        out = apply(config, parameters, tokens[:, i : i + 1], cache=cache)
        np.testing.assert_allclose(out.logits, whole[:, i : i + 1], rtol=1e-5, atol=1e-5)  # as above
        cache = out.cache


def test_sampling_a_row_does_not_depend_on_its_neighbours_below():
    config, parameters = make("llama")
    alone = decoding.generate(config, parameters, [[1, 2, 3]], 8, key=jax.random.key(5))
    with_others = decoding.generate(config, parameters, [[1, 2, 3], [4, 5, 6], [1, 1, 1]], 8, key=jax.random.key(5))
    assert alone[0] == with_others[0]


def test_stop_tokens_end_a_row_and_are_left_out():
    config, parameters = make("gpt2")
    free = decoding.generate(config, parameters, [[1, 2]], 12, how=Sampling(temperature=0.0))[0]
    stop = free[4]
    assert (
        decoding.generate(config, parameters, [[1, 2]], 12, how=Sampling(temperature=0.0), stop_tokens=[stop])[0]
        == (free[: free.index(stop)])
    )


def test_rope_runs_past_its_context_and_learned_positions_refuse():
    config, parameters = make("llama")
    assert len(decoding.generate(config, parameters, [[1]], 40)[0]) == 40
    config, parameters = make("gpt2")
    with pytest.raises(ConfigError, match="24 learned positions"):
        decoding.generate(config, parameters, [[1]], 24)
    with pytest.raises(ConfigError, match="max_tokens"):
        decoding.generate(config, parameters, [[1]], 0)
    for prompts in ([], [[]], [[1], []], [[V]], [[-1]]):
        with pytest.raises(ConfigError, match="prompt"):
            decoding.generate(config, parameters, prompts, 2)


STACK = replace(
    GPT, num_layers=2, d_model=16, norm="rms_norm", use_bias=False, init_std=0.7, positions=Relative(8, 16), heads=(),
    masks=(masks.full(),), tie_embeddings=False,
)  # fmt: skip
DECODER = replace(STACK, positions=Relative(8, 16, bidirectional=False), heads=(LanguageModel(),), masks=(masks.causal(),))
PAIRS = {
    "t5": EncoderDecoder(STACK, DECODER),
    "learned": EncoderDecoder(
        replace(STACK, num_layers=1, positions=Learned(offset=2), context_length=7, vocab_size=11),
        replace(DECODER, num_layers=1, positions=Learned(offset=2), context_length=12),
        share_embeddings=False,
    ),
}
SOURCES, STARTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9], [3, 1, 4, 1]], [[0], [0, 5, 7], [0]]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "t5" else pytest.mark.slow) for n in PAIRS])
def test_greedy_generation_of_a_pair_equals_repeated_forward_passes(name):
    """Sources and prompts of different length, together; each row is what a model that sees it alone finds likeliest."""
    config = PAIRS[name]
    parameters = jax.jit(models.init, static_argnums=0)(config, jax.random.key(3))
    outs = decoding.generate(config, parameters, STARTS, 8, sources=SOURCES, how=Sampling(temperature=0.0))
    for source, prompt, out in list(zip(SOURCES, STARTS, outs, strict=True))[:2]:
        logits = apply(config, parameters, jnp.array([prompt + out]), source=jnp.array([source])).logits[0]
        assert jnp.argmax(logits[len(prompt) - 1 : -1], axis=-1).tolist() == out
    assert outs[0] != outs[2]  # two sources, one prompt


def test_pairs_need_sources_that_fit():
    config = PAIRS["learned"]
    shapes = params.abstract(models.spec(config))
    for prompts, sources, said in (
        ([[0]], None, "an encoder-decoder needs `sources`"),
        ([[0], [0]], [[1]], "2 prompts need as many sources"),
        ([[0]], [[]], "none of them empty"),
        ([[0]], [[1, 11]], "source token 11 is outside the vocabulary of 11"),
        ([[0]], [[-1]], "source token -1"),
        ([[0]], [[1] * 8], "8 source tokens exceed the 7 learned positions"),
        ([[0] * 5], [[1]], r"5 prompt \+ 8 new tokens exceed the 12 learned positions"),
        ([], [], "a prompt is empty"),
    ):
        with pytest.raises(ConfigError, match=said):
            decoding.generate(config, shapes, prompts, 8, sources=sources)
    with pytest.raises(ConfigError, match="only an encoder-decoder has `sources`"):
        decoding.generate(GPT, shapes, [[0]], 8, sources=[[1]])


def probabilities(logits):
    return np.asarray(jax.nn.softmax(logits, axis=-1))


def test_filters_against_their_definitions():
    for seed in range(20):
        logits = jax.random.normal(jax.random.key(seed), (3, V)) * 2
        p = probabilities(logits)
        kept = np.isfinite(np.asarray(sampling.top_k(logits, 4)))
        np.testing.assert_array_equal(kept, p >= np.sort(p)[:, -4:-3])
        kept = np.isfinite(np.asarray(sampling.min_p(logits, 0.2)))
        np.testing.assert_array_equal(kept, p >= 0.2 * p.max(axis=-1, keepdims=True))
        kept = np.isfinite(np.asarray(sampling.top_p(logits, 0.7)))
        for row in range(3):
            order = np.argsort(-p[row])
            count = int(np.searchsorted(np.cumsum(p[row][order]), 0.7)) + 1
            assert set(np.flatnonzero(kept[row])) == set(order[:count])


def test_frequencies_follow_the_filtered_distribution():
    logits = jnp.tile(jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]])), (20_000, 1))
    keys = jax.random.split(jax.random.key(0), 20_000)
    drawn = np.asarray(sampling.sample(logits, keys, Sampling(temperature=0.5, top_k=3)))
    expected = np.array([0.25, 0.09, 0.0225, 0]) / 0.3625
    # 20,000 draws: the standard error is at most 0.0036
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / 20_000, expected, atol=0.015)
    assert (np.asarray(sampling.sample(logits, keys, Sampling(temperature=0.0))) == 0).all()


@pytest.mark.parametrize(
    "bad",
    [
        dict(temperature=-1.0),
        dict(top_k=0),
        dict(top_p=0.0),
        dict(min_p=1.5),
        dict(temperature=float("nan")),
        dict(temperature=1e-40),
    ],
)
def test_bad_settings_are_refused(bad):
    with pytest.raises(ConfigError):
        Sampling(**bad)
