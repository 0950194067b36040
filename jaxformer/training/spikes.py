"""Steps whose loss or gradient is far above those before: `Experiment(spikes=Spikes())` leaves them out."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class Spikes:
    """A step is bad whose loss or gradient norm is so many `deviations` above the mean of the last `window` good steps.

    Nothing is bad before so many steps were good. Standard deviations, of the losses and of the norms.
    """

    deviations: float = 6.0  # standard deviations above the mean
    window: int = 128  # good steps

    def __post_init__(self):
        if not (self.deviations > 0 and self.window > 1):
            raise ConfigError(f"{self}: expected deviations above 0 and a window of at least 2 steps")


def is_spike(spikes: Spikes | None, recent: Array | None, values: Array) -> Array:
    """Whether one of the values [2] is far above its recent [2, window], which are NaN, and so compare false, at first."""
    if spikes is None or recent is None:
        return jnp.bool_(False)
    return jnp.any(values > recent.mean(axis=1) + spikes.deviations * recent.std(axis=1))
