"""Drawn examples: functions of (seed, i), alone and in batches."""

import numpy as np
import pytest

from jaxformer.data.batching import take_rows
from jaxformer.data.drawn import Drawn, dataset_of_drawn
from jaxformer.errors import ConfigError


def numbers(rng):
    return {"x": rng.standard_normal(3), "y": np.int32(rng.integers(9))}


@pytest.mark.parametrize("seed", range(3))
def test_an_example_is_a_function_of_the_seed_and_its_number(seed):
    split = Drawn(numbers, 7, seed)
    order = np.random.default_rng(seed).permutation(7)
    batch = take_rows(split, order)
    for place, i in enumerate(order):
        expected = numbers(np.random.default_rng((seed, i)))
        for name in ("x", "y"):
            np.testing.assert_array_equal(batch[name][place], expected[name])
            np.testing.assert_array_equal(split[int(i) - 7][name], expected[name])
    assert len(split) == 7
    with pytest.raises(IndexError):
        split[7]


def test_a_batch_may_be_made_of_all_draws_at_once():
    """An example alone is the same as in a batch."""

    def squares(draws):
        return {"squares": np.array(draws) ** 2}

    split = Drawn(lambda rng: rng.integers(9), 5, 0, squares)
    batch = take_rows(split, np.arange(5))
    np.testing.assert_array_equal(batch["squares"], [split.drawn(i) ** 2 for i in range(5)])
    assert [int(split[i]["squares"]) for i in range(5)] == batch["squares"].tolist()


def test_the_digest_is_that_of_what_decides_and_of_the_first_examples():
    def digest(decided_by, seed=0, draw=numbers, count=40):
        splits = Drawn(draw, count, seed), Drawn(draw, 4, seed + 1)
        return dataset_of_drawn(*splits, decided_by).digest

    first = digest("config")
    assert digest("config") == first
    others = [
        digest("other"),
        digest("config", seed=2),
        # another NumPy: the same facts, other numbers
        digest("config", draw=lambda rng: numbers(rng) | {"x": rng.standard_normal(3)}),
    ]
    assert len({first, *others}) == 4


def test_splits_of_one_seed_and_impossible_sizes_are_refused():
    with pytest.raises(ConfigError, match="give them different seeds"):
        dataset_of_drawn(Drawn(numbers, 4, 3), Drawn(numbers, 2, 3), "config")
    with pytest.raises(ConfigError, match=r"Drawn\.count"):
        Drawn(numbers, 0, 0)
    with pytest.raises(ConfigError, match=r"Drawn\.seed"):
        Drawn(numbers, 1, -1)
