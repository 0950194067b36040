"""Generation: what greedy decoding finds, rows that are refilled, stops, streams, refusals, and
what is compiled."""

import itertools
import sys
from dataclasses import dataclass, replace
from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import decoding, masks, models, params
from jaxformer.decoding import Sampling, filters
from jaxformer.decoding.model import padded_length
from jaxformer.errors import ConfigError
from jaxformer.models import (
    Classification,
    EncoderDecoder,
    LanguageModel,
    Learned,
    Mixture,
    ModelConfig,
    Relative,
    Sinusoidal,
    blocks,
)
from jaxformer.ops.positions import NTK, LongRoPE, Rope
from jaxformer.ops.quantised import NF4, Int4, Int8
from jaxformer.ops.stored_weight import BlockWeight

V = 19
GPT = ModelConfig(
    vocab_size=V, num_layers=3, d_model=24, num_heads=4, context_length=24, init_std=0.4
)
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
    "vaswani": replace(GPT, block=blocks.post_norm, positions=Sinusoidal(), feedforward="relu"),
}


init, apply = jax.jit(models.init, static_argnums=0), jax.jit(models.apply, static_argnums=0)


@cache
def make(name):
    config = FAMILIES[name]
    return config, init(config, jax.random.key(3))


@pytest.mark.thorough
def test_a_decoding_step_is_compiled_once():
    """A cache keeps its form from step to step; only the first call, which makes it, has
    another."""
    chex.clear_trace_counter()
    config, parameters = make("llama")

    @jax.jit
    @chex.assert_max_traces(n=2)
    def step(tokens, cache):
        return models.apply(config, parameters, tokens, cache=cache).cache

    cache = decoding.init_cache(config, 2, 6)
    for token in range(6):
        cache = step(jnp.full((2, 1), token), cache)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n == "gpt3" else ()) for n in FAMILIES]
)
def test_greedy_generation_equals_repeated_forward_passes_for_ragged_prompts(name):
    config, parameters = make(name)
    # tokens before the end of a prefix need it to be there
    prompts = [[1, 2, 3, 4, 5], [7, 8, 9] if name == "prefix" else [7], [4] * 8]
    together = decoding.generate(
        config, parameters, prompts, 10, sampling=Sampling(temperature=0.0)
    )
    for prompt, out in zip(prompts, together, strict=True):
        # causal, so one forward pass over the result shows what was likeliest at every step
        logits = apply(config, parameters, jnp.array([prompt + out])).logits[0]
        assert jnp.argmax(logits[len(prompt) - 1 : -1], axis=-1).tolist() == out


