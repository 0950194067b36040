"""Error against cost of cheap attention: linear, Performer, Linformer, LSH; and the softmax's rank.

Katharopoulos et al. 2020, arXiv:2006.16236; Choromanski et al. 2021, arXiv:2009.14794; Wang et al.
2020, arXiv:2006.04768; Kitaev et al. 2020, arXiv:2001.04451. Queries, keys and values are
independent normal vectors. The scores have the standard deviation `sharpness`. The error is
|out - exact| / |exact|. As a baseline, the mean of all values is no attention at all. Linformer
takes every (T / R)-th key, and its value projection is the best one for these queries and keys, by
least squares. LSH uses its queries as keys, so it is compared with another exact attention. FLOPs
are those of the program's matrix products (`planning.flops`); LSH also sorts.

Expected (seed 0, 512 tokens, 2 heads of 16, means of 5 draws): where attention is flat, Performer's
error falls as 1 / sqrt(features). The slope of the logarithms is -0.51, -0.42, -0.12 and 0.00 at
deviations of 0.1, 0.25, 1 and 4, because the variance of its features grows with
exp(|q|^2 / sqrt(H)). Linear attention (elu + 1) does not approximate the softmax: its error is
0.211, 0.739 and 0.992 at 0.25, 1 and 4; the mean of all values has 0.225, 0.776 and 0.996. The rank
explains the errors: 99 % of |A|^2 are in 2, 14, 176 and 216 of 512 singular values; a Linformer of
rank 64 has an error of 0.031 at 0.25 and of 0.865 at 4. LSH with one round has an error of 2.9,
more than no attention. At 4 it is the best method for half of the exact attention's cost or more
(4 rounds: 0.643).
Time: a minute and a half of CPU time.
Command: python -m experiments.theory.approximation [--out approximation.png]
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments.theory import small
from jaxformer import ops, zoo
from jaxformer.masks import full
from jaxformer.tools.planning import flops

LENGTH, HEADS, WIDTH = 512, 2, 16
SHARPNESS = (0.1, 0.25, 1.0, 4.0)
SHOWN = {"flat": 0.25, "sharp": 4.0}
FEATURES, RANKS, ROUNDS = (16, 64, 256, 1024), (16, 32, 64, 128, 256), (1, 2, 4, 8)
METHODS = ("linear (elu + 1)", "Performer (features)", "Linformer (rank)", "LSH (rounds)")
CHUNK = 16
DRAWS = 5  # an error is the mean over DRAWS draws of the random part of a method


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
    _, weights = ops.attention(*x, implementation="reference", return_weights=True)
    return np.asarray(weights[0], np.float64)


def relative_error(out: Array, target: Array) -> float:
    return float(jnp.linalg.norm(out - target) / jnp.linalg.norm(target))


def measured(
    function: Callable, argument, size: int, x: Inputs, target: Array, draws: int = DRAWS
) -> Point:
    """The FLOPs and the mean error of `function(argument(key), x)` over `draws` keys."""
    arguments = [argument(jax.random.key(i + 1)) for i in range(draws)]
    compiled = jax.jit(function)
    errors = [relative_error(compiled(drawn, x), target) for drawn in arguments]
    return Point(size, flops.count(function, arguments[0], x).flops, float(np.mean(errors)))


def linear(x: Inputs) -> Point:
    def attention(_, x: Inputs) -> Array:
        return zoo.linear_attention.attention(*x, mask=full())

    return measured(attention, lambda key: None, WIDTH, x, exact(x), draws=1)


def performer(x: Inputs, features: Sequence[int] = FEATURES) -> list[Point]:
    def attention(projection: Array, x: Inputs) -> Array:
        return zoo.performer.attention(*x, projection, mask=full())

    points = []
    for size in features:
        draw = lambda key, size=size: zoo.performer.orthogonal_projection(key, size, WIDTH)
        points.append(measured(attention, draw, size, x, exact(x)))
    return points


def linformer(x: Inputs, ranks: Sequence[int] = RANKS) -> list[Point]:
    def attention(projections: tuple[Array, Array], x: Inputs) -> Array:
        return zoo.linformer.attention(*x, *projections)

    points = []
    for rank in ranks:
        best = lambda key, rank=rank: best_projections(x, rank)
        points.append(measured(attention, best, rank, x, exact(x), draws=1))
    return points


def best_projections(x: Inputs, rank: int) -> tuple[Array, Array]:
    """(E, F) of each head, [N, T, R]: E takes every (T / R)-th key, F is its least-squares fit."""
    length = x.key.shape[1]
    step = slice(None, None, length // rank)
    of_keys = np.eye(length)[:, step]
    fewer = x._replace(key=x.key[:, step], value=x.value[:, step])
    of_values = []
    for weights, wanted in zip(attention_matrix(fewer), attention_matrix(x), strict=True):
        of_values.append(np.linalg.lstsq(weights, wanted, rcond=1e-5)[0].T)
    E = jnp.broadcast_to(jnp.asarray(of_keys, jnp.float32), (HEADS, *of_keys.shape))
    F = jnp.asarray(np.stack(of_values), jnp.float32)
    return E, F


def reformer(
    x: Inputs, sharpness: float, rounds: Sequence[int] = ROUNDS, chunk: int = CHUNK
) -> list[Point]:
    """LSH attention of the queries to themselves; with one chunk of all tokens it is exact."""
    length = x.query.shape[1]
    # reformer normalises its keys to length 1, so q . k then has the deviation 1
    x = x._replace(query=x.query * sharpness**-0.5)

    def draw(key: Array, count: int) -> Any:
        return zoo.reformer.random_rotations(key, HEADS, WIDTH, count, 2 * length // chunk)

    target = lsh_attention(draw(jax.random.key(0), 1), x, chunk=length, scale=sharpness)
    attention = partial(lsh_attention, chunk=chunk, scale=sharpness)
    return [measured(attention, partial(draw, count=size), size, x, target) for size in rounds]


def lsh_attention(rotations: Array, x: Inputs, chunk: int, scale: float) -> Array:
    after = int(chunk < x.query.shape[1])
    return zoo.reformer.attention(
        x.query, x.value, rotations, chunk=chunk, chunks_after=after, scale=scale
    )


def spectrum(matrix: np.ndarray) -> tuple[float, float, np.ndarray]:
    """(stable rank |A|_F^2 / |A|_2^2, rank that holds 99 % of |A|_F^2, least error of each rank).

    Each is a mean over heads. The least error is that of the best approximation of that rank.
    """
    squares = np.square(np.linalg.svd(matrix, compute_uv=False))  # [N, T]
    tails = 1 - np.cumsum(squares, axis=1) / squares.sum(axis=1, keepdims=True)
    stable_rank = float((squares.sum(axis=1) / squares[:, 0]).mean())
    rank = float(1 + (tails > 0.01).sum(axis=1).mean())
    best = np.sqrt(np.maximum(tails, 0)).mean(axis=0)
    return stable_rank, rank, best


def study(sharpness: float, length: int = LENGTH) -> dict[str, Any]:
    """Every method at one sharpness; FLOPs are shares of the exact attention's FLOPs."""
    x = inputs(sharpness, length)
    exact_flops = flops.count(exact, x).flops
    target = exact(x)
    mean = jnp.broadcast_to(x.value.mean(axis=1, keepdims=True), target.shape)
    results = ([linear(x)], performer(x), linformer(x), reformer(x, sharpness))
    methods = {
        name: [point._replace(flops=point.flops / exact_flops) for point in points]
        for name, points in zip(METHODS, results, strict=True)
    }
    stable, rank, best = spectrum(attention_matrix(x))
    return {
        "methods": methods,
        "mean": relative_error(mean, target),
        "stable rank": stable,
        "rank": rank,
        "best": best,
    }


