"""The cost of attention as sequences grow, forward and backward, beside torch and the reference.

The first part compares with peers, each in its own process, in turns: causal and window(256), 4,096
to 16,384 tokens, in float32 and bfloat16. The peers are torch's scaled_dot_product_attention
(causal, or with the window as a mask), flex_attention (compiled, where torch can differentiate it
on CPU), and the package local-attention, whose windows are blocks of 256 and the block before.

The second part prints the ratios that the library promises, with 8 heads. Then it prints the
efficiency table of Long Range Arena (Tay et al. 2020, arXiv:2011.04006, table 2) for this machine:
milliseconds and mebibytes of temporary memory (the compiler's account) of a call, batch 1, 4 heads
of 64, float32, from 512 to 32,768 tokens. Programs run alternately; figures are medians.

Command: make bench WHAT=attention          (30 minutes on 2 cores)
         make bench WHAT=attention ARGS="--peers 0 --longest 4096"
         make bench WHAT=attention ARGS="--alone 0"                    (only beside peers)
Writes runs/bench/attention.json and .png.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import random

from experiments.bench.compare import (
    OURS,
    PRECISIONS,
    alternate,
    both_heaps,
    ceiling,
    measure,
    report,
    run_of_peer,
)
from experiments.bench.shapes import ATTENTION
from jaxformer import masks, ops, zoo
from jaxformer.runs import memory

FEATURES, RANK = 128, 128
_, HEADS, WIDTH, WINDOW = ATTENTION
LENGTHS = 4096, 8192, 16_384  # beside peers
DENSE_UP_TO = 8192  # its scores alone are 1 GiB there, and it keeps several such arrays
causal = masks.causal()
MASKS = {"causal": causal, "window": causal & masks.window(WINDOW)}  # beside peers


def exact(mask: masks.Mask, implementation: str = "blockwise") -> Callable:
    return partial(ops.attention, mask=mask, implementation=implementation)


def performer(query, key, value):
    projection = zoo.performer.orthogonal_projection(random.key(0), FEATURES, WIDTH)
    return zoo.performer.attention(query, key, value, projection, mask=causal, stabiliser=0.0)


def linformer(query, key, value):
    project = random.normal(random.key(0), (key.shape[1], RANK)) / RANK**0.5
    return zoo.linformer.attention(query, key, value, project)


def longformer(query, key, value):
    return zoo.longformer.attention(
        query, key, value, query, key, value, window=512, global_tokens=16
    )


def bigbird(query, key, value):
    layout = zoo.bigbird.random_layout(random.key(0), query.shape[1], 64, 3, HEADS)
    return zoo.bigbird.attention(query, key, value, layout, block=64)


def reformer(query, key, value):
    # buckets of 32 tokens, in two digits: hashing stays below n^1.5
    digits = int(np.log2(2 * query.shape[1] / 64))
    buckets = 2 ** (digits // 2), 2 ** (digits - digits // 2)
    rotations = zoo.reformer.random_rotations(random.key(0), HEADS, WIDTH, 2, buckets)
    return zoo.reformer.attention(query, value, rotations, chunk=64, mask=causal)


# name: (function of query, key, value; how its cost should grow)
VARIANTS: dict[str, tuple[Callable, str]] = {
    "dense": (exact(causal, "reference"), "n^2"),
    "blockwise, causal": (exact(causal), "n^2 / 2"),
    "window(256)": (exact(masks.window(256)), "n"),
    "longformer": (longformer, "n"),
    "bigbird": (bigbird, "n"),
    "sparse, strided": (
        exact(masks.sparse_transformer_strided(128)),
        "n^2 / 2 (no block is empty)",
    ),
    "sparse, fixed": (exact(masks.sparse_transformer_fixed(128, 8)), "n^2 / 2 (no block is empty)"),
    "linear": (partial(zoo.linear_attention.attention, mask=causal), "n"),
    "performer": (performer, "n"),
    "linformer": (linformer, "n"),
    "reformer": (reformer, "n log n"),
}


class Program:
    """A variant's forward and backward pass at one length, compiled.

    Calling it runs it and adds the milliseconds to `times`.
    """

    def __init__(self, function: Callable, length: int, heads: int = HEADS, dtype: str = "float32"):
        def both(query, key, value, g):
            out, pullback = jax.vjp(function, query, key, value)
            return out, pullback(g)

        keys = random.split(random.key(0), 4)
        self.arrays = [random.normal(key, (1, length, heads, WIDTH), dtype) for key in keys]
        self.compiled = jax.jit(both).lower(*self.arrays).compile()
        analysis: Any = self.compiled.memory_analysis()
        self.memory: int = analysis.temp_size_in_bytes
        self.times: list[float] = []
        jax.block_until_ready(self.compiled(*self.arrays))

    def __call__(self) -> None:
        began = time.perf_counter()
        jax.block_until_ready(self.compiled(*self.arrays))
        self.times.append(1e3 * (time.perf_counter() - began))

    @property
    def median(self) -> float:
        return statistics.median(self.times)


def compare(one: Program, other: Program, rounds: int) -> float:
    """The median time of `one` / the median time of `other`, run alternately."""
    for _ in range(rounds):
        one()
        other()
    return one.median / other.median


def shown(program: Program) -> str:
    return (
        f"{program.median:.1f} ms (median of {len(program.times)}, from {min(program.times):.1f})"
    )


def one(kind: str, length: int, precision: str) -> dict[str, float]:
    """Our attention, with the implementation that it chooses itself."""
    program = Program(partial(ops.attention, mask=MASKS[kind]), length, dtype=precision)
    call = lambda: program.compiled(*program.arrays)
    return measure(call, jax.block_until_ready, 5) | dict(ceiling=ceiling(precision))


def beside_peers(rounds: int) -> None:
    """A table for each mask and length."""
    names = {"sdpa": "torch sdpa", "flex": "torch flex_attention", "local": "local-attention"}
    for length, (kind, peers) in itertools.product(
        LENGTHS, (("causal", ("sdpa", "flex")), ("window", tuple(names)))
    ):
        runs = {}
        for precision in PRECISIONS:
            ours = [
                sys.executable,
                "-m",
                "experiments.bench.attention",
                "--one",
                kind,
                str(length),
                precision,
            ]
            runs[OURS, precision] = ours
            for peer in peers:
                runs |= both_heaps(
                    names[peer],
                    precision,
                    run_of_peer("attention", f"{kind}-{length}", peer, precision),
                )
        # two products forward, five backward
        flops = 7 * 2 * HEADS * WIDTH * length**2 * MASKS[kind].density(length, length)
        title = (
            f"{kind}{f'({WINDOW})' if kind == 'window' else ''}, {length:,} tokens, "
            f"{HEADS} heads of {WIDTH}"
        )
        report(title, alternate(runs, rounds), flops)


def ratios(rounds: int) -> dict[str, Any]:
    """The issue's claims, each with both raw figures."""
    heads = 2 * HEADS
    dense, blockwise = (
        Program(exact(causal, "reference"), 4096, heads),
        Program(exact(causal), 4096, heads),
    )
    against_dense = compare(blockwise, dense, rounds)
    print(
        (
            f"causal, n = 4,096: blockwise {shown(blockwise)} / dense {shown(dense)} = "
            f"{against_dense:.2f}"
        ),
        flush=True,
    )
    n, mask = 16_384, masks.window(256)
    window, full = Program(exact(mask), n, heads), Program(exact(masks.full()), n, heads)
    share, density = compare(window, full, max(3, rounds // 2)), mask.density(n, n)
    print(
        f"window(256), n = 16,384: {shown(window)} / all keys {shown(full)} = {share:.4f} = "
        f"{share / density:.2f} x its "
        f"density {density:.4f}"
    )
    for name, program in {"all keys": full, "window(256)": window}.items():
        print(
            f"memory at n = 16,384, {name}: {program.memory / 2**20:.1f} MiB = "
            f"{program.memory / (4 * heads * n * n):.2%} of the scores",
            flush=True,
        )
    growth = {}
    for name in ("linear", "performer", "linformer"):
        programs = [Program(VARIANTS[name][0], n) for n in (8192, 16_384, 32_768)]
        for program in programs * rounds:
            program()
        growth[name] = [b.median / a.median for a, b in pairwise(programs)]
        print(
            f"{name}, time(2n) / time(n) from 8,192 on, run in turn: "
            + ", ".join(f"{r:.2f}" for r in growth[name])
            + f"; ms {', '.join(f'{p.median:.0f}' for p in programs)}",
            flush=True,
        )
    return dict(
        growth=growth,
        blockwise_to_dense=against_dense,
        window_to_density=share / density,
        memory=full.memory / (4 * heads * n * n),
    )


def table(longest: int, budget: float) -> dict[str, dict[int, tuple[float, int]]]:
    """{variant: {length: (milliseconds, bytes)}}, printed as it grows.

    The runs of each figure take about `budget` seconds.
    """
    results: dict[str, dict[int, tuple[float, int]]] = {name: {} for name in VARIANTS}
    length = 512
    while length <= longest:
        for name, (function, _) in VARIANTS.items():
            if name == "dense" and length > DENSE_UP_TO:
                continue
            program, began = Program(function, length), time.perf_counter()
            while len(program.times) < 3 or (
                time.perf_counter() - began < budget and len(program.times) < 30
            ):
                program()
                if program.times[-1] > 1e4:
                    break
            results[name][length] = program.median, program.memory
            ratio = (
                f"{results['dense'][length][0] / program.median:6.2f} x dense"
                if length in results["dense"]
                else ""
            )
            print(
                (
                    f"{length:6,}  {name:18} {program.median:10.1f} ms "
                    f"{program.memory / 2**20:9.1f} "
                    f"MiB  {ratio}"
                ),
                flush=True,
            )
        length *= 2
    print("\ntime(2n) / time(n)")
    for name, row in results.items():
        lengths = sorted(row)[1:]
        growth = "  ".join(f"{n:,}: {row[n][0] / row[n // 2][0]:.2f}" for n in lengths)
        print(f"  {name:18} grows as {VARIANTS[name][1]:28} {growth}")
    return results


def plot(results: dict[str, dict[int, tuple[float, int]]], path: Path) -> None:
    """Time and memory against length, both axes logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), dpi=150, layout="constrained")
    for axes, index, unit in zip(
        figure.subplots(1, 2), (0, 1), ("milliseconds", "MiB"), strict=True
    ):
        for i, (name, row) in enumerate(results.items()):
            lengths = sorted(row)
            values = [row[n][index] / (2**20 if index else 1) for n in lengths]
            axes.plot(
                lengths,
                values,
                marker="o",
                markersize=3,
                linewidth=1.2,
                label=name,
                color=f"C{i}" if i < 10 else "black",
                linestyle="--" if i >= 10 else "-",
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(
            xlabel="tokens",
            ylabel=unit,
            title="forward + backward" if index == 0 else "temporary memory",
        )
        axes.grid(alpha=0.25)
    figure.axes[1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--longest", type=int, default=32_768, help="0 leaves the table out")
    parser.add_argument("--budget", type=float, default=2.0, help="seconds a figure of the table")
    parser.add_argument(
        "--peers", type=int, default=3, help="rounds beside peers; 0 leaves them out"
    )
    parser.add_argument(
        "--alone", type=int, choices=(0, 1), default=1, help="0 leaves out what has no peer"
    )
    parser.add_argument(
        "--one", nargs=3, metavar=("KIND", "LENGTH", "PRECISION"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    memory.keep()
    if options.one:
        kind, length, precision = options.one
        print(json.dumps(one(kind, int(length), precision)))
        return
    if options.peers:
        beside_peers(options.peers)
    if not options.alone:
        return
    device = jax.devices()[0]
    print(
        f"jax {jax.__version__}, {device.device_kind}, {HEADS} heads x {WIDTH}, float32, "
        "forward + backward"
    )
    summary = ratios(options.rounds)
    results = table(options.longest, options.budget) if options.longest else {}
    folder = Path("runs/bench")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "attention.json").write_text(
        json.dumps({"ratios": summary, "table": results}, indent=2)
    )
    if results:
        plot(results, folder / "attention.png")
        print(f"{folder}/attention.json, {folder}/attention.png")


if __name__ == "__main__":
    main()
