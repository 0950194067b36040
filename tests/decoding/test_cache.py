"""Decoding over a cache equals the forward pass: whatever the model, the mask, the pieces of a text
and its neighbours."""

import itertools
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import decoding, masks, models, zoo
from jaxformer.families.falcon import falcon_alibi
from jaxformer.families.qwen_moe import GatedShared
from jaxformer.families.t5 import RelativeByLayer
from jaxformer.masks import Mask, causal
from jaxformer.models import (
    Alibi,
    Axial,
    EncoderDecoder,
    Learned,
    Mixture,
    ModelConfig,
    Relative,
    Sinusoidal,
    presets,
)
from jaxformer.models.norm import one_plus_rms_norm
from jaxformer.ops.attention.cached import QUERY_BLOCK, widths
from jaxformer.ops.positions import NTK, LongRoPE, Rope
from jaxformer.ops.stored_weight import StoredWeight

V, B, T, ROOM = 19, 3, 12, 16
TOKENS = np.random.default_rng(0).integers(0, V, (B, T)).astype(np.int32)
SOURCE = jnp.asarray(np.random.default_rng(1).integers(0, V, (B, 7)), jnp.int32)

MODEL = ModelConfig(
    vocab_size=V,
    num_layers=1,
    d_model=16,
    num_heads=4,
    num_kv_heads=2,
    context_length=32,
    d_ff=8,
    feedforward="relu",
    norm="rms_norm",
    use_bias=False,
    tie_embeddings=False,
    init_std=0.5,
    positions=Rope(),
)


def places(config):
    """A function of absolute positions, by head."""
    rates = jnp.arange(1.0, 1 + config.num_heads)[:, None, None]
    return lambda q, kv: (
        jnp.sin(rates * q[None, :, None]) * jnp.cos(0.7 * rates * kv[None, None, :])
    )


