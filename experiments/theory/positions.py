"""Every positional encoding of the library, and its relative-shift property: which scores depend on key - query alone.

Sinusoidal (Vaswani et al. 2017), learned, axial (Kitaev et al. 2020), rotary (Su et al. 2021), ALiBi (Press et al. 2022),
relative tables of T5 (Raffel et al. 2020) and of Shaw et al. 2018, here with random tables.

Expected (seed 0): along a diagonal of the scores nothing changes (less than 1e-4 of the largest score) for all but learned and
axial positions.
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

from jaxformer import models
from jaxformer.models import ModelConfig, Sinusoidal, embedding
from jaxformer.models.config import Alibi, Axial, Embedding, Learned, Relative
from jaxformer.models.mixers.attention import score_bias
from jaxformer.ops.bias import Bias, shaw
from jaxformer.ops.positions import Rope, rope
from jaxformer.params import Tree
from jaxformer.tools.analysis import figures

LENGTH, WIDTH, HEADS = 64, 64, 8


class Encoding(NamedTuple):
    """Of T positions."""

    values: np.ndarray  # [features or heads, T]
    scores: np.ndarray  # [T, T], of each query and key
    rows: str  # what the rows of `values` are

    def shift_error(self) -> float:
        """How far scores are from depending on key - query alone: the largest change along a diagonal, of the largest score."""
        return float(np.abs(self.scores[1:, 1:] - self.scores[:-1, :-1]).max() / np.abs(self.scores).max())


def encoding(config: ModelConfig, tree: Tree, length: int) -> Encoding:
    """The encoding of a stack with these parameters (only tables of positions are read).

    Absolute: rows that are added, and their dot products. Rotary: a query of ones turned, and its scores with such keys.
    A bias: of the middle query by head, and of the middle head. KeyError and TypeError for what there is not.
    """
    at, how = jnp.arange(length)[None], config.positions
    how = next((each for each in how if each is not None), None) if isinstance(how, tuple) else how
    match how:
        case Learned() | Sinusoidal() | Axial():
            table = tree.get("embedding", {}) | {"tokens": jnp.zeros((1, config.d_model))}
            table = {name: leaf for name, leaf in table.items() if name in ("tokens", "positions")}
            rows = embedding.embed(
                replace(config, embedding=Embedding(), vocab_size=1, heads=()), table, jnp.zeros_like(at), at
            )[0]
        case Rope():
            rows = rope(jnp.ones((1, length, 1, config.head_size)), at, how)[0, :, 0]
        case None:
            raise KeyError("positions")
        case _:
            bias: Any = score_bias(config, tree.get("shared"))
            if isinstance(bias, Bias):
                scores = np.asarray(bias.block(0, length, 0, length))
            else:
                scores = np.asarray(bias(at[0], at[0]) if callable(bias) else bias)
            scores = scores.reshape(-1, *scores.shape[-2:])
            return Encoding(scores[:, length // 2], scores[len(scores) // 2], "head (middle query)")
    rows = np.asarray(rows, np.float64)
    return Encoding(rows.T, rows @ rows.T, "feature")


def relative_keys(config: ModelConfig):
    """The bias of Shaw et al. for queries that are all alike."""
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
    found = {}
    for name, positions in KINDS.items():
        config = replace(ModelConfig(1, 1, WIDTH, HEADS, LENGTH), positions=positions)
        found[name] = encoding(config, models.init(config, jax.random.key(0)), LENGTH)
    return found


def draw(encodings: Mapping[str, Encoding]) -> Any:
    """Above what each encoding gives a position, below what it alone makes of the score of a query and a key."""
    count = len(encodings)
    panels = figures.panels(2 * count, count, 2.4, 2.4)
    for i, (name, found) in enumerate(encodings.items()):
        shifts = "key − query" if found.shift_error() < 1e-4 else "both positions"
        for axes, values in ((panels[i], found.values), (panels[i + count], found.scores)):
            most = float(np.abs(values).max()) or 1.0
            axes.imshow(values, aspect="auto", cmap="RdBu_r", vmin=-most, vmax=most, interpolation="none")
        panels[i].set(xlabel="position", ylabel=found.rows)
        panels[i].set_title(name, fontsize=8)
        panels[i + count].set(xlabel="key", ylabel="query")
        panels[i + count].set_title(f"score: depends on {shifts}", fontsize=8)
    return panels[0].figure


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="positions.png")
    options = parser.parse_args()
    found = measure()
    for name, one in found.items():
        print(f"{name:<12} largest change along a diagonal: {one.shift_error():.1e} of the largest score")
    print(f"figure: {figures.save(lambda: draw(found), options.out)}")


if __name__ == "__main__":
    main()
