"""Why post-norm needs a warm-up of the learning rate, and pre-norm does not.

Xiong et al. 2020, arXiv:2002.04745. At the start of training, the gradients of a post-norm model
are large near the output at any depth. Those of a pre-norm model are smaller there, and smaller
still in a deeper model. The paper concludes that the full rate at the first steps is unstable with
post-norm. Here models of 12 layers train with and without warm-up, at three rates. Initial values
are those of the paper: Xavier's, at any depth. Adam has b2 = 0.98 and no clipping; the rate is
constant after the warm-up. The task is to say the token before this one; chance is log 16 = 2.77
nats.

Expected (seed 0): with pre-norm the gradient of the last matrix of a feed-forward falls from 0.50
in layer 1 to 0.16 in layer 12; with post-norm it is 0.41 and 0.50. Loss after 300 steps at rates of
1e-3, 2e-3 and 4e-3: pre-norm 0.011, 0.003 and 0.001 without warm-up, and 0.024, 0.007 and 0.002
with a warm-up of 150 steps; post-norm 0.035, 2.785 and 2.780 without, and 0.037, 0.010 and 0.405
with it (0.189 on another CPU: the loss has spikes at this rate). So post-norm needs the warm-up at
rates of 2e-3 and above. At 1e-3 the warm-up makes no difference for post-norm; pre-norm is slower
with it. A warm-up of 50 steps was too short at 3e-3 (2.40 after 200 steps; without it 2.78).
Time: a minute and a half of CPU time.
Command: python -m experiments.theory.warmup [--steps 300] [--out warmup.png]
"""

import argparse
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from experiments.theory import small
from jaxformer import models
from jaxformer.models import ModelConfig, blocks
from jaxformer.ops.positions import Rope

RATES, WARMUPS = (1e-3, 2e-3, 4e-3), (0, 150)
VOCABULARY, LENGTH, BATCH = 16, 16, 16
CHANCE = float(np.log(VOCABULARY))
BASE = ModelConfig(VOCABULARY, 12, 32, 2, context_length=LENGTH, positions=Rope(), init_std=1.0)
PLACES = {"pre-norm": BASE, "post-norm": replace(BASE, block=blocks.post_norm)}


def initial(config: ModelConfig, seed: int = 0) -> Any:
    """Xavier's initial values: the variance of a matrix is 2 / (inputs + outputs), at any depth."""
    params = models.init(config, jax.random.key(seed))
    D, F = config.d_model, config.ff_width
    deviations = {
        "attention": D**-0.5,  # query, key, value, out: D inputs, D outputs
        "feedforward": (2 / (D + F)) ** 0.5,  # up, down
    }
    for sublayer, deviation in deviations.items():
        for leaves in params["layers"][sublayer].values():
            kernel = leaves["kernel"]
            leaves["kernel"] = kernel * deviation / kernel.std()
    embedding = jax.tree.map(lambda table: table * D**-0.5, params["embedding"])
    return params | {"embedding": embedding}


def draw(key: Array) -> small.Batch:
    return small.previous_tokens(key, VOCABULARY, BATCH, LENGTH)


def gradient_norms(config: ModelConfig) -> np.ndarray:
    """The gradient norm of the last matrix of each feed-forward [L] before training.

    It is figure 3 of the paper.
    """
    batch = draw(jax.random.key(1))

    def loss(params):
        logits = models.apply(config, params, batch["tokens"]).logits
        return small.cross_entropy(logits, batch)

    gradient = jax.jit(jax.grad(loss))(initial(config))
    kernel = gradient["layers"]["feedforward"]["down"]["kernel"]
    return np.asarray(jnp.linalg.norm(kernel, axis=(1, 2)))


