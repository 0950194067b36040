"""Masks against their definitions, written as loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer import masks

leaves = st.one_of(
    st.just(masks.full()),
    st.just(masks.causal()),
    st.builds(masks.window, st.integers(0, 5), st.integers(0, 3)),
    st.builds(masks.prefix, st.integers(0, 6)),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
        st.builds(lambda a: ~a, inner),
    ),
    max_leaves=6,
)


def visible(mask: masks.Mask, i: int, j: int) -> bool:
    """The definition, for one query and one key."""
    match mask.rule.__name__:
        case "_full":
            return True
        case "_causal":
            return j <= i
        case "_window":
            left, right = mask.args
            return i - left <= j <= i + right
        case "_prefix":
            return j < mask.args[0]
        case "_and":
            return all(visible(part, i, j) for part in mask.parts)
        case "_or":
            return any(visible(part, i, j) for part in mask.parts)
        case "_not":
            return not visible(mask.parts[0], i, j)
    raise AssertionError(mask.rule)


@settings(deadline=None, max_examples=60)
@given(trees, st.integers(1, 8), st.integers(0, 5), st.integers(0, 3))
def test_algebra_equals_its_definition(mask, T, more, offset):
    S = T + more
    dense = np.asarray(mask.dense(T, S))[0, 0]
    np.testing.assert_array_equal(dense, [[visible(mask, i + S - T, j) for j in range(S)] for i in range(T)])
    shifted = np.asarray(mask.at(offset).dense(T, S))[0, 0]
    np.testing.assert_array_equal(shifted, [[visible(mask, i + offset, j) for j in range(S)] for i in range(T)])


@settings(deadline=None, max_examples=100)
@given(trees)
def test_text_form_reads_back_as_the_same_value(mask):
    again = masks.parse(str(mask))
    assert again == mask and hash(again) == hash(mask)
    np.testing.assert_array_equal(again.dense(5, 7), mask.dense(5, 7))


@pytest.mark.parametrize(
    "text", ["causal", "windw(3)", "causal() + full()", "window(-1)", "__import__('os')", "window(1, 2, 3)", ""]
)
def test_other_text_is_refused(text):
    with pytest.raises(ValueError):
        masks.parse(text)


def test_segments_separate_and_padding_is_seen_by_nobody():
    ids = jnp.array([[0, 0, 1, 1, 2], [1, 1, 1, 0, 0]])
    dense = np.asarray(masks.segments(ids).dense(5, 5))
    for b in range(2):
        for i in range(5):
            for j in range(5):
                assert dense[b, 0, i, j] == (ids[b, i] == ids[b, j] and ids[b, j] != 0)


def test_lengths_and_prefix_by_row():
    q, kv = jnp.array([2, 4]), jnp.array([3, 1])
    dense = np.asarray(masks.lengths(q, kv).dense(4, 4))
    prefix = np.asarray(masks.prefix(kv).dense(4, 4))
    for b in range(2):
        for i in range(4):
            for j in range(4):
                assert dense[b, 0, i, j] == (i < q[b] and j < kv[b])
                assert prefix[b, 0, i, j] == (j < kv[b])


def test_masks_are_static_arguments_or_pytrees():
    static = jax.jit(lambda mask: mask.dense(3, 3), static_argnums=0)
    np.testing.assert_array_equal(
        static(masks.causal() | masks.prefix(1)), (masks.causal() | masks.prefix(1)).dense(3, 3)
    )
    traced = jax.jit(lambda mask: mask.dense(3, 3))
    mask = masks.causal() & masks.segments(jnp.array([[1, 1, 2]]))
    np.testing.assert_array_equal(traced(mask), mask.dense(3, 3))


def test_a_users_rule_is_a_mask():
    even = masks.Mask(lambda mask, q, kv: (q + kv) % 2 == 0)
    np.testing.assert_array_equal((even & masks.causal()).dense(3, 3)[0, 0], [[1, 0, 0], [0, 1, 0], [1, 0, 1]])


def test_two_offsets_do_not_combine():
    with pytest.raises(ValueError, match="offset"):
        masks.causal().at(1) & masks.full().at(2)
