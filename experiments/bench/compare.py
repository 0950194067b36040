"""Parts that all benchmarks share: peers in their own environment, runs in turns, medians, ratios.

A run is a process that prints one line of JSON with `ms`. It may add `ceiling` (the FLOP/s of one
large matrix product in the run's own library and precision), `faults` (page faults of a call) and
`loss`. All runs of a case take turns, so that changes of the machine's speed affect all alike. If
there is an NVIDIA GPU, both sides run on it, unless JAX_PLATFORMS=cpu.
"""

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

VENV = Path(".venv-bench")
PRECISIONS = ("float32", "bfloat16")
# the shape (m, k, n) of the product whose speed is the ceiling
SIZES = {"cpu": (4096, 1024, 4096), "gpu": (8192, 8192, 8192)}
OURS = "jaxformer"
SETTLE = 2.0  # seconds of calls before the timed ones
# For a process of a peer, the treatment of freed memory that our runs have (`runs.memory`): it is
# kept, in one heap and in huge pages.
KEEP_FREED_MEMORY = "arena_max=1", "mmap_max=0", "trim_threshold=1000000000000", "hugetlb=1"


def platform() -> str:
    """The platform of both sides: "gpu" or "cpu".

    It does not ask JAX, which would reserve the memory of the GPU for this process.
    """
    return (
        "gpu" if shutil.which("nvidia-smi") and os.environ.get("JAX_PLATFORMS") != "cpu" else "cpu"
    )


def torch_python(*packages: str) -> str:
    """The interpreter that $TORCH_PYTHON names, or that of .venv-bench.

    The first use makes .venv-bench with torch and these packages.
    """
    if named := os.environ.get("TORCH_PYTHON"):
        return named
    # the first is the CPU build, the second the CUDA build
    torch = "torch==2.13.0" if platform() == "cpu" else "torch>=2.11"
    python, packages = VENV / "bin" / "python", (torch, "numpy", *packages)
    ready = VENV / "ready"
    have = set(ready.read_text().split()) if ready.exists() else set()
    if not set(packages) <= have:
        print(f"setting up {VENV} with {', '.join(packages)} (once)", flush=True)
        # `make bench` names the oldest Python, because torch supports a new one late
        base = os.environ.get("BENCH_PYTHON", sys.executable)
        subprocess.run([base, "-m", "venv", VENV], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
        ready.write_text("\n".join(sorted(have | set(packages))))
    return str(python)


def measure(
    call: Callable[[], Any], wait: Callable[[Any], Any], count: int, warm: int = 2
) -> dict[str, float]:
    """`time_calls` on a CPU, `mean_time` on a GPU. `wait` waits for the result of a call."""
    if platform() == "gpu":
        return mean_time(call, wait, count, warm)
    return time_calls(lambda: wait(call()), count, warm)


def mean_time(
    call: Callable[[], Any], wait: Callable[[Any], Any], count: int, warm: int
) -> dict[str, float]:
    """Mean `ms` of `count` calls; the host waits only for the last, as in a run that logs late."""
    for _ in range(warm):
        wait(call())
    result = None
    began = time.perf_counter()
    for _ in range(count):
        result = call()
    wait(result)
    return dict(ms=1e3 * (time.perf_counter() - began) / count)


def time_calls(call: Callable[[], Any], count: int, warm: int = 3) -> dict[str, float]:
    """Median `ms` of `count` calls, and the page `faults` of one: pages of 4 KiB or huge pages.

    The first `warm` calls, and all in the first `SETTLE` seconds, do not count: a virtual machine
    may run two threads on one core for a second after a process begins to use both cores.
    """
    done = 0
    began = time.perf_counter()
    while done < warm or (warm and time.perf_counter() - began < SETTLE):
        call()
        done += 1
    times = []
    faults_before = page_faults()
    for _ in range(count):
        began = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - began))
    return dict(ms=statistics.median(times), faults=(page_faults() - faults_before) / count)


def page_faults() -> int:
    """The pages that the kernel has given this process. It clears each first, which takes time."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def ceiling(precision: str) -> float:
    """FLOP/s of a large product in JAX: the best of five."""
    import jax

    m, k, n = SIZES[platform()]
    # random numbers: a GPU multiplies zeros or ones faster, because they draw less power
    a, b = (
        jax.random.normal(jax.random.key(i), shape, precision)
        for i, shape in enumerate(((m, k), (k, n)))
    )
    # like our products, it accumulates in float32
    product = jax.jit(partial(jax.numpy.matmul, preferred_element_type="float32"))
    return best_speed(lambda: product(a, b), jax.block_until_ready)


def best_speed(product: Callable[[], Any], wait: Callable[[Any], Any]) -> float:
    """FLOP/s of a product of matrices of `SIZES`: the best of five."""
    m, k, n = SIZES[platform()]
    wait(product())
    count = {"cpu": 1, "gpu": 20}[platform()]
    return max(2 * m * k * n / (1e-3 * measure(product, wait, count, 0)["ms"]) for _ in range(5))


def chip_peak() -> dict[str, float]:
    """{"peak": FLOP/s in bfloat16 of this device's data sheet}; {} for an unknown device."""
    import jax

    from jaxformer.models.cost import CHIPS

    kind = jax.devices()[0].device_kind
    return dict(peak=CHIPS[kind].peak) if kind in CHIPS else {}


def peak_memory() -> dict[str, float]:
    """{"peak_bytes": the most that this process held on its device}; {} if it has no count."""
    import jax

    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return {"peak_bytes": peak} if peak else {}


def alternate(
    runs: dict[tuple[str, str], list[str]], rounds: int
) -> dict[tuple[str, str], list[dict]]:
    """{(who, precision): [the line of each run]} of commands that take turns.

    A command that fails is left out, with a message.
    """
    results: dict[tuple[str, str], list[dict]] = {run: [] for run in runs}
    for turn in range(rounds):
        for (who, precision), command in runs.items():
            if (who, precision) not in results:
                continue
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["failed"])[-1][:160]
                print(f"  {who} {precision} is left out: {reason}", flush=True)
                del results[who, precision]
                continue
            results[who, precision].append(json.loads(done.stdout.splitlines()[-1]))
            print(
                f"  round {turn + 1}: {who} {precision} {results[who, precision][-1]['ms']:.1f} ms",
                file=sys.stderr,
                flush=True,
            )
    return results