MASKS = {
    "window": causal() & masks.window(3),
    "dilated": causal() & masks.window(2, dilation=2),
    "wide window": causal() & masks.window(2, 1),
    "windows": masks.window(7) & masks.window(3, 2) & causal(),
    "strided": causal() & (masks.strided(3) | masks.window(0)),
    "chunked": causal() & masks.chunked(4, 1),
    "columns": causal() & (masks.columns(3, 1) | masks.window(0)),
    "prefix": causal() | masks.prefix(2),
    "globals": causal() & masks.longformer(4, (0, 5)),
    "one global": causal() & (masks.window(1) | masks.global_tokens(1)),
    "random": causal() & (masks.random_blocks(1, 2, seed=5) | masks.window(0)),
    "bigbird": causal() & masks.bigbird(2, 1, 0, 1),
    "strided transformer": masks.sparse_transformer_strided(3),
    "fixed transformer": masks.sparse_transformer_fixed(4, 1),
    "layout": causal() & masks.block_sparse(np.tri(8), 4),
    "by_head": masks.by_head(
        causal(), causal() & masks.window(2), causal() & masks.chunked(4), masks.window(1)
    ),
    "yours": causal() & Mask(lambda mask, q, kv: ((q + kv) % 3 != 1) | (q == kv)),
}
MIXERS = {
    "qk_norm": zoo.qk_norm.qk_norm,
    "qk_norm_full": zoo.qk_norm.qk_norm_full,
    "qk_model_norm": zoo.qk_norm.qk_model_norm,
    "qk_layer_norm": zoo.qk_layer_norm.qk_layer_norm,
    "sinks": zoo.sinks.sinks,
    "relative by layer": RelativeByLayer(Relative(6, 8, False)),
    "gated": zoo.gated.gated,
    "differential": zoo.differential.differential,
    "sigmoid": zoo.sigmoid.sigmoid,
    "value_residual": zoo.value_residual.value_residual,
    "temperature": partial(zoo.temperature.temperature, floor_scale=2, attn_scale=0.5),
    "inverse_depth_scale": zoo.temperature.inverse_depth_scale,
    "linear": zoo.Linear(),
    "performer": zoo.Performer(features=8),
    "relu": zoo.Performer(8, kernel="relu"),
    "in turn": (None, zoo.Linear(), zoo.gated.gated, zoo.Performer(features=8)),
}
LINEAR = ("linear", "performer", "relu", "in turn")  # have sums, so no windows to roll
CONFIGS = {name: replace(MODEL, masks=(mask,)) for name, mask in MASKS.items()}
CONFIGS |= {
    name: replace(MODEL, mixer=mixer, num_layers=4 if name == "in turn" else 2)
    for name, mixer in MIXERS.items()
}
CONFIGS |= {
    "layers in turn": replace(MODEL, num_layers=3, masks=(causal(), causal() & masks.window(3))),
    "softcap": replace(MODEL, attention_softcap=0.7, logit_softcap=2.0, attention_scale=0.9),
    "alibi": replace(MODEL, positions=Alibi()),
    "t5": replace(MODEL, positions=Relative(6, 8, False), num_layers=2),
    "sinusoidal": replace(MODEL, positions=Sinusoidal()),
    "learned": replace(MODEL, positions=Learned(2)),
    "axial": replace(MODEL, positions=Axial((4, 8), (6, 10))),
    "no positions": replace(MODEL, positions=None),
    "some positions": replace(MODEL, positions=(Rope(), None), num_layers=2),
    "your bias": replace(MODEL, positions=places),
    "part of a head": replace(MODEL, positions=Rope(fraction=0.5)),
    "one key head": replace(MODEL, num_kv_heads=1),
    "as many key heads": replace(MODEL, num_kv_heads=None, use_bias=True),
    "alibi in a window": replace(MODEL, positions=Alibi(), masks=(causal() & masks.window(3),)),
    "t5 in a window, capped": replace(
        MODEL,
        positions=Relative(6, 8, False),
        masks=(causal() & masks.window(3),),
        attention_softcap=0.7,
    ),
    "differential in a window": replace(
        MODEL, masks=(causal() & masks.window(3),), mixer=MIXERS["differential"]
    ),
    "sigmoid in a window": replace(
        MODEL, masks=(causal() & masks.window(3),), mixer=MIXERS["sigmoid"]
    ),
    "your bias on sigmoid": replace(MODEL, positions=places, mixer=MIXERS["sigmoid"]),
    "falcon_alibi": replace(MODEL, positions=falcon_alibi),
    "one_plus_rms_norm": replace(MODEL, norm=one_plus_rms_norm, mixer=MIXERS["qk_model_norm"]),
    "sinks in a window": replace(MODEL, masks=(MASKS["window"], causal()), mixer=MIXERS["sinks"]),
    "clamped_mixture": replace(MODEL, feedforward=zoo.ClampedMixture(4, 2)),
    "grouped_experts": replace(
        MODEL, feedforward=zoo.GroupedExperts(8, 3, groups=4, top_groups=2, shared=12)
    ),
    "gated_shared": replace(MODEL, feedforward=GatedShared(Mixture(4, 2, d_ff=12), d_ff=20)),
}
LATENT = replace(
    MODEL,
    num_kv_heads=None,
    head_width=12,
    mixer=zoo.LatentAttention(rank=6, rotated=4, query_rank=8, value_width=5),
    num_layers=2,
)
CONFIGS |= {
    "latent_attention": LATENT,
    "latent_attention in a window": replace(LATENT, masks=(MASKS["window"],)),
    "latent_attention, by_head": replace(LATENT, masks=(MASKS["by_head"],), num_layers=1),
    "latent_attention, learned": replace(
        LATENT, mixer=zoo.LatentAttention(6, 4), positions=Learned(), attention_softcap=0.7
    ),
}


