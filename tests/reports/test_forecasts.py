"""Forecasts of time series: what users of public code of PatchTST and its kin reported."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.zoo.patchtst import patches_of, statistics
from tests.zoo import test_patchtst as forecasts


@pytest.mark.thorough
@pytest.mark.report(
    "google-research/timesfm#522",
    right="a series is divided by the same deviation that multiplies its forecast",
)
@pytest.mark.parametrize("spread", [0.0, 1e-9, 1e-3, 1.0])
def test_normalisation_and_its_inverse(spread):
    x = 5 + spread * jax.random.normal(jax.random.key(0), (3, 21))
    mean, deviation = statistics(x)
    back = (x - mean) / deviation * deviation + mean
    np.testing.assert_allclose(back, x, rtol=1e-6)
    # the forecast of an almost constant series still moves with the model's answer
    params = [forecasts.random_parameters(forecasts.MODEL, seed) for seed in (0, 1)]
    first, second = (forecasts.apply(forecasts.MODEL, each, x).logits for each in params)
    assert np.abs(first - second).max() > 0


@pytest.mark.thorough
@pytest.mark.report(
    "unit8co/darts#2739",
    right="other units of a series change the units of its forecast alone, also small ones",
)
@pytest.mark.parametrize("scale", [1e-10, 1e-5, 1e-4, 100.0])
def test_small_units(scale):
    forecasts.test_forecasts_have_the_units_of_the_series(scale)


@pytest.mark.thorough
@pytest.mark.report(
    "google-research/timesfm#306",
    "romainlafarguette/quantileproj#11",
    "simonpf/quantnn#3",
    "dmlc/xgboost#10136",
    right="a quantile is never below a lower one",
)
def test_quantiles_in_order():
    forecasts.test_quantiles_do_not_cross()


@pytest.mark.report(
    "timeseriesAI/tsai#907",
    right="the last value is repeated behind the series, not the first one before it",
)
def test_the_side_of_the_padding():
    found = patches_of(jnp.arange(8.0)[None], 4, 2)
    expected = [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7], [6, 7, 7, 7]]
    np.testing.assert_array_equal(found[0], expected)


@pytest.mark.thorough
@pytest.mark.report(
    "yuqinie98/PatchTST#60",
    right="forecasts come in the units of the series, without a further step",
)
def test_forecasts_need_no_further_step():
    params = forecasts.random_parameters(forecasts.MODEL)
    x = 1e6 + forecasts.series(4)
    forecast = forecasts.apply(forecasts.MODEL, params, x).logits
    assert np.abs(forecast / 1e6 - 1).max() < 0.1