@pytest.mark.thorough
@pytest.mark.parametrize(
    "scaling",
    [pytest.param(NTK(4.0, 8), marks=pytest.mark.slow), LongRoPE((1.0,) * 3, (2.0,) * 3, 8)],
)
def test_ragged_prompts_are_not_turned_by_the_longest_row(scaling):
    """A row beside a longer one has the tokens that it has alone, also where the rotation depends
    on the length."""
    config = replace(GPT, positions=Rope(scaling=scaling), num_layers=1)
    parameters, greedy = init(config, jax.random.key(0)), Sampling(temperature=0.0)
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [3]]
    together = decoding.generate(config, parameters, prompts, 7, sampling=greedy)
    assert together == [
        decoding.generate(config, parameters, [prompt], 7, sampling=greedy)[0] for prompt in prompts
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("slots", [9, pytest.param(12, marks=pytest.mark.slow), 40])
def test_random_masks_do_not_depend_on_the_slots_of_a_cache(slots):
    drawn = (
        masks.causal() & (masks.random_blocks(1, 2, seed=5) | masks.window(0)),
        masks.causal() & masks.bigbird(2, 1, 0),
    )
    config = replace(GPT, masks=drawn)
    parameters, tokens = (
        init(config, jax.random.key(3)),
        jax.random.randint(jax.random.key(0), (2, 9), 0, V),
    )
    whole, cache = apply(config, parameters, tokens).logits, decoding.init_cache(config, 2, slots)
    for i in range(9):
        out = apply(config, parameters, tokens[:, i : i + 1], cache=cache)
        # as above
        np.testing.assert_allclose(out.logits, whole[:, i : i + 1], rtol=1e-5, atol=1e-5)
        cache = out.cache


@pytest.mark.thorough
def test_sampling_a_row_does_not_depend_on_its_neighbours_below():
    config, parameters = make("llama")
    alone = decoding.generate(config, parameters, [[1, 2, 3]], 8, key=jax.random.key(5))
    with_others = decoding.generate(
        config, parameters, [[1, 2, 3], [4, 5, 6], [1, 1, 1]], 8, key=jax.random.key(5)
    )
    assert alone[0] == with_others[0]


@pytest.mark.thorough
def test_stop_tokens_end_a_row_and_are_left_out():
    config, parameters = make("gpt2")
    free = decoding.generate(config, parameters, [[1, 2]], 12, sampling=Sampling(temperature=0.0))[
        0
    ]
    stop = free[4]
    assert (
        decoding.generate(
            config, parameters, [[1, 2]], 12, sampling=Sampling(temperature=0.0), stop_tokens=[stop]
        )[0]
        == (free[: free.index(stop)])
    )


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_each_prompt_may_have_its_own_number_of_tokens():
    config, parameters = make("gpt2")
    prompts, limits, greedy = (
        [[1, 2], [3] * 23, [4, 5, 6], [7]],
        [9, 1, 4, 23],
        Sampling(temperature=0.0),
    )
    found = decoding.generate(config, parameters, prompts, limits, sampling=greedy, rows=2)
    assert [len(new) for new in found] == limits
    beams = decoding.search(
        config, parameters, prompts[:3], limits[:3], beams=decoding.Beams(2), rows=2
    )
    assert [len(best.tokens) for (best,) in beams] == limits[:3]
    for prompt, limit, new in zip(prompts, limits, found, strict=True):
        assert decoding.generate(config, parameters, [prompt], limit, sampling=greedy) == [new]
    for bad in ([9, 1], [9, 1, 4, 0], [9, 1, 4, 24], [9, 2, 4, 23]):
        with pytest.raises(
            ConfigError, match=r"of all prompts or of each|exceed the 24 learned positions"
        ):
            decoding.generate(config, parameters, prompts, bad)


@pytest.mark.thorough
def test_experts_with_a_capacity_drop_no_choice_where_a_text_is_written_or_scored():
    """Rows that compete for room would depend on their neighbours."""
    config = replace(GPT, num_layers=1, feedforward=Mixture(4, 2, d_ff=16, capacity=0.3))
    free = replace(config, feedforward=Mixture(4, 2, d_ff=16))
    parameters, prompts = init(config, jax.random.key(3)), [[1, 2, 3], [4, 5], [6], [7, 8, 9]]
    assert decoding.generate(config, parameters, prompts, 6) == decoding.generate(
        free, parameters, prompts, 6
    )
    scores = [decoding.score(each, parameters, prompts, [[5, 6]] * 4) for each in (config, free)]
    assert scores[0] == scores[1]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "how", [Sampling(top_k=4, top_p=0.9, typical=0.9), Sampling(temperature=0.0)]
)
def test_parameters_in_float64(how):
    config = replace(GPT, num_layers=1)
    parameters = init(config, jax.random.key(3))
    expected = decoding.generate(
        config, parameters, [[1, 2], [3]], 5, sampling=Sampling(temperature=0.0)
    )
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), parameters)
        found = decoding.generate(config, wide, [[1, 2], [3]], 5, sampling=how)
        spoken = decoding.speculate(
            config, wide, [[1, 2], [3]], 5, sampling=how, draft=decoding.Lookup()
        )
    assert list(map(len, found)) == list(map(len, spoken.tokens)) == [5, 5]
    if how.temperature == 0:
        assert found == spoken.tokens == expected


@pytest.mark.thorough
def test_parameters_of_more_heads_are_those_of_the_model_and_others_are_refused():
    """As `models.apply` has it; once prepared, parameters of a layer are not compared with the
    config."""
    config = replace(GPT, tie_embeddings=False)
    both = replace(config, heads=(LanguageModel(), Classification(2)))
    shapes = params.abstract(models.spec(both))
    for make in (
        decoding.prepare,
        decoding.quantize,
        lambda config, w: decoding.quantize(config, w, NF4(8)),
        lambda config, w: decoding.round_to_int8(models.spec(config), w),
        lambda config, w: decoding.round_to_blocks(NF4(8), models.spec(config), w),
    ):
        tree, own = (jax.eval_shape(partial(make, one), shapes) for one in (config, both))
        assert tree["heads"]["classification"] == shapes["heads"]["classification"]
        assert (
            tree["heads"]["language_model"] == own["heads"]["language_model"]
            and tree["layers"] == own["layers"]
        )
    run = lambda tree: (
        models.apply(config, decoding.prepare(config, tree), jnp.ones((2, 3), jnp.int32)).logits
    )
    assert jax.eval_shape(run, shapes).shape == (2, 3, V)
    for change in (
        dict(num_layers=2),
        dict(d_ff=8),
        dict(use_bias=False),
        dict(vocab_size=V + 1),
        dict(norm="rms_norm"),
    ):
        with pytest.raises(
            ConfigError, match=r"apply: parameter .*; models.init makes those of the config"
        ):
            jax.eval_shape(partial(decoding.prepare, replace(both, **change)), shapes)


