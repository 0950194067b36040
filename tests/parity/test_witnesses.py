"""The packages that the fixtures came from, run again: they still answer what tests/fixtures says
they answered."""

import importlib

import numpy as np
import pytest

from tests import witnesses


@pytest.mark.parity
@pytest.mark.filterwarnings("default")  # theirs
@pytest.mark.parametrize("name", witnesses.NAMES)
def test_the_live_package_agrees_with_its_fixture(name):
    arrays = importlib.import_module(f"tests.witnesses.{name}").witness()
    kept = witnesses.load(name)
    assert sorted(arrays) == sorted(kept)
    for key, array in arrays.items():
        # some packages compute in float32 inside, which on another machine may round otherwise
        np.testing.assert_allclose(
            np.asarray(array, kept[key].dtype), kept[key], rtol=1e-6, atol=1e-6, err_msg=key
        )
