"""`Evaluation`, the argument of a metric.

A metric is any function `Evaluation -> {name: number, or text such as a signature}`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from etils import epath


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A model at one moment of its training, and the data that it is scored on.

    A metric runs at every evaluation. A metric with the attribute `only_final = True` runs only at
    the end of training. A metric may have a method `check(model, dataset) -> names of its scores`.
    It is called before the first step, and raises ConfigError for what would fail at the end.

    A metric may write pictures into `folder`. All processes call the metric; only the first one
    (`jax.process_index() == 0`) should write.
    """

    model: Any  # the config as it is scored: without dropout
    params: Any  # its parameters
    dataset: Any  # its validation split is scored
    # the batches of that split on the devices, as large as a micro-batch
    batches: Callable[[], Iterator[dict[str, Any]]]
    precision: str  # of activations
    seed: int
    # the folder of the run, where a metric may write pictures; None outside of a run
    folder: epath.Path | None = None
    step: int = 0  # number of steps that the parameters have trained


def as_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as numbers; a metric with a value for each layer becomes name/0, name/1, ..."""
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if np.ndim(value):
            flat |= {f"{name}/{i}": float(of_layer) for i, of_layer in enumerate(value)}
        else:
            flat[name] = float(value)
    return flat
