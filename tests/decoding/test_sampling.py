"""Filters of sampling against a float64 witness in NumPy; against transformers in tests/parity."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.decoding import sampling

V = 50_257
rng = np.random.default_rng(0)
ROWS = {
    "peaked": np.concatenate([[30.0], rng.normal(size=V - 1)]),  # GPT-2's vocabulary, one token nearly sure
    "flat": np.zeros(V),
    "wide": 4 * rng.normal(size=V),
    "ties": rng.integers(0, 4, 300).astype(float),
    "filtered": np.where(np.arange(300) % 7, rng.normal(size=300), -np.inf),  # as top_k leaves it
    "one": np.zeros(1),
}
SHARES = (1e-7, 0.1, 0.5, 0.9, 0.999, 1.0)


def kept_of(filtered, logits):
    """Which logits a filter left, each as it was."""
    kept = np.isfinite(np.asarray(filtered))[0]
    np.testing.assert_array_equal(np.asarray(filtered)[0][kept], logits[kept])
    return kept


def probabilities_of(logits):
    exponentials = np.exp(logits - logits.max())
    return exponentials / exponentials.sum()


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("p", SHARES)
def test_top_p_keeps_the_fewest_of_the_likeliest(name, p):
    """The kept are a beginning of the tokens by (probability, index), as long as p asks for and no longer."""
    logits = ROWS[name].astype(np.float32)
    kept = kept_of(sampling.top_p(jnp.asarray(logits)[None], p), logits)
    probabilities = probabilities_of(logits.astype(np.float64))
    order = np.argsort(-probabilities, kind="stable")
    count = kept.sum()
    assert count >= 1 and set(np.flatnonzero(kept)) == set(order[:count])
    # float32 sums of 50,257 terms, relative to 1
    slack = 2e-6
    removed = probabilities[order[count:]].sum()
    assert removed <= 1 - p + slack
    if count > 1:
        assert removed + probabilities[order[count - 1]] > 1 - p - slack


@pytest.mark.parametrize("name", ROWS)
def test_top_p_of_one_removes_nothing_that_float32_knows_a_probability_of(name):
    logits = ROWS[name].astype(np.float32)
    kept = kept_of(sampling.top_p(jnp.asarray(logits)[None], 1.0), logits)
    np.testing.assert_array_equal(kept, probabilities_of(logits.astype(np.float64)) > 1e-38)


def test_of_equal_tokens_top_p_keeps_the_first_and_no_more_than_it_needs():
    kept = np.isfinite(sampling.top_p(jnp.array([[0.0, 1.0, 0.0, 1.0], [2.0, 2.0, 2.0, 2.0]]), 0.5))
    np.testing.assert_array_equal(kept, [[False, True, False, True], [True, True, False, False]])
    kept = np.isfinite(sampling.top_p(jnp.array([[2.0, 2.0, 2.0, 2.0]]), 1e-6))
    np.testing.assert_array_equal(kept, [[True, False, False, False]])


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("k", [1, 7, 300, 10**6])
def test_top_k_keeps_ties_with_the_last(name, k):
    logits = ROWS[name].astype(np.float32)
    kept = kept_of(sampling.top_k(jnp.asarray(logits)[None], k), logits)
    least = np.sort(logits)[::-1][min(k, len(logits)) - 1]
    np.testing.assert_array_equal(kept, (logits >= least) & np.isfinite(logits))


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_min_p_compares_probabilities(name, dtype):
    """Also of logits in 16 bits, whose sum with log(p) would be rounded to 1/8 of an e-fold at 30."""
    logits = np.asarray(jnp.asarray(ROWS[name], dtype)).astype(np.float32)
    probabilities = probabilities_of(logits.astype(np.float64))
    for p in (1e-6, 0.05, 0.3, 1.0):
        kept = kept_of(sampling.min_p(jnp.asarray(logits, dtype)[None], p), logits)
        share = probabilities / probabilities.max()
        clear = (np.abs(share - p) > 1e-5 * p) | (share == p)  # float32 exponentials
        np.testing.assert_array_equal(kept[clear], (share >= p)[clear])
