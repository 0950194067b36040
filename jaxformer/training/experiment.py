"""What a run is, as data. An experiment file ends in `experiment = Experiment(...)`; nothing here computes anything."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from jaxformer.data.sources import Stdlib, Text
from jaxformer.data.tasks import Copy, Recall, Reverse, Sort
from jaxformer.decoding.sampling import Sampling
from jaxformer.errors import ConfigError
from jaxformer.models.config import ModelConfig
from jaxformer.parallel.mesh import Mesh
from jaxformer.training.objectives import token_cross_entropy

NOT_DECAYED = r"(bias|scale)$"


def _check_rate(optimizer):
    for name in ("learning_rate", "adam_learning_rate"):
        rate = getattr(optimizer, name, 1.0)
        if not (math.isfinite(rate) and rate > 0):
            raise ConfigError(f"optimizer.{name}={rate}: must be a positive finite number")


@dataclass(frozen=True)
class Adam:
    """Kingma & Ba 2014, with the constants of Vaswani et al. 2017, section 5.3."""

    learning_rate: float = 1.0  # a factor: the Noam schedule carries the scale
    b1: float = 0.9
    b2: float = 0.98
    eps: float = 1e-9

    __post_init__ = _check_rate


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2017) on every parameter whose path `not_decayed` misses."""

    learning_rate: float = 1e-3
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    not_decayed: str = NOT_DECAYED

    __post_init__ = _check_rate


@dataclass(frozen=True)
class Adafactor:
    """Factored second moments, updates relative to the parameter's scale, layer by layer. Shazeer & Stern 2018,
    arXiv:1804.04235; matrices with a side below 128 are not factored, as in optax."""

    learning_rate: float = 1e-2
    decay_rate: float = 0.8
    clipping_threshold: float = 1.0
    weight_decay: float = 0.0
    not_decayed: str = NOT_DECAYED

    __post_init__ = _check_rate


@dataclass(frozen=True)
class Lion:
    """The sign of an interpolated momentum. Chen et al. 2023, arXiv:2302.06675."""

    learning_rate: float = 1e-4
    b1: float = 0.9
    b2: float = 0.99
    weight_decay: float = 1.0
    not_decayed: str = NOT_DECAYED

    __post_init__ = _check_rate


@dataclass(frozen=True)
class Muon:
    """Orthogonalised momentum for each layer's matrices (Jordan et al. 2024); AdamW for embeddings, head, norms, biases."""

    learning_rate: float = 2e-2
    momentum: float = 0.95
    newton_schulz_steps: int = 5
    adam_learning_rate: float = 1e-3  # follows the same schedule
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.0
    not_decayed: str = NOT_DECAYED

    __post_init__ = _check_rate


@dataclass(frozen=True)
class Noam:
    """factor * d_model^-0.5 * min(s^-0.5, s * warmup^-1.5). Vaswani et al. 2017, eq. 3."""

    warmup: int = 4000


@dataclass(frozen=True)
class Cosine:
    """Linear warm-up, then half a cosine down to `final` times the peak at the last step."""

    warmup: int = 0
    final: float = 0.1


@dataclass(frozen=True)
class Linear:
    """Linear warm-up, then a straight line down to `final` times the peak at the last step."""

    warmup: int = 0
    final: float = 0.0


@dataclass(frozen=True)
class WSD:
    """Warm-up, a stable plateau, and a linear decay over the last `decay` share of the run, to `final` times the peak at
    the last step. Hu et al. 2024."""

    warmup: int = 0
    decay: float = 0.2
    final: float = 0.0

    def decay_steps(self, steps: int) -> int:
        """How many of a run's last steps are below the peak."""
        return max(round(steps * self.decay), 1)


@dataclass(frozen=True)
class Constant:
    """Linear warm-up, then the peak."""

    warmup: int = 0


