"""Scores and baselines of forecasts of a time series. The package is statsmodels."""

import numpy as np
from jaxtyping import Float

from jaxformer.errors import ConfigError, check_whole, package_of


def seasonal_naive_error(past: Float[np.ndarray, " T"], season: int) -> float:
    """The mean of |y_t - y_{t - season}|: a mean absolute error divided by it is a MASE.

    Raises ConfigError for a season below 1, for a series no longer than a season, and for one that
    repeats its season exactly: then no error has a MASE. Hyndman & Koehler 2006, section 3.
    """
    check_whole("seasonal_naive_error: season", season)
    changes = np.abs(past[season:] - past[:-season])
    if not changes.any():
        raise ConfigError(
            f"seasonal_naive_error: {len(past)} values, season={season}: no value differs from "
            "that of a season before; a MASE would divide by 0"
        )
    return float(changes.mean())


def autoregression(
    values: Float[np.ndarray, " T"], cut: int, horizon: int, most_lags: int
) -> Float[np.ndarray, "n horizon"]:
    """AutoReg's forecasts of `horizon` values from each time on, from `cut` to the last full one.

    The parameters are fitted to the first `cut` values, and AIC chooses the number of lags. Each
    forecast knows all values before it. Raises ConfigError without the package.
    """
    with package_of("forecast"):
        from statsmodels.tsa.ar_model import AutoReg, ar_select_order
    lags = ar_select_order(values[:cut], most_lags, ic="aic").ar_lags or 0
    fitted = AutoReg(values[:cut], lags).fit().params
    forecasts = []
    for begin in range(cut, len(values) - horizon + 1):
        known = AutoReg(values[:begin], lags)
        forecasts.append(known.predict(fitted, begin, begin + horizon - 1))
    return np.stack(forecasts)
