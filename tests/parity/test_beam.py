"""Beam search gives the texts and scores of transformers' `generate` on the same weights."""

import collections
import itertools
from functools import cache

import numpy as np
import pytest

from jaxformer import decoding
from jaxformer.decoding.beam import Beams
from jaxformer.decoding.filters import ForcedPrefix, MinLength, NoRepeatNgram, Repetition

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]

V, STEPS, PAD, START = 29, 9, 28, 27
SHARED = dict(vocab_size=V, pad_token_id=PAD, bos_token_id=START, eos_token_id=None)
T5 = dict(d_model=16, d_kv=6, d_ff=20, num_layers=2, num_heads=3, relative_attention_num_buckets=8)
MARIAN = {
    f"{side}_{name}": n
    for side in ("encoder", "decoder")
    for name, n in zip(("layers", "ffn_dim"), (2, 20), strict=True)
}
MARIAN |= dict(
    d_model=16, encoder_attention_heads=2, decoder_attention_heads=2, max_position_embeddings=64
)
LLAMA = dict(
    hidden_size=24,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
FAMILIES = {
    "GPT2LMHeadModel": dict(n_embd=24, n_layer=2, n_head=4, n_positions=64),
    "LlamaForCausalLM": LLAMA,
    "T5ForConditionalGeneration": T5 | dict(decoder_start_token_id=START),
    "MarianMTModel": MARIAN | dict(decoder_start_token_id=START, forced_eos_token_id=None),
}
EQUAL = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3], [5, 8, 9, 7, 9]]
RAGGED = [[3, 1, 4, 1, 5], [9], [7, 9, 3]]


def padded(prompts):
    """(tokens, 1 where they are text), padded on the left."""
    tokens, ids = np.zeros((2, len(prompts), max(map(len, prompts))), np.int32)
    for i, prompt in enumerate(prompts):
        tokens[i, -len(prompt) :], ids[i, -len(prompt) :] = prompt, 1
    return tokens, ids


@cache
def both(name):
    """(their model, our config, our params)."""
    import tempfile

    import transformers

    from jaxformer import families
    from tests.golden.write import EXACT, redraw, tensors

    kind = getattr(transformers, name)
    model = kind(kind.config_class(**SHARED, **FAMILIES[name], **EXACT)).eval()
    redraw(model, 3)
    layers = 3 if model.config.tie_word_embeddings else 1
    # of a tied table as large as the layers, a model repeats its last token
    for parameter in tensors(model):
        parameter.data *= (
            0.5
            if parameter is model.get_input_embeddings().weight
            else layers
            if parameter.ndim == 2
            else 1
        )
    start = {"decoder_start_token_id": START} if model.config.is_encoder_decoder else {}
    model.generation_config = transformers.GenerationConfig(
        pad_token_id=PAD, bos_token_id=START, **start
    )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        checkpoint = families.load(folder)
    return model, checkpoint.config, checkpoint.params


def theirs(name, prompts, how, steps, stop_tokens, **options):
    """[(new tokens, score)] of each row."""
    import torch

    model = both(name)[0]
    # sources are padded on the right, prompts on the left
    side = -1 if model.config.is_encoder_decoder else 1
    ids, mask = (
        np.flip(x, axis=1) if side < 0 else x for x in padded([p[::side] for p in prompts])
    )
    scored = dict(return_dict_in_generate=True, output_scores=True) if how.beams > 1 else {}
    with torch.no_grad():
        out = model.generate(
            torch.from_numpy(np.where(mask, ids, PAD).astype(np.int64)),
            attention_mask=torch.from_numpy(mask.astype(np.int64)),
            num_beams=how.beams,
            num_return_sequences=how.n_best,
            length_penalty=how.length_penalty,
            do_sample=False,
            early_stopping=how.early_stopping,
            max_new_tokens=steps,
            eos_token_id=list(stop_tokens) or None,
            **scored,
            **options,
        )
    sequences = (out.sequences if scored else out).numpy()[:, 1 if side < 0 else ids.shape[1] :]
    scores = out.sequences_scores.numpy() if scored else np.zeros(len(sequences))
    rows = []
    for text, score in zip(sequences.tolist(), scores.tolist(), strict=True):
        end = next((i + 1 for i, token in enumerate(text) if token in stop_tokens), len(text))
        assert all(token == PAD for token in text[end:]) or not stop_tokens
        # ours leaves the stop token out
        cut = end - 1 if end and text[end - 1] in stop_tokens else end
        rows.append((text[:cut], score))
    return [rows[i : i + how.n_best] for i in range(0, len(rows), how.n_best)]


