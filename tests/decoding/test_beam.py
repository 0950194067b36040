"""Beam search against a reference of plain lists in float64, against exhaustive search, and against
forward passes."""

import itertools
import math
from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import decoding, masks, models
from jaxformer.decoding.beam import Beams, beam_search, gnmt
from jaxformer.decoding.filters import History
from jaxformer.errors import ConfigError
from jaxformer.models import ModelConfig

# The model of these tests is a recurrent network: its state depends on all tokens, so that a wrong
# cache row shows


def network(seed, V, D=8):
    rng = np.random.default_rng(seed)
    return {
        "embed": rng.normal(size=(V, D)),
        "recur": rng.normal(size=(D, D)) / math.sqrt(D) * 1.5,
        "out": rng.normal(size=(D, V)) * 1.2,
    }


def advance(weights, tokens, state):
    state = jnp.tanh(state @ weights["recur"] + weights["embed"][tokens])
    return state @ weights["out"], state


def log_probabilities(weights, text):
    state = np.zeros(weights["recur"].shape[0])
    for token in text:
        state = np.tanh(state @ weights["recur"] + weights["embed"][token])
    logits = state @ weights["out"]
    return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()


@partial(jax.jit, static_argnames=("filters",))
def search(weights, tokens, length, max_tokens, how, stop_tokens, filters=()):
    """Prompts `tokens[b, :length[b]]` go through the network, then the search begins."""
    B = tokens.shape[0]
    zeros = jnp.zeros((B, weights["out"].shape[1])), jnp.zeros((B, weights["recur"].shape[0]))

    def feed(slot, carry):
        new = advance(weights, tokens[:, slot], carry[1])
        return jax.tree.map(
            lambda new, old: jnp.where((slot < length)[:, None], new, old), new, carry
        )

    logits, state = jax.lax.fori_loop(0, tokens.shape[1], feed, zeros)
    history = History(tokens, length, length)
    return beam_search(
        partial(advance, weights), logits, state, history, max_tokens, how, stop_tokens, filters
    )


