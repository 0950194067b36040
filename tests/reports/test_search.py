"""Beams, diverse beams, contrastive and speculative search, n-best lists: what users of other
projects reported."""

import itertools
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import models
from jaxformer.data.sources import Question
from jaxformer.decoding import (
    Beams,
    Draft,
    Hypothesis,
    Lookup,
    Sampling,
    contrast,
    generate,
    search,
    speculate,
)
from jaxformer.decoding.beam import gnmt
from jaxformer.decoding.speculative import Proposal, accept
from jaxformer.errors import ConfigError
from jaxformer.evaluation.generation import answers
from jaxformer.models import ModelConfig
from jaxformer.ops.positions import LongRoPE, Rope

V, STOP, PROMPT, LIMIT = 5, 4, [1, 2], 4
TINY = ModelConfig(
    vocab_size=V, num_layers=1, d_model=8, num_heads=2, context_length=32, init_std=0.7
)
GREEDY = Sampling(temperature=0.0)
apply = jax.jit(models.apply, static_argnums=0)


@cache
def params():
    return models.init(TINY, jax.random.key(3))


@cache
def log_probabilities(text):
    """Of each token after a text, in float64."""
    padded = np.zeros((1, 8), np.int32)
    padded[0, : len(text)] = text
    logits = np.asarray(apply(TINY, params(), padded).logits, np.float64)[0, len(text) - 1]
    return logits - np.log(np.exp(logits).sum())


@cache
def every_text():
    """{new tokens: log-probability} of all texts that end with the stop token or at the limit."""
    open_tokens = [token for token in range(V) if token != STOP]
    ended = [
        (*text, STOP) for n in range(LIMIT) for text in itertools.product(open_tokens, repeat=n)
    ]
    full = list(itertools.product(open_tokens, repeat=LIMIT))
    total = lambda text: sum(
        log_probabilities((*PROMPT, *text[:i]))[token] for i, token in enumerate(text)
    )
    return {text: total(text) for text in ended + full}


def best(size, score):
    """The tokens of the best texts by score(log-probability, length), without the stop token."""
    order = sorted(every_text(), key=lambda text: -score(every_text()[text], len(text)))
    return [[token for token in text if token != STOP] for text in order[:size]]


def found(how, prompts=(PROMPT,), **options):
    return search(TINY, params(), [*prompts], LIMIT, beams=how, stop_tokens=[STOP], **options)


@pytest.mark.report(
    "huggingface/transformers#20901",
    "OpenNMT/OpenNMT-py#1320",
    right=(
        "the order of texts is that of the score as it is defined, whatever the size of the "
        "length penalty"
    ),
    hit=(
        "length_penalty=80 over 4 tokens: all scores were -0.0 and the order that of the list; "
        "-25 over 100 tokens: no text"
    ),
    listed="second 02",
)
@pytest.mark.report(
    "tnq177/witwicky#8",
    right="the length in the score counts the stop token, in open and in finished texts alike",
)
@pytest.mark.thorough
def test_length_penalties_of_any_size_order_by_the_score():
    """All 85 x 4 texts as witness.

    The logarithm of a score is exact where the score itself is not to be had.
    """
    for penalty in (-90.0, 0.0, 1.0, 80.0, 400.0):
        logs = lambda total, n, penalty=penalty: -(np.log(-total) - penalty * np.log(n))
        texts = found(Beams(64, 3, length_penalty=penalty, early_stopping="never"))[0]
        assert [text.tokens for text in texts] == best(3, logs)
        assert all(np.isfinite(text.score) for text in texts)
    for alpha in (-60.0, 0.6, 300.0):
        logs = lambda total, n, alpha=alpha: -(np.log(-total) - alpha * np.log((5 + n) / 6))
        texts = found(Beams(64, 3, length_penalty=gnmt(alpha), early_stopping="never"))[0]
        assert [text.tokens for text in texts] == best(3, logs)
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="finite"):
            Beams(length_penalty=wrong)
        with pytest.raises(ConfigError, match="finite"):
            gnmt(wrong)


