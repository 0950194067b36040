"""Every positional encoding of the library: do its scores depend on key - query alone?

Sinusoidal (Vaswani et al. 2017), learned, axial (Kitaev et al. 2020), rotary (Su et al. 2021),
ALiBi (Press et al. 2022), relative tables of T5 (Raffel et al. 2020) and of Shaw et al. 2018, here
with random tables.

Expected (seed 0): scores are constant along each diagonal (changes are below 1e-4 of the largest
score) for all encodings except learned and axial positions.
Time: 15 seconds.
Command: python -m experiments.theory.positions [--out positions.png]
"""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.theory import small
from jaxformer import masks, models
from jaxformer.models import ModelConfig, Sinusoidal, embedding
from jaxformer.models.config import Alibi, Axial, Embedding, Learned, Relative
from jaxformer.models.layer import Context
from jaxformer.models.mixers.attention import score_bias
from jaxformer.ops.bias import Bias, shaw
from jaxformer.ops.positions import Rope, rope
from jaxformer.params import Tree

LENGTH, WIDTH, HEADS = 64, 64, 8


class Encoding(NamedTuple):
    """The encoding of T positions."""

    values: np.ndarray  # [features or heads, T]
    scores: np.ndarray  # [T, T], of each query and key
    rows: str  # the label of the first axis of `values`

    def shift_error(self) -> float:
        """The largest change of scores along a diagonal, divided by the largest score.

        It is 0 if scores depend on key - query alone.
        """
        changes = np.abs(self.scores[1:, 1:] - self.scores[:-1, :-1])
        return float(changes.max() / np.abs(self.scores).max())


def encoding(config: ModelConfig, tree: Tree, length: int) -> Encoding:
    """The encoding of a stack with these parameters (only tables of positions are read).

    Absolute positions: the vectors that are added, and their dot products. Rotary positions: a
    rotated query of ones, and its scores with such keys. A bias: for the middle query by head, and
    for the middle head. Raises KeyError or TypeError if the config has no such positions.
    """
    numbers = jnp.arange(length)[None]
    positions = config.positions
    if isinstance(positions, tuple):  # one entry a layer, None for a layer without positions
        positions = next((each for each in positions if each is not None), None)
    match positions:
        case Learned() | Sinusoidal() | Axial():
            tables = {"tokens": jnp.zeros((1, config.d_model))}  # a token that adds nothing
            if "positions" in tree.get("embedding", {}):
                tables["positions"] = tree["embedding"]["positions"]
            bare = replace(config, embedding=Embedding(), vocab_size=1, heads=())
            context = Context(masks.full(), numbers)
            vectors = embedding.embed(bare, tables, jnp.zeros_like(numbers), context)[0]
        case Rope():
            ones = jnp.ones((1, length, 1, config.head_size))
            vectors = rope(ones, numbers, positions)[0, :, 0]
        case None:
            raise KeyError("positions")
        case _:
            bias: Any = score_bias(config, tree.get("shared"))
            if isinstance(bias, Bias):
                scores = np.asarray(bias.block(0, length, 0, length))
            else:
                scores = np.asarray(bias(numbers[0], numbers[0]) if callable(bias) else bias)
            scores = scores.reshape(-1, *scores.shape[-2:])
            return Encoding(scores[:, length // 2], scores[len(scores) // 2], "head, middle query")
    vectors = np.asarray(vectors, np.float64)  # [T, features]
    return Encoding(vectors.T, vectors @ vectors.T, "feature")


def relative_keys(config: ModelConfig):
    """The bias of Shaw et al. for queries that are all equal."""
    query = jax.random.normal(jax.random.key(1), (1, 1, HEADS, config.head_size))
    table = jax.random.normal(jax.random.key(2), (2 * 16 + 1, config.head_size))
    return shaw(jnp.broadcast_to(query, (1, LENGTH, *query.shape[2:])), table)


KINDS = {
    "sinusoidal": Sinusoidal(),
    "learned": Learned(),
    "axial": Axial((8, LENGTH // 8), (WIDTH // 2, WIDTH // 2)),
    "rotary": Rope(),
    "ALiBi": Alibi(),
    "T5": Relative(max_distance=32),
    "Shaw": relative_keys,
}


def measure() -> dict[str, Encoding]:
    """The encoding of each kind."""
    encodings = {}
    for name, positions in KINDS.items():
        config = replace(ModelConfig(1, 1, WIDTH, HEADS, LENGTH), positions=positions)
        encodings[name] = encoding(config, models.init(config, jax.random.key(0)), LENGTH)
    return encodings


def draw(encodings: Mapping[str, Encoding]) -> Any:
    """Above: the values of each encoding. Below: its part of the score of each query and key."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    columns = 4
    groups = -(-len(encodings) // columns)  # each has a row of values and a row of scores
    figure = Figure(figsize=(2.2 * columns, 3.4 * groups), layout="constrained")
    grid = figure.subplots(2 * groups, columns)
    for axes in grid.ravel():
        axes.set_axis_off()
    colours = ScalarMappable(Normalize(-1, 1), "RdBu_r")
    for i, (name, one) in enumerate(encodings.items()):
        above, below = grid[2 * (i // columns) :, i % columns][:2]
        for axes, values in ((above, one.values), (below, one.scores)):
            axes.set_axis_on()
            share = values / (float(np.abs(values).max()) or 1.0)
            axes.imshow(
                share, aspect="auto", interpolation="none", cmap=colours.cmap, norm=colours.norm
            )
        above.set(xlabel="position (tokens)", ylabel=one.rows, title=name)
        shifts = "key − query" if one.shift_error() < 1e-4 else "both positions"
        below.set(xlabel="key position", ylabel="query position", title=f"score: {shifts}")
    figure.colorbar(colours, ax=grid, shrink=0.4, label="share of the largest value")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="positions.png")
    options = parser.parse_args()
    encodings = measure()
    for name, one in encodings.items():
        print(
            f"{name:<12} largest change along a diagonal: {one.shift_error():.1e} "
            "of the largest score"
        )
    small.save_figure(lambda: draw(encodings), options.out, colors=40)


if __name__ == "__main__":
    main()
