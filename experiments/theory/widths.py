"""Transfer of the learning rate to wider models: the standard parameterisation against muP.

Yang et al. 2022, arXiv:2203.03466, figure 1. Models of 2 layers, of widths 32 to 256, learn a
Markov text of order 2: the next of 16 tokens depends on the two tokens before it, so attention is
needed. For each parameterisation, each width is trained with Adam at several rates. A
parameterisation transfers if the best rate of the narrowest model is good for the widest.

Expected (seed 0): at widths 32, 64, 128, 256 the best rate of the standard parameterisation is
0.0078, 0.0039, 0.0020, 0.0020; the best rate of width 32 costs width 256 1.03 nats. The best rate
of muP is 0.0078, 0.0156, 0.0078, 0.0078; that of width 32 costs nothing.
Time: 16 minutes of one CPU core; with --widths 32,64,128 five.
Command:
    python -m experiments.theory.widths [--widths 32,64,128,256] [--steps 300] [--out widths.png]
"""

import argparse
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.theory import small
from jaxformer import models
from jaxformer.models import ModelConfig, MuP
from jaxformer.ops.losses import cross_entropy
from jaxformer.training import optimizers

VOCABULARY, T, BATCH, HEAD = 16, 32, 16, 16
RATES = tuple(2.0**power for power in range(-10, -3))


def model(width: int, base: int | None) -> ModelConfig:
    """A model whose attention heads have one width and whose output head has its own matrix.

    `base` is the width at which muP equals the standard parameterisation; None: the standard one.
    """
    start = 0.1 if base is None else MuP(base, 0.1)
    return ModelConfig(
        VOCABULARY, 2, width, width // HEAD, T, tie_embeddings=False, use_bias=False, init_std=start
    )


def texts(key: jax.Array, table: jax.Array, count: int) -> jax.Array:
    """Texts `[count, T + 1]`; `table` `[V, V, V]`: logits of a token given the two before it."""
    first, rest = jax.random.split(key)
    start = jax.random.randint(first, (2, count), 0, VOCABULARY)

    def step(last, key):
        token = jax.random.categorical(key, table[last[0], last[1]])
        return (last[1], token), token

    _, tokens = jax.lax.scan(step, (start[0], start[1]), jax.random.split(rest, T + 1))
    return tokens.T


def losses(config: ModelConfig, rates: Sequence[float], steps: int, seed: int = 0) -> jax.Array:
    """The mean loss of the last tenth of the steps, for each learning rate."""
    table = 3 * jax.random.normal(jax.random.key(7), (VOCABULARY,) * 3)
    optimizer = optimizers.build(optimizers.Adam(b2=0.95), models.spec(config))

    def loss_of(params, tokens):
        logits = models.apply(config, params, tokens[:, :-1]).logits
        sums = cross_entropy(logits, tokens[:, 1:], jnp.ones((BATCH, T)))
        return sums.loss / sums.weight

    def step(rate, carry, key):
        params, state = carry
        loss, gradient = jax.value_and_grad(loss_of)(params, texts(key, table, BATCH))
        updates, state = optimizer.update(gradient, state, params)
        updates = jax.tree.map(partial(jnp.multiply, rate), updates)
        return (optax.apply_updates(params, updates), state), loss

    @jax.jit
    def train(rate):
        params = models.init(config, jax.random.key(seed))
        keys = jax.random.split(jax.random.key(seed + 1), steps)
        _, losses = jax.lax.scan(partial(step, rate), (params, optimizer.init(params)), keys)
        return losses

    last = max(1, steps // 10)
    return jnp.stack([train(jnp.float32(rate))[-last:].mean() for rate in rates])


def study(
    widths: Sequence[int], steps: int, rates: Sequence[float] = RATES
) -> dict[str, np.ndarray]:
    """Losses `[widths, rates]` of both parameterisations; they are equal at the narrowest width."""
    bases = {"standard": None, "muP": widths[0]}
    return {
        name: np.stack([losses(model(w, base), rates, steps) for w in widths])
        for name, base in bases.items()
    }


def draw(results: dict[str, np.ndarray], widths: Sequence[int], rates: Sequence[float]):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, len(results), sharey=True)
    for axes, (name, values) in zip(panels, results.items(), strict=True):
        for by_rate, width, color in zip(values, widths, small.COLORS, strict=False):
            axes.plot(rates, by_rate, "o-", color=color, markersize=3, label=f"width {width}")
            best = int(np.nanargmin(by_rate))
            axes.plot(rates[best], by_rate[best], "*", color=color, markersize=12)
        axes.set(xscale="log", xlabel="learning rate", title=name)
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("training loss (nats per token)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside right center",
        frameon=False,
        title="star: the best rate",
        fontsize=8,
    )
    top = max(float(np.nanmax(values[:, 0])) for values in results.values())
    panels[0].set_ylim(top=top + 0.05)  # losses of diverged models are outside of the picture
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", default="32,64,128,256")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", default="widths.png")
    arguments = parser.parse_args()
    widths = list(map(int, arguments.widths.split(",")))
    results = study(widths, arguments.steps)
    for name, values in results.items():
        for width, by_rate in zip(widths, values, strict=True):
            best = int(np.nanargmin(by_rate))
            print(
                f"{name:9} width {width:4}: best rate {RATES[best]:.5f}, "
                f"loss {by_rate[best]:.3f}  {np.round(by_rate, 3)}"
            )
        loss = values[-1, int(np.nanargmin(values[0]))]  # of the widest, at the narrowest's rate
        difference = loss - np.nanmin(values[-1])
        print(
            f"{name:9} the best rate of width {widths[0]} costs width {widths[-1]} "
            f"{difference:.3f} nats"
        )
    small.save_figure(lambda: draw(results, widths, RATES), arguments.out)


if __name__ == "__main__":
    main()