def _check_schedule(schedule, steps: int) -> None:
    for name in ("final", "decay"):
        if not 0 <= getattr(schedule, name, 0.0) <= 1:
            raise ConfigError(f"schedule.{name}={getattr(schedule, name)}: must be in [0, 1]")
    if isinstance(schedule, Noam):  # has no end, and warms up for as long as it likes
        return
    warmup = f"schedule.warmup={schedule.warmup}"
    if schedule.warmup >= steps:
        raise ConfigError(f"{warmup}: must be below steps={steps}; lower --schedule.warmup or raise --steps")
    if isinstance(schedule, WSD) and schedule.warmup and schedule.warmup + schedule.decay_steps(steps) > steps:
        raise ConfigError(
            f"{warmup}: overlaps the last {schedule.decay_steps(steps)} of steps={steps}, which decay; lower it or "
            f"schedule.decay={schedule.decay}"
        )


@dataclass(frozen=True)
class Checkpoints:
    """When to save, and what to keep. The last step is always saved."""

    every: int = 500
    keep_latest: int = 2
    keep_best: int = 1


@dataclass(frozen=True)
class Sample:
    """Text to continue at the end of a run; None starts from the vocabulary's first token."""

    prompt: str | None = None
    tokens: int = 200
    how: Sampling = Sampling(temperature=0.8)  # noqa: RUF009 (frozen)


@dataclass(frozen=True)
class Experiment:
    """Everything that decides a run's numbers. Batches and dropout masks are functions of (seed, step)."""

    name: str
    model: ModelConfig
    data: Text | Stdlib | Reverse | Copy | Sort | Recall
    optimizer: Adam | AdamW | Adafactor | Lion | Muon = AdamW()
    schedule: Noam | Cosine | Linear | WSD | Constant = Cosine()
    mesh: Mesh = Mesh(data=1)  # noqa: RUF009 (frozen); one device. Where a run computes, not what: no part of its name
    frozen: str | None = None  # a regular expression: parameters whose path it matches somewhere do not train
    objective: Callable = token_cross_entropy
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    steps: int = 1000
    batch_size: int = 32
    accumulation: int = 1  # micro-batches a step; the gradient is that of the whole batch
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    clip_norm: float | None = 1.0
    ema_decay: float | None = None
    seed: int = 0
    log_every: int = 10
    eval_every: int = 500
    eval_batches: int | None = None  # None: the whole validation split
    max_skipped: int = 10  # non-finite steps in a row before the run gives up
    checkpoints: Checkpoints = Checkpoints()
    sample: Sample = Sample()
    loggers: tuple[Literal["tensorboard", "wandb"], ...] = ()

    def __post_init__(self):
        least = {
            **{
                name: (getattr(self, name), 1)
                for name in ("steps", "batch_size", "accumulation", "log_every", "eval_every")
            },
            "eval_batches": (1 if self.eval_batches is None else self.eval_batches, 1),
            "max_skipped": (self.max_skipped, 1),
            "seed": (self.seed, 0),
            "checkpoints.every": (self.checkpoints.every, 1),
            "checkpoints.keep_latest": (self.checkpoints.keep_latest, 1),
            "checkpoints.keep_best": (self.checkpoints.keep_best, 0),
            "schedule.warmup": (self.schedule.warmup, 0),
            "sample.tokens": (self.sample.tokens, 1),
            "z_loss": (self.z_loss, 0),
            "optimizer.weight_decay": (getattr(self.optimizer, "weight_decay", 0.0), 0),
        }
        for name, (value, limit) in least.items():
            if not value >= limit:
                raise ConfigError(f"{name}={value}: must be at least {limit}")
        _check_schedule(self.schedule, self.steps)
        if self.frozen is not None:
            try:
                re.compile(self.frozen)
            except re.error as error:
                raise ConfigError(f"frozen={self.frozen!r}: no regular expression ({error})") from None
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(f"label_smoothing={self.label_smoothing}: must be in [0, 1)")
        if self.batch_size % self.accumulation:
            raise ConfigError(f"accumulation={self.accumulation} does not divide batch_size={self.batch_size}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"clip_norm={self.clip_norm}: must be positive, or None for no clipping")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ConfigError(f"ema_decay={self.ema_decay}: must be in (0, 1), or None")