def report(
    title: str,
    results: dict[tuple[str, str], list[dict]],
    flops: float | None = None,
    each_peer: bool = False,
) -> dict[str, float]:
    """Prints a table of a case, and returns the ratios best peer / ours.

    There is one ratio for each precision, and one for the best precision of each side. With
    `each_peer` it prints a ratio for each peer, too. A name that begins with `OURS` is ours.
    """
    print(title, flush=True)
    ceilings: dict[str, float] = {}
    for (_, precision), lines in results.items():
        ceilings[precision] = max(
            [ceilings.get(precision, 0.0), *(line.get("ceiling", 0.0) for line in lines)]
        )
    medians = {
        run: statistics.median(line["ms"] for line in lines) for run, lines in results.items()
    }
    for (who, precision), lines in results.items():
        print(_row(who, precision, lines, medians[who, precision], flops, ceilings[precision]))
    if any(ceilings.values()):
        speeds = [f"{name} {top / 1e9:.0f} GFLOP/s" for name, top in ceilings.items() if top]
        product = "{} x {} x {}".format(*SIZES[platform()])
        print(f"  ceiling, one product {product}: {', '.join(speeds)}")
    ratios = _ratios(medians)
    best = min((ms for run, ms in medians.items() if run[0].startswith(OURS)), default=0)
    for (who, precision), ms in medians.items():
        if each_peer and best and not who.startswith(OURS):
            print(f"  ratio {who} {precision} / {OURS}: {ms / best:.2f}")
    shown = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    print(f"  ratio, best peer / {OURS} (above 1 we are faster): {shown}\n", flush=True)
    return ratios


def _row(
    who: str, precision: str, lines: list[dict], ms: float, flops: float | None, ceiling: float
) -> str:
    """The line of one peer and precision in the table of `report`."""
    times = sorted(line["ms"] for line in lines)
    spread = f"({times[0]:.1f} to {times[-1]:.1f}, {len(times)} rounds)"
    text = f"  {who:34} {precision:8} {ms:9.1f} ms  {spread}"
    if flops:
        speed = 1e3 * flops / ms
        text += f"  {speed / 1e9:7.1f} GFLOP/s"
        if ceiling:
            text += f" = {speed / ceiling:4.0%}"
        if "peak" in lines[0]:
            text += f", MFU {speed / lines[0]['peak']:4.1%}"
    faults = statistics.median(line.get("faults", 0.0) for line in lines)
    if faults >= 1:
        text += f"  {faults:7,.0f} faults"
    losses = [line["loss"] for line in lines if "loss" in line]
    if losses:
        text += f"  first loss {losses[0]:.3f}"
    return text


def _ratios(medians: dict[tuple[str, str], float]) -> dict[str, float]:
    """{precision or "best of each": best peer / best of ours}, from {(who, precision): ms}."""
    ratios = {}
    for name in (*dict.fromkeys(precision for _, precision in medians), "best of each"):
        ours, peers = [], []
        for (who, precision), ms in medians.items():
            if name in (precision, "best of each"):
                side = ours if who.startswith(OURS) else peers
                side.append(ms)
        if ours and peers:
            ratios[name] = min(peers) / min(ours)
    return ratios


def run_of_peer(*arguments: str) -> list[str]:
    """The command of a run of `experiments.bench.peers`."""
    return [
        torch_python("transformers>=5.23", "local-attention>=1.11"),
        "-m",
        "experiments.bench.peers",
        *arguments,
    ]


def both_heaps(peer: str, precision: str, command: list[str]) -> dict[tuple[str, str], list[str]]:
    """The runs of a peer; on a CPU also a run that keeps freed memory, like ours."""
    if platform() == "gpu":
        return {(peer, precision): command}
    tunables = ":".join(f"glibc.malloc.{one}" for one in KEEP_FREED_MEMORY)
    return {
        (peer, precision): command,
        (f"{peer}, heap kept", precision): ["env", f"GLIBC_TUNABLES={tunables}", *command],
    }