def small(preset):
    """The preset two layers deep, with a window of 3 where it has one."""
    if isinstance(preset, EncoderDecoder):
        return EncoderDecoder(small(preset.encoder), small(preset.decoder), preset.share_embeddings)
    shrunk = tuple(
        causal() & masks.window(3) if masks.reach(mask) else mask for mask in preset.masks
    )
    heads = None if preset.num_kv_heads is None else 2
    return presets.sized(
        preset,
        2,
        16,
        4,
        vocab_size=V,
        num_kv_heads=heads,
        head_width=None,
        d_ff=24,
        context_length=32,
        masks=shrunk,
        dropout_rate=0.0,
        attention_dropout_rate=0.0,
        init_std=0.5,
    )


DECODERS = (
    "gpt2_small",
    "gpt3_125m",
    "llama_7b",
    "llama3_8b",
    "mistral_7b",
    "mixtral_8x7b",
    "qwen2_7b",
    "qwen2_05b",
)
PAIRS = "transformer_base", "t5_small", "t5_v1_1_small"
FAMILIES = {name: small(zoo.PRESETS[name]) for name in (*DECODERS, *PAIRS)}

# How many tokens each row gets in each call. Calls have few different widths: each is compiled
SCHEDULES = {
    "prompt": [(5,) * B, *[(1,) * B] * 7],
    "pieces": [(3,) * B, (4,) * B, (4,) * B, (1,) * B],
    "ones": [(1,) * B] * T,
    # rows of different length, of which some wait (0); all of them are at their end when the last
    # one is
    "ragged": [(5, 2, 3), (1, 0, 5), (0, 5, 1), (1, 1, 1), (4, 3, 1), (1, 0, 1)],
}


def apply(config, params, tokens, **options):
    return models.apply(config, params, jnp.asarray(tokens), **options)


step = jax.jit(apply, static_argnums=0, static_argnames=("dtype", "intermediates"))
prefill, decode_step = (
    jax.jit(function, static_argnums=0) for function in (decoding.prefill, decoding.decode_step)
)


@cache
def drawn(config):
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf: jnp.float32(0.5 * rng.normal(size=leaf.shape)), models.spec(config)
    )


@cache
def forward(config):
    """The logits of all tokens at once."""
    source = {"source": SOURCE} if isinstance(config, EncoderDecoder) else {}
    return np.asarray(apply(config, drawn(config), TOKENS, **source).logits)


def decode(
    config,
    schedule,
    params=None,
    tokens=TOKENS,
    room=ROOM,
    dtype=jnp.float32,
    run=step,
    wide=0,
    **more,
):
    """Logits of each row, its tokens given as the schedule says, with tokens that mean nothing as
    padding behind them."""
    state = decoding.init_cache(config, len(tokens), room, dtype, **more)
    params = drawn(config) if params is None else params
    found, at = [[] for _ in tokens], np.zeros(len(tokens), int)
    options = {"source": SOURCE} if isinstance(config, EncoderDecoder) else {}
    for counts in schedule:
        piece = np.full((len(tokens), max(*counts, wide * (max(counts) > 1))), 7, np.int32)
        for row, count in enumerate(counts):
            piece[row, :count] = tokens[row, at[row] : at[row] + count]
        lengths = {} if set(counts) == {piece.shape[1]} else {"lengths": jnp.array(counts)}
        out = run(config, params, piece, cache=state, dtype=dtype, **lengths, **options)
        state, options = out.cache, {}
        for row, count in enumerate(counts):
            found[row].append(np.asarray(out.logits)[row, :count])
            at[row] += count
    assert state.lengths.tolist() == at.tolist()
    return [np.concatenate(row) for row in found]


def close(found, expected):
    for row, wanted in zip(found, expected, strict=True):
        # float32 sums of numbers of order one, in another order, some layers deep
        scale = np.abs(wanted[: len(row)]).max()
        np.testing.assert_allclose(row, wanted[: len(row)], rtol=1e-5, atol=1e-5 * scale)


def some(cases, fast):
    """Each case, marked slow unless `fast(case)`."""
    return [pytest.param(*case, marks=() if fast(*case) else pytest.mark.slow) for case in cases]


