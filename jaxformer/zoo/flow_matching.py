"""Flow matching: a model learns the direction from noise to data, and a sampler follows it.

Lipman et al. 2022, arXiv:2210.02747; Liu et al. 2022, arXiv:2209.03003. With classifier-free
guidance: Ho & Salimans 2022, arXiv:2207.12598.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jaxformer import models
from jaxformer.errors import ConfigError
from jaxformer.ops.losses import LossSums

Velocity = Callable[[Array, Array], Array]  # (x [B, ...], time [B]) -> [B, ...]


def logit_normal(key: Array, count: int) -> Float[Array, " B"]:
    """Times sigmoid(z) of normal z, so that most lie in the middle: Esser et al. 2024.

    arXiv:2403.03206, section 3.1.
    """
    return jax.nn.sigmoid(jax.random.normal(key, (count,)))


def uniform(key: Array, count: int) -> Float[Array, " B"]:
    """Times between 0 and 1, all as often."""
    return jax.random.uniform(key, (count,))


def between(
    noise: Float[Array, "B *rest"], data: Float[Array, "B *rest"], time: Float[Array, " B"]
) -> Float[Array, "B *rest"]:
    """(1 - t) noise + t data."""
    t = time.reshape(-1, *(1,) * (data.ndim - 1))
    return (1 - t) * noise + t * data


def unknown_labels(model: Any) -> Int[Array, "1 K"]:
    """The labels that mean "unknown" to a model of `zoo.dit`: one more than the last of each kind.

    Raises ConfigError for a model with another block.
    """
    counts = getattr(model.block, "labels", None)
    if counts is None:
        raise ConfigError(
            "model.block: flow matching reads its labels; expected zoo.dit.AdaLNZero(labels)"
        )
    return jnp.array(counts, jnp.int32)[None]


@dataclass(frozen=True)
class FlowMatching:
    """|v(x_t, t, labels) - (image - noise)|^2, the mean over pixels, x_t = (1 - t) noise + t image.

    The batch has `images` [B, ...], `labels` [B, kinds] and, optionally, `weights` [B]. The model
    answers with an array like the images, and reads `inputs={"time": [B], "labels": [B, kinds]}`,
    as `zoo.dit` does. Evaluation never drops a label. Lipman et al. 2022, equation 23 with
    sigma_min = 0.
    """

    drop: float = 0.1  # the share of images whose labels are unknown, for guidance
    times: Callable = uniform  # (key, B) -> times [B]

    def __post_init__(self):
        if not 0 <= self.drop < 1:
            raise ConfigError(
                f"objective.drop={self.drop}: expected a share of at least 0, below 1"
            )

    def evaluation(self) -> "FlowMatching":
        return replace(self, drop=0.0)

    def __call__(self, model: Any, params: Any, batch: dict, context: Any) -> LossSums:
        unknown = unknown_labels(model)
        images = batch["images"].astype(jnp.float32)
        of_noise, of_time, of_drop = jax.random.split(context.key, 3)
        noise = jax.random.normal(of_noise, images.shape)
        time = self.times(of_time, len(images))
        is_dropped = jax.random.bernoulli(of_drop, self.drop, (len(images), 1))
        labels = jnp.where(is_dropped, unknown, batch["labels"])
        x = between(noise, images, time).astype(context.dtype)
        inputs = {"time": time, "labels": labels}
        found = models.apply(model, params, x, inputs=inputs, dtype=context.dtype).logits
        errors = jnp.square(found - (images - noise)).reshape(len(images), -1).mean(axis=1)
        weights = batch.get("weights", jnp.ones(len(images)))
        return LossSums(errors @ weights, weights.sum(), unit="images")


def guided(
    model: Any, params: Any, labels: Int[Array, "B K"], scale: float, dtype: Any = None
) -> Velocity:
    """v(x, t, unknown) + scale (v(x, t, labels) - v(x, t, unknown)); a scale of 1: no guidance."""
    unknown = jnp.broadcast_to(unknown_labels(model), labels.shape)
    both = jnp.concatenate([labels, unknown])

    def velocity(x: Array, time: Array) -> Array:
        inputs = {"time": jnp.tile(time, 2), "labels": both}
        doubled = jnp.concatenate([x, x])
        found = models.apply(model, params, doubled, inputs=inputs, dtype=dtype).logits
        asked, free = jnp.split(found, 2)
        return free + scale * (asked - free)

    return velocity


def follow(velocity: Velocity, noise: Float[Array, "B *rest"], steps: int) -> Array:
    """x at time 1 of dx / dt = v(x, t), from noise at time 0, by Heun's method of second order."""

    def step(x: Array, i: Array) -> tuple[Array, None]:
        start, stop = (jnp.full(len(x), (i + k) / steps) for k in (0, 1))
        first = velocity(x, start)
        second = velocity(x + first / steps, stop)
        return x + (first + second) / (2 * steps), None

    x, _ = jax.lax.scan(step, noise, jnp.arange(steps))
    return x