STACK = replace(
    GPT,
    num_layers=2,
    d_model=16,
    norm="rms_norm",
    use_bias=False,
    init_std=0.7,
    positions=Relative(8, 16),
    heads=(),
    masks=(masks.full(),),
    tie_embeddings=False,
)
DECODER = replace(
    STACK,
    positions=Relative(8, 16, bidirectional=False),
    heads=(LanguageModel(),),
    masks=(masks.causal(),),
)
PAIRS = {
    "t5": EncoderDecoder(STACK, DECODER),
    "learned": EncoderDecoder(
        replace(STACK, num_layers=1, positions=Learned(offset=2), context_length=7, vocab_size=11),
        replace(DECODER, num_layers=1, positions=Learned(offset=2), context_length=12),
        share_embeddings=False,
    ),
}
SOURCES, STARTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9], [3, 1, 4, 1]], [[0], [0, 5, 7], [0]]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "t5" else pytest.mark.slow) for n in PAIRS]
)
def test_greedy_generation_of_a_pair_equals_repeated_forward_passes(name):
    """Sources and prompts of different length, together; each row is what a model that sees it
    alone finds likeliest."""
    config = PAIRS[name]
    parameters = init(config, jax.random.key(3))
    outs = decoding.generate(
        config, parameters, STARTS, 8, sources=SOURCES, sampling=Sampling(temperature=0.0)
    )
    for source, prompt, out in list(zip(SOURCES, STARTS, outs, strict=True))[:2]:
        logits = apply(
            config, parameters, jnp.array([prompt + out]), source=jnp.array([source])
        ).logits[0]
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


# Rows that are refilled

PROMPTS = [np.random.default_rng(n).integers(0, V, 1 + 5 * n % 23).tolist() for n in range(13)]
SERVED = replace(GPT, num_layers=2, positions=Rope(), num_kv_heads=2, context_length=32)
SETTINGS = {
    "greedy": dict(sampling=Sampling(temperature=0.0)),
    "sampled": dict(sampling=Sampling(temperature=0.8, top_k=9, top_p=0.95)),
    "filtered": dict(
        sampling=Sampling(),
        filters=(filters.Repetition(1.3), filters.NoRepeatNgram(2)),
        stop_tokens=(3,),
    ),
    "stopped": dict(
        sampling=Sampling(), stop=lambda tokens: tokens.index(5) + 1 if 5 in tokens else None
    ),
}


def recording(logs):
    """A filter that keeps the logits of every call, with what stands in the rows."""

    def record(logits, history):
        jax.debug.callback(
            lambda *arrays: logs.append(tuple(map(np.asarray, arrays))),
            logits,
            *jax.tree.leaves(history),
        )
        return logits

    return record


def served(logs, most):
    """The logits, bit by bit, by the text that they follow; of rows in use, which have 2 to `most`
    - 1 new tokens then."""
    found = {}
    for logits, tokens, lengths, prompts in logs:
        for row, text, length, prompt in zip(logits, tokens, lengths, prompts, strict=True):
            if 2 <= length - prompt < most:
                found.setdefault(tuple(text[:length].tolist()), set()).add(row.tobytes())
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n != "stopped" else pytest.mark.slow) for n in SETTINGS]
)
def test_a_row_that_is_refilled_continues_its_prompt_as_if_alone(name):
    """13 prompts in 4 rows: the tokens that each has beside others, with its own random numbers."""
    parameters, options = (
        init(SERVED, jax.random.key(3)),
        SETTINGS[name] | {"key": jax.random.key(5), "rows": 4},
    )
    together = decoding.generate(SERVED, parameters, PROMPTS, 12, **options)
    assert len(set(map(len, together))) == 1 or name in ("filtered", "stopped")
    for index in (0, 4, 7, 12):
        # its place in the queue decides its random numbers
        alone = [[0]] * index + [PROMPTS[index], [0], [0], [0]]
        assert (
            decoding.generate(SERVED, parameters, alone, 12, **options)[index] == together[index]
        ), index


