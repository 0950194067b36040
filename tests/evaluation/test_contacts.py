"""Contacts without training, beside definitions that count one pair at a time."""

import math

import numpy as np
import pytest

from jaxformer.errors import ConfigError
from jaxformer.evaluation.contacts import (
    frequencies,
    mean_field,
    mean_top_precision,
    mutual_information,
    top_precision,
    without_average_product,
)

S, R, Q = 17, 5, 3


def random_alignment(seed, residues=R):
    return np.random.default_rng(seed).integers(Q, size=(S, residues))


def share(alignment, i, j, a, b, pseudocount):
    """The frequency of the types a and b at the residues i and j."""
    if i == j:
        one = sum(row[i] == a for row in alignment) / len(alignment)
        return ((1 - pseudocount) * one + pseudocount / Q) * (a == b)
    both = sum(row[i] == a and row[j] == b for row in alignment) / len(alignment)
    return (1 - pseudocount) * both + pseudocount / Q**2


def corrected(scores):
    found = np.zeros((R, R))
    mean = lambda i: sum(scores[i, k] for k in range(R) if k != i) / (R - 1)
    whole = sum(mean(i) for i in range(R)) / R
    for i in range(R):
        for j in range(R):
            found[i, j] = (scores[i, j] if i != j else 0) - mean(i) * mean(j) / whole
    return found


@pytest.mark.parametrize("pseudocount", [0.1, 0.8])
@pytest.mark.parametrize("seed", [0, 1])
def test_mutual_information_equals_its_definition(seed, pseudocount):
    x = random_alignment(seed)
    scores = np.zeros((R, R))
    for i in range(R):
        for j in range(R):
            for a in range(Q):
                for b in range(Q):
                    f = share(x, i, j, a, b, pseudocount)
                    one, other = (share(x, k, k, t, t, pseudocount) for k, t in ((i, a), (j, b)))
                    scores[i, j] += f * math.log(f / one / other) if f else 0
    found = mutual_information(x, Q, pseudocount)
    np.testing.assert_allclose(found, corrected(scores), atol=1e-12)


@pytest.mark.parametrize("seed", [0, 1])
def test_mean_field_equals_its_definition(seed):
    """Couplings relative to the last type, then each with the means of its types taken off."""
    x, p = random_alignment(seed), 0.5
    places = [(i, a) for i in range(R) for a in range(Q - 1)]
    covariance = [
        [
            share(x, i, j, a, b, p) - share(x, i, i, a, a, p) * share(x, j, j, b, b, p)
            for j, b in places
        ]
        for i, a in places
    ]
    inverse = np.linalg.inv(np.array(covariance))
    scores = np.zeros((R, R))
    for i in range(R):
        for j in range(R):
            block = np.zeros((Q, Q))
            for a in range(Q - 1):
                for b in range(Q - 1):
                    block[a, b] = -inverse[places.index((i, a)), places.index((j, b))]
            for a in range(Q):
                for b in range(Q):
                    centred = block[a, b] - block[a].mean() - block[:, b].mean() + block.mean()
                    scores[i, j] += centred**2
    found = mean_field(x, Q, p)
    np.testing.assert_allclose(found, corrected(np.sqrt(scores)), atol=1e-10)


def test_frequencies_are_those_of_a_distribution():
    single, double = frequencies(random_alignment(3), Q, 0.3)
    np.testing.assert_allclose(single.sum(axis=1), 1)
    np.testing.assert_allclose(double.sum(axis=(1, 3)), 1)
    np.testing.assert_allclose(double, double.transpose(2, 3, 0, 1))
    for i in range(R):
        np.testing.assert_allclose(np.diag(double[i, :, i]), single[i])


@pytest.mark.parametrize("method", [mutual_information, mean_field])
def test_a_pair_that_always_agrees_is_the_surest(method):
    rng = np.random.default_rng(0)
    x = rng.integers(Q, size=(200, 8))
    x[:, 6] = (x[:, 1] + 1) % Q
    scores = method(x, Q)
    np.testing.assert_allclose(scores, scores.T, atol=1e-9)
    assert np.unravel_index(np.argmax(np.triu(scores, 1)), scores.shape) == (1, 6)
    # a column that never changes says nothing, and is no error
    x[:, 2] = 0
    assert np.isfinite(method(x, Q)).all()


def test_the_correction_of_equal_scores_leaves_nothing():
    found = without_average_product(np.ones((R, R)))
    off = ~np.eye(R, dtype=bool)
    np.testing.assert_allclose(found[off], 0, atol=1e-12)
    assert np.isfinite(without_average_product(np.zeros((R, R)))).all()


def test_the_precision_counts_distant_pairs_alone():
    residues = 8
    truth = np.zeros((residues, residues))
    truth[0, 5] = truth[1, 7] = truth[5, 0] = truth[7, 1] = 1
    truth[0, 1] = 1  # too near to count
    scores = np.zeros((residues, residues))
    scores[0, 1] = 9
    scores[0, 5], scores[2, 6], scores[1, 7] = 3, 2, 1
    assert top_precision(scores, truth, 4, 1) == 1
    assert top_precision(scores, truth, 4, 2) == 0.5
    assert top_precision(scores, truth, 4, 3) == pytest.approx(2 / 3)
    assert top_precision(scores, truth) == pytest.approx(2 / residues)
    # pairs that do not count may be marked by a negative number
    assert top_precision(scores, np.where(truth > 0, truth, -1), 4, 2) == 0.5
    both = mean_top_precision(np.stack([scores, scores]), np.stack([truth, 0 * truth]))
    assert both == pytest.approx(1 / residues)


@pytest.mark.parametrize("method", [mean_field, mutual_information])
def test_what_is_no_alignment_is_refused(method):
    x = random_alignment(0)
    for wrong in (x + 1, x - 1, x[0], x.astype(float), x[:0]):
        with pytest.raises(ConfigError, match=r"expected integers \[S, R\] from 0 to 2"):
            method(wrong, Q)
    with pytest.raises(ConfigError, match=r"pseudocount=1\.5"):
        method(x, Q, 1.5)
    with pytest.raises(ConfigError, match="pseudocount=0"):
        mean_field(x, Q, 0.0)
