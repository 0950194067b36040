"""Which cheap attention comes near the softmax, at which cost: linear, Performer, Linformer, LSH; and the rank of the softmax.

Katharopoulos et al. 2020, arXiv:2006.16236; Choromanski et al. 2021, arXiv:2009.14794; Wang et al. 2020, arXiv:2006.04768;
Kitaev et al. 2020, arXiv:2001.04451. Queries, keys and values are independent normal vectors, and the scores have the standard
deviation `sharpness`. The error is |out - exact| / |exact|; that of the mean of all values says what no attention at all gives.
Linformer takes every (T / R)-th key, and the projection of its values is the best for these queries and keys, by least squares.
The queries of LSH are its keys, so its exact attention is another one. FLOPs are those of the program's matrix products
(`planning.flops`); LSH also sorts.

Expected (seed 0, 512 tokens, 2 heads of 16, means of 5 draws): Performer's error falls as 1 / sqrt(features) where attention
is flat: the slope of the logarithms is -0.51, -0.42, -0.12 and 0.00 at deviations of 0.1, 0.25, 1 and 4, as the variance of
its features grows with exp(|q|^2 / sqrt(H)). Linear attention (elu + 1) does not approximate the softmax: it errs by 0.211,
0.739 and 0.992 at 0.25, 1 and 4, the mean of all values by 0.225, 0.776 and 0.996. Rank decides: 99 % of |A|^2 are in 2, 14,
176 and 216 of 512 singular values; a Linformer of rank 64 errs by 0.031 at 0.25 and by 0.865 at 4. LSH errs by 2.9 with one
round, more than no attention. At 4 it is the best from half of the exact attention's cost on (4 rounds: 0.643).
Time: a minute and a half of CPU time.
Command: python -m experiments.theory.approximation [--out approximation.png]
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxformer import ops, zoo
from jaxformer.masks import full
from jaxformer.tools.analysis import figures
from jaxformer.tools.planning import flops

LENGTH, HEADS, WIDTH = 512, 2, 16
SHARPNESS, SHOWN = (0.1, 0.25, 1.0, 4.0), {"flat": 0.25, "sharp": 4.0}
FEATURES, RANKS, ROUNDS = (16, 64, 256, 1024), (16, 32, 64, 128, 256), (1, 2, 4, 8)
METHODS = ("linear (elu + 1)", "Performer (features)", "Linformer (rank)", "LSH (rounds)")
CHUNK, DRAWS = 16, 5  # errors are means over so many draws of what is random


class Inputs(NamedTuple):
    query: Array  # [1, T, N, H]
    key: Array
    value: Array


class Point(NamedTuple):
    """One setting of one method."""

    size: int  # features, rank or rounds
    flops: float
    error: float


def inputs(sharpness: float, length: int = LENGTH, seed: int = 0) -> Inputs:
    """Normal vectors; the scores q . k / sqrt(H) have the standard deviation `sharpness`."""
    query, key, value = jax.random.normal(jax.random.key(seed), (3, 1, length, HEADS, WIDTH))
    return Inputs(query * sharpness**0.5, key * sharpness**0.5, value)


def exact(x: Inputs) -> Any:
    return ops.attention(*x, implementation="reference")


def attention_matrix(x: Inputs) -> np.ndarray:
    """[N, T, T], in float64."""
    return np.asarray(ops.attention(*x, implementation="reference", return_weights=True)[1][0], np.float64)


def relative_error(out: Array, target: Array) -> float:
    return float(jnp.linalg.norm(out - target) / jnp.linalg.norm(target))


def measured(function: Callable, argument, size: int, x: Inputs, target: Array, draws: int = DRAWS) -> Point:
    """`function(argument(key), x)` for some keys: its FLOPs and its mean error."""
    drawn, compiled = [argument(jax.random.key(i + 1)) for i in range(draws)], jax.jit(function)
    errors = [relative_error(compiled(one, x), target) for one in drawn]
    return Point(size, flops.count(function, drawn[0], x).flops, float(np.mean(errors)))


def linear(x: Inputs) -> Point:
    function = lambda _, x: zoo.linear_attention.attention(*x, mask=full())
    return measured(function, lambda key: None, WIDTH, x, exact(x), draws=1)


def performer(x: Inputs, features: Sequence[int] = FEATURES) -> list[Point]:
    function = lambda projection, x: zoo.performer.attention(x.query, x.key, x.value, projection, mask=full())
    draw = lambda size: lambda key: zoo.performer.orthogonal_projection(key, size, WIDTH)
    return [measured(function, draw(size), size, x, exact(x)) for size in features]


def linformer(x: Inputs, ranks: Sequence[int] = RANKS) -> list[Point]:
    function = lambda projections, x: zoo.linformer.attention(*x, *projections)
    return [measured(function, lambda key, rank=rank: best_projections(x, rank), rank, x, exact(x), draws=1) for rank in ranks]


def best_projections(x: Inputs, rank: int) -> tuple[Array, Array]:
    """E and F of each head, [N, T, R]: E takes every (T / R)-th key, F is the best for it, by least squares."""
    length = x.key.shape[1]
    every = slice(None, None, length // rank)
    chosen, fewer = np.eye(length)[:, every], x._replace(key=x.key[:, every], value=x.value[:, every])
    found = []
    for weights, wanted in zip(attention_matrix(fewer), attention_matrix(x), strict=True):
        found.append(np.linalg.lstsq(weights, wanted, rcond=1e-5)[0].T)
    return jnp.broadcast_to(jnp.asarray(chosen, jnp.float32), (HEADS, *chosen.shape)), jnp.asarray(np.stack(found), jnp.float32)


def reformer(x: Inputs, sharpness: float, rounds: Sequence[int] = ROUNDS, chunk: int = CHUNK) -> list[Point]:
    """LSH attention of the queries to themselves; one chunk of all tokens is the exact one."""
    length = x.query.shape[1]
    x = x._replace(query=x.query * sharpness**-0.5)  # the keys have the length 1: then q . k has the deviation 1

    def function(chunk):
        return lambda rotations, x: zoo.reformer.attention(
            x.query, x.value, rotations, chunk=chunk, chunks_after=int(chunk < length), scale=sharpness
        )

    draw = lambda size: lambda key: zoo.reformer.random_rotations(key, HEADS, WIDTH, size, 2 * length // chunk)
    target = function(length)(draw(1)(jax.random.key(0)), x)
    return [measured(function(chunk), draw(size), size, x, target) for size in rounds]


def spectrum(matrix: np.ndarray) -> tuple[float, float, np.ndarray]:
    """(stable rank |A|_F^2 / |A|_2^2, singular values that hold 99 % of |A|_F^2, error of the best matrix of each rank)."""
    squares = np.square(np.linalg.svd(matrix, compute_uv=False))  # [N, T]
    tails = 1 - np.cumsum(squares, axis=1) / squares.sum(axis=1, keepdims=True)
    best = np.sqrt(np.maximum(tails, 0)).mean(axis=0)
    return float((squares.sum(axis=1) / squares[:, 0]).mean()), float(1 + (tails > 0.01).sum(axis=1).mean()), best


def study(sharpness: float, length: int = LENGTH) -> dict[str, Any]:
    """Every method at one sharpness; FLOPs are shares of those of the exact attention."""
    x = inputs(sharpness, length)
    whole, target = flops.count(exact, x).flops, exact(x)
    mean = jnp.broadcast_to(x.value.mean(axis=1, keepdims=True), target.shape)
    found = dict(zip(METHODS, ([linear(x)], performer(x), linformer(x), reformer(x, sharpness)), strict=True))
    found = {name: [point._replace(flops=point.flops / whole) for point in points] for name, points in found.items()}
    stable, rank, best = spectrum(attention_matrix(x))
    return {"methods": found, "mean": relative_error(mean, target), "stable rank": stable, "rank": rank, "best": best}


def slope(points: Sequence[Point]) -> float:
    """d log error / d log size: -1/2 where the error falls as 1 / sqrt(features)."""
    return float(np.polyfit(np.log([p.size for p in points]), np.log([p.error for p in points]), 1)[0])


def draw(found: dict[float, dict[str, Any]]):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.2), layout="constrained")
    panels = figure.subplots(1, 3)
    for axes, (word, sharpness) in zip(panels, SHOWN.items(), strict=False):
        result = found[sharpness]
        for color, (name, points) in zip(figures.COLORS, result["methods"].items(), strict=False):
            axes.plot([p.flops for p in points], [p.error for p in points], "o-", color=color, label=name)
            for point in points[:: max(len(points) - 1, 1)]:
                place = dict(textcoords="offset points", xytext=(4, 5), fontsize=7, color=color)
                axes.annotate("" if len(points) == 1 else str(point.size), (point.flops, point.error), **place)
        axes.axhline(result["mean"], color="#888888", linestyle=":", linewidth=1, label="the mean of all values")
        axes.axvline(1, color="black", linewidth=0.8, linestyle="--", label="cost of the exact attention")
        axes.set(
            xscale="log",
            yscale="log",
            ylim=(2e-3, 5),
            xlim=(0.02, 12),
            xlabel="FLOPs, as a share of the exact attention's",
            ylabel="relative error",
        )
        axes.set_title(f"{word} attention: scores of deviation {sharpness:g}", fontsize=10)
    panels[0].legend(frameon=False, fontsize=7)
    for i, (sharpness, result) in enumerate(found.items()):
        style = dict(color=str(0.75 - 0.75 * i / len(found)), label=f"scores of deviation {sharpness:g}")
        panels[2].plot(np.arange(1, len(result["best"]) + 1), result["best"], **style)
    panels[2].set(xscale="log", yscale="log", ylim=(1e-2, 1.1), xlabel="rank", ylabel="relative error")
    panels[2].set_title("best error of any attention matrix of a lower rank", fontsize=10)
    panels[2].legend(frameon=False, fontsize=7)
    for axes in panels:
        axes.grid(alpha=0.25)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="approximation.png")
    options = parser.parse_args()
    found = {sharpness: study(sharpness) for sharpness in SHARPNESS}
    print(f"{LENGTH} tokens, {HEADS} heads of {WIDTH}; relative errors of the output (share of the exact attention's FLOPs)")
    for sharpness, result in found.items():
        rank = f"stable rank {result['stable rank']:.1f}, {result['rank']:.0f} of {LENGTH} singular values hold 99 %"
        print(f"\nscores of deviation {sharpness:g}: {rank}; the mean of all values errs by {result['mean']:.3f}")
        for name, points in result["methods"].items():
            print(f"{name:<22}" + "".join(f"{p.size:>6}: {p.error:.3f} ({p.flops:.2f})" for p in points))
        print(f"slope of Performer's error against its features: {slope(result['methods'][METHODS[1]]):.2f}")
    print(f"figure: {figures.save(lambda: draw(found), options.out)}")


if __name__ == "__main__":
    main()