@pytest.mark.thorough
def test_logits_of_a_row_are_bit_by_bit_those_of_the_prompt_alone():
    """Float32, one device, as many rows, up to 128 slots: neighbours, and who was in the row
    before, change no bit."""
    parameters, most = init(SERVED, jax.random.key(3)), 12
    run = partial(
        decoding.generate,
        SERVED,
        parameters,
        max_tokens=most,
        sampling=Sampling(temperature=0.0),
        rows=4,
    )
    together, alone = [], []
    everything = run(PROMPTS, filters=(recording(together),))
    record = recording(alone)
    for index in (1, 7, 12):
        assert run([PROMPTS[index], [0], [0], [0]], filters=(record,))[0] == everything[index]
    jax.effects_barrier()
    together, alone = served(together, most), served(alone, most)
    shared = [text for text in alone if text in together]
    assert len(shared) >= 3 * (most - 2)
    assert all(len(together[text]) == 1 and together[text] == alone[text] for text in shared)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["gpt2", "llama", pytest.param("prefix", marks=pytest.mark.thorough), "pair"]
)
def test_prompts_of_about_one_length_are_read_in_one_call(name, monkeypatch):
    """And each is continued as alone; prompts of very different lengths are read one by one."""
    stack = replace(GPT, masks=(masks.full(),), heads=())
    config = EncoderDecoder(stack, GPT) if name == "pair" else FAMILIES[name]
    parameters, rng, rows_read = init(config, jax.random.key(5)), np.random.default_rng(5), []
    module = sys.modules["jaxformer.decoding.generate"]
    read = module._read

    def count_and_read(*arguments):
        rows_read.append(arguments[4].shape[0])
        return read(*arguments)

    monkeypatch.setattr(module, "_read", count_and_read)

    def continued(prompts):
        options = (
            {"sources": [[3, 4, len(prompt) % V] for prompt in prompts]} if name == "pair" else {}
        )
        return decoding.generate(
            config, parameters, prompts, 5, sampling=Sampling(temperature=0.0), rows=4, **options
        )

    even = [rng.integers(1, V, length).tolist() for length in (5, 8, 4)]
    together = continued(even)
    assert rows_read == [4]
    assert together == [continued([prompt])[0] for prompt in even]
    rows_read.clear()
    assert len(continued([even[0], even[1] * 2, even[2]])) == 3
    assert rows_read == [1, 1, 1]


class Compilations:
    """How many programs XLA compiled."""

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self)

    def __call__(self, event, duration, **_):
        self.count += event == "/jax/core/compile/backend_compile_duration"


@pytest.mark.thorough
def test_other_prompts_and_settings_compile_nothing():
    """50 prompts of random lengths within a bucket; other temperatures, k, p, token counts and stop
    tokens."""
    config = replace(SERVED, num_layers=1, d_ff=8)
    parameters, rng, compiled = (
        init(config, jax.random.key(3)),
        np.random.default_rng(0),
        Compilations(),
    )
    draw = lambda count: [rng.integers(0, V, n).tolist() for n in rng.integers(17, 33, count)]

    def run(prompts, max_tokens, temperature, top_k, top_p, stops, seed):
        how = Sampling(temperature, top_k, top_p)
        decoding.generate(
            config,
            parameters,
            prompts,
            max_tokens,
            sampling=how,
            filters=(filters.MinP(0.01 * seed),),
            stop_tokens=stops,
            key=jax.random.key(seed),
            rows=4,
        )

    longest = [rng.integers(0, V, 32).tolist()]  # of one bucket with max_tokens from 13 to 16
    assert padded_length(32 + 13, config) == padded_length(32 + 16, config) and padded_length(
        17, config
    ) == padded_length(32, config)
    run(draw(8) + longest, 14, 0.9, 5, 0.9, [1], 1)
    assert compiled.count > 0
    before = compiled.count
    for i in range(7):
        run(
            draw(6 + i % 3) + longest,
            13 + i % 4,
            0.5 + 0.1 * i,
            2 + i,
            0.6 + 0.05 * i,
            list(range(i)),
            i + 2,
        )
    assert compiled.count == before


