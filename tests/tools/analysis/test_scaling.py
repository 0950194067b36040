"""Laws come back from the losses that they give, with and without noise; intervals hold what is
true."""

import numpy as np
import pytest

from jaxformer.errors import ConfigError
from jaxformer.tools.analysis import scaling


def grid(law, noise=0.0, seed=0):
    N, D = map(np.ravel, np.meshgrid(np.geomspace(1e6, 1e9, 5), np.geomspace(1e8, 1e11, 5)))
    return law.loss(N, D) * np.exp(np.random.default_rng(seed).normal(0, noise, N.size)), N, D


@pytest.mark.thorough
@pytest.mark.parametrize("law", [scaling.HOFFMANN, scaling.Law(1.2, 60.0, 0.25, 900.0, 0.35)])
def test_known_exponents_come_back(law):
    found = scaling.fit(*grid(law))
    assert abs(found.alpha - law.alpha) < 0.01 and abs(found.beta - law.beta) < 0.01
    noisy = scaling.fit(*grid(law, 1e-3))
    assert abs(noisy.alpha - law.alpha) < 0.01 and abs(noisy.beta - law.beta) < 0.01
    N = np.geomspace(1e5, 1e9, 7)
    alone = scaling.fit(law.E + law.A / N**law.alpha, N)
    assert abs(alone.alpha - law.alpha) < 0.01 and abs(alone.E / law.E - 1) < 0.01 and alone.B == 0


@pytest.mark.thorough
def test_one_run_gone_wrong_does_not_move_the_law():
    losses, N, D = grid(scaling.HOFFMANN)
    losses[7] *= 1.5
    found = scaling.fit(losses, N, D)
    assert abs(found.alpha - 0.34) < 0.01 and abs(found.beta - 0.28) < 0.01


@pytest.mark.thorough
def test_intervals_hold_the_truth_and_grow_with_noise():
    widths = []
    for noise in (1e-3, 4e-3):
        rows = grid(scaling.HOFFMANN, noise)
        low, high = scaling.intervals(scaling.fit(*rows), *rows, draws=60).alpha
        assert low < 0.34 < high
        widths.append(high - low)
    assert widths[0] < widths[1]


def test_the_optimum_is_the_least_loss_of_its_budget():
    for flops in (1e19, 1e23):
        N, D = scaling.HOFFMANN.optimum(flops)
        assert abs(6 * N * D / flops - 1) < 1e-9
        others = N * np.geomspace(0.5, 2, 101)
        losses = scaling.HOFFMANN.loss(others, flops / 6 / others)
        assert abs(others[np.argmin(losses)] / N - 1) < 0.02
    # Gopher's budget: Hoffmann et al. 2022, table A3, approach 3: 40 billion parameters
    assert scaling.HOFFMANN.optimum(5.76e23)[0] == pytest.approx(40e9, rel=0.25)


def test_parabolas_find_the_growth_of_the_best_size():
    budgets = np.geomspace(1e18, 1e21, 4)
    rows = [
        (c, n) for c in budgets for n in scaling.HOFFMANN.optimum(c)[0] * np.geomspace(0.5, 2, 5)
    ]
    flops, sizes = np.array(rows).T
    found = scaling.isoflop(flops, sizes, scaling.HOFFMANN.loss(sizes, flops / 6 / sizes))
    assert abs(found.exponent - 0.28 / 0.62) < 0.01
    # a parabola is not the law
    np.testing.assert_allclose(found.parameters, scaling.HOFFMANN.optimum(budgets)[0], rtol=0.05)


def test_kaplans_law_has_its_exponents():
    N = np.geomspace(1e4, 1e8, 9)
    assert np.polyfit(np.log(N), np.log(scaling.kaplan(N, 1e30)), 1)[0] == pytest.approx(
        -0.076, abs=1e-3
    )
    D = np.geomspace(1e6, 1e10, 9)
    assert np.polyfit(np.log(D), np.log(scaling.kaplan(1e30, D)), 1)[0] == pytest.approx(
        -0.103, abs=1e-3
    )


def test_what_shows_no_law_is_refused():
    with pytest.raises(ConfigError, match="2 runs; a law of 3 constants"):
        scaling.fit([2.0, 1.0], [1e6, 1e7])
    with pytest.raises(ConfigError, match="show no size of least loss"):
        scaling.isoflop([1.0] * 3, [1e6, 1e7, 1e8], [3.0, 2.5, 2.0])


def test_runs_that_determine_no_law_are_refused():
    true, D = scaling.HOFFMANN, np.geomspace(1e6, 3e7, 6)
    for N, tokens, said in (
        (np.full(6, 1e5), D, "runs of 1 different sizes"),
        (np.geomspace(1e5, 1e6, 6), np.full(6, 1e7), "runs of 1 different numbers of tokens"),
        (np.repeat([1e5, 1e6], 3), D, "runs of 2 different sizes"),
        (D / 20, D, "alpha and beta cannot be told apart"),
    ):
        with pytest.raises(ConfigError, match=said):
            scaling.fit(true.loss(N, tokens), N, tokens)
    with pytest.raises(ConfigError, match="all above 0 and finite"):
        scaling.fit([3.0, np.inf, 2.8, 2.7], np.geomspace(1e5, 1e6, 4))


@pytest.mark.parametrize("best", [1e6, 1e9])
def test_a_best_size_outside_of_the_runs_is_refused(best):
    sizes = np.array([1e7, 2e7, 4e7])
    losses = 2 + 0.02 * np.log(sizes / best) ** 2
    with pytest.raises(
        ConfigError, match=rf"it lies near {best:.3g}, outside of them".replace("+", r"\+")
    ):
        scaling.isoflop([6e15] * 3, sizes, losses)
