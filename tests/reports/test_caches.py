"""Caches of keys and values: what users of other projects reported.

What is read in pieces is what is read at once.
"""

import sys
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import decoding, masks, models
from jaxformer.decoding import Lookup, Sampling, generate, speculate
from jaxformer.errors import ConfigError
from jaxformer.masks import causal
from jaxformer.models import ModelConfig
from jaxformer.ops.positions import NTK, LongRoPE, Rope
from jaxformer.ops.stored_weight import to_int8
from jaxformer.zoo.linear_attention import Linear
from tests.decoding.test_copies import copies

V = 19
TINY = ModelConfig(
    vocab_size=V,
    num_layers=2,
    d_model=16,
    num_heads=4,
    num_kv_heads=2,
    context_length=64,
    norm="rms_norm",
    use_bias=False,
    init_std=0.5,
    positions=Rope(),
)
GREEDY = Sampling(temperature=0.0)
TEXT = np.random.default_rng(0).integers(0, V, 30).tolist()
WIDTH, ROOM = 24, 32  # of a piece and its padding, and of a cache: few programs for all tests
apply = jax.jit(models.apply, static_argnums=0)
prefill, decode_step = (
    jax.jit(function, static_argnums=0) for function in (decoding.prefill, decoding.decode_step)
)


@cache
def drawn(config):
    return models.init(config, jax.random.key(0))


def forward(config, tokens):
    """The logits after the last token of a text that is read at once, without a cache."""
    ids = (np.arange(ROOM) < len(tokens)).astype(np.int32)[None]
    logits = apply(config, drawn(config), padded(tokens, ROOM), segment_ids=ids).logits
    return np.asarray(logits)[0, len(tokens) - 1]


def padded(tokens, width):
    """A row of tokens, with others that mean nothing behind them."""
    return np.array([[*tokens, *[7] * (width - len(tokens))]], np.int32)


def read_in_pieces(config, tokens, sizes, **options):
    """The logits after the last token, of a cache that takes pieces of these sizes."""
    state, start = decoding.init_cache(config, 1, ROOM, **options), 0
    for size in sizes:
        piece = padded(tokens[start : start + size], WIDTH)
        output = apply(config, drawn(config), piece, cache=state, lengths=np.array([size]))
        state, start = output.cache, start + size
    return np.asarray(output.logits)[0, size - 1]


def close(found, expected):
    # sums of float32
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())