@pytest.mark.thorough
@pytest.mark.parametrize(
    "search", [decoding.generate, decoding.search, decoding.contrast, decoding.speculate]
)
def test_a_filter_that_makes_no_logits_is_refused_by_its_number(search):
    options = {"draft": decoding.Lookup()} if search is decoding.speculate else {}
    own = lambda logits, history: logits[:, :1]
    for wrong in (
        filters.Repetition,
        filters.LogitBias([1, 2]),
        filters.ForcedPrefix(1),
        filters.TopK([1, 2]),
        own,
    ):
        with pytest.raises(
            ConfigError, match=r"filters: number 2 is no function \(logits, history\) -> logits"
        ):
            search(
                GPT,
                init(GPT, jax.random.key(0)),
                [[1, 2]],
                2,
                filters=[filters.TopK(3), wrong],
                **options,
            )


@pytest.mark.thorough
@pytest.mark.parametrize("every", [1, 3])
def test_a_stream_gives_the_tokens_of_generate(every):
    parameters, how = init(SERVED, jax.random.key(3)), Sampling(temperature=0.7)
    options = dict(sampling=how, key=jax.random.key(2))
    whole = decoding.generate(SERVED, parameters, [PROMPTS[5]], 11, rows=1, **options)[0]
    parts = list(decoding.stream(SERVED, parameters, PROMPTS[5], 11, every=every, **options))
    assert list(itertools.chain(*parts)) == whole and all(parts) and len(parts) >= 11 // every
    stop = whole[6]
    parts = list(
        decoding.stream(
            SERVED, parameters, PROMPTS[5], 11, every=every, stop_tokens=[stop], **options
        )
    )
    assert list(itertools.chain(*parts)) == whole[: whole.index(stop)]


@pytest.mark.thorough
def test_a_function_of_the_new_tokens_ends_a_row():
    """It is asked after some steps, and what it cuts is gone; the row takes the next prompt."""
    parameters = init(SERVED, jax.random.key(3))
    run = partial(
        decoding.generate, SERVED, parameters, PROMPTS[:5], 12, key=jax.random.key(1), rows=2
    )
    free, asked = run(), []

    def stop(tokens):
        asked.append(len(tokens))
        return 4 if len(tokens) >= 4 else None

    assert run(stop=stop) == [tokens[:4] for tokens in free]
    assert max(asked) <= 12 and run(stop=lambda tokens: None) == free
    assert run(stop=lambda tokens: 0) == [[]] * 5


@pytest.mark.slow
def test_prompts_longer_than_a_piece_are_read_in_pieces(monkeypatch):
    """The same tokens, whatever the length of the pieces; prompts end within, at and behind the end
    of one."""
    parameters = init(SERVED, jax.random.key(3))
    prompts = [np.random.default_rng(n).integers(0, V, n).tolist() for n in (15, 16, 17, 33, 64)]
    run = partial(
        decoding.generate, SERVED, parameters, prompts, 6, sampling=Sampling(temperature=0.0)
    )
    whole = run()
    monkeypatch.setattr(sys.modules["jaxformer.decoding.generate"], "CHUNK", 16)
    assert run() == whole


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gpt3", pytest.param("llama", marks=pytest.mark.slow)])
def test_long_prompts_are_read_in_pieces_and_keys_may_have_8_bits(name, monkeypatch):
    """Pieces of 8 tokens, of which the first is read as training reads it, give the tokens of the
    whole prompt."""
    config, parameters = make(name)
    config = replace(config, context_length=64)
    parameters = init(config, jax.random.key(3))
    prompts, greedy = (
        [[7 * i % V for i in range(n)] for n in (37, 5, 20)],
        Sampling(temperature=0.0),
    )
    whole = decoding.generate(config, parameters, prompts, 6, sampling=greedy)
    assert (
        decoding.generate(config, parameters, prompts, 6, sampling=greedy, cache_dtype=jnp.int8)
        == whole
    )
    monkeypatch.setattr(sys.modules["jaxformer.decoding.generate"], "CHUNK", 8)
    assert decoding.generate(config, parameters, prompts, 6, sampling=greedy) == whole


@pytest.mark.thorough
def test_a_cache_in_8_bits_costs_as_much_as_its_rounding():
    """A key or value is off by at most half of 1/127 of its head's largest: logits by a few percent
    of their spread."""
    config, parameters = make("llama")
    tokens = jax.random.randint(jax.random.key(0), (4, 20), 0, V)
    whole, cache = (
        apply(config, parameters, tokens).logits,
        decoding.init_cache(config, 4, 20, jnp.int8),
    )
    out = apply(config, parameters, tokens[:, :10], cache=cache)
    rest = apply(config, parameters, tokens[:, 10:], cache=out.cache).logits
    error, spread = jnp.abs(rest - whole[:, 10:]).max(), jnp.abs(whole).max()
    assert 0 < error < 0.05 * spread
    assert out.cache.layers[0]["key"].values.dtype == jnp.int8