def whole(name, schedule):
    """A prefix is seen whole or not at all: tokens before its end need it to be there. So is what
    all see of the future."""
    return min(SCHEDULES[schedule][0]) > 1 or name != "prefix"


CASES = [case for case in itertools.product(CONFIGS, SCHEDULES) if whole(*case)]
# the others take a minute more
FAST = {
    *(
        "dilated",
        "prefix",
        "bigbird",
        "by_head",
        "layers in turn",
        "t5 in a window, capped",
        "learned",
        "your bias",
    ),
    *("sigmoid", "in turn", "differential in a window", "gpt3_125m", "t5_small"),
}


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize(
    ("name", "schedule"), some(CASES, lambda name, schedule: name in FAST and schedule == "ragged")
)
def test_decoding_equals_the_forward_pass(name, schedule):
    close(decode(CONFIGS[name], SCHEDULES[schedule]), forward(CONFIGS[name]))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "schedule"),
    some(
        itertools.product(FAMILIES, SCHEDULES),
        lambda name, schedule: name in FAST and schedule == "prompt",
    ),
)
def test_families_decode_as_their_forward_pass(name, schedule):
    close(decode(FAMILIES[name], SCHEDULES[schedule]), forward(FAMILIES[name]))


@pytest.mark.thorough
def test_prefill_and_steps_equal_the_forward_pass():
    """`prefill` gives the logits of each row's last token alone; `decode_step` those of all
    tokens."""
    for config in (CONFIGS["t5"], FAMILIES["mistral_7b"], FAMILIES["t5_small"]):
        options = {"source": SOURCE} if isinstance(config, EncoderDecoder) else {}
        expected, counts = forward(config), np.array([5, 2, 4])
        state = decoding.init_cache(config, B, ROOM)
        logits, state = prefill(
            config,
            drawn(config),
            jnp.asarray(TOKENS[:, :5]),
            state,
            lengths=jnp.asarray(counts),
            **options,
        )
        close(logits, expected[np.arange(B), counts - 1])
        for i in range(3):
            tokens = jnp.asarray(TOKENS[np.arange(B), counts + i][:, None])
            logits, state = decode_step(config, drawn(config), tokens, state)
            close(logits[:, 0], expected[np.arange(B), counts + i])


ROLLING = {
    "window": MASKS["window"], "dilated": MASKS["dilated"], "windows": MASKS["windows"],
    "in turn": (causal() & masks.window(2), causal()),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name",), some([(name,) for name in ROLLING], lambda name: name == "in turn")
)
def test_a_window_keeps_only_what_it_spans(name):
    """Texts several windows long, in pieces longer than the window, and a prompt that fills it many
    times."""
    mask = ROLLING[name] if isinstance(ROLLING[name], tuple) else (ROLLING[name],)
    config = replace(MODEL, masks=mask, num_layers=2)
    slots = [layer["key"].shape[2] for layer in decoding.init_cache(config, 2, 40).layers]
    assert slots == [
        {"dilated": 5, "in turn": 3}.get(name, 4),
        {"dilated": 5, "in turn": 40}.get(name, 4),
    ]
    tokens = np.random.default_rng(2).integers(0, V, (2, 31)).astype(np.int32)
    expected = np.asarray(apply(config, drawn(config), tokens).logits)
    for schedule in (
        [(13, 13), (13, 13), (1, 1), (1, 1)],
        [(1, 13), (2, 0), (9, 5), (0, 1), (13, 1), (1, 2)],
    ):
        close(decode(config, schedule, tokens=tokens, room=40, wide=13), expected)