@pytest.mark.report(
    "OpenNMT/OpenNMT-py#60", "huggingface/transformers#25103", "huggingface/transformers#24407",
    right="a list of the best texts has each text once", listed="second 13",
    hit="one text with two stop tokens, and one text of two groups, stood there twice",
)  # fmt: skip
@pytest.mark.thorough
def test_a_list_of_texts_has_no_copies():
    for how, stop in ((Beams(4, 4), [3, 4]), (Beams(4, 4, groups=2, diversity=0.05), [4])):
        texts = [
            tuple(text.tokens)
            for text in search(TINY, params(), [PROMPT], 4, beams=how, stop_tokens=stop)[0]
        ]
        assert len(texts) == len(set(texts)) > 1
    two = search(TINY, params(), [PROMPT], 4, beams=Beams(4, 4), stop_tokens=[3, 4])[0]
    scores = [text.score for text in two]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.thorough
@pytest.mark.report(
    "OpenNMT/OpenNMT-py#60",
    right="what is cut off at a stop string is listed once, too",
    listed="second 13",
    hit="texts that differ behind the stop string alone stood in `continue_all` several times",
)
def test_texts_that_a_stop_string_makes_equal_are_one(monkeypatch):
    texts = [Hypothesis([1, 2], -1.0), Hypothesis([1, 3], -2.0), Hypothesis([2, 2], -3.0)]
    monkeypatch.setattr("jaxformer.evaluation.generation.search", lambda *_, **options: [texts])
    tokenizer = type(
        "T", (), {"decode": staticmethod(lambda tokens: "".join(f"{token}." for token in tokens))}
    )
    kept = answers(TINY, params(), [Question([0], "")], tokenizer, 4, Beams(3, 3), stop=["."])
    assert kept == [["1", "2"]]


@pytest.mark.thorough
@pytest.mark.report(
    "facebookresearch/ParlAI#2007",
    right="the first step follows different tokens, not copies of one beam",
)
def test_beams_differ_from_the_first_step_on():
    texts = found(Beams(3, 3, length_penalty=0.0))[0]
    assert len({tuple(text.tokens) for text in texts}) == 3


@pytest.mark.report(
    "neulab/xnmt#572", "ottokart/beam_search#1",
    right="a search ends where no open text can become better, not at the first finished ones",
)  # fmt: skip
@pytest.mark.thorough
def test_more_beams_find_no_worse_text():
    score = lambda total, n: total / n
    top = best(1, score)[0]
    wide = found(Beams(64, 1, length_penalty=1.0, early_stopping="never"))[0][0]
    assert wide.tokens == top
    narrow = [found(Beams(size, 1, early_stopping="never"))[0][0].score for size in (1, 4)]
    assert max(narrow) <= wide.score + 1e-6


@pytest.mark.report(
    "facebookresearch/fairseq#5069", "huggingface/transformers#13079",
    right="each group keeps its beams to the end: a group is a search of its own",
)  # fmt: skip
@pytest.mark.thorough
def test_no_group_is_lost():
    """A diversity that forbids the tokens of the other groups leaves texts with different first
    tokens."""
    texts = found(Beams(4, 4, groups=4, diversity=1e4, length_penalty=0.0))[0]
    first = [text.tokens[0] if text.tokens else STOP for text in texts]
    assert len(texts) == len(set(first)) == 4


@pytest.mark.report(
    "batistagroup/DirectMultiStep#20",
    "THUDM/GLM#110",
    right="beams of a row are those that it has alone",
)
@pytest.mark.thorough
def test_beams_of_a_batch_are_those_of_each_row():
    prompts, how = [[1, 2], [3], [0, 0, 1, 2, 3]], Beams(3, 2)
    together = found(how, prompts)
    for prompt, texts in zip(prompts, together, strict=True):
        (alone,) = found(how, [prompt])
        assert [text.tokens for text in texts] == [text.tokens for text in alone]
        np.testing.assert_allclose([t.score for t in texts], [t.score for t in alone], rtol=1e-5)


@pytest.mark.report(
    "huggingface/transformers#33507",
    right="contrastive search does not compare with the padding of shorter prompts",
)
@pytest.mark.thorough
def test_contrastive_search_of_a_batch_is_that_of_each_row():
    prompts = [[1, 2], [3, 1, 0, 2, 2, 1, 0]]
    together = contrast(TINY, params(), prompts, 6, k=3, alpha=0.7)
    assert together == [
        contrast(TINY, params(), [prompt], 6, k=3, alpha=0.7)[0] for prompt in prompts
    ]


