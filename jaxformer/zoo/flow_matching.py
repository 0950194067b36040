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
from jaxformer.models.config import Patches
from jaxformer.models.reports import with_own
from jaxformer.ops.losses import LossSums, weighted_sum

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
    noise: Float[Array, " B *rest"], data: Float[Array, " B *rest"], time: Float[Array, " B"]
) -> Float[Array, " B *rest"]:
    """(1 - t) noise + t data."""
    t = time.reshape(-1, *(1,) * (data.ndim - 1))
    return (1 - t) * noise + t * data


def unknown_labels(model: Any) -> Int[Array, "1 K"]:
    """The label of each kind that means "unknown": one more than the last, `model.block.labels`.

    The block is `zoo.dit.AdaLNZero`, or a block of your own with the attribute `labels`, the
    numbers of labels. Raises ConfigError for a model without them.
    """
    counts = getattr(getattr(model, "block", None), "labels", None)
    if counts is None:
        raise ConfigError(
            "model.block: flow matching needs the number of its labels; expected "
            "zoo.dit.AdaLNZero(labels), or a block of your own with an attribute `labels`"
        )
    return jnp.array(counts, jnp.int32).reshape(1, -1)


@dataclass(frozen=True)
class FlowMatching:
    """|v(x_t, t, labels) - (image - noise)|^2, the mean over pixels, x_t = (1 - t) noise + t image.

    The batch has `images` [B, ...] and `weights` [B] and, for a model with labels, `labels`
    [B, kinds]. The model answers with an array like the images, and reads
    `inputs={"time": [B], "labels": [B, kinds]}`, as `zoo.dit` does. Evaluation never drops a label.
    Lipman et al. 2022, equation 23 with sigma_min = 0. Raises ConfigError as `unknown_labels` does,
    for labels of another number of kinds, and for an answer that is no array like the images.
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

    def example(self, model: Any, batch: dict) -> dict:
        """The inputs of the model for a report: an image without noise, with its labels."""
        images, labels = batch["images"], labels_of(model, batch)
        return {"images": images, "inputs": {"time": jnp.ones(len(images)), "labels": labels}}

    def __call__(self, model: Any, params: Any, batch: dict, context: Any) -> LossSums:
        labels = labels_of(model, batch)
        wide = jnp.promote_types(batch["images"].dtype, jnp.float32)
        images = batch["images"].astype(wide)
        of_noise, of_time, of_drop, of_model = jax.random.split(context.key, 4)
        noise = jax.random.normal(of_noise, images.shape, wide)
        time = self.times(of_time, len(images)).astype(wide)
        is_dropped = jax.random.bernoulli(of_drop, self.drop, (len(images), 1))
        output = models.apply(
            model,
            params,
            between(noise, images, time).astype(context.dtype),
            inputs={
                "time": time,
                "labels": jnp.where(is_dropped, unknown_labels(model), labels),
            },
            dropout_key=of_model,
            dtype=context.dtype,
        )
        if output.logits.shape != images.shape:
            raise ConfigError(
                f"model: the first head answers with {list(output.logits.shape)}; flow matching "
                f"expects an array like the images, {list(images.shape)}, as zoo.dit.Pixels gives"
            )
        squares = jnp.square(output.logits - (images - noise))
        errors = squares.reshape(len(images), -1).mean(axis=1)
        weights = batch["weights"].astype(wide)
        sums = LossSums(weighted_sum(errors, weights), weights.sum(), unit="images")
        return with_own(sums, output)


def labels_of(model: Any, batch: dict) -> Int[Array, "B K"]:
    """The labels of a batch; without any, [B, 0]. Raises ConfigError for other numbers of kinds."""
    kinds = unknown_labels(model).shape[1]
    B = len(batch["images"])
    labels = batch.get("labels", jnp.zeros((B, 0), jnp.int32))
    if labels.shape != (B, kinds):
        raise ConfigError(
            f"data: labels {list(labels.shape)}: the model reads {kinds} labels of each image; "
            f"expected [{B}, {kinds}]"
        )
    return labels


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


def follow(velocity: Velocity, noise: Float[Array, " B *rest"], steps: int) -> Array:
    """x at time 1 of dx / dt = v(x, t), from noise at time 0, by Heun's method of second order."""

    def step(x: Array, i: Array) -> tuple[Array, None]:
        start, stop = (jnp.full(len(x), (i + k) / steps) for k in (0, 1))
        first = velocity(x, start)
        second = velocity(x + first / steps, stop)
        return x + (first + second) / (2 * steps), None

    x, _ = jax.lax.scan(step, noise, jnp.arange(steps))
    return x


def sample(
    model: Any,
    params: Any,
    key: Array,
    labels: Int[Array, "B K"],
    *,
    steps: int = 20,
    scale: float = 2.0,
    dtype: Any = None,
) -> Float[Array, "B height width C"]:
    """New images of these labels: `guided` velocities, which `follow` adds up from noise.

    Jit it with `static_argnums=0` and `static_argnames=("steps", "dtype")`. Raises ConfigError for
    a model whose embedding is not `Patches`, and as `unknown_labels` does.
    """
    patches = model.embedding
    if not isinstance(patches, Patches):
        raise ConfigError(f"model.embedding={patches}: a sampler of images expects Patches")
    noise = jax.random.normal(key, (len(labels), *patches.image, patches.channels))
    return follow(guided(model, params, labels, scale, dtype), noise, steps)