LONG = {
    "causal": MODEL, "window": replace(MODEL, masks=(causal() & masks.window(40),)),
    "t5": replace(MODEL, positions=Relative(32, 128, False), attention_softcap=1.0),
    "by_head": CONFIGS["by_head"], "prefix": CONFIGS["prefix"], "sigmoid": CONFIGS["sigmoid"],
    "linear": CONFIGS["linear"],
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name",), some([(name,) for name in LONG], lambda name: name in ("causal", "window"))
)
def test_pieces_of_many_blocks_of_queries_in_caches_of_many_widths(name):
    config, room = LONG[name], 400
    tokens = np.random.default_rng(2).integers(0, V, (2, 391)).astype(np.int32)
    schedule = [(5, 130), (200, 131), (1, 1), (1, 1), (150, 100), (1, 1)]
    assert widths(room) == [128, 256, 384, 400] and 200 > QUERY_BLOCK > 150 - 131
    expected = np.asarray(step(config, drawn(config), tokens).logits)
    # sums of up to 391 numbers
    for row, wanted in zip(
        decode(config, schedule, tokens=tokens, room=room), expected, strict=True
    ):
        np.testing.assert_allclose(
            row, wanted[: len(row)], rtol=2e-5, atol=2e-5 * np.abs(wanted).max()
        )


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["causal", "learned", "axial", "linear", "mistral_7b", "t5_small"])
def test_a_row_may_wait_from_the_first_call_on(name):
    """Its slots are empty, whatever the others wrote: also where a table has no row for its
    position."""
    config = {"causal": MODEL, **CONFIGS, **FAMILIES}[name]
    close(decode(config, [(5, 0, 3), (0, 5, 0), (1, 1, 1), (1, 5, 1)], wide=5), forward(config))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "scaling",
    [NTK(4.0, 6), pytest.param(LongRoPE((1.0,) * 2, (2.0,) * 2, 6), marks=pytest.mark.slow)],
)
def test_rows_in_a_batch_are_the_rows_alone(scaling):
    """Also where a rotation depends on the length of its row, which the cache then has to know: it
    is the forward pass."""
    config = replace(MODEL, positions=Rope(scaling=scaling))
    together = decode(config, SCHEDULES["ragged"], text_lengths=jnp.full(B, T))
    close(together, forward(config))
    for row in range(B):
        counts = [
            tuple(n * (i == row) for i, n in enumerate(counts))
            for counts in SCHEDULES["ragged"]
            if counts[row]
        ]
        close([together[row]], [decode(config, counts, wide=5, text_lengths=jnp.full(B, T))[row]])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name",),
    some(
        [(n,) for n in ("gpt3_125m", "mixtral_8x7b", "qwen2_05b", "t5_small", "in turn", "gated")],
        lambda name: name in ("t5_small", "in turn"),
    ),
)
def test_prepared_parameters_are_the_plain_ones(name):
    config = {**CONFIGS, **FAMILIES}[name]
    plain = drawn(config)
    prepared = decoding.prepare(config, plain)
    leaves = jax.tree.leaves(prepared, is_leaf=lambda leaf: isinstance(leaf, StoredWeight))
    assert any(isinstance(leaf, StoredWeight) for leaf in leaves)
    assert sum(leaf.size for leaf in jax.tree.leaves(prepared)) == sum(
        leaf.size for leaf in jax.tree.leaves(plain)
    )
    again = decoding.prepare(config, prepared)
    assert all(
        a is b for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(prepared), strict=True)
    )
    close(decode(config, SCHEDULES["ragged"], prepared), forward(config))
    kept = jax.tree.leaves(decoding.prepare(config, plain, jnp.bfloat16))
    assert {leaf.dtype for leaf in kept if leaf.ndim > 1} <= {
        jnp.dtype(jnp.bfloat16),
        jnp.dtype(jnp.float32),
    }


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "schedule"),
    some(
        itertools.product(
            ["qwen2_05b", "gpt2_small", "mistral_7b", "t5_small", "softcap", "performer"],
            ["prompt", "ragged"],
        ),
        lambda name, schedule: name == "t5_small" and schedule == "prompt",
    ),
)
def test_bfloat16_rounds_no_more_than_the_forward_pass(name, schedule):
    """Both round each activation to 8 bits.

    Their errors are of one size, and some roundings of the largest logit.
    """
    config = {**CONFIGS, **FAMILIES}[name]
    source = {"source": SOURCE} if isinstance(config, EncoderDecoder) else {}
    rounded = apply(config, drawn(config), TOKENS, dtype=jnp.bfloat16, **source).logits
    exact, expected = forward(config), np.asarray(rounded, np.float32)
    error = np.sqrt(np.mean((expected - exact) ** 2))
    for params in (drawn(config), decoding.prepare(config, drawn(config), jnp.bfloat16)):
        rows = decode(config, SCHEDULES[schedule], params, dtype=jnp.bfloat16)
        found, wanted = (
            np.concatenate(rows),
            np.concatenate([exact[i, : len(row)] for i, row in enumerate(rows)]),
        )
        assert np.sqrt(np.mean((found - wanted) ** 2)) < 2 * error
        # 2^-8 of the largest number at each of the some ten roundings in a row of two layers
        assert np.abs(found - wanted).max() < 10 * 2**-8 * np.abs(exact).max()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name",),
    some(
        [(n,) for n in ("causal", "window", "linear", "differential", "t5_small")],
        lambda n: n in ("window", "linear", "t5_small"),
    ),
)
def test_a_row_with_more_tokens_than_room_is_nan_and_no_other(name):
    config = {"causal": MODEL, **CONFIGS, **FAMILIES}[name]
    full = decode(config, [(5, 3, 1), (3, 2, 1), (1, 1, 1), (1, 1, 1), (1, 0, 1)], room=8)
    expected = forward(config)
    assert np.isnan(full[0][8:]).all() and len(full[0]) == 11
    close([full[0][:8], *full[1:]], expected)


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize(
    ("name",),
    some(
        [(n,) for n in ("causal", "window", "alibi", "softcap", "sigmoid", "differential")],
        lambda n: n != "causal",
    ),
)
def test_returned_maps_come_with_the_same_logits(name):
    config = {"causal": MODEL, **CONFIGS}[name]
    run = partial(step, intermediates=("layers/*/attention/weights",))
    close(decode(config, SCHEDULES["ragged"], run=run), forward(config))


