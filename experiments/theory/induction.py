"""In-context learning: an induction head forms while two layers of attention learn to continue a text that repeats itself.

Olsson et al. 2022, arXiv:2209.11895; Elhage et al. 2021, A Mathematical Framework for Transformer Circuits. A row is a
random list of distinct tokens, again and again; its period is random, so that no fixed distance helps. Where the list comes
again, the next token is the one that followed this one before. A head of layer 1 that looks there (induction score) needs a
head of layer 0 that looks one token back (previous-token score): it tells each token what stands before it. One layer knows
which tokens are in the list, not their order. The models have attention and no feed-forward.

Expected (seed 0): with two layers the loss falls from 3.5 to 0.06 (accuracy 99 %), half of the way by step 160; the induction
score rises from 0.04 to 0.81, half of the way by step 170, and the previous-token score from 0.07 to 0.68, by step 180. With
one layer the loss is 2.67 at the end, the accuracy 13 %, the score 0.08.
Time: half a minute of CPU time.
Command: python -m experiments.theory.induction [--steps 400] [--out induction.png]
"""

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from experiments.theory import small
from jaxformer import models
from jaxformer.models import ModelConfig
from jaxformer.models.layer import FeedForward, FeedForwardOutput
from jaxformer.ops.positions import Rope
from jaxformer.tools.analysis import attention_maps, figures

VOCABULARY, LENGTH, PERIODS, BATCH = 32, 48, (12, 24), 32
NAMES = {1: "one layer", 2: "two layers"}


def nothing(config: ModelConfig) -> FeedForward:
    """A feed-forward that adds nothing: the layers are attention alone."""
    return FeedForward({}, lambda params, x, context: FeedForwardOutput(jnp.zeros_like(x)))


def model(layers: int) -> ModelConfig:
    rope = Rope()
    return ModelConfig(VOCABULARY, layers, 64, 4, context_length=LENGTH, positions=rope, feedforward=nothing, init_std=0.1)


def draw(key: Array, batch: int = BATCH) -> small.Batch:
    """Lists of distinct tokens, each repeated with its own period; the labels that count are those of the repetitions."""
    keys = jax.random.split(key, batch + 1)
    periods = jax.random.randint(keys[0], (batch, 1), *PERIODS)
    lists = jax.vmap(lambda key: jax.random.permutation(key, VOCABULARY))(keys[1:])
    places = jnp.arange(LENGTH + 1)[None]
    text = jnp.take_along_axis(lists, places % periods, axis=1)
    return {"tokens": text[:, :-1], "labels": text[:, 1:], "weights": (places[:, 1:] >= periods).astype(jnp.float32)}


def scores(config: ModelConfig, params: Any, batch: small.Batch) -> dict[str, Array]:
    """Loss and accuracy on the repetitions; the best head's share of its weight at the induction target, and one token back."""
    name, tokens = "layers/*/attention/weights", batch["tokens"]
    output = models.apply(config, params, tokens, intermediates=(name,))
    weights, targets = output.intermediates[name], attention_maps.induction_targets(tokens)
    induction = attention_maps.head_means(attention_maps.weight_at(weights, targets), targets >= 0)  # [L, N]
    before = attention_maps.previous_tokens(tokens)
    previous = attention_maps.head_means(attention_maps.weight_at(weights, before), before >= 0)
    loss, accuracy = small.cross_entropy(output.logits, batch), small.accuracy(output.logits, batch)
    return {"test loss": loss, "accuracy": accuracy, "induction": induction[-1].max(), "previous": previous[0].max()}


def train(layers: int, steps: int, every: int = 10, seed: int = 0) -> list[dict]:
    """A record each `every` steps."""
    config, test = model(layers), draw(jax.random.key(1), 64)
    forward = lambda params, tokens: models.apply(config, params, tokens).logits
    params = models.init(config, jax.random.key(seed))
    return small.train(forward, params, draw, optax.adam(3e-3), steps, every, partial(scores, config, batch=test), seed)[1]


def crossing(records: list[dict], name: str) -> int:
    """The first step at which a curve has gone half of the way between its first and its last value."""
    values = np.array([record[name] for record in records])
    middle = (values[0] + values[-1]) / 2
    return records[int(np.argmax((values - middle) * np.sign(values[-1] - values[0]) >= 0))]["step"]


def draw_figure(found: dict[int, list[dict]]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 5.5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    for color, (layers, records) in zip((figures.COLORS[5], figures.COLORS[0]), found.items(), strict=True):
        steps = [record["step"] for record in records]
        top.plot(steps, [record["test loss"] for record in records], color=color, label=NAMES[layers])
        bottom.plot(steps, [record["induction"] for record in records], color=color, label=f"induction, {NAMES[layers]}")
    steps = [record["step"] for record in found[2]]
    values = [record["previous"] for record in found[2]]
    bottom.plot(steps, values, color=figures.COLORS[3], label="previous token, layer 0 of two")
    for name, axes in (("test loss", top), ("induction", bottom)):
        half = crossing(found[2], name)
        axes.axvline(half, color=figures.COLORS[0], linestyle=":", linewidth=1, label=f"half of the way: step {half}")
    top.set(ylabel="loss (nats per token)", ylim=(0, None), title="loss where the text repeats itself")
    bottom.set(ylabel="share of the weight", ylim=(0, 1.05), xlabel="step", title="where the best head looks")
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", default="induction.png")
    options = parser.parse_args()
    found = {layers: train(layers, options.steps) for layers in NAMES}
    for layers, records in found.items():
        last = records[-1]
        print(
            f"{NAMES[layers]:<12}" + "".join(f"{name} {last[name]:.3f}   " for name in ("test loss", "accuracy", "induction"))
        )
    for name in ("previous", "induction", "test loss"):
        values = " ".join(f"{record['step']}:{record[name]:.2f}" for record in found[2][:: max(len(found[2]) // 10, 1)])
        print(f"two layers, {name}: half of the way at step {crossing(found[2], name)}; {values}")
    print(f"figure: {figures.save(lambda: draw_figure(found), options.out)}")


if __name__ == "__main__":
    main()
