"""The Transformer whose weights are written down runs any finite automaton, exactly."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from experiments.theory import automaton as theory
from jaxformer import models


@pytest.mark.thorough
@settings(max_examples=4, deadline=None)
@given(
    states=st.integers(1, 4),
    symbols=st.integers(1, 3),
    length=st.integers(1, 12),
    seed=st.integers(0),
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_gives_the_states_of_any_automaton(dtype, states, symbols, length, seed):
    automaton = theory.random_automaton(states, symbols, seed)
    texts = np.random.default_rng(seed).integers(symbols, size=(4, length))
    truth = np.array([theory.run(automaton, text) for text in texts.tolist()])
    assert (theory.answers(automaton, texts, dtype) == truth).all()


@pytest.mark.thorough
def test_the_first_layers_run_a_part_of_the_text():
    """l layers are right for 2^l symbols, and not for the next one."""
    automaton = theory.remainder(5)
    texts = np.random.default_rng(0).integers(2, size=(64, 9))
    truth = np.array([theory.run(automaton, text) for text in texts.tolist()])
    for layers in (1, 2, 3):
        is_right = (theory.answers(automaton, texts, layers=layers) == truth).all(axis=0)
        assert is_right[: 2**layers].all() and not is_right[2**layers]


def test_the_depth_is_the_logarithm_of_the_length():
    automaton = theory.remainder(3)
    depths = [theory.transformer(automaton, length).num_layers for length in (1, 3, 4, 63, 64)]
    assert depths == [1, 2, 3, 6, 7]


def test_the_automata_are_what_their_names_say():
    digits = [1, 0, 1, 1, 0, 1]  # 1, 2, 5, 11, 22, 45
    assert theory.run(theory.remainder(7), digits) == [1, 2, 5, 4, 1, 3]
    swap, move = 0, 1
    cups = theory.ball_under_cups()
    assert theory.run(cups, [swap, move, swap, move, move, move]) == [1, 2, 2, 3, 4, 0]


@pytest.mark.thorough
def test_the_weights_are_those_of_the_model():
    automaton = theory.remainder(2)
    spec = models.spec(theory.transformer(automaton, 5))
    written = theory.weights(automaton, 5)
    assert jax.tree.map(lambda leaf: leaf.shape, spec) == jax.tree.map(np.shape, written)
