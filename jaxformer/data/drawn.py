"""Data whose examples are drawn from random numbers when they are read, so none is in memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxformer.data.batching import digest_of_drawn, stacked
from jaxformer.data.sources import Dataset, read_example
from jaxformer.errors import ConfigError, check_numbers


@dataclass(frozen=True, eq=False)
class Drawn:
    """A split of `count` examples. What example i shows is `draw(rng)`, a function of (seed, i).

    `batch(draws)` makes the arrays of several draws at once. By default a draw is {name: array}.
    Raises ConfigError for a count below 1 and a negative seed.
    """

    draw: Callable[[np.random.Generator], Any]
    count: int
    seed: int
    batch: Callable[[Sequence[Any]], dict[str, np.ndarray]] = stacked
    __getitem__ = read_example

    def __post_init__(self):
        check_numbers("data: Drawn.", self, count=1, seed=0)

    def __len__(self) -> int:
        return self.count

    def drawn(self, index: int) -> Any:
        """What example `index` shows."""
        return self.draw(np.random.default_rng((self.seed, range(self.count)[index])))

    def take_rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The examples at `indices` as one batch."""
        return self.batch([self.drawn(int(index)) for index in indices])


def dataset_of_drawn(
    train: Any, validation: Any, decided_by: Any, description: str = "", **fields: Any
) -> Dataset:
    """A data set of drawn examples: `Drawn`, or splits of your own with a `seed`.

    Further fields are those of `Dataset`.
    Its digest is that of `decided_by`, which names all that decides the draws, and of the first
    examples. Another version of NumPy may draw other numbers from the same seed. Raises ConfigError
    for splits of one seed, which may show the same examples.
    """
    if train.seed == validation.seed:
        raise ConfigError(
            f"data: training and validation have the seed {train.seed}, so validation may ask what "
            "training shows; give them different seeds"
        )
    return Dataset(
        train, validation, digest_of_drawn(str(decided_by), train), description, **fields
    )
