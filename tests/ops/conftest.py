"""What the tests of operations share."""

import jax
import pytest


@pytest.fixture
def choose_gpu(monkeypatch):
    """A call lets `jax.lax.platform_dependent` take, on this machine, what it takes on an NVIDIA
    GPU."""
    taken = lambda *arrays, cuda=None, default=None, **others: (default if cuda is None else cuda)(
        *arrays
    )
    return lambda: monkeypatch.setattr(jax.lax, "platform_dependent", taken)
