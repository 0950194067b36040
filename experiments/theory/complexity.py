"""Growth of cost with length for each kind of layer: by formula, FLOPs, time and memory.

Vaswani et al. 2017, arXiv:1706.03762, table 1, and the surveys of efficient attention. With
logarithmic axes a cost c n^p is a line of slope p. The slope of the program's FLOPs is exact. The
slopes of time and temporary memory are fitted to measurements at lengths where the leading term
dominates: n^2 d exceeds n d^2 only above some thousand tokens.

Expected: every FLOP slope within 0.02 of the stated exponent, but 1.94 for causal attention, which
computes the blocks on the diagonal whole; slopes of time: block by block 1.89, causal 1.82, where 2
is stated; the others 0.89 (BigBird) to 1.18 (Linformer), where 1 is stated.
Time: four minutes on 2 quiet CPU cores (seconds with --longest 0, which counts FLOPs alone).
Command: python -m experiments.theory.complexity [--longest 16384] [--out complexity.png]
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from experiments.bench import attention as bench
from experiments.theory import small
from jaxformer import masks, ops
from jaxformer.runs import memory
from jaxformer.tools.planning import flops

N, H = bench.HEADS, bench.WIDTH
D = N * H
COUNTED = 4096, 8192, 16_384  # tokens


def recurrent(query: Array, key: Array, value: Array) -> Array:
    """h_t = tanh(W h_(t-1) + x_t): n steps, one after another."""
    W = random.normal(random.key(0), (D, D)) / D**0.5
    x = value.reshape(value.shape[1], D)
    _, states = jax.lax.scan(lambda h, row: (jnp.tanh(h @ W + row),) * 2, jnp.zeros(D), x)
    return states.reshape(value.shape)


def convolution(query: Array, key: Array, value: Array, width: int = 4) -> Array:
    """Each position reads `width` positions: a product [n, width D] x [width D, D]."""
    W = random.normal(random.key(0), (width * D, D)) / D**0.5
    x = jnp.pad(value.reshape(-1, D), ((width - 1, 0), (0, 0)))
    near = jnp.concatenate([x[i : i + value.shape[1]] for i in range(width)], axis=1)
    return (near @ W).reshape(value.shape)


def feedforward(query: Array, key: Array, value: Array) -> Array:
    """Two products of width 4 D, position by position."""
    up = random.normal(random.key(0), (D, 4 * D)) / D**0.5
    down = random.normal(random.key(1), (4 * D, D)) / D**0.5
    return ops.mlp(value.reshape(1, -1, D), up, down, jax.nn.relu).reshape(value.shape)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    formula: str  # operations of a layer, in n tokens and d features
    exponent: float  # of n, in operations
    path: str  # steps between two positions
    function: Callable
    memory: float | None = 1.0  # exponent of n in temporary memory


by_name = {name: function for name, (function, _) in bench.VARIANTS.items()}
ROWS = {
    "attention, scores kept": Row("n^2 d", 2, "1", bench.exact(masks.full(), "reference"), 2),
    "attention, block by block": Row("n^2 d", 2, "1", bench.exact(masks.full())),
    "the same, causal": Row("n^2 d / 2", 2, "1", by_name["blockwise, causal"]),
    "window of w = 256": Row("n w d", 1, "n / w", by_name["window(256)"]),
    "Longformer, w = 512, 16 globals": Row("n (w + g) d", 1, "2", by_name["longformer"]),
    "BigBird, blocks of 64": Row("n b r d", 1, "2", by_name["bigbird"]),
    "linear (elu + 1)": Row("n d^2 / h", 1, "1", by_name["linear"]),
    "Performer, m = 128": Row("n m d", 1, "1", by_name["performer"]),
    "Linformer, k = 128": Row("n k d", 1, "1", by_name["linformer"]),
    "Reformer, 2 rounds": Row("n log n d", 1, "1", by_name["reformer"]),
    "recurrent": Row("n d^2", 1, "n", recurrent),
    "convolution, k = 4": Row("k n d^2", 1, "n / k", convolution),
    "feed-forward": Row("8 n d^2", 1, "none", feedforward),
}


def slope(lengths: Sequence[int], values: Sequence[float]) -> float:
    """p of the fit c n^p, by least squares of the logarithms."""
    return float(np.polyfit(np.log(lengths), np.log(values), 1)[0])


def flop_counts(function: Callable, lengths: Sequence[int] = COUNTED) -> list[float]:
    """FLOPs of a forward and a backward pass at each length, counted from the program."""

    def passes(n: int) -> float:
        x = jax.ShapeDtypeStruct((1, n, N, H), jnp.float32)
        both = jax.grad(lambda *heads: jnp.sum(function(*heads)), argnums=(0, 1, 2))
        return flops.count(both, x, x, x).flops

    return [passes(n) for n in lengths]


def flop_slope(function: Callable, lengths: Sequence[int] = COUNTED) -> float:
    """The exponent of the length in `flop_counts`."""
    return slope(lengths, flop_counts(function, lengths))


def measure(name: str, longest: int, rounds: int = 3) -> dict[int, tuple[float, int]]:
    """{length: (milliseconds, bytes of temporary memory)} at three lengths up to `longest`.

    The programs of the three lengths run in turn, `rounds` times.
    """
    lengths = [longest // 4, longest // 2, longest]
    programs = {n: bench.Program(ROWS[name].function, n) for n in lengths}
    for program in list(programs.values()) * rounds:
        program()
    return {n: (program.median, program.memory) for n, program in programs.items()}


def draw(counted: dict[str, list[float]], measured: dict[str, dict[int, tuple[float, int]]]):
    """FLOPs against length and, where it was measured, time.

    The legend gives the formula.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13 if measured else 9.5, 5), layout="constrained")
    panels = figure.subplots(1, 2 if measured else 1, squeeze=False)[0]
    for i, name in enumerate(counted):
        style = dict(color=small.COLORS[i % 6], marker="osD"[i // 6], markersize=4)
        style |= dict(linestyle=("-", "--", ":")[i // 6], label=f"{name}: {ROWS[name].formula}")
        panels[0].plot(COUNTED, [count / 1e9 for count in counted[name]], **style)
        if name in measured:
            times = [time for time, _ in measured[name].values()]
            panels[1].plot(list(measured[name]), times, **style)
    for axes, ylabel in zip(panels, ("GFLOP", "milliseconds"), strict=False):
        axes.set(xscale="log", yscale="log", xlabel="tokens n")
        axes.set_ylabel(f"{ylabel} of a forward and a backward pass")
        axes.set_xticks(COUNTED, [f"{n:,}" for n in COUNTED])
        axes.minorticks_off()
        axes.grid(alpha=0.25)
    panels[-1].legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--longest", type=int, default=16_384, help="0: FLOPs alone, nothing is timed"
    )
    parser.add_argument("--out", default="complexity.png")
    arguments = parser.parse_args()
    memory.keep()
    print(f"{'layer':34} {'operations':12} path    n^ stated  FLOPs  time  memory")
    counted = {}
    measured = {}
    for name, row in ROWS.items():
        counted[name] = flop_counts(row.function)
        words = (
            f"{name:34} {row.formula:12} {row.path:7} {row.exponent:9} "
            f"{slope(COUNTED, counted[name]):6.2f}"
        )
        if arguments.longest:
            # with longer texts the machine would swap the n^2 scores
            longest = arguments.longest // (4 if row.memory == 2 else 1)
            measured[name] = measure(name, longest)
            times, sizes = zip(*measured[name].values(), strict=True)
            lengths = list(measured[name])
            words += f"  {slope(lengths, times):.2f}  {slope(lengths, sizes):6.2f}"
        print(words, flush=True)
    small.save_figure(partial(draw, counted, measured), arguments.out)


if __name__ == "__main__":
    main()
