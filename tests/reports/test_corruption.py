"""Hidden tokens and corrupted spans: what users of transformers and T5 reported."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxformer.objectives.corruption import corrupt_spans, span_counts
from jaxformer.objectives.masked import hide_tokens

KEY = jax.random.key(0)
SENTINEL, END = 5000, 1


@pytest.mark.thorough
@pytest.mark.report(
    "huggingface/transformers#21803",
    listed="third 25",
    right=(
        "Words are hidden whole: 15 %; of their tokens 80 % are the mask, 10 % any token, 10 % "
        "as they were."
    ),
)
def test_shares_of_hidden_tokens():
    rng = np.random.default_rng(0)
    starts = rng.random((2000, 32)) < 0.4
    tokens = rng.integers(0, 50, starts.shape)
    hide = jax.jit(lambda tokens, starts: hide_tokens(KEY, tokens, 99, 0.15, starts, 50))
    hidden, chosen = map(np.asarray, hide(tokens, starts))
    np.testing.assert_array_equal(hidden[~chosen], tokens[~chosen])
    inside = ~starts[:, 1:]  # this token goes on with the word before it
    np.testing.assert_array_equal(chosen[:, 1:][inside], chosen[:, :-1][inside])
    assert chosen[starts].mean() == pytest.approx(0.15, abs=0.01)
    drawn = np.bincount(hidden[chosen], minlength=100) / chosen.sum()
    assert drawn[99] == pytest.approx(0.8, abs=0.02)
    assert drawn[50:99].sum() == 0
    assert (hidden == tokens)[chosen].mean() == pytest.approx(0.1 + 0.1 / 50, abs=0.015)
    others = np.bincount(hidden[chosen & (hidden != tokens) & (hidden < 50)], minlength=50)
    assert others.min() > others.mean() / 2


def joined(source, target):
    """A text from the two parts of it: each sentinel of the source gives way to its span."""
    spans = {}
    for token in target[:-1]:
        if token > SENTINEL - 100:
            spans[token] = []
        else:
            spans[[*spans][-1]].append(token)
    return [one for token in source[:-1] for one in spans.pop(token, [token])] + [*spans]


@pytest.mark.thorough_after(2)
@pytest.mark.report(
    "google-research/text-to-text-transfer-transformer#905",
    "huggingface/transformers#22246",
    listed="third 25",
    right="Source and target together are the text, for any length. As in T5's code spans begin "
    "behind"
    " the first token and end with the last, and the docstring says so.",
)
@pytest.mark.parametrize(
    ("length", "rate", "mean_span"), [(2, 0.15, 3.0), (3, 0.55, 1.0), (32, 0.3, 2.0)]
)
def test_spans_and_the_rest_are_the_text(length, rate, mean_span):
    tokens = np.arange(100, 100 + length) + np.zeros((300, 1), int)
    corrupt = lambda tokens: corrupt_spans(KEY, tokens, SENTINEL, END, rate, mean_span)
    sources, targets = (np.asarray(part).tolist() for part in jax.jit(corrupt)(tokens))
    count, spans = span_counts(length, rate, mean_span)
    assert 1 <= spans <= count < length
    for source, target in zip(sources, targets, strict=True):
        assert source[-1] == target[-1] == END
        assert joined(source, target) == tokens[0].tolist()
        marks = [token for token in source if token > SENTINEL - 100]
        assert marks == [SENTINEL - number for number in range(spans)]
        assert [token for token in target if token in marks] == marks
        assert len(target) == count + spans + 1
        assert source[0] == 100 and source[-2] == marks[-1]
    assert len(set(map(tuple, sources))) > (1 if length > 3 else 0)


@pytest.mark.report(
    "huggingface/transformers#22246",
    listed="third 25",
    right="A text has as many spans as it can: each has a token, and a token stays before each.",
)
@given(st.integers(2, 600), st.floats(0.01, 0.99), st.floats(1, 40))
@settings(max_examples=60, deadline=None)
def test_any_text_has_room_for_its_spans(length, rate, mean_span):
    count, spans = span_counts(length, rate, mean_span)
    assert 1 <= spans <= min(count, length - count)
    assert abs(count - length * rate) <= 1
