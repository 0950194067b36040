"""Whether the best learning rate stays where it is when a model gets wider: the standard parameterisation against muP.

Yang et al. 2022, arXiv:2203.03466, figure 1. Models of 2 layers, of widths 32 to 256, learn a Markov text of order 2: which of
16 tokens follows depends on the two before it, so attention is needed. Each parameterisation trains each width with Adam at
several rates. A parameterisation transfers if the best rate of the narrowest model is good for the widest.

Expected (seed 0): at widths 32, 64, 128, 256 the best rate of the standard parameterisation is 0.0078, 0.0039, 0.0020, 0.0020:
that of width 32 costs width 256 1.03 nats. Of muP it is 0.0078, 0.0156, 0.0078, 0.0078: that of width 32 costs nothing.
Time: 16 minutes of one CPU core; with --widths 32,64,128 five.
Command: python -m experiments.theory.widths [--widths 32,64,128,256] [--steps 300] [--out widths.png]
"""

import argparse
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxformer import models
from jaxformer.models import ModelConfig, MuP
from jaxformer.ops.losses import cross_entropy
from jaxformer.tools.analysis import figures
from jaxformer.training import optimizers

VOCABULARY, T, BATCH, HEAD = 16, 32, 16, 16
RATES = tuple(2.0**power for power in range(-10, -3))


def model(width: int, base: int | None) -> ModelConfig:
    """With heads of one width, and a head of its own; `base`: the width at which muP is the standard parameterisation."""
    start = 0.1 if base is None else MuP(base, 0.1)
    return ModelConfig(VOCABULARY, 2, width, width // HEAD, T, tie_embeddings=False, use_bias=False, init_std=start)


def texts(key: jax.Array, table: jax.Array, count: int) -> jax.Array:
    """Texts `[count, T + 1]` in which two tokens decide the chances of the next one: logits `table` `[V, V, V]`."""
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

    def loss(tree, tokens):
        sums = cross_entropy(models.apply(config, tree, tokens[:, :-1]).logits, tokens[:, 1:], jnp.ones((BATCH, T)))
        return sums.loss / sums.weight

    @jax.jit
    def train(rate):
        def step(carry, key):
            tree, state = carry
            value, gradient = jax.value_and_grad(loss)(tree, texts(key, table, BATCH))
            updates, state = optimizer.update(gradient, state, tree)
            return (optax.apply_updates(tree, jax.tree.map(partial(jnp.multiply, rate), updates)), state), value

        tree = models.init(config, jax.random.key(seed))
        keys = jax.random.split(jax.random.key(seed + 1), steps)
        return jax.lax.scan(step, (tree, optimizer.init(tree)), keys)[1]

    return jnp.stack([train(jnp.float32(rate))[-max(1, steps // 10) :].mean() for rate in rates])


def study(widths: Sequence[int], steps: int, rates: Sequence[float] = RATES) -> dict[str, np.ndarray]:
    """Losses `[widths, rates]` of both parameterisations; muP is the standard one at the narrowest width."""
    bases = {"standard": None, "muP": widths[0]}
    return {name: np.stack([losses(model(w, base), rates, steps) for w in widths]) for name, base in bases.items()}


def draw(found: dict[str, np.ndarray], widths: Sequence[int], rates: Sequence[float]):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, len(found), sharey=True)
    for axes, (name, values) in zip(panels, found.items(), strict=True):
        for row, width, color in zip(values, widths, figures.COLORS, strict=False):
            axes.plot(rates, row, "o-", color=color, markersize=3, label=f"width {width}")
            best = int(np.nanargmin(row))
            axes.plot(rates[best], row[best], "*", color=color, markersize=12)
        axes.set(xscale="log", xlabel="learning rate", title=name)
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("training loss (nats per token)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, title="star: the best rate", fontsize=8)
    top = max(float(np.nanmax(values[:, 0])) for values in found.values())
    panels[0].set_ylim(top=top + 0.05)  # what diverged is beyond the picture
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", default="32,64,128,256")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", default="widths.png")
    arguments = parser.parse_args()
    widths = list(map(int, arguments.widths.split(",")))
    found = study(widths, arguments.steps)
    for name, values in found.items():
        for width, row in zip(widths, values, strict=True):
            best = int(np.nanargmin(row))
            print(f"{name:9} width {width:4}: best rate {RATES[best]:.5f}, loss {row[best]:.3f}  {np.round(row, 3)}")
        kept = values[-1, int(np.nanargmin(values[0]))] - np.nanmin(values[-1])
        print(f"{name:9} the best rate of width {widths[0]} costs width {widths[-1]} {kept:.3f} nats")
    print("figure:", figures.save(lambda: draw(found, widths, RATES), arguments.out))


if __name__ == "__main__":
    main()