@pytest.mark.thorough
@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.slow), "llama"])
def test_weights_in_8_bits(name):
    """A weight is off by at most half of 1/127 of its channel's largest; without the rounding,
    products are the same."""
    config, parameters = make(name)
    tokens = jax.random.randint(jax.random.key(0), (2, 12), 0, V)
    small = decoding.quantize(config, parameters)
    plain = decoding.round_to_int8(models.spec(config), parameters)
    found, expected = (apply(config, tree, tokens).logits for tree in (small, plain))
    # activations have 16 bits in products of int8 on CPU
    np.testing.assert_allclose(found, expected, atol=2e-3 * float(jnp.abs(expected).max()))
    assert float(jnp.abs(expected - apply(config, parameters, tokens).logits).max()) > 1e-2
    assert len(decoding.generate(config, small, [[1, 2], [3]], 4)[0]) == 4


@dataclass(frozen=True)
class Ternary:
    """A form of a user's own."""

    block: int = 4

    def levels(self):
        return np.array([-1, 0, 1], np.float32)


@pytest.mark.thorough
@pytest.mark.parametrize("form", [NF4(8), Int4(6), Int8(16), Ternary()], ids=str)
def test_weights_in_blocks_of_few_bits_are_their_rounded_selves(form):
    """The product is that of the rounded matrix; a table of 4 bits is looked up row by row. The
    last block of a line may have padding: D = 16 is no multiple of 6."""
    config = replace(GPT, num_layers=2)
    parameters = init(config, jax.random.key(3))
    tokens = jax.random.randint(jax.random.key(0), (2, 12), 0, V)
    run = jax.jit(lambda tree: models.apply(config, tree, tokens).logits)
    small = decoding.quantize(config, parameters, form)
    stored = [leaf for leaf in jax.tree.leaves(small, is_leaf=is_in_blocks) if is_in_blocks(leaf)]
    assert len(stored) == 1 + 2 * 6  # the table, and six matrices a layer
    found = run(small)
    expected = run(decoding.round_to_blocks(form, models.spec(config), parameters))
    np.testing.assert_allclose(found, expected, atol=2e-6 * float(jnp.abs(expected).max()))
    assert float(jnp.abs(expected - run(parameters)).max()) > 1e-3
    plain = decoding.round_to_blocks(form, models.spec(config), parameters)
    prompts, greedy = [[1, 2, 3], [3]], Sampling(temperature=0.0)
    written = decoding.generate(config, small, prompts, 4, sampling=greedy)
    assert written == decoding.generate(config, plain, prompts, 4, sampling=greedy)


def is_in_blocks(leaf):
    return isinstance(leaf, BlockWeight)


@pytest.mark.thorough
@pytest.mark.parametrize("bad", [0, -3])
def test_numbers_of_rows_that_are_none_are_refused(bad):
    """In one line, before anything is compiled: `range` and a loop without an end were there
    before."""
    params = init(GPT, jax.random.key(0))
    calls = {
        "generate: rows": lambda: decoding.generate(GPT, params, [[1]], 2, rows=bad),
        "search: rows": lambda: decoding.search(GPT, params, [[1]], 2, rows=bad),
        "score: rows": lambda: decoding.score(GPT, params, [[1]], [[2]], rows=bad),
        "contrast: rows": lambda: decoding.contrast(GPT, params, [[1]], 2, rows=bad),
        "speculate: rows": lambda: decoding.speculate(
            GPT, params, [[1]], 2, draft=decoding.Lookup(), rows=bad
        ),
        "stream: every": lambda: list(decoding.stream(GPT, params, [1], 2, every=bad)),
        "init_cache: batch": lambda: decoding.init_cache(GPT, bad, 4),
        "init_cache: length": lambda: decoding.init_cache(GPT, 1, bad),
        "init_cache: ahead": lambda: decoding.init_cache(GPT, 1, 4, ahead=-1),
    }
    for name, call in calls.items():
        with pytest.raises(ConfigError, match=f"{name}=(-1|{bad}): expected a whole number"):
            call()
