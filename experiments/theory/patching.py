"""Activation patching: which layer of a model moves a recalled fact, and from where to where.

Meng et al. 2022, arXiv:2202.05262, section 2. A model of two layers reads "k1 v1 ... kn vn" and
then the keys, and answers with their values. Two texts have the same keys in the same positions and
different values. The residual stream of the second text replaces that of the first, after one layer
and at one kind of position: at the values, or at the questions (the repeated keys).

Predicted: in the layers before the values are fetched, the answers follow a patch at the values.
After the last layer they follow a patch at the questions, and no longer one at the values. The
layer in between fetches the values.
Expected (seed 0, 256 pairs of texts, share of answers that become the other text's): embedding
100 % at the values, 0 % at the questions; after layer 0 the same; after layer 1 0 % and 100 %. So
layer 1 fetches the values, by the keys that layer 0 has put beside them.
Time: a minute on 2 CPU cores.
Command: python -m experiments.theory.patching [--runs runs] [--out patching.png]
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from experiments.theory import small
from jaxformer import models
from jaxformer.data import batching
from jaxformer.data.tasks import Recall
from jaxformer.models import ModelConfig
from jaxformer.ops.positions import Rope
from jaxformer.runs import loop, run_folder
from jaxformer.runs.run import Run
from jaxformer.training import AdamW, Cosine, Experiment

PAIRS = 6
experiment = Experiment(
    name="recall",
    model=ModelConfig(32, 2, 64, 2, context_length=3 * PAIRS, positions=Rope(), init_std=0.1),
    data=Recall(vocab_size=32, length=PAIRS, examples=20_000),
    optimizer=AdamW(learning_rate=3e-3),
    schedule=Cosine(warmup=50),
    steps=1000,
    batch_size=64,
    eval_every=500,
    log_every=100,
)


def texts(count: int, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """(tokens, tokens with other values) [count, 3 PAIRS]."""
    validation = batching.open_dataset(experiment.data, experiment.model).validation
    tokens = batching.take_rows(validation, np.arange(count))["tokens"]
    half = experiment.data.vocab_size // 2  # values are tokens from here on
    # a shift is never 0, so no value stays the same
    shift = np.random.default_rng(seed).integers(1, half, size=(count, PAIRS))
    values = slice(1, 2 * PAIRS, 2)
    other = tokens.copy()
    other[:, values] = half + (tokens[:, values] - half + shift) % half
    return jnp.asarray(tokens), jnp.asarray(other)


def answers(params, tokens, edits=None) -> jax.Array:
    """The likeliest value of each question, [B, PAIRS]."""
    logits = models.apply(experiment.model, params, tokens, edits=edits).logits
    return logits[:, 2 * PAIRS :].argmax(axis=-1)


def patched(params, tokens, other) -> dict[tuple[str, str], float]:
    """{(intermediate, positions): share of answers that are those of the other text}."""
    names = ("embedding", *(f"layers/{i}/residual" for i in range(experiment.model.num_layers)))
    states = models.apply(experiment.model, params, other, intermediates=names).intermediates
    positions = jnp.arange(tokens.shape[1])
    is_question = positions >= 2 * PAIRS
    masks = {"values": ~is_question & (positions % 2 == 1), "questions": is_question}
    other_answers = answers(params, other)
    results = {}
    for name in names:
        for kind, mask in masks.items():
            edits = {name: partial(put, states[name], mask)}
            results[name, kind] = float((answers(params, tokens, edits) == other_answers).mean())
    return results


def put(states: jax.Array, mask: jax.Array, x: jax.Array, layer) -> jax.Array:
    """The edit that replaces x `[B, T, D]` by the states of the other text where `mask` `[T]`."""
    return jnp.where(mask[None, :, None], states, x)


def draw(results: dict[tuple[str, str], float]):
    """The share of answers that follow a patch, by place of the patch."""
    from matplotlib.figure import Figure

    axes = Figure(figsize=(6.5, 3.4), layout="constrained").add_subplot()
    names = list(dict.fromkeys(name for name, _ in results))
    for i, kind in enumerate(("values", "questions")):
        heights = [results[name, kind] for name in names]
        places = np.arange(len(names)) + 0.36 * (i - 0.5)
        axes.bar(places, heights, 0.36, color=small.COLORS[i], label=f"patch at the {kind}")
    labels = ["embedding", *(f"after layer {i}" for i in range(len(names) - 1))]
    axes.set_xticks(np.arange(len(names)), labels)
    axes.set(ylim=(0, 1.25), xlabel="where the stream is replaced", ylabel="answers that follow")
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    axes.grid(alpha=0.25, axis="y")
    axes.legend(frameon=False, loc="upper center", ncols=2)
    return axes.figure


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", default="runs")
    parser.add_argument("--out", default="patching.png")
    options = parser.parse_args()
    folder = run_folder.run_folder(experiment, options.runs)
    if not folder.result.is_file():
        loop.train(experiment, options.runs)
    params = Run(folder, experiment).params
    tokens, other = texts(256)
    own = float((answers(params, other) != answers(params, tokens)).mean())
    print(f"answers of the two texts differ in {own:.1%} of the questions")
    print(f"{'patched':<20}{'values':>12}{'questions':>12}")
    results = patched(params, tokens, other)
    for name in dict.fromkeys(name for name, _ in results):
        print(f"{name:<20}{results[name, 'values']:>12.1%}{results[name, 'questions']:>12.1%}")
    small.save_figure(partial(draw, results), options.out)


if __name__ == "__main__":
    main()
