"""The table of costs by the FLOPs of programs, and the transfer of learning rates between widths,
small."""

import numpy as np
import pytest

from experiments.theory import complexity, widths


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("name", complexity.ROWS)
def test_flops_grow_as_the_table_says(name):
    """No clock: the products of the program, forward and backward."""
    row = complexity.ROWS[name]
    assert complexity.flop_slope(row.function) == pytest.approx(row.exponent, abs=0.1)


@pytest.mark.thorough
def test_rows_compute_what_they_say():
    """Of the layers that the library does not have: a state that reads the past, and neighbours
    alone."""
    keys = complexity.random.split(complexity.random.key(0), 3)
    heads = [complexity.random.normal(key, (1, 32, complexity.N, complexity.H)) for key in keys]
    later = [x.at[:, 20:].set(0) for x in heads]
    for name, reach in {"recurrent": 12, "convolution, k = 4": 3, "feed-forward": 0}.items():
        function = complexity.ROWS[name].function
        changed = np.any(np.asarray(function(*heads) != function(*later)), axis=(0, 2, 3))
        assert not changed[:20].any() and changed[20:].all()
        one = [x.at[:, 10].set(0) for x in heads]
        moved = np.flatnonzero(
            np.any(np.asarray(function(*heads) != function(*one)), axis=(0, 2, 3))
        )
        assert moved[0] == 10 and moved[-1] - 10 >= reach
        assert name == "recurrent" or moved[-1] - 10 == reach


def test_slope():
    lengths = [10, 20, 40]
    assert complexity.slope(lengths, [3 * n**1.5 for n in lengths]) == pytest.approx(1.5)


def test_the_figure_of_costs_needs_no_times():
    """A panel of FLOPs, and one of times where they were measured."""
    counted = {name: [1e9, 2e9, 4e9] for name in complexity.ROWS}
    assert len(complexity.draw(counted, {}).axes) == 1
    measured = {"feed-forward": {4096: (1.0, 8), 8192: (2.0, 16), 16_384: (4.0, 32)}}
    assert len(complexity.draw(counted, measured).axes) == 2


@pytest.mark.thorough
def test_parameterisations_agree_at_the_base_alone():
    """One learning rate, two widths: equal losses where muP is the standard one, others beyond."""
    found = widths.study([16, 32], steps=3, rates=(0.01,))
    assert found["standard"][0] == found["muP"][0] and found["standard"][1] != found["muP"][1]
    assert widths.draw(found, [16, 32], (0.01,)).axes