def ours(name, prompts, how, steps, stop_tokens, filters=()):
    model, config, params = both(name)
    pair = model.config.is_encoder_decoder
    prompts, sources = ([[START]] * len(prompts), prompts) if pair else (prompts, None)
    options = dict(sources=sources, filters=filters, stop_tokens=stop_tokens)
    found = decoding.search(config, params, prompts, steps, beams=how, **options)
    return [[(text, score) for text, score in row] for row in found]


@cache
def likely(name):
    """Tokens that searches without a stop token make at most, the likeliest first."""
    found = theirs(name, EQUAL, Beams(8, 8), STEPS, (), no_repeat_ngram_size=2)
    counts = collections.Counter(token for row in found for text, _ in row for token in text)
    return [token for token, _ in counts.most_common()]


def assert_same(found, expected, scored=True):
    for ours, theirs in zip(found, expected, strict=True):
        assert [text for text, _ in ours] == [text for text, _ in theirs]
        if scored:
            # two float32 models
            np.testing.assert_allclose(
                [s for _, s in ours], [s for _, s in theirs], atol=1e-4, rtol=0
            )


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_texts_and_scores(name, early_stopping):
    stops = [(), tuple(likely(name)[1:2]), tuple(likely(name)[:1])]
    # a program takes some seconds to compile
    sizes = ((4, 3), (8, 8)) if early_stopping is False else ((4, 3),)
    searches = itertools.product(sizes, (0.0, 1.0, 0.6, 2.0, -1.0))
    for i, ((beams, n_best), penalty) in enumerate(searches):
        options = (
            name,
            (EQUAL, RAGGED)[i % 2],
            Beams(beams, n_best, penalty, early_stopping),
            4 if i % 4 == 3 else STEPS,
        )
        for stop in stops[i % 3 :: 2]:  # one or two of them
            assert_same(ours(*options, stop), theirs(*options, stop))
        if i % 2 == 0:  # texts that do not repeat themselves; theirs would count padding as text
            theirs_too = theirs(*options, stops[-1], no_repeat_ngram_size=2)
            assert_same(ours(*options, stops[-1], (NoRepeatNgram(2),)), theirs_too)


@pytest.mark.parametrize("name", FAMILIES)
def test_several_stop_tokens_make_no_copies(name):
    """Theirs lists a text once for each stop token that ends it, and such copies may end the
    search; ours has it once."""
    how, stop = Beams(4, 4, 1.0, False), tuple(likely(name)[:3])
    found, expected = ours(name, EQUAL, how, STEPS, stop), theirs(name, EQUAL, how, STEPS, stop)
    for row, other in zip(found, expected, strict=True):
        texts = [tuple(text) for text, _ in row]
        assert len(set(texts)) == len(texts)
        # two float32 models
        assert max(score for _, score in row) > max(score for _, score in other) - 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_one_beam_is_greedy(name):
    for prompts, stop in itertools.product((EQUAL, RAGGED), [(), tuple(likely(name)[:3])]):
        for early_stopping in (True, False):
            options = name, prompts, Beams(1, 1, 1.0, early_stopping), STEPS, stop
            assert_same(ours(*options), theirs(*options), scored=False)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_texts_with_filters(name):
    first, stop = likely(name)[2], tuple(likely(name)[:1])
    minimum, repeat, pairs = MinLength(4, np.array(stop)), Repetition(1.7), NoRepeatNgram(2)
    cases = [
        ((minimum,), dict(min_new_tokens=4), EQUAL),
        ((repeat,), dict(repetition_penalty=1.7), EQUAL),
        (
            (repeat, pairs, minimum),
            dict(repetition_penalty=1.7, no_repeat_ngram_size=2, min_new_tokens=4),
            EQUAL,
        ),
        # theirs forces after one token
        (
            (ForcedPrefix([first]),),
            dict(forced_bos_token_id=first),
            [[3], [1], [4]],
        ),
    ]
    for filters, options, prompts in cases:
        how = Beams(4, 4, 1.0, False)
        assert_same(
            ours(name, prompts, how, STEPS, stop, filters),
            theirs(name, prompts, how, STEPS, stop, **options),
        )
