"""How far a network remembers: recurrence, whose path is as long as the distance, against attention, whose path is one step.

Vaswani et al. 2017, arXiv:1706.03762, section 4 and table 1; Bengio et al. 1994 (gradients through time). A row of noise
has one token of another kind, to be said at the end of the row, `distance` tokens later. A GRU and an attention layer
have as many parameters (within 2 %), the same batches and the same number of steps. Beside the accuracy, before training: the
gradient of the answer's loss with respect to the embedding of a token, by its distance from the answer.

Expected (seed 0, chance 6 %): GRU 100, 96, 27, 15 and 4 % at distances of 8, 16, 32, 64 and 128; attention 100 % at each. The
gradient of the GRU falls by a factor of 1.35 a token, from 3.3e-4 at 8 to 9e-20 at 128; that of attention is 1.3e-3 everywhere.
Time: a minute and a half of CPU time.
Command: python -m experiments.theory.recurrence [--steps 500] [--out recurrence.png]
"""

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import Array

from experiments.theory import small
from jaxformer import models
from jaxformer.models import ModelConfig
from jaxformer.ops.positions import Rope
from jaxformer.tools.analysis import figures, interventions

DISTANCES = (8, 16, 32, 64, 128)
LENGTH, SYMBOLS, BATCH = 130, 16, 16
QUESTION = 2 * SYMBOLS  # the token at the end of a row; noise is below SYMBOLS, the fact is not
ATTENTION = ModelConfig(QUESTION + 1, 1, 32, 2, context_length=LENGTH, positions=Rope(), init_std=0.1)
NAMES = ("GRU", "attention")


class Gru(nn.Module):
    """Embedding, one GRU layer, logits. `shift` [B, T, D] is added to the embedding, for gradients."""

    width: int = 42

    @nn.compact
    def __call__(self, tokens: Array, shift: float | Array = 0.0) -> Array:
        x = nn.Embed(QUESTION + 1, self.width)(tokens) + shift
        return nn.Dense(QUESTION + 1)(nn.RNN(nn.GRUCell(self.width))(x))


def draw(distance: int | Array, key: Array, batch: int = BATCH, length: int = LENGTH) -> small.Batch:
    """Rows of noise, a fact, noise and the question; the one label is the fact, `distance` tokens before the question."""
    noise, facts = (
        jax.random.randint(k, (batch, n), 0, SYMBOLS) for k, n in zip(jax.random.split(key), (length, 1), strict=True)
    )
    places = jnp.arange(length)[None]
    tokens = jnp.where(places == length - 1 - distance, SYMBOLS + facts, noise).at[:, -1].set(QUESTION)
    weights = jnp.broadcast_to(places == length - 1, tokens.shape).astype(jnp.float32)
    return {"tokens": tokens, "labels": jnp.broadcast_to(SYMBOLS + facts, tokens.shape), "weights": weights}


def initial(name: str) -> tuple[Any, Any]:
    """(params, tokens -> logits; parameters) of "GRU" or "attention"."""
    if name == "GRU":
        return Gru().apply, Gru().init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    return (lambda params, tokens: models.apply(ATTENTION, params, tokens).logits), models.init(ATTENTION, jax.random.key(0))


def recalled(name: str, steps: int, distances: Sequence[int] = DISTANCES, length: int = LENGTH) -> np.ndarray:
    """Accuracy of a network for each distance, all trained at once side by side, on 256 rows that were not trained on."""
    forward, params = initial(name)
    of_all = jax.vmap(forward)
    batches = lambda key, batch=BATCH: jax.vmap(lambda d: draw(d, key, batch, length))(jnp.array(distances))
    optimizer = optax.adam(optax.linear_schedule(3e-3, 3e-4, steps))
    several, _ = small.train(of_all, small.copies(params, len(distances)), batches, optimizer, steps, steps)
    test = batches(jax.random.key(1), 256)
    return np.asarray(jax.vmap(small.accuracy)(jax.jit(of_all)(several, test["tokens"]), test))


def gradient_norms(name: str, length: int = LENGTH) -> np.ndarray:
    """Mean norm of d loss / d embedding of each token [T], from the question (distance 0) back; before training."""
    forward, params = initial(name)
    batch = draw(length - 1, jax.random.key(1), 64, length)
    factor = 1e12  # without it, float32 has no square of the smallest
    loss = lambda logits: factor * small.cross_entropy(logits, batch)
    if name == "GRU":
        shift = jnp.zeros((*batch["tokens"].shape, Gru.width))
        found = jax.jit(jax.grad(lambda shift: loss(forward(params, batch["tokens"], shift))))(shift)
    else:
        of_logits, names = lambda output: loss(output.logits), ("embedding",)
        gradients = jax.jit(lambda params: interventions.gradients(ATTENTION, params, batch["tokens"], of_logits, names))
        found = gradients(params)["embedding"]
    return np.asarray(jnp.linalg.norm(found, axis=-1).mean(axis=0), np.float64)[::-1] / factor


def draw_figure(accuracies: dict[str, np.ndarray], norms: dict[str, np.ndarray], distances: Sequence[int]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for color, name in zip(figures.COLORS, NAMES, strict=False):
        left.plot(distances, accuracies[name], "o-", color=color, label=name)
        right.plot(norms[name], color=color, label=name)
    left.axhline(1 / SYMBOLS, color="#888888", linestyle=":", linewidth=1, label="chance")
    left.set(xscale="log", xticks=distances, xticklabels=distances, ylim=(0, 1.05))
    left.set(xlabel="tokens from the fact to the question")
    left.set(ylabel="accuracy", title="after training: recall of one fact")
    left.minorticks_off()
    right.set(yscale="log", xlabel="tokens from an input to the answer", ylabel="norm of the gradient of the answer's loss")
    right.set_title("before training: gradient at an input, by its distance")
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--out", default="recurrence.png")
    options = parser.parse_args()
    norms = {name: gradient_norms(name) for name in NAMES}
    accuracies = {name: recalled(name, options.steps) for name in NAMES}
    for name in NAMES:
        count = sum(leaf.size for leaf in jax.tree.leaves(initial(name)[1]))
        print(f"{name}: {count:,} parameters")
    print(f"{'':<12}" + "".join(f"{distance:>10}" for distance in DISTANCES) + "   distance")
    for name in NAMES:
        print(f"{name:<12}" + "".join(f"{value:>10.1%}" for value in accuracies[name]) + "   accuracy")
        print(f"{name:<12}" + "".join(f"{norms[name][d]:>10.1e}" for d in DISTANCES) + "   gradient before training")
    print(f"figure: {figures.save(lambda: draw_figure(accuracies, norms, DISTANCES), options.out)}")


if __name__ == "__main__":
    main()