@pytest.mark.report(
    "lablup/mlxcel#994",
    "paiml/aprender#2014",
    "ohdearquant/lattice#243",
    right=(
        "a draft that is the model itself is always right, and what is written is what greedy "
        "decoding writes"
    ),
)
@pytest.mark.thorough
def test_the_model_as_its_own_draft_is_accepted():
    (greedy,) = generate(TINY, params(), [PROMPT], 16, sampling=GREEDY)
    own = speculate(
        TINY, params(), [PROMPT], 16, draft=Draft(TINY, params()), ahead=3, sampling=GREEDY
    )
    assert own.tokens == [greedy]
    assert own.accepted == own.proposed and own.proposed[0] > 0
    other = models.init(TINY, jax.random.key(9))  # most of its tokens are taken back
    poor = speculate(
        TINY, params(), [PROMPT], 16, draft=Draft(TINY, other), ahead=3, sampling=GREEDY
    )
    assert poor.tokens == [greedy]


@pytest.mark.thorough
@pytest.mark.report(
    "openvinotoolkit/openvino.genai#4190",
    right=(
        "behind a rejected token stands one of the rest of the model's distribution at that place"
    ),
)
def test_a_rejected_token_is_replaced_at_its_own_place():
    """Tokens that are written at the first place follow the model, whatever the draft proposed."""
    rows = 20_000
    p = jnp.broadcast_to(jnp.array([[0.5, 0.3, 0.2, 0.0], [0.0, 0.0, 0.0, 1.0]]), (rows, 2, 4))
    q = jnp.array([0.1, 0.1, 0.2, 0.6])
    drafted = jax.random.choice(jax.random.key(1), 4, (rows, 1), p=q)
    proposal = Proposal(drafted, jnp.broadcast_to(q, (rows, 1, 4)))
    keys = jax.random.split(jax.random.key(0), rows)
    new, taken = jax.jit(accept)(p, proposal, jnp.ones(rows, jnp.int32), keys, 1.0)
    shares = np.bincount(np.asarray(new[:, 0]), minlength=4) / rows
    np.testing.assert_allclose(shares, [0.5, 0.3, 0.2, 0.0], atol=0.015)  # four standard deviations
    assert np.all(np.asarray(new[:, 1])[np.asarray(taken) == 1] == 3)  # then the model's next place


@pytest.mark.thorough
@pytest.mark.report(
    "ml-explore/mlx-lm#1109",
    "ml-explore/mlx-lm#846",
    right=(
        "speculation with a state that cannot go back is refused, also where only the draft has one"
    ),
)
def test_a_draft_that_cannot_go_back_is_refused():
    """So are texts that outgrow the rotations of their cache: no draft may check them."""
    turning = replace(TINY, positions=Rope(scaling=LongRoPE((1.0,) * 2, (4.0,) * 2, 8)))
    trained = models.init(turning, jax.random.key(0))
    for run in (
        lambda: speculate(turning, trained, [PROMPT], 9, draft=Lookup()),
        lambda: speculate(TINY, params(), [PROMPT], 9, draft=Draft(turning, trained)),
        lambda: search(turning, trained, [PROMPT], 9),
        lambda: contrast(turning, trained, [PROMPT], 9),
    ):
        with pytest.raises(NotImplementedError, match="at most 7 new tokens"):
            run()


@pytest.mark.thorough
@pytest.mark.report(
    "facebookresearch/ParlAI#2058",
    right="a stop token in the prompt ends nothing",
    listed="second 41",
)
def test_a_stop_token_in_the_prompt_ends_nothing():
    prompt = [STOP, 1, STOP, 2, STOP]
    texts = found(Beams(4, 4, length_penalty=0.0), [prompt])[0]
    assert len(texts) == 4 and any(text.tokens for text in texts)
    (whole,) = generate(TINY, params(), [prompt], 6, sampling=GREEDY)
    assert generate(TINY, params(), [prompt], 3, sampling=GREEDY) == [whole[:3]]


@pytest.mark.thorough
@pytest.mark.report(
    "turboderp-org/exllamav2#274", "vllm-project/vllm#57941",
    right="a draft of another vocabulary, or of fewer positions, is refused",
    listed="second 38",
)  # fmt: skip
def test_a_draft_that_does_not_fit_is_refused():
    larger = replace(TINY, vocab_size=V + 1)
    with pytest.raises(ConfigError, match="vocabulary"):
        speculate(TINY, params(), [PROMPT], 4, draft=Draft(larger, params()))
    short = replace(TINY, context_length=4)
    with pytest.raises(ConfigError, match="4 learned positions"):
        speculate(
            TINY, params(), [PROMPT], 4, draft=Draft(short, models.init(short, jax.random.key(0)))
        )
