"""Learning rate schedules as configs: `schedule(experiment) -> (step -> learning rate)`.

Steps count from 0. Your own schedule is a function of that form. A schedule of optax is
`lambda experiment: optax.cosine_decay_schedule(...)`. The peak is the optimizer's `learning_rate`,
or 1 if it has none.

Step s of a warm-up of w steps has (s + 1) / w times the peak. So no step has rate 0, and step w - 1
has the peak (step 0 without a warm-up). The decay begins with the next step. The last step, number
steps - 1, has `final` times the peak. A run of one step has the peak.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxformer.errors import ConfigError

Rate = Callable[[Any], Any]


@dataclass(frozen=True)
class Noam:
    """factor * d_model^-0.5 * min(s^-0.5, s * warmup^-1.5) for s = step + 1.

    Vaswani et al. 2017, eq. 3. It never ends.
    """

    warmup: int = 4000  # steps until the peak
    factor: float = 1.0  # multiplies the rate; the optimizer's learning_rate is not used

    def __call__(self, experiment: Any) -> Rate:
        _check(self, experiment.steps, ends=False)
        model = getattr(experiment.model, "decoder", experiment.model)
        scale = self.factor / math.sqrt(model.d_model)

        def rate(step):
            count = jnp.asarray(step, jnp.float32) + 1
            return scale * jnp.minimum(count**-0.5, count * max(self.warmup, 1) ** -1.5)

        return rate


@dataclass(frozen=True)
class Cosine:
    """Linear warm-up, then half a cosine down to `final` times the peak at the last step."""

    warmup: int = 0  # steps until the peak
    final: float = 0.1  # share of the peak at the last step

    def __call__(self, experiment: Any) -> Rate:
        return _decay(
            self, experiment, self.final, shape=lambda done: (1 - jnp.cos(jnp.pi * done)) / 2
        )


@dataclass(frozen=True)
class Linear:
    """Linear warm-up, then a straight line down to `final` times the peak at the last step."""

    warmup: int = 0  # steps until the peak
    final: float = 0.0  # share of the peak at the last step

    def __call__(self, experiment: Any) -> Rate:
        return _decay(self, experiment, self.final)


@dataclass(frozen=True)
class WSD:
    """Linear warm-up, the peak, and a linear decay at the end to `final` times the peak.

    Hu et al. 2024.
    """

    warmup: int = 0  # steps until the peak
    decay: float = 0.2  # share of the run that decays; 0: none
    final: float = 0.0  # share of the peak at the last step

    def __call__(self, experiment: Any) -> Rate:
        _check(self, steps := experiment.steps)
        if self.decay == 0:
            return _decay(self, experiment, 1.0)
        last = max(round(steps * self.decay), 1)  # number of steps below the peak
        if self.warmup and self.warmup + last > steps:
            overlap = (
                f"overlaps the last {last} of steps={steps}, which decay; "
                f"lower it or schedule.decay={self.decay}"
            )
            raise ConfigError(f"schedule.warmup={self.warmup}: {overlap}")
        return _decay(self, experiment, self.final, max(steps - 1 - last, 0))


@dataclass(frozen=True)
class Constant:
    """Linear warm-up, then the peak."""

    warmup: int = 0  # steps until the peak

    def __call__(self, experiment: Any) -> Rate:
        return _decay(self, experiment, 1.0)


def _decay(
    schedule: Any,
    experiment: Any,
    final: float,
    start: int | None = None,
    shape: Callable = lambda x: x,
) -> Rate:
    """Linear warm-up, the peak up to step `start`, then a decay to `final` times the peak.

    `shape` maps the share of the decay that is done, in [0, 1], to the share of the way down.
    """
    _check(schedule, experiment.steps)
    peak, last = getattr(experiment.optimizer, "learning_rate", 1.0), experiment.steps - 1
    warmup = max(schedule.warmup, 1)
    start = warmup - 1 if start is None else start

    def rate(step):
        step = jnp.asarray(step, jnp.float32)
        done = shape(jnp.clip((step - start) / max(last - start, 1), 0, 1))
        return peak * jnp.minimum((step + 1) / warmup, 1) * (done * final + (1 - done))

    return rate


def _check(schedule: Any, steps: int, ends: bool = True) -> None:
    for name in ("final", "decay"):
        if not 0 <= getattr(schedule, name, 0.0) <= 1:
            raise ConfigError(f"schedule.{name}={getattr(schedule, name)}: must be in [0, 1]")
    factor = getattr(schedule, "factor", 1.0)
    if not (math.isfinite(factor) and factor > 0):  # a negative rate would go uphill
        raise ConfigError(f"schedule.factor={factor}: must be a positive finite number")
    if schedule.warmup < 0 or int(schedule.warmup) != schedule.warmup:
        raise ConfigError(
            f"schedule.warmup={schedule.warmup}: must be a whole number of steps, at least 0; "
            "not a share of the run"
        )
    if ends and schedule.warmup >= steps:
        raise ConfigError(
            f"schedule.warmup={schedule.warmup}: must be below steps={steps}; "
            "lower it or raise steps"
        )