def train(config: ModelConfig, steps: int, every: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """(steps, test loss [step, warm-up, rate]) of models that train side by side.

    All have the same initial values and batches.
    """
    grid = jnp.meshgrid(jnp.array(WARMUPS), jnp.array(RATES), indexing="ij")
    warmups, rates = (axis.ravel() for axis in grid)  # of each model
    forward = jax.vmap(lambda params, tokens: models.apply(config, params, tokens).logits)

    def draw_all(key: Array) -> small.Batch:
        return small.copies(draw(key), len(rates))

    test = draw_all(jax.random.key(1))

    def measure(params) -> dict[str, Array]:
        logits = forward(params, test["tokens"])
        return {"losses": jax.vmap(small.cross_entropy)(logits, test)}

    params = small.copies(initial(config), len(rates))
    optimizer = optax.chain(optax.scale_by_adam(b2=0.98), scale_by_rates(rates, warmups))
    _, records = small.train(forward, params, draw_all, optimizer, steps, every, measure)
    losses = np.array([record["losses"] for record in records])
    losses = losses.reshape(-1, len(WARMUPS), len(RATES))
    return np.array([record["step"] for record in records]), losses


def scale_by_rates(rates: Array, warmups: Array) -> optax.GradientTransformation:
    """Steps with one learning rate and linear warm-up for each model; leaves are [models, ...]."""

    def init(params):
        return jnp.zeros((), jnp.int32)  # the number of the step

    def update(updates, state, params=None):
        now = rates * jnp.minimum((state + 1) / jnp.maximum(warmups, 1), 1)
        scale = lambda leaf: -leaf * now.reshape(-1, *[1] * (leaf.ndim - 1))
        return jax.tree.map(scale, updates), state + 1

    return optax.GradientTransformation(init, update)


def draw_figure(
    norms: dict[str, np.ndarray], results: dict[str, tuple[np.ndarray, np.ndarray]]
) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(13.5, 4), layout="constrained")
    first, *panels = figure.subplots(1, 1 + len(results))
    for color, (name, values) in zip(small.COLORS, norms.items(), strict=False):
        first.plot(
            np.arange(1, len(values) + 1), values, "o-", color=color, markersize=4, label=name
        )
    first.set(
        ylim=(0, None),
        xlabel="layer",
        ylabel="gradient of the feed-forward's last matrix",
        title="before training",
    )
    first.xaxis.set_major_locator(MaxNLocator(integer=True))
    first.legend(frameon=False)
    for axes, (name, (steps, losses)) in zip(panels, results.items(), strict=True):
        for i, rate in enumerate(RATES):
            for j, (warmup, line) in enumerate(zip(WARMUPS, ("-", "--"), strict=True)):
                label = f"{rate:g}" + (f", {warmup} steps of warm-up" if warmup else "")
                axes.plot(steps, losses[:, j, i], line, color=small.COLORS[i], label=label)
        axes.axhline(CHANCE, color="#888888", linestyle=":", linewidth=1, label="chance")
        axes.set(
            ylim=(0, 1.2 * CHANCE),
            xlabel="training step",
            ylabel="loss (nats per token)",
            title=f"{name}, {BASE.num_layers} layers",
        )
    panels[-1].legend(
        frameon=False, fontsize=8, title="learning rate", loc="center left", bbox_to_anchor=(1, 0.5)
    )
    for axes in (first, *panels):
        axes.grid(alpha=0.25)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", default="warmup.png")
    options = parser.parse_args()
    norms = {name: gradient_norms(config) for name, config in PLACES.items()}
    for name, values in norms.items():
        print(
            f"{name:<10} gradient norms by layer, before training: "
            + " ".join(f"{value:.3f}" for value in values)
        )
    results = {name: train(config, options.steps) for name, config in PLACES.items()}
    print(
        f"{'loss, last 50 steps':<28}"
        + "".join(f"{rate:>12g}" for rate in RATES)
        + "   learning rate"
    )
    for name, (_, losses) in results.items():
        for j, warmup in enumerate(WARMUPS):
            last = losses[-5:, j].mean(axis=0)
            print(
                f"{name + (f', warm-up {warmup}' if warmup else ', no warm-up'):<28}"
                + "".join(f"{x:>12.3f}" for x in last)
            )
    small.save_figure(lambda: draw_figure(norms, results), options.out)


if __name__ == "__main__":
    main()
