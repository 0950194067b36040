"""Where a fact is inside a model: associative recall with the states of one text put into another (activation patching).

Meng et al. 2022, arXiv:2202.05262, section 2. A model of two layers reads "k1 v1 ... kn vn" and then the keys, and says their
values. Two texts have the same keys in the same places and different values. The residual stream of the second is put into
the first, after one layer and at one kind of place: where the values stand, or where the keys are asked for.

Predicted: before the values have moved, the answers follow a patch at the places of the values; after the last layer they
follow one at the places of the questions, and no longer the other. Where it changes is the layer that fetches the values.
Expected (seed 0, 256 pairs of texts, share of answers that become the other text's): embedding 100 % at the values, 0 % at
the questions; after layer 0 the same; after layer 1 0 % and 100 %. So layer 1 fetches, by keys that layer 0 has put beside
the values.
Time: a minute on 2 CPU cores.
Command: python -m experiments.theory.patching [--runs runs]
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

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
    rows = batching.take_rows(batching.open_dataset(experiment.data, experiment.model).validation, np.arange(count))
    tokens, half = rows["tokens"], experiment.data.vocab_size // 2
    other = tokens.copy()
    shift = np.random.default_rng(seed).integers(1, half, size=(count, PAIRS))  # never the same value
    other[:, 1 : 2 * PAIRS : 2] = half + (tokens[:, 1 : 2 * PAIRS : 2] - half + shift) % half
    return jnp.asarray(tokens), jnp.asarray(other)


def answers(params, tokens, edits=None) -> jax.Array:
    """The likeliest value of each question, [B, PAIRS]."""
    return models.apply(experiment.model, params, tokens, edits=edits).logits[:, 2 * PAIRS :].argmax(axis=-1)


def patched(params, tokens, other) -> dict[tuple[str, str], float]:
    """The share of answers that are those of the other text, by (name, places)."""
    names = ("embedding", *(f"layers/{i}/residual" for i in range(experiment.model.num_layers)))
    states = models.apply(experiment.model, params, other, intermediates=names).intermediates
    slots, theirs = jnp.arange(tokens.shape[1]), answers(params, other)
    places = {"values": (slots < 2 * PAIRS) & (slots % 2 == 1), "questions": slots >= 2 * PAIRS}
    found = {}
    for name in names:
        for place, chosen in places.items():
            edit = lambda x, layer, name=name, chosen=chosen: jnp.where(chosen[None, :, None], states[name], x)
            found[name, place] = float((answers(params, tokens, {name: edit}) == theirs).mean())
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", default="runs")
    options = parser.parse_args()
    folder = run_folder.run_folder(experiment, options.runs)
    if not folder.result.is_file():
        loop.train(experiment, options.runs)
    params = Run(folder, experiment).params
    tokens, other = texts(256)
    own = float((answers(params, other) != answers(params, tokens)).mean())
    print(f"answers of the two texts differ in {own:.1%} of the questions")
    print(f"{'patched':<20}{'values':>12}{'questions':>12}")
    found = patched(params, tokens, other)
    for name in dict.fromkeys(name for name, _ in found):
        print(f"{name:<20}{found[name, 'values']:>12.1%}{found[name, 'questions']:>12.1%}")


if __name__ == "__main__":
    main()
