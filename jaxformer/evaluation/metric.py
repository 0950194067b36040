"""What a metric is called with. A metric is any function `Evaluation -> {name: number, or text such as a signature}`."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from etils import epath


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A model at one moment of its training, and what it is scored on.

    A metric runs at every evaluation. One with an attribute `only_final = True` runs at the end of training alone. One
    with `check(model, dataset) -> names of its scores` is asked before the first step: it raises ConfigError for what
    would fail at the end. A metric that draws writes into `folder`; of several processes, which all call it, only the first
    one (`jax.process_index() == 0`) should write.
    """

    model: Any  # as it is scored: without dropout
    params: Any  # its parameters
    dataset: Any  # of which the validation split is scored
    batches: Callable[[], Iterator[dict[str, Any]]]  # that split's batches on the devices, as large as a micro-batch
    precision: str  # of activations
    seed: int
    folder: epath.Path | None = None  # the run's, where a metric may write pictures; None outside of a run
    step: int = 0  # how many steps the parameters have trained


def as_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as numbers; one with a value for each layer as name/0, name/1 and so on."""
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        several = {f"{name}/{i}": float(one) for i, one in enumerate(value)} if np.ndim(value) else {name: float(value)}
        flat |= several
    return flat