def slope(points: Sequence[Point]) -> float:
    """d log error / d log size: -1/2 where the error falls as 1 / sqrt(features)."""
    sizes = np.log([point.size for point in points])
    errors = np.log([point.error for point in points])
    return float(np.polyfit(sizes, errors, 1)[0])


def draw(results: dict[float, dict[str, Any]]):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.5, 4.2), layout="constrained")
    panels = figure.subplots(1, 3)
    for axes, (word, sharpness) in zip(panels, SHOWN.items(), strict=False):
        result = results[sharpness]
        for color, (name, points) in zip(small.COLORS, result["methods"].items(), strict=False):
            costs = [point.flops for point in points]
            errors = [point.error for point in points]
            axes.plot(costs, errors, "o-", color=color, label=name)
            for point in points[:: max(len(points) - 1, 1)]:
                place = dict(textcoords="offset points", xytext=(4, 5), fontsize=7, color=color)
                size = "" if len(points) == 1 else str(point.size)
                axes.annotate(size, (point.flops, point.error), **place)
        axes.axhline(
            result["mean"],
            color="#888888",
            linestyle=":",
            linewidth=1,
            label="the mean of all values",
        )
        axes.axvline(
            1, color="black", linewidth=0.8, linestyle="--", label="cost of the exact attention"
        )
        axes.set(
            xscale="log",
            yscale="log",
            ylim=(2e-3, 5),
            xlim=(0.02, 12),
            xlabel="FLOPs, share of exact attention",
            ylabel="relative error",
        )
        axes.set_title(f"{word} attention: deviation {sharpness:g}", fontsize=10)
    panels[1].legend(frameon=False, loc="lower left")
    for i, (sharpness, result) in enumerate(results.items()):
        style = dict(color=str(0.75 - 0.75 * i / len(results)), label=f"{sharpness:g}")
        panels[2].plot(np.arange(1, len(result["best"]) + 1), result["best"], **style)
    panels[2].set(
        xscale="log", yscale="log", ylim=(1e-2, 1.1), xlabel="rank", ylabel="relative error"
    )
    panels[2].set_title("the best attention matrix of that rank", fontsize=10)
    panels[2].legend(frameon=False, title="deviation", loc="lower left")
    for axes in panels:
        axes.grid(alpha=0.25)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="approximation.png")
    options = parser.parse_args()
    results = {sharpness: study(sharpness) for sharpness in SHARPNESS}
    print(
        f"{LENGTH} tokens, {HEADS} heads of {WIDTH}; relative errors of the output "
        "(share of the exact attention's FLOPs)"
    )
    for sharpness, result in results.items():
        rank = (
            f"stable rank {result['stable rank']:.1f}, "
            f"{result['rank']:.0f} of {LENGTH} singular values hold 99 %"
        )
        print(
            f"\nscores of deviation {sharpness:g}: {rank}; "
            f"the mean of all values errs by {result['mean']:.3f}"
        )
        for name, points in result["methods"].items():
            cells = [f"{p.size:>6}: {p.error:.3f} ({p.flops:.2f})" for p in points]
            print(f"{name:<22}" + "".join(cells))
        print(
            "slope of Performer's error against its features: "
            f"{slope(result['methods'][METHODS[1]]):.2f}"
        )
    small.save_figure(lambda: draw(results), options.out)


if __name__ == "__main__":
    main()
