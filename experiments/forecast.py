"""The next six values of a series, with bands: CO2, El Niño, sunspots, births of 192 countries.

PatchTST: Nie et al. 2022, arXiv:2211.14730. One model learns from the first 80 % of 195 series
that statsmodels ships: it reads 24 values, and answers with quantiles of the next six.
Scores come from all windows whose six values lie in the last 20 %, as a mean over series. `mase` is
the absolute error of the median, in units of the seasonal naive one on the first 80 %, as is
`quantile_loss`; `inside` is the share of values between the quantiles 0.1 and 0.9. Baselines:
`mase_naive` repeats the last season; `mase_ar` is statsmodels' AutoReg. `forecasts.png` draws both.
Expected: mase 1.23, 1.24, 1.22 (seeds 0, 1, 2), AR 1.64, naive 3.36; inside 0.64, 0.64, 0.66. AR is
better on CO2, El Niño, sunspots: 0.27, 0.58, 0.99, not 0.39, 0.70, 1.59, and was on economic
series, which were left out for it. Time: 5 minutes, beside 4 jobs.
Needs pip install 'jaxformer[forecast]'. Command: make train EXP=forecast
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from jaxformer import models
from jaxformer.data.arrays import dataset_of_arrays
from jaxformer.data.batching import every_row
from jaxformer.data.sources import Dataset
from jaxformer.errors import package_of
from jaxformer.evaluation.forecasts import autoregression, seasonal_naive_error
from jaxformer.evaluation.metric import Evaluation
from jaxformer.masks import full
from jaxformer.models import ModelConfig
from jaxformer.tools.analysis import figures
from jaxformer.training import Cosine, Experiment, Muon
from jaxformer.zoo.patchtst import Quantiles, SeriesPatches, quantile_loss, quantile_regression

LENGTH, HORIZON = 24, 6  # values that the model reads, and that it forecasts
LEVELS = (0.1, 0.25, 0.5, 0.75, 0.9)
DRAWN = ("CO2", "El Niño", "sunspots", "Brazil", "Nigeria", "Sweden")


class Series(NamedTuple):
    """A series in units of its seasonal naive error, so that a mean absolute error is its MASE."""

    values: np.ndarray
    season: int  # values of a season
    cut: int  # the number of values of the past


def load() -> dict[str, Series]:
    """The series by name."""
    with package_of("forecast"):
        from statsmodels import datasets
    names = "co2", "elnino", "sunspots", "fertility"
    air, sea, sun, births = (getattr(datasets, name).load_pandas().data for name in names)
    carbon = air["co2"].resample("MS").mean().interpolate()
    warmth = sea.drop(columns="YEAR").to_numpy().ravel()
    births = births.set_index("Country Name").loc[:, "1960":"2011"]
    found = [("CO2", carbon, 12), ("El Niño", warmth, 12), ("sunspots", sun["SUNACTIVITY"], 11)]
    found += [(country, numbers, 1) for country, numbers in births.dropna().iterrows()]
    series = {}
    for name, numbers, season in found:
        values = np.asarray(numbers, np.float64)
        cut = int(0.8 * len(values))
        series[name] = Series(values / seasonal_naive_error(values[:cut], season), season, cut)
    return series


@dataclass(frozen=True)
class Windows:
    """Windows of all series: training ones end before the cut, validation ones begin behind it."""

    def open(self, model: Any) -> Dataset:
        train, unseen = [], []
        for number, one in enumerate(load().values()):
            every = sliding_window_view(one.values.astype(np.float32), LENGTH + HORIZON)
            of_series: Any = {"series": every[:, :LENGTH], "future": every[:, LENGTH:]}
            of_series["number"] = np.full(len(every), number, np.int32)
            of_series["weights"] = np.ones(len(every))
            train.append({key: x[: one.cut - LENGTH - HORIZON + 1] for key, x in of_series.items()})
            unseen.append({key: x[one.cut - LENGTH :] for key, x in of_series.items()})
        splits = (jax.tree.map(lambda *x: np.concatenate(x), *parts) for parts in (train, unseen))
        return dataset_of_arrays(*splits, description="series of statsmodels")


def scores(scored: Evaluation) -> dict[str, float]:
    """The scores that the head of this file explains; `forecasts.png` draws six series."""
    series = load()
    batch = every_row(scored.dataset.validation)
    before, truth, number = batch["series"], batch["future"], batch["number"]
    forecast = models.apply(scored.model, scored.params, jnp.asarray(before)).logits
    losses, forecast = quantile_loss(forecast, jnp.asarray(truth), LEVELS), np.asarray(forecast)
    seasons = np.array([one.season for one in series.values()])[number][:, None]
    last = np.take_along_axis(before, LENGTH - seasons + np.arange(HORIZON) % seasons, axis=1)
    ar = [autoregression(x, cut, HORIZON, 2 * season + 2) for x, season, cut in series.values()]
    points = {"mase": forecast[..., 2], "mase_naive": last, "mase_ar": np.concatenate(ar)}
    found = {name: np.abs(point - truth) for name, point in points.items()}
    found["quantile_loss"] = np.asarray(losses)
    found["inside"] = (forecast[..., 0] <= truth) & (truth <= forecast[..., -1])
    if scored.folder is not None and jax.process_index() == 0:
        drawn = {name: number.searchsorted(list(series).index(name)) for name in DRAWN}
        path = scored.folder / "forecasts.png"
        figures.save(lambda: picture(batch, points, forecast, drawn), path)
    is_of = number == np.arange(len(series))[:, None]
    return {k: float(np.mean([x[rows].mean() for rows in is_of])) for k, x in found.items()}


def picture(batch: dict, points: dict, forecast: np.ndarray, drawn: dict) -> Any:
    """The first unseen window of each drawn series, with bands of 50 and of 80 %."""
    all_axes = figures.panels(len(drawn), 3, 3.4, 2.2)
    places = np.arange(1 - LENGTH, HORIZON + 1)
    lines = dict(zip(points, ("PatchTST", "last season", "AR"), strict=True))
    for axes, (name, i) in zip(all_axes, drawn.items(), strict=True):
        truth = np.append(batch["series"][i], batch["future"][i])
        axes.plot(places, truth, "k", lw=1, label="truth")
        for low in (0, 1):
            band = forecast[i, :, low], forecast[i, :, -1 - low]
            axes.fill_between(places[LENGTH:], *band, color=figures.COLORS[0], alpha=0.25, lw=0)
        for color, (key, label) in zip(figures.COLORS, lines.items(), strict=False):
            axes.plot(places[LENGTH:], points[key][i], color=color, label=label)
        axes.set_title(name, fontsize=9)
    labels = all_axes[0].get_legend_handles_labels()
    all_axes[0].figure.legend(*labels, loc="outside lower center", ncols=4, frameon=False)
    return all_axes[0].figure


experiment = Experiment(
    name="forecast",
    model=ModelConfig(
        vocab_size=0,
        num_layers=2,
        d_model=64,
        num_heads=4,
        context_length=12,
        d_ff=128,
        feedforward="gelu",
        embedding=SeriesPatches(LENGTH, patch=4, stride=2),
        heads=(Quantiles(HORIZON, LEVELS),),
        masks=(full(),),
        dropout_rate=0.1,
    ),
    data=Windows(),
    objective=quantile_regression,
    optimizer=Muon(learning_rate=1e-2, adam_learning_rate=2e-3),
    schedule=Cosine(warmup=50),
    steps=2000,
    batch_size=64,
    log_every=100,
    eval_every=1000,
    metrics=(scores,),
)
