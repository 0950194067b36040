"""Data that are in memory: named arrays whose first axis counts the examples."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxformer.data.sources import Dataset, read_example
from jaxformer.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Arrays:
    """Example i is {name: array[i]}. Raises ConfigError for arrays of different lengths."""

    arrays: Mapping[str, np.ndarray]
    __getitem__ = read_example

    def __post_init__(self):
        lengths = {name: len(array) for name, array in self.arrays.items()}
        if len(set(lengths.values())) != 1:
            raise ConfigError(f"data: arrays {lengths}: expected one length, of one array or more")

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def take_rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The examples at `indices` as one batch."""
        return {name: array[indices] for name, array in self.arrays.items()}


def dataset_of_arrays(
    train: Mapping[str, Any], validation: Mapping[str, Any], description: str = "", **fields: Any
) -> Dataset:
    """A data set in memory. Both splits have the same names. Its digest is that of the content.

    Further fields are those of `Dataset`. Raises ConfigError for splits with other names, and for
    arrays of different lengths.
    """
    if train.keys() != validation.keys():
        raise ConfigError(
            f"data: training has {', '.join(train)}, validation has {', '.join(validation)}; "
            "expected the same names"
        )
    digest = hashlib.sha256()
    splits = []
    for arrays in (train, validation):
        held = {name: np.asarray(array) for name, array in arrays.items()}
        for name, array in held.items():
            digest.update(f"{name} {array.dtype} {array.shape} ".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        splits.append(Arrays(held))
    return Dataset(*splits, digest=digest.hexdigest(), description=description, **fields)