def naive(config, prompt, count):
    """Greedy decoding by a whole forward pass for each token."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(forward(config, text).argmax()))
    return text[len(prompt) :]


TURNING = {
    "longrope": replace(
        TINY, num_layers=1, positions=Rope(scaling=LongRoPE((1.0,) * 2, (4.0,) * 2, 8))
    ),
    "ntk": replace(TINY, num_layers=1, positions=Rope(scaling=NTK(4.0, 8))),
}


@pytest.mark.report(
    "lablup/mlxcel#1580",
    "trymirai/uzu#604",
    "huggingface/transformers#25104",
    right="all keys of a text have one rotation, that of its whole length",
    listed="first 02",
    hit=(
        "a prompt was read in pieces, and each had the rotation of its own length: logits "
        "differed by 0.26 to 0.68"
    ),
)
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["longrope", pytest.param("ntk", marks=pytest.mark.slow)])
def test_a_text_that_is_read_in_pieces_has_one_rotation(name, monkeypatch):
    """Also of rows side by side, and of texts that grow beyond the original length while they are
    written."""
    config = TURNING[name]
    monkeypatch.setattr(sys.modules["jaxformer.decoding.generate"], "CHUNK", 8)
    prompts = [TEXT[:20], [3], [5, 1, 4, 4, 2, 7, 7], TEXT[:8]]
    written = generate(config, drawn(config), prompts, 5, sampling=GREEDY, rows=2)
    assert written == [naive(config, prompt, 5) for prompt in prompts]
    close(
        read_in_pieces(config, TEXT[:20], [8, 8, 4], text_lengths=jnp.array([20])),
        forward(config, TEXT[:20]),
    )
    # a cache that was not told how long its text is refuses in the one way that a compiled program
    # has
    assert np.isnan(read_in_pieces(config, TEXT[:12], [6, 6])).all()


@pytest.mark.thorough
@pytest.mark.report(
    "tenstorrent/tt-forge-onnx#422",
    right="a rotation depends on the text of a row, not on its padding or its neighbours",
)  # fmt: skip
def test_padding_does_not_turn_a_row():
    config = TURNING["longrope"]
    tokens, lengths = jnp.asarray([TEXT[:16], [*TEXT[:8], *[0] * 8]]), jnp.array([16, 8])
    state = decoding.init_cache(config, 2, 32)
    logits, state = prefill(config, drawn(config), tokens, state, lengths=lengths)
    close(logits[0], forward(config, TEXT[:16]))
    close(logits[1], forward(config, TEXT[:8]))
    assert state.text_lengths.tolist() == [16, 8]


@pytest.mark.thorough
@pytest.mark.report(
    "RBLN-SW/optimum-rbln#646",
    right="a prompt whose tokens see later ones is read whole",
    hit=(
        "a prefix or global tokens beyond the first piece of 1,024 tokens were not seen: logits "
        "differed by 0.45, in silence"
    ),
)
@pytest.mark.parametrize(
    "mask",
    [causal() | masks.prefix(12), causal() | masks.global_tokens(2)],
    ids=["prefix", "global"],
)
def test_a_prompt_that_sees_later_tokens_is_not_cut(mask, monkeypatch):
    module = sys.modules["jaxformer.decoding.generate"]
    monkeypatch.setattr(module, "CHUNK", 8)
    config = replace(TINY, masks=(mask,))
    model = module.open_model(config, drawn(config), [TEXT[:20]], 4, None)
    close(np.asarray(module.read(model, [TEXT[:20]], None)[0])[0], forward(config, TEXT[:20]))


@pytest.mark.thorough
@pytest.mark.report(
    "Lightning-AI/litgpt#2182",
    "pytorch/executorch#20346",
    right=(
        "a prompt, or a piece, longer than the window sees what the window holds, and nothing later"
    ),
)
def test_pieces_longer_than_the_window():
    config = replace(TINY, masks=(causal() & masks.window(4), causal()))
    expected = forward(config, TEXT[:21])
    for sizes in ([21], [13, 8], [2, 9, 9, 1]):
        close(read_in_pieces(config, TEXT[:21], sizes), expected)


@pytest.mark.report(
    "ml-explore/mlx-lm#1427", "ml-explore/mlx-lm#1423",
    right="rejected tokens are taken back, also where the ring of a window has been full for long",
)  # fmt: skip
@pytest.mark.thorough
def test_a_full_ring_takes_tokens_back():
    config = replace(TINY, masks=(causal() & masks.window(4),))
    # look-up proposes what followed, and is mostly wrong
    prompt = [
        1,
        2,
        3,
        1,
        2,
        4,
        1,
        2,
        3,
        5,
        1,
        2,
    ]
    (greedy,) = generate(config, drawn(config), [prompt], 14, sampling=GREEDY)
    drafted = speculate(
        config, drawn(config), [prompt], 14, draft=Lookup(2), ahead=5, sampling=GREEDY
    )
    assert drafted.tokens == [greedy]
    assert drafted.accepted[0] < drafted.proposed[0]


@pytest.mark.report(
    "turboderp-org/exllamav2#200",
    "huggingface/transformers#30670",
    "rasbt/reasoning-from-scratch#33",
    right=(
        "a prompt beside longer ones is continued as it is alone: each row counts its own positions"
    ),
)
@pytest.mark.thorough
def test_rows_of_unequal_lengths_are_continued_as_alone():
    prompts = [TEXT[:3], TEXT[:17], [4]]
    together = generate(TINY, drawn(TINY), prompts, 6, sampling=GREEDY)
    assert together == [naive(TINY, prompt, 6) for prompt in prompts]


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#14521",
    right="padding in front of a row changes nothing",
    listed="first 30",
)
def test_padding_in_front_changes_nothing():
    tokens, ids = np.array([[0] * 25 + TEXT[:7]]), np.array([[0] * 25 + [1] * 7])
    close(apply(TINY, drawn(TINY), tokens, segment_ids=ids).logits[0, -1], forward(TINY, TEXT[:7]))


@pytest.mark.report(
    "ml-explore/mlx-lm#1736", "ml-explore/mlx-lm#1908",
    right="padding behind a shorter prompt does not enter the sums of linear attention",
)  # fmt: skip
@pytest.mark.thorough
def test_padding_does_not_enter_a_recurrent_state():
    config = replace(TINY, num_kv_heads=None, mixer=Linear())
    tokens, lengths = jnp.asarray([TEXT[:9], [*TEXT[9:12], *[7] * 6]]), jnp.array([9, 3])
    state = decoding.init_cache(config, 2, 16)
    logits, state = prefill(config, drawn(config), tokens, state, lengths=lengths)
    close(logits[1], forward(config, TEXT[9:12]))
    more, _ = decode_step(config, drawn(config), jnp.asarray([[1], [2]]), state)
    close(more[1, 0], forward(config, [*TEXT[9:12], 2]))


@pytest.mark.report(
    "lablup/mlxcel#717",
    "InfiniTensor/InfiniLM#553",
    right=(
        "8 bits have a scale for each token and head, however small its numbers; zeros stay zeros"
    ),
)
def test_small_numbers_keep_their_digits_in_8_bits():
    x = (
        np.random.default_rng(0).normal(size=(1, 2, 6, 8))
        * np.array([1e-6, 1e-3, 0.02, 1.0, 50.0, 0.0])[:, None]
    )
    values, scale = to_int8(jnp.asarray(x, jnp.float32), (-1,))
    largest = np.abs(x).max(axis=-1, keepdims=True)
    assert np.all(np.abs(np.asarray(values) * np.asarray(scale) - x) <= largest / 127 * 0.501)
    assert np.isfinite(np.asarray(scale)).all()


@pytest.mark.thorough
@pytest.mark.report(
    "flashinfer-ai/flashinfer#155",
    "EricLBuehler/mistral.rs#1570",
    right="a precision in which keys and values cannot be kept is refused by name",
    hit=(
        "cache_dtype=uint8 and int16 cut keys off to whole numbers and wrote another text; "
        "float8 ended in a traceback"
    ),
)
def test_a_cache_of_whole_numbers_is_refused():
    for wrong in (jnp.uint8, jnp.int16, jnp.int32, jnp.float8_e4m3fn, bool):
        with pytest.raises(ConfigError, match="cache_dtype="):
            generate(TINY, drawn(TINY), [[1]], 2, cache_dtype=wrong)
    with pytest.raises(ConfigError, match="dtype="):
        generate(TINY, drawn(TINY), [[1]], 2, dtype=jnp.int32)


@pytest.mark.thorough
@pytest.mark.report(
    "Integral2u/SharpMind#57",
    right="a text that does not fit its cache is refused, no token is left out in silence",
)
def test_a_full_cache_is_no_shorter_text():
    with pytest.raises(ConfigError, match="do not fit"):
        apply(TINY, drawn(TINY), jnp.asarray([TEXT[:9]]), cache=decoding.init_cache(TINY, 1, 8))
    assert np.isnan(read_in_pieces(TINY, [*TEXT, *TEXT], [24, 9])).all()


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#37574",
    right="a window by layer keeps what it spans when the text reaches its size",
    listed="second 24",
)
@pytest.mark.report(
    "lucidrains/x-transformers#311",
    "huggingface/transformers#25420",
    right=(
        "decoding token by token gives the logits of a whole pass, also with rotations and "
        "shared key heads"
    ),
)
def test_a_cache_gives_the_forward_pass():
    config = replace(TINY, masks=(causal() & masks.window(3), causal()))
    for sizes in ([6, 1, 1, 1, 1], [1] * 10, [10]):
        close(read_in_pieces(config, TEXT[:10], sizes), forward(config, TEXT[:10]))


@pytest.mark.thorough
@pytest.mark.report(
    "tenstorrent/tt-xla#4197",
    right="slots that hold no token cost no time: no step of decoding copies the cache",
    hit="with several rows on a CPU, each step copied the keys and values of each layer four times",
)
def test_slots_without_tokens_cost_no_copy(monkeypatch):
    assert not copies(monkeypatch, 3, jnp.float32)
