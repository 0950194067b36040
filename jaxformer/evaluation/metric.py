"""What a metric is called with. A metric is any function `Evaluation -> {name: number, or text such as a signature}`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A model at one moment of its training, and what it is scored on.

    A metric runs at every evaluation. One with an attribute `only_final = True` runs at the end of training alone. One
    with `check(model, dataset) -> names of its scores` is asked before the first step: it raises ConfigError for what
    would fail at the end.
    """

    model: Any  # as it is scored: without dropout
    params: Any  # its parameters
    dataset: Any  # of which the validation split is scored
    batches: Callable[[], Iterator[dict[str, Any]]]  # that split's batches on the devices, as large as a micro-batch
    precision: str  # of activations
    seed: int
