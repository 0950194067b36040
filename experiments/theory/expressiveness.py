"""How near a small Transformer comes to a fixed continuous function, by its width and its heads.

Yun et al. 2019, arXiv:1912.10077: Transformers approximate any continuous function of sequences on
a compact set. The proof gives no rate, so this file measures one. The function maps T points x_t of
[-1, 1]^2 to T numbers: y_t = sum_s K(x_t, x_s) sin(3 x_s1 + x_s2) / sum_s K(x_t, x_s), a mean over
the points near x_t, with K(x, z) = exp(-8 |x - z|^2). It is continuous, each y_t depends on
all points, and it does not depend on their order. The error is that of unseen points: the mean
square error as a share of the variance of y. Models have two layers and no positions; they train
for the same steps at the same rate of Adam, which falls to zero.

Expected (seed 0): with 4 heads the error is 3.1, 2.6, 1.1, 0.81 and 0.20 % of the variance at
widths 4, 8, 16, 32 and 64; it falls as width^-0.95. At width 32 it is 0.71, 1.12, 0.81 and 0.82 %
with 1, 2, 4 and 8 heads: no trend, since one kernel needs one head.
Time: 6.5 minutes of CPU time.
Command: python -m experiments.theory.expressiveness [--steps 1500] [--out expressiveness.png]
"""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from experiments.theory import small
from jaxformer import models, params as parameters
from jaxformer.masks import full
from jaxformer.models import ModelConfig, TokenClassification
from jaxformer.models.layer import Embedder, linear

LENGTH, BATCH, UNSEEN = 16, 64, 512  # points of a sequence; sequences of a step, and unseen ones
TICKS = (0.002, 0.005, 0.01, 0.02, 0.05)  # errors that the figure names
WIDTHS, HEADS = (4, 8, 16, 32, 64), (1, 2, 4, 8)


def function(points: Array) -> Array:
    """y [B, T] of points [B, T, 2]."""
    squares = jnp.square(points[:, :, None] - points[:, None]).sum(axis=-1)
    weights = jax.nn.softmax(-8 * squares, axis=-1)
    values = jnp.sin(3 * points[..., 0] + points[..., 1])
    return jnp.einsum("bts,bs->bt", weights, values)


def coordinates(config: ModelConfig) -> Embedder:
    """The embedding of points: a linear map."""
    start = jax.nn.initializers.normal(1.0)
    spec = {
        "points": parameters.linear((2, config.d_model), ("line", "embed"), ("line",), start, True)
    }

    def apply(params: Any, points: Array, inputs: Any, context: Any) -> Array:
        return linear("btc,cd->btd", points, params["points"])

    return Embedder(spec, apply, lambda points: points.shape[1])


def model(width: int, heads: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=0,
        num_layers=2,
        d_model=width,
        num_heads=heads,
        context_length=LENGTH,
        feedforward="gelu",
        embedding=coordinates,
        positions=None,
        heads=(TokenClassification(1, name="value"),),
        masks=(full(),),
        init_std=width**-0.5,
    )


def draw(key: Array, count: int) -> Array:
    """Random points [count, T, 2] of [-1, 1]^2."""
    return jax.random.uniform(key, (count, LENGTH, 2), minval=-1.0)


def error(config: ModelConfig, params: Any, points: Array) -> Array:
    """The mean square error as a share of the variance of the function."""
    found = models.apply(config, params, points).logits[..., 0]
    y = function(points)
    return jnp.square(found - y).mean() / y.var()


def train(config: ModelConfig, steps: int, seed: int = 0) -> float:
    """The error of unseen points after training."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 20, steps)
    optimizer = optax.adam(schedule)

    @jax.jit
    def run(key: Array) -> Array:
        start_key, data_key, unseen_key = jax.random.split(key, 3)
        params = models.init(config, start_key)

        def step(carry: Any, number: Array) -> tuple[Any, None]:
            params, state = carry
            points = draw(jax.random.fold_in(data_key, number), BATCH)
            gradient = jax.grad(partial(error, config))(params, points)
            updates, state = optimizer.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), None

        (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), jnp.arange(steps))
        return error(config, params, draw(unseen_key, UNSEEN))

    return float(run(jax.random.key(seed)))


def draw_figure(widths: Sequence[float], heads: Sequence[float]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    curves = ("width, 4 heads", WIDTHS, widths), ("heads at width 32", HEADS, heads)
    for axes, (name, x, y) in zip(figure.subplots(1, 2, sharey=True), curves, strict=True):
        axes.loglog(x, y, "o-", color=small.COLORS[0])
        axes.set_xticks(x, [str(each) for each in x])
        axes.minorticks_off()
        axes.set_yticks(TICKS, [f"{tick:.1%}" for tick in TICKS])
        axes.set(xlabel=name)
        axes.grid(alpha=0.25)
    figure.axes[0].set_ylabel("error, share of the variance")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--out", default="expressiveness.png")
    options = parser.parse_args()
    widths = [train(model(width, 4), options.steps) for width in WIDTHS]
    heads = [train(model(32, count), options.steps) for count in HEADS]
    for name, x, y in (("width", WIDTHS, widths), ("heads", HEADS, heads)):
        print(f"{name:<8}" + "   ".join(f"{n}: {e:.5f}" for n, e in zip(x, y, strict=True)))
    slope = np.polyfit(np.log(WIDTHS), np.log(widths), 1)[0]
    print(f"the error falls as width^{slope:.2f}")
    small.save_figure(lambda: draw_figure(widths, heads), options.out)


if __name__ == "__main__":
    main()
