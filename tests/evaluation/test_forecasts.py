"""Baselines of forecasts, beside their definitions."""

import numpy as np
import pytest

from jaxformer.errors import ConfigError
from jaxformer.evaluation.forecasts import autoregression, seasonal_naive_error


def test_the_error_of_the_seasonal_naive_forecast():
    values = np.random.default_rng(0).standard_normal(30)
    expected = np.mean([abs(values[t] - values[t - 4]) for t in range(4, 30)])
    assert seasonal_naive_error(values, 4) == pytest.approx(expected)
    with pytest.raises(ConfigError, match="season"):
        seasonal_naive_error(values, 0)
    for without in (values[:4], np.tile(values[:4], 3)):  # too short; each season like the last
        with pytest.raises(ConfigError, match="would divide by 0"):
            seasonal_naive_error(without, 4)


def test_an_autoregression_knows_what_comes_before_and_nothing_more():
    rng = np.random.default_rng(1)
    values = np.zeros(80)
    for t in range(2, 80):
        values[t] = 0.5 + 1.2 * values[t - 1] - 0.5 * values[t - 2] + 0.1 * rng.standard_normal()
    found = autoregression(values, 60, 5, most_lags=1)
    # least squares of one lag, then its recursion
    past = values[:60]
    constant, slope = np.linalg.lstsq(np.stack([np.ones(59), past[:-1]], 1), past[1:])[0]
    assert found.shape == (16, 5)
    for row, begin in enumerate(range(60, 76)):
        last = values[begin - 1]
        for step in range(5):
            last = constant + slope * last
            assert found[row, step] == pytest.approx(last, rel=1e-6)
    changed = values.copy()
    changed[65:] = 7
    np.testing.assert_array_equal(autoregression(changed, 60, 5, 1)[:6], found[:6])