@pytest.mark.thorough
def test_rows_of_a_cache_may_be_taken_copied_and_replaced():
    """Every array has the rows first: of an encoder-decoder also the source."""
    for config in (CONFIGS["in turn"], FAMILIES["mistral_7b"], FAMILIES["t5_small"]):
        options = {"source": SOURCE} if isinstance(config, EncoderDecoder) else {}
        state = decoding.init_cache(config, B, ROOM)
        assert {leaf.shape[0] for leaf in jax.tree.leaves(state)} == {B}
        state = step(
            config,
            drawn(config),
            TOKENS[:, :6],
            cache=state,
            lengths=jnp.array([6, 4, 5]),
            **options,
        ).cache
        assert {leaf.shape[0] for leaf in jax.tree.leaves(state)} == {B}
        order = np.array([2, 0, 0])
        state = jax.tree.map(lambda leaf, order=order: leaf[order], state)
        at = np.array([5, 6, 6])
        for i in range(2):
            out = step(config, drawn(config), TOKENS[order, at + i][:, None], cache=state)
            close(out.logits[:, 0], forward(config)[order, at + i])
            state = out.cache


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [pytest.param("transformer_base", marks=pytest.mark.slow), "t5_small"]
)
def test_neighbours_share_a_source(name):
    """Two sources for four rows are those sources repeated: attention to a source is the same for
    the beams of a text."""
    config, tokens = FAMILIES[name], jnp.asarray(TOKENS[:2])
    params, first, others = drawn(config), tokens[:, :1], jnp.repeat(tokens, 2, axis=0)[:, 1:3]
    _, cache = prefill(
        config, params, first, decoding.init_cache(config, 2, ROOM), source=SOURCE[:2]
    )
    twice = lambda tree: jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), tree)
    expected, _ = decode_step(config, params, others, twice(cache))
    found, _ = decode_step(config, params, others, replace(twice(cache), source=cache.source))
    close(found, expected)