def run(weights, prompts, max_tokens, how, stop_tokens, filters=(), slots=None):
    """Each row's [(new tokens, score)]."""
    tokens = np.zeros((len(prompts), slots or max(map(len, prompts)) + max_tokens), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    single = jax.tree.map(lambda x: np.asarray(x, np.float32), weights)
    out = search(
        single,
        tokens,
        np.array([len(p) for p in prompts]),
        max_tokens,
        how,
        np.array(stop_tokens, np.int32),
        filters,
    )
    return texts(out, prompts)


def texts(out, prompts):
    rows = []
    for prompt, tokens, lengths, scores in zip(
        prompts, *map(np.asarray, (out.tokens, out.length, out.score)), strict=True
    ):
        for text in tokens:
            assert text[: len(prompt)].tolist() == list(prompt)
        found = zip(tokens, lengths, scores, strict=True)
        rows.append([(t[len(prompt) : n].tolist(), float(s)) for t, n, s in found if s > -np.inf])
    return rows


def assert_same(found, expected):
    assert [text for text, _ in found] == [list(text) for text, _ in expected]
    # float32 sums of ten log-probabilities
    np.testing.assert_allclose(
        [score for _, score in found], [score for _, score in expected], rtol=1e-5, atol=1e-5
    )


def reference(
    weights,
    prompt,
    max_tokens,
    how,
    stop_tokens,
    score,
    diversity=0.0,
    allowed=None,
    always_on=False,
):
    """Beam search as it is described: lists of (log-probability, text), one row, one group after
    the other at each step."""
    size = how.beams // how.groups
    groups = [dict(running=[(0.0, ())], finished=[], done=False) for _ in range(how.groups)]
    for n in range(1, max_tokens + 1):
        taken = np.zeros(weights["out"].shape[1])
        for group in groups:
            if group["done"]:
                continue
            pool = []
            for total, text in group["running"]:
                scores = log_probabilities(weights, (*prompt, *text)) - diversity * taken
                new = [
                    (total + scores[t], (*text, t))
                    for t in range(len(scores))
                    if not allowed or allowed(text, t)
                ]
                # the same text: the best one counts
                stopped = [entry for entry in new if entry[1][-1] in stop_tokens]
                pool += [entry for entry in new if entry not in stopped or entry == max(stopped)]
            pool.sort(reverse=True)
            ends = lambda text, n=n: text[-1] in stop_tokens or n == max_tokens
            group["finished"] += [
                (score(total, n), text) for total, text in pool[:size] if ends(text)
            ]
            group["finished"] = sorted(group["finished"], reverse=True)[:size]
            group["running"] = [entry for entry in pool if entry[1][-1] not in stop_tokens][:size]
            for _, text in group["running"]:
                taken[text[-1]] += 1
            full = len(group["finished"]) == size
            lengths = range(n, max_tokens + 1) if how.early_stopping == "never" else [n]
            best = (
                max((score(group["running"][0][0], m) for m in lengths), default=0)
                if group["running"]
                else -math.inf
            )
            improves = not full or best > group["finished"][-1][0]
            group["done"] = (
                not group["running"] or not improves or (how.early_stopping is True and full)
            )
            group["done"] &= not always_on
    found = {}  # each text once
    for total, text in sorted(
        (entry for group in groups for entry in group["finished"]), reverse=True
    ):
        found.setdefault(text[:-1] if text[-1] in stop_tokens else text, (text, total))
    return list(found.values())[: how.n_best]


PENALTIES = {p: (p, lambda s, n, p=p: s / n**p) for p in (0.0, 1.0, 0.6, 2.0, -1.0)}
SEEDS = (0, 1, 6)  # in 6 a text that falls short at the limit gets better before it
GNMT = {f"gnmt {a}": (gnmt(a), lambda s, n, a=a: s / ((5 + n) / 6) ** a) for a in (0.8, -0.8, 3.0)}


@pytest.mark.thorough
@pytest.mark.parametrize(  # each kind of beams with one way to stop; the other pairs are slow
    ("beams", "penalties", "early_stopping"),
    [
        pytest.param(*kind, early, marks=() if i == k else pytest.mark.slow)
        for i, kind in enumerate([(1, PENALTIES), (8, PENALTIES), (3, GNMT)])
        for k, early in enumerate([False, "never", True])
    ],
)
def test_plain_beams_equal_the_reference(beams, penalties, early_stopping):
    """Rows with prompts of different length, each as it is alone; stop tokens are among the likely
    ones."""
    V, prompts = 7, [[1, 2, 3], [4], [5, 5]]
    for seed, (penalty, score) in itertools.product(SEEDS, penalties.values()):
        weights = network(seed, V)
        how = Beams(beams, n_best=beams, length_penalty=penalty, early_stopping=early_stopping)
        stop_tokens = [[1, 2, 3, 4, 5], [0, 0, 0, 2, 2]][seed % 2]
        for row, prompt in zip(run(weights, prompts, 6, how, stop_tokens), prompts, strict=True):
            assert_same(row, reference(weights, prompt, 6, how, stop_tokens, score))
            # loses nothing to a search that always uses all its steps
            if early_stopping == "never":
                assert_same(
                    row, reference(weights, prompt, 6, how, stop_tokens, score, always_on=True)
                )


@pytest.mark.thorough
@pytest.mark.parametrize(("groups", "early_stopping"), [(2, False), (4, "never"), (8, True)])
def test_diverse_beams_equal_the_reference(groups, early_stopping):
    prompts = [[1, 2, 3], [4]]
    score = lambda s, n: s / n
    firsts = []
    for seed in range(3):
        weights = network(seed, 9)
        for diversity in (0.0, 0.7, 20.0):
            how = Beams(
                8, n_best=8, early_stopping=early_stopping, groups=groups, diversity=diversity
            )
            for row, prompt in zip(run(weights, prompts, 5, how, [0]), prompts, strict=True):
                expected = reference(weights, prompt, 5, how, [0], score, diversity)
                # two groups may find one text, with scores that differ by rounding
                assert_same(sorted(row), sorted((list(text), total) for text, total in expected))
                assert row == sorted(row, key=lambda entry: -entry[1])
                firsts.append((diversity, len({text[0] for text, _ in row})))
    mean = lambda d: np.mean([count for diversity, count in firsts if diversity == d])
    assert mean(20.0) > mean(0.0)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", PENALTIES | GNMT)
def test_enough_beams_find_the_best_of_all_texts(kind):
    V, steps, prompt, stop = 3, 4, [1], 0
    penalty, score = (PENALTIES | GNMT)[kind]
    weights, every = network(5, V), []

    def walk(text, total):
        if text and (text[-1] == stop or len(text) == steps):
            every.append((score(total, len(text)), text))
            return
        for token, more in enumerate(log_probabilities(weights, (*prompt, *text))):
            walk((*text, token), total + more)

    walk((), 0.0)
    how = Beams(V**steps, n_best=10, length_penalty=penalty, early_stopping="never")
    expected = [(text, s) for s, text in sorted(every, reverse=True)[:10]]
    assert_same(run(weights, [prompt], steps, how, [stop])[0], expected)


def first_is_four(scores, history):
    first = (history.length == history.prompt)[:, None]
    only = jnp.where(jnp.arange(scores.shape[-1]) == 4, 0.0, -jnp.inf)
    return jnp.where(first, only[None], scores)


def never_twice(scores, history):
    """Removes every token that the text holds already, prompt included."""
    used = jnp.arange(history.tokens.shape[1])[None] < history.length[:, None]
    hits = (history.tokens[:, :, None] == jnp.arange(scores.shape[-1])[None, None]) & used[
        :, :, None
    ]
    return jnp.where(hits.any(axis=1), -jnp.inf, scores)


@pytest.mark.thorough
def test_filters_see_the_text_of_their_row():
    weights, prompts, how = network(2, 9), [[1, 2], [3]], Beams(4, n_best=3)
    for row, prompt in zip(
        run(weights, prompts, 5, how, [0], (never_twice,)), prompts, strict=True
    ):
        allowed = lambda text, token, prompt=prompt: token not in (*prompt, *text)
        assert_same(
            row, reference(weights, prompt, 5, how, [0], lambda s, n: s / n, allowed=allowed)
        )
    for row in run(weights, prompts, 5, how, [0], (first_is_four,)):
        assert all(text[0] == 4 for text, _ in row) and len({tuple(text) for text, _ in row}) == 3


@pytest.mark.thorough
def test_a_text_ends_where_no_token_is_left():
    """Of four tokens, one in the prompt, none twice: six orders of three, whether the limit is
    there or later."""
    orders = {
        (a, b, c) for a in (0, 2, 3) for b in (0, 2, 3) for c in (0, 2, 3) if len({a, b, c}) == 3
    }
    for limit in (6, 3):
        found = run(
            network(0, 4),
            [[1]],
            limit,
            Beams(8, n_best=8, early_stopping="never"),
            [],
            (never_twice,),
        )[0]
        # for two more beams there is no text: their scores are -inf, which `texts` leaves out
        assert len(found) == 6
        assert {tuple(text) for text, _ in found} == orders


def no_number_beyond_the_slots(scores, history):
    """As of a model whose cache is full."""
    return jnp.where((history.length >= history.tokens.shape[1])[:, None], jnp.nan, scores)


@pytest.mark.thorough
def test_a_row_ends_where_its_slots_are_full():
    weights, how = network(1, 7), Beams(3, n_best=3)
    full, short = run(
        weights, [[1, 2, 3], [4]], 20, how, [], (no_number_beyond_the_slots,), slots=8
    )
    assert_same(full, reference(weights, [1, 2, 3], 5, how, [], lambda s, n: s / n))
    assert_same(short, reference(weights, [4], 7, how, [], lambda s, n: s / n))


@pytest.mark.thorough
def test_limits_stop_tokens_penalties_and_diversity_are_no_constants():
    chex.clear_trace_counter()
    weights = jax.tree.map(np.float32, network(0, 7))

    @jax.jit
    @chex.assert_max_traces(n=2)  # a number, a function
    def once(how, max_tokens, stop_tokens):
        logits, state = advance(
            jax.tree.map(jnp.array, weights), jnp.array([1, 2]), jnp.zeros((2, 8))
        )
        history = History(jnp.zeros((2, 9), jnp.int32), jnp.array([1, 1]), jnp.array([1, 1]))
        return beam_search(
            partial(advance, jax.tree.map(jnp.array, weights)),
            logits,
            state,
            history,
            max_tokens,
            how,
            stop_tokens,
        )

    for i in range(3):
        for penalty in (1.0 - i, gnmt(0.5 * i)):
            how = Beams(4, 2, penalty, groups=2, diversity=0.1 * i)
            out = once(how, 4 + i, np.array([i, 2 * i]))
            assert out.tokens.shape == (2, 2, 9) and out.length.max() <= 5 + i


@pytest.mark.thorough
def test_a_plain_function_is_a_length_penalty():
    weights, score = network(3, 7), lambda total, length: total - 0.3 * length
    how = Beams(4, 4, score, early_stopping="never")
    assert_same(run(weights, [[1]], 5, how, [0])[0], reference(weights, [1], 5, how, [0], score))


@pytest.mark.parametrize(
    "bad",
    [dict(n_best=5), dict(beams=0), dict(n_best=0), dict(groups=3), dict(early_stopping="no")],
)
def test_bad_settings_are_refused(bad):
    with pytest.raises(ConfigError):
        Beams(**bad)


@pytest.mark.parametrize("number", [0, 1, 1.0])
def test_numbers_that_equal_true_and_false_are_neither(number):
    how = Beams()
    # this suite checks the types of fields, a user's program does not
    object.__setattr__(how, "early_stopping", number)
    with pytest.raises(ConfigError, match=f"early_stopping={number}: must be True, False"):
        how.__post_init__()


@pytest.mark.thorough
def test_texts_to_score_have_tokens_of_the_vocabulary_and_no_part_is_empty():
    """Wherever the wrong token stands: the last one is predicted, but not read."""
    config = ModelConfig(vocab_size=7, num_layers=1, d_model=8, num_heads=2, context_length=6)
    weights, text = jax.eval_shape(lambda: models.init(config, jax.random.key(0))), [1, 2, 3, 4]
    for place, wrong in itertools.product(range(4), (-1, 7)):
        changed = [*text[:place], wrong, *text[place + 1 :]]
        with pytest.raises(ConfigError, match=f"token {wrong} is outside the vocabulary of 7"):
            decoding.score(config, weights, [[1], changed[:2]], [[2], changed[2:]])
    for prompts, continuations in (([[]], [text]), ([text], [[]]), ([text], [])):
        with pytest.raises(
            ConfigError, match="as many continuations; no prompt or continuation may be empty"
        ):
            decoding.score(config, weights, prompts, continuations)


@pytest.mark.thorough
def test_no_score_of_tokens_that_the_mask_shows_to_those_before():
    """Behind a prefix each token is predicted; one that begins inside, or a model of both
    directions, has no score."""
    config = ModelConfig(vocab_size=7, num_layers=1, d_model=8, num_heads=2, context_length=9)
    prefix = replace(config, masks=(masks.causal(), masks.causal() | masks.prefix(3)))
    weights, new = models.init(config, jax.random.key(0)), [4, 5, 6]
    for wrong, prompts in (
        (prefix, [[1, 2, 3], [1, 2]]),
        (replace(config, masks=(masks.full(),)), [[1] * 3, [1] * 3]),
    ):
        with pytest.raises(ConfigError, match="score: the mask shows tokens"):
            decoding.score(wrong, weights, prompts, [new, new])
    (found,) = decoding.score(prefix, weights, [[1, 2, 3]], [new])
    logits, cache = decoding.prefill(
        prefix, weights, jnp.array([[1, 2, 3]]), decoding.init_cache(prefix, 1, 9)
    )
    for token, log in zip(new, found.tokens, strict=True):
        np.testing.assert_allclose(log, jax.nn.log_softmax(logits.reshape(-1))[token], rtol=1e-5)
        logits, cache = decoding.decode_step(prefix, weights, jnp.array([[token]]), cache)


@pytest.mark.thorough
def test_scores_of_a_model_are_those_of_its_forward_pass():
    config = ModelConfig(
        vocab_size=19, num_layers=2, d_model=24, num_heads=4, context_length=24, init_std=0.4
    )
    params, prompts = (
        jax.jit(models.init, static_argnums=0)(config, jax.random.key(3)),
        [[1, 2, 3, 4], [7], [4, 4]],
    )
    forward = jax.jit(models.apply, static_argnums=0)
    how, stop = Beams(4, 4, length_penalty=0.7), (5, 11)
    for prompt, row in zip(
        prompts,
        decoding.search(config, params, prompts, 7, beams=how, stop_tokens=stop),
        strict=True,
    ):
        assert len({tuple(text) for text, _ in row}) == 4
        whole = np.zeros((4, 12), np.int32)
        for line, (text, _) in zip(whole, row, strict=True):
            line[: len(prompt + text)] = prompt + text
        logits = np.asarray(forward(config, params, whole).logits, np.float64)
        logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        for line, (text, score) in zip(logits, row, strict=True):
            assert not set(text) & set(stop)  # the stop token is left out, and counts
            log = lambda i, token, line=line, before=len(prompt) - 1: line[before + i, token]
            total = sum(log(i, token) for i, token in enumerate(text))
            ends = [total] if len(text) == 7 else [total + log(len(text), token) for token in stop]
            length = min(7, len(text) + 1)
            # float32, the cache sums more slots
            assert any(math.isclose(end / length**0.7, score, rel_tol=1e-4) for end in ends)
