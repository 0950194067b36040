"""Arrays in memory as a data set: rows, digest, and what does not fit."""

import numpy as np
import pytest

from jaxformer.data.arrays import Arrays, dataset_of_arrays
from jaxformer.data.batching import take_rows
from jaxformer.errors import ConfigError


def arrays(count, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return {"images": rng.standard_normal((count, 2, 3)).astype(dtype), "labels": np.arange(count)}


def test_rows_are_those_of_the_arrays():
    held = arrays(9)
    dataset = dataset_of_arrays(held, arrays(4, seed=1), "nine images", vocab_size=7)
    assert (len(dataset.train), len(dataset.validation), dataset.vocab_size) == (9, 4, 7)
    chosen = np.random.default_rng(0).integers(9, size=20)
    batch = take_rows(dataset.train, chosen)
    for name, array in held.items():
        np.testing.assert_array_equal(batch[name], array[chosen])
        np.testing.assert_array_equal(dataset.train[-1][name], array[8])


def test_the_digest_is_that_of_the_content():
    digest = lambda *splits: dataset_of_arrays(*splits).digest
    one, other = arrays(3), arrays(3, seed=1)
    strided = {name: np.repeat(array, 2, axis=0)[::2] for name, array in one.items()}
    assert digest(one, other) == digest(strided, other)
    changed = [
        (other, one),
        (arrays(3, dtype=np.float64), other),
        ({**one, "images": one["images"].reshape(3, 3, 2)}, other),
    ]
    assert digest(one, other) not in {digest(*splits) for splits in changed}
    assert digest({"a": one["images"]}, {"a": one["images"]}) != digest(
        {"b": one["images"]}, {"b": one["images"]}
    )


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="expected one length"):
        Arrays({"a": np.zeros(3), "b": np.zeros(4)})
    with pytest.raises(ConfigError, match="expected one length"):
        Arrays({})
    with pytest.raises(ConfigError, match="training has a, validation has b"):
        dataset_of_arrays({"a": np.zeros(3)}, {"b": np.zeros(3)})
