"""Filters against float64 witnesses in NumPy, one row and one token at a time; against transformers
in tests/parity."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.decoding.filters import (
    BadWords,
    ForcedPrefix,
    Frequency,
    History,
    LogitBias,
    MinLength,
    MinP,
    NoRepeatNgram,
    Presence,
    Repetition,
    Temperature,
    TopK,
    TopP,
    Typical,
)  # fmt: skip
from jaxformer.errors import ConfigError

V = 50_257
rng = np.random.default_rng(0)
ROWS = {
    # GPT-2's vocabulary, one token nearly sure
    "peaked": np.concatenate([[30.0], rng.normal(size=V - 1)]),
    "flat": np.zeros(V),
    "wide": 4 * rng.normal(size=V),
    "ties": rng.integers(0, 4, 300).astype(float),
    "filtered": np.where(np.arange(300) % 7, rng.normal(size=300), -np.inf),  # as TopK leaves it
    "zeros": np.where(np.arange(300) % 2, 0.0, -0.0) - np.arange(300) % 3,
    "one": np.zeros(1),
}
SHARES = (1e-7, 0.1, 0.5, 0.9, 0.999, 1.0)
# four rows; their first PROMPTS tokens are the prompt
TEXTS = [
    [5, 1, 2, 3, 1, 2],
    [4, 4, 4],
    [7],
    [1, 2, 3, 1, 2, 3, 1, 2],
]
PROMPTS = [3, 1, 1, 2]
run = jax.jit(lambda keep, logits, history: keep(logits, history))  # filters are arguments


def history_of(texts=TEXTS, prompts=PROMPTS, slots=10):
    """Texts in rows; beyond their ends stand tokens that no filter may see."""
    tokens = np.tile([1, 2], (len(texts), slots))[:, :slots]
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    arrays = (tokens, [len(text) for text in texts], prompts)
    return History(*(jnp.asarray(array, jnp.int32) for array in arrays))


def random_logits(rows=4, width=9, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32) * 3


def kept_of(keep, logits):
    """Which logits of one row a filter leaves, each as it was."""
    filtered = np.asarray(run(keep, jnp.asarray(logits, jnp.float32)[None], None))[0]
    kept = np.isfinite(filtered)
    np.testing.assert_array_equal(filtered[kept], logits[kept])
    return kept


def probabilities_of(logits):
    exponentials = np.exp(logits - logits.max())
    return exponentials / exponentials.sum()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ROWS)
def test_top_p_keeps_the_fewest_of_the_likeliest(name):
    """The kept are a beginning of the tokens by (probability, index), as long as p asks for and no
    longer."""
    logits = ROWS[name].astype(np.float32)
    probabilities = probabilities_of(logits.astype(np.float64))
    order = np.argsort(-probabilities, kind="stable")
    for p in SHARES:
        kept = kept_of(TopP(p), logits)
        count = kept.sum()
        assert count >= 1 and set(np.flatnonzero(kept)) == set(order[:count])
        # float32 sums of 50,257 terms, relative to 1
        slack = 2e-6
        removed = probabilities[order[count:]].sum()
        assert removed <= 1 - p + slack
        if count > 1:
            assert removed + probabilities[order[count - 1]] > 1 - p - slack
    # p = 1 removes nothing that float32 knows a probability of
    np.testing.assert_array_equal(kept, probabilities > 1e-38)


@pytest.mark.thorough
def test_of_equal_tokens_top_p_keeps_the_first_and_no_more_than_it_needs():
    logits = jnp.array([[0.0, 1.0, 0.0, 1.0], [2.0, 2.0, 2.0, 2.0], [2.0, 2.0, 2.0, 2.0]])
    kept = np.isfinite(run(TopP([0.5, 0.5, 1e-6]), logits, None))
    np.testing.assert_array_equal(
        kept, [[False, True, False, True], [True, True, False, False], [True, False, False, False]]
    )


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("name", ROWS)
def test_top_k_keeps_ties_with_the_last(name):
    logits = ROWS[name].astype(np.float32)
    for k in (1, 7, 300, 10**6):
        kept = kept_of(TopK(k), logits)
        least = np.sort(logits)[::-1][min(k, len(logits)) - 1]
        np.testing.assert_array_equal(kept, (logits >= least) & np.isfinite(logits))


@pytest.mark.parametrize("name", ROWS)
def test_min_p_compares_probabilities(name):
    logits = ROWS[name].astype(np.float32)
    probabilities = probabilities_of(logits.astype(np.float64))
    for p in (0.0, 1e-6, 0.05, 0.3, 1.0):
        share = probabilities / probabilities.max()
        clear = (np.abs(share - p) > 1e-5 * p) | (share == p)  # float32 logarithms
        clear &= np.isfinite(logits)
        np.testing.assert_array_equal(kept_of(MinP(p), logits)[clear], (share >= p)[clear])


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("name", ROWS)
def test_typical_keeps_the_fewest_by_distance_from_the_entropy(name):
    logits = ROWS[name].astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        p = probabilities_of(logits.astype(np.float64))
        distance = np.abs(-np.log(p) + np.nansum(p * np.log(p)))
    for mass in (1e-3, 0.2, 0.9, 0.999):
        kept = kept_of(Typical(mass), logits)
        slack = 2e-5  # of distances, float32 logarithms; of sums, 50,257 terms
        farthest = distance[kept].max()
        assert (distance[~kept] >= farthest - slack).all()
        assert p[kept].sum() >= mass - slack
        assert p[distance < farthest - slack].sum() < mass + slack


def test_temperature_divides_and_leaves_greedy_rows():
    logits = random_logits()
    out = np.asarray(run(Temperature([0.5, 0.0, 1.0, 2.0]), jnp.asarray(logits), None))
    np.testing.assert_array_equal(out, logits / np.array([[0.5], [1], [1], [2]], np.float32))


@pytest.mark.parametrize("seed", range(3))
def test_penalties_of_repeated_tokens(seed):
    """Of each token alone; repetition counts the prompt, presence and frequency do not."""
    logits, expected = random_logits(seed=seed), {}
    for name in ("repetition", "presence", "frequency"):
        expected[name] = logits.astype(np.float64)
    for row, (text, prompt) in enumerate(zip(TEXTS, PROMPTS, strict=True)):
        for token in set(text):
            score, new = float(logits[row, token]), text[prompt:].count(token)
            expected["repetition"][row, token] = score * 1.3 if score < 0 else score / 1.3
            expected["presence"][row, token] -= 0.7 * (new > 0)
            expected["frequency"][row, token] -= 0.4 * new
    for name, made in (
        ("repetition", Repetition(1.3)),
        ("presence", Presence(0.7)),
        ("frequency", Frequency(0.4)),
    ):
        np.testing.assert_allclose(
            run(made, jnp.asarray(logits), history_of()), expected[name], rtol=1e-6, err_msg=name
        )


@pytest.mark.parametrize("n", [1, 2, 3, 4, 9])
def test_no_n_gram_is_repeated(n):
    logits = jnp.asarray(random_logits())
    removed = np.isinf(run(NoRepeatNgram(n), logits, history_of()))
    for row, text in enumerate(TEXTS):
        seen = {tuple(text[i : i + n]) for i in range(len(text) - n + 1)}
        repeats = [
            len(text) >= n - 1 and (*text[len(text) - n + 1 :], token) in seen for token in range(9)
        ]
        np.testing.assert_array_equal(removed[row], repeats)


def test_bad_words_are_removed_where_they_would_end():
    words = [
        [3],
        [1, 2, 3],
        [4, 4, 4, 4],
        [4, 4, 5],
        [9, 7, 0],
        [7, 7],
        [3, 1, 2, 8],
        [0, 0, 0, 0, 0, 0, 7, 6],
    ]
    removed = np.isinf(run(BadWords(words), jnp.asarray(random_logits()), history_of()))
    for row, text in enumerate(TEXTS):
        ends = {
            word[-1]
            for word in words
            if text[max(len(text) - len(word) + 1, 0) :] == word[:-1] or len(word) == 1
        }
        assert set(np.flatnonzero(removed[row])) == ends, text


def test_bias_of_some_tokens_and_of_all():
    logits = random_logits()
    some = {2: 1.5, 8: -np.inf, 0: -0.25}
    bias = np.zeros(9, np.float32)
    for token, value in some.items():
        bias[token] = value
    for made in (LogitBias(some), LogitBias(bias), LogitBias(np.tile(bias, (4, 1)))):
        np.testing.assert_array_equal(run(made, jnp.asarray(logits), None), logits + bias)


def test_no_stop_token_before_the_least_length():
    new = np.subtract([len(text) for text in TEXTS], PROMPTS)  # 3, 2, 0, 6
    removed = np.isinf(
        run(
            MinLength([4, 2, 1, 0], np.array([3, -1, 8])),
            jnp.asarray(random_logits()),
            history_of(),
        )
    )
    for row, least in enumerate((4, 2, 1, 0)):
        assert set(np.flatnonzero(removed[row])) == ({3, 8} if new[row] < least else set())


def test_the_first_new_tokens_are_forced_even_if_removed():
    # of 3, 2, 0 and 6 new tokens
    prefixes = np.array([[0, 0, 0, 5], [1, -1, -1, -1], [6, 2, 3, 4], [1, 1, 1, 1]])
    logits = random_logits()
    logits[2, 6] = -np.inf
    out = np.asarray(run(ForcedPrefix(prefixes), jnp.asarray(logits), history_of()))
    for row, token in ((0, 5), (2, 6)):
        assert set(np.flatnonzero(np.isfinite(out[row]))) == {token}
    np.testing.assert_array_equal(out[[1, 3]], logits[[1, 3]])
    alike = run(ForcedPrefix([8]), jnp.asarray(logits), history_of())
    np.testing.assert_array_equal(np.isfinite(alike).sum(axis=1), [9, 9, 1, 9])


NUMBERS = {
    Temperature: [0.7, 1.0, 0.0, 2.0],
    TopK: [1, 2, 5, 20],
    TopP: [0.2, 0.5, 0.9, 1.0],
    MinP: [0.0, 0.1, 0.5, 1.0],
    Typical: [0.2, 0.5, 0.9, 1.0],
    Repetition: [0.5, 1.0, 1.2, 3.0],
    Presence: [0.0, 1.0, -1.0, 2.0],
    Frequency: [0.0, 1.0, -1.0, 2.0],
    lambda length: MinLength(length, np.array([2, 3])): [0, 1, 3, 9],
    ForcedPrefix: [[5, -1, 1], [1, 2, 3], [4, 4, 4], [-1, 2, 2]],
}


def compiled_at_most(times):
    chex.clear_trace_counter()
    return jax.jit(
        chex.assert_max_traces(lambda keep, logits, history: keep(logits, history), n=times)
    )


@pytest.mark.thorough_after(2)
@pytest.mark.parametrize("make", NUMBERS)
def test_other_numbers_compile_nothing_and_a_row_is_what_it_is_alone(make):
    logits, history, numbers = jnp.asarray(random_logits(width=40)), history_of(), NUMBERS[make]
    apply = compiled_at_most(2)  # one number per row, and one for all
    together = apply(make(numbers), logits, history)
    for row, number in enumerate(numbers):  # integers among floats
        np.testing.assert_array_equal(together[row], apply(make(number), logits, history)[row])


@pytest.mark.thorough
def test_other_words_and_biases_of_one_shape_compile_nothing():
    logits, history = jnp.asarray(random_logits(width=40)), history_of()
    for makes in (
        [BadWords([[1, 2], [3]]), BadWords([[4, 4], [5, 2]])],
        [LogitBias({1: 2.0, 3: 0.0}), LogitBias({7: 1, 2: -np.inf})],
        [NoRepeatNgram(2), NoRepeatNgram(2)],
    ):
        apply = compiled_at_most(1)
        for made in makes:
            apply(made, logits, history)


def test_numbers_that_mean_nothing_are_refused():
    for make, number in (
        (Temperature, -1.0),
        (Temperature, 1e-40),
        (Temperature, float("nan")),
        (Temperature, float("inf")),
        (TopK, 0),
        (TopP, 0.0),
        (TopP, [0.5, 1.5]),
        (MinP, -0.1),
        (Typical, 0),
        (Repetition, 0),
        (Presence, float("inf")),
        (Frequency, float("nan")),
        (NoRepeatNgram, 0),
        (BadWords, [[1], []]),
        (BadWords, [[-1]]),
        (LogitBias, {-1: 1.0}),
        (LogitBias, {1: float("nan")}),
        (lambda length: MinLength(length, [0]), -1),
        (ForcedPrefix, [1, -2]),
        (TopK, 2.5),
        (TopK, float("inf")),
        (ForcedPrefix, [1.5]),
        (LogitBias, {1.5: 1.0}),  # were cut to whole ones
    ):
        with pytest.raises(ConfigError, match="must be"):
            make(number)


def test_every_integer_of_the_search_has_the_order_of_its_float():
    """The k-th largest of any floats, tiny, huge, of both signs and both zeros, is one of them."""
    values = np.concatenate(
        [
            rng.normal(size=200) * 10.0 ** rng.integers(-37, 38, 200),
            [0.0, -0.0, np.inf, -np.inf, 3e38, -3e38],
        ]
    )
    values = values.astype(np.float32)
    for k in (1, 2, 3, 100, 150, 205, 206):
        kept = np.asarray(run(TopK(k), jnp.asarray(values)[None], None))[0]
        np.testing.assert_array_equal(
            kept > -np.inf, (values >= np.sort(values)[-k]) & (values > -np.inf)
        )
