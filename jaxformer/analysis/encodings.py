"""Positional encodings to look at: what they give a position, and what they alone make of the score of a query and a key."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxformer.models import ModelConfig, embedding
from jaxformer.models.config import Axial, Embedding, Learned, Sinusoidal
from jaxformer.models.mixers.attention import score_bias
from jaxformer.ops.positions import Bias, Rope, rope
from jaxformer.params import Tree


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
