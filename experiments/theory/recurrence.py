"""Memory over distance: recurrence needs as many steps as the distance, attention needs one.

Vaswani et al. 2017, arXiv:1706.03762, section 4 and table 1; Bengio et al. 1994 (gradients through
time). A text of noise holds one token of another kind, the fact, which the model must say at the
end of the text, `distance` tokens later. A GRU and an attention layer have the same number of
parameters (within 2 %), the same batches and the same number of steps. Two numbers are measured:
the accuracy after training, and before training the gradient of the answer's loss with respect to
the embedding of a token, by its distance from the answer.

Expected (seed 0, chance 6 %): GRU 100, 96, 27, 15 and 4 % at distances of 8, 16, 32, 64 and 128;
attention 100 % at each. The gradient of the GRU falls by a factor of 1.35 a token, from 3.3e-4 at 8
to 9e-20 at 128; that of attention is 1.3e-3 everywhere.
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
from jaxformer.tools.analysis import interventions

DISTANCES = (8, 16, 32, 64, 128)
LENGTH, SYMBOLS, BATCH = 130, 16, 16
# the last token of a text; noise tokens are below SYMBOLS, the fact is from SYMBOLS on
QUESTION = 2 * SYMBOLS
ATTENTION = ModelConfig(
    QUESTION + 1, 1, 32, 2, context_length=LENGTH, positions=Rope(), init_std=0.1
)
NAMES = ("GRU", "attention")


class Gru(nn.Module):
    """Embedding, one GRU layer, logits.

    `shift` [B, T, D] is added to the embedding; its gradient is that of the embedding.
    """

    width: int = 42

    @nn.compact
    def __call__(self, tokens: Array, shift: float | Array = 0.0) -> Array:
        x = nn.Embed(QUESTION + 1, self.width)(tokens) + shift
        return nn.Dense(QUESTION + 1)(nn.RNN(nn.GRUCell(self.width))(x))


def draw(
    distance: int | Array, key: Array, batch: int = BATCH, length: int = LENGTH
) -> small.Batch:
    """Texts of noise, a fact, noise and the question.

    The fact stands `distance` tokens before the question. It is the only label with a weight.
    """
    noise_key, fact_key = jax.random.split(key)
    noise = jax.random.randint(noise_key, (batch, length), 0, SYMBOLS)
    facts = SYMBOLS + jax.random.randint(fact_key, (batch, 1), 0, SYMBOLS)
    positions = jnp.arange(length)[None]
    tokens = jnp.where(positions == length - 1 - distance, facts, noise).at[:, -1].set(QUESTION)
    weights = jnp.broadcast_to(positions == length - 1, tokens.shape).astype(jnp.float32)
    return {
        "tokens": tokens,
        "labels": jnp.broadcast_to(facts, tokens.shape),
        "weights": weights,
    }


def initial(name: str) -> tuple[Any, Any]:
    """(the function (params, tokens) -> logits, initial parameters) of "GRU" or "attention"."""
    if name == "GRU":
        return Gru().apply, Gru().init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    forward = lambda params, tokens: models.apply(ATTENTION, params, tokens).logits
    return forward, models.init(ATTENTION, jax.random.key(0))


def recalled(
    name: str, steps: int, distances: Sequence[int] = DISTANCES, length: int = LENGTH
) -> np.ndarray:
    """The accuracy of a network for each distance, on 256 texts that were not trained on.

    The networks of all distances are trained side by side.
    """
    forward, params = initial(name)
    forward_all = jax.vmap(forward)

    def draw_all(key: Array, batch: int = BATCH) -> small.Batch:
        return jax.vmap(lambda d: draw(d, key, batch, length))(jnp.array(distances))

    optimizer = optax.adam(optax.linear_schedule(3e-3, 3e-4, steps))
    copies = small.copies(params, len(distances))
    trained, _ = small.train(forward_all, copies, draw_all, optimizer, steps, steps)
    test = draw_all(jax.random.key(1), 256)
    logits = jax.jit(forward_all)(trained, test["tokens"])
    return np.asarray(jax.vmap(small.accuracy)(logits, test))


def gradient_norms(name: str, length: int = LENGTH) -> np.ndarray:
    """The mean norm of d loss / d embedding of each token [T] before training.

    The first is that of the question (distance 0), the last that of the first token.
    """
    forward, params = initial(name)
    batch = draw(length - 1, jax.random.key(1), 64, length)
    factor = 1e12  # without it the squares of the smallest gradients underflow in float32
    tokens = batch["tokens"]
    loss = lambda logits: factor * small.cross_entropy(logits, batch)
    if name == "GRU":
        shift = jnp.zeros((*tokens.shape, Gru.width))
        gradient = jax.jit(jax.grad(lambda shift: loss(forward(params, tokens, shift))))(shift)
    else:
        of_output = lambda output: loss(output.logits)
        gradients = lambda params: interventions.gradients(
            ATTENTION, params, tokens, of_output, ("embedding",)
        )
        gradient = jax.jit(gradients)(params)["embedding"]
    norms = jnp.linalg.norm(gradient, axis=-1).mean(axis=0)
    return np.asarray(norms, np.float64)[::-1] / factor


def draw_figure(
    accuracies: dict[str, np.ndarray], norms: dict[str, np.ndarray], distances: Sequence[int]
) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for color, name in zip(small.COLORS, NAMES, strict=False):
        left.plot(distances, accuracies[name], "o-", color=color, label=name)
        right.plot(norms[name], color=color, label=name)
    left.axhline(1 / SYMBOLS, color="#888888", linestyle=":", linewidth=1, label="chance")
    left.set(xscale="log", xticks=distances, xticklabels=distances, ylim=(0, 1.05))
    left.set(xlabel="tokens from the fact to the question")
    left.set(ylabel="accuracy", title="after training: recall of one fact")
    left.minorticks_off()
    right.set(
        yscale="log",
        xlabel="tokens from an input to the answer",
        ylabel="norm of the gradient of the answer's loss",
    )
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
        shares = "".join(f"{value:>10.1%}" for value in accuracies[name])
        sizes = "".join(f"{norms[name][distance]:>10.1e}" for distance in DISTANCES)
        print(f"{name:<12}{shares}   accuracy")
        print(f"{name:<12}{sizes}   gradient before training")
    small.save_figure(lambda: draw_figure(accuracies, norms, DISTANCES), options.out)


if __name__ == "__main__":
    main()
