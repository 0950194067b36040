"""What the benchmarks share: peers in an environment of their own, runs in alternation, medians with their spread, ratios.

A run is a process that prints one line of JSON with `ms`, and may add `ceiling` (the FLOP/s of one large matrix product in the
run's own library and precision), `faults` (pages that a call faulted in) and `loss`. All runs of a case take turns, so that the
machine's mood is the same for all. Where there is an NVIDIA GPU, both sides run on it, unless JAX_PLATFORMS=cpu.
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
SIZES = {"cpu": (4096, 1024, 4096), "gpu": (8192, 8192, 8192)}  # of the product whose speed is the ceiling
OURS = "jaxformer"
SETTLE = 2.0  # seconds of calls before those that count
# what our runs do with freed memory (`training.memory`), for a process that is not ours: kept, in one heap and in huge pages
KEPT = "arena_max=1", "mmap_max=0", "trim_threshold=1000000000000", "hugetlb=1"


def platform() -> str:
    """Where both sides run: "gpu" or "cpu". JAX is not asked, because it would take the memory of the GPU for this process."""
    return "gpu" if shutil.which("nvidia-smi") and os.environ.get("JAX_PLATFORMS") != "cpu" else "cpu"


def torch_python(*packages: str) -> str:
    """The interpreter that $TORCH_PYTHON names, or that of .venv-bench, made on first use with torch and these packages."""
    if named := os.environ.get("TORCH_PYTHON"):
        return named
    torch = "torch==2.13.0" if platform() == "cpu" else "torch>=2.11"  # the CPU build of the one, the CUDA build of the other
    python, packages = VENV / "bin" / "python", (torch, "numpy", *packages)
    ready = VENV / "ready"
    have = set(ready.read_text().split()) if ready.exists() else set()
    if not set(packages) <= have:
        print(f"setting up {VENV} with {', '.join(packages)} (once)", flush=True)
        base = os.environ.get("BENCH_PYTHON", sys.executable)  # `make bench` names the oldest one: torch lags behind Python
        subprocess.run([base, "-m", "venv", VENV], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
        ready.write_text("\n".join(sorted(have | set(packages))))
    return str(python)


def measure(call: Callable[[], Any], wait: Callable[[Any], Any], count: int, warm: int = 2) -> dict[str, float]:
    """`time_calls` on a CPU, `mean_time` on a GPU. `wait` waits for the result of a call."""
    if platform() == "gpu":
        return mean_time(call, wait, count, warm)
    return time_calls(lambda: wait(call()), count, warm)


def mean_time(call: Callable[[], Any], wait: Callable[[Any], Any], count: int, warm: int) -> dict[str, float]:
    """Mean `ms` of `count` calls, of which the host waits for the last alone: as a run that reads its losses late."""
    for _ in range(warm):
        wait(call())
    began, result = time.perf_counter(), None
    for _ in range(count):
        result = call()
    wait(result)
    return dict(ms=1e3 * (time.perf_counter() - began) / count)


def time_calls(call: Callable[[], Any], count: int, warm: int = 3) -> dict[str, float]:
    """Median `ms` of `count` calls, and the `faults` of one: pages, of 4 KiB or huge, that the kernel gave it.

    Some calls do not count: `warm` of them, and as many as `SETTLE` seconds take. A virtual machine may run two threads on one
    core for as long as a second after a process has begun to use both.
    """
    began, done = time.perf_counter(), 0
    while done < warm or (warm and time.perf_counter() - began < SETTLE):
        call()
        done += 1
    times, before = [], page_faults()
    for _ in range(count):
        began = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - began))
    return dict(ms=statistics.median(times), faults=(page_faults() - before) / count)


def page_faults() -> int:
    """Pages that the kernel has given this process so far. It clears each of them first, which takes time."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def ceiling(precision: str) -> float:
    """FLOP/s of a large product in JAX: the best of five."""
    import jax

    m, k, n = SIZES[platform()]
    # not of zeros or ones, which a GPU multiplies faster: they draw less power
    a, b = (jax.random.normal(jax.random.key(i), shape, precision) for i, shape in enumerate(((m, k), (k, n))))
    product = jax.jit(partial(jax.numpy.matmul, preferred_element_type="float32"))  # as our products are summed
    return best_speed(lambda: product(a, b), jax.block_until_ready)


def best_speed(product: Callable[[], Any], wait: Callable[[Any], Any]) -> float:
    """FLOP/s of a product of matrices of `SIZES`: the best of five."""
    m, k, n = SIZES[platform()]
    wait(product())
    count = {"cpu": 1, "gpu": 20}[platform()]
    return max(2 * m * k * n / (1e-3 * measure(product, wait, count, 0)["ms"]) for _ in range(5))


def chip_peak() -> dict[str, float]:
    """{"peak": FLOP/s in bfloat16 that the data sheet of this device says}, where the library knows it."""
    import jax

    from jaxformer.models.cost import CHIPS

    kind = jax.devices()[0].device_kind
    return dict(peak=CHIPS[kind].peak) if kind in CHIPS else {}


def peak_memory() -> dict[str, float]:
    """{"peak_bytes": most that this process held on its device so far}, where the device counts them."""
    import jax

    statistics_of_device = jax.devices()[0].memory_stats() or {}
    return {name: value for name, value in {"peak_bytes": statistics_of_device.get("peak_bytes_in_use")}.items() if value}


def alternate(runs: dict[tuple[str, str], list[str]], rounds: int) -> dict[tuple[str, str], list[dict]]:
    """{(who, precision): what each of its runs printed}, of commands that take turns. A run that fails is left out, aloud."""
    found: dict[tuple[str, str], list[dict]] = {run: [] for run in runs}
    for turn in range(rounds):
        for (who, precision), command in runs.items():
            if (who, precision) not in found:
                continue
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["failed"])[-1][:160]
                print(f"  {who} {precision} is left out: {reason}", flush=True)
                del found[who, precision]
                continue
            found[who, precision].append(json.loads(done.stdout.splitlines()[-1]))
            print(
                f"  round {turn + 1}: {who} {precision} {found[who, precision][-1]['ms']:.1f} ms", file=sys.stderr, flush=True
            )
    return found


def report(
    title: str, found: dict[tuple[str, str], list[dict]], flops: float | None = None, each_peer: bool = False
) -> dict[str, float]:
    """Prints a table of a case, and the ratios best peer / ours for each precision and for the best of each; returns them.

    With `each_peer`, a ratio for each peer too. Who begins with `OURS` is ours.
    """
    print(title, flush=True)
    tops: dict[str, float] = {}
    for (_, precision), lines in found.items():
        tops[precision] = max([tops.get(precision, 0.0), *(line.get("ceiling", 0.0) for line in lines)])
    medians = {run: statistics.median(line["ms"] for line in lines) for run, lines in found.items()}
    for (who, precision), lines in found.items():
        ms, times = medians[who, precision], sorted(line["ms"] for line in lines)
        text = f"  {who:34} {precision:8} {ms:9.1f} ms  ({times[0]:.1f} to {times[-1]:.1f}, {len(times)} rounds)"
        if flops:
            speed = 1e3 * flops / ms
            text += f"  {speed / 1e9:7.1f} GFLOP/s" + (f" = {speed / tops[precision]:4.0%}" if tops[precision] else "")
            text += f", MFU {speed / lines[0]['peak']:4.1%}" if "peak" in lines[0] else ""
        if (faults := statistics.median(line.get("faults", 0.0) for line in lines)) >= 1:
            text += f"  {faults:7,.0f} faults"
        losses = [line["loss"] for line in lines if "loss" in line]
        print(text + (f"  first loss {losses[0]:.3f}" if losses else ""))
    if any(tops.values()):
        print("  ceiling, one product {} x {} x {}: ".format(*SIZES[platform()])
              + ", ".join(f"{precision} {top / 1e9:.0f} GFLOP/s" for precision, top in tops.items() if top))  # fmt: skip
    ratios = {}
    for name in (*dict.fromkeys(precision for _, precision in medians), "best of each"):
        each = {run: ms for run, ms in medians.items() if name in (run[1], "best of each")}
        ours, peers = ([ms for run, ms in each.items() if run[0].startswith(OURS) == own] for own in (True, False))
        if ours and peers:
            ratios[name] = min(peers) / min(ours)
    best = min((ms for run, ms in medians.items() if run[0].startswith(OURS)), default=0)
    for (who, precision), ms in medians.items():
        if each_peer and best and not who.startswith(OURS):
            print(f"  ratio {who} {precision} / {OURS}: {ms / best:.2f}")
    shown = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    print(f"  ratio, best peer / {OURS} (above 1 we are faster): {shown}\n", flush=True)
    return ratios


def run_of_peer(*arguments: str) -> list[str]:
    """The command of a run of `experiments.bench.peers`."""
    return [torch_python("transformers>=5.23", "local-attention>=1.11"), "-m", "experiments.bench.peers", *arguments]


def both_heaps(peer: str, precision: str, command: list[str]) -> dict[tuple[str, str], list[str]]:
    """The runs of a peer: as it is, and on a CPU with the memory that it frees kept as ours is."""
    if platform() == "gpu":
        return {(peer, precision): command}
    tunables = ":".join(f"glibc.malloc.{one}" for one in KEPT)
    return {
        (peer, precision): command,
        (f"{peer}, heap kept", precision): ["env", f"GLIBC_TUNABLES={tunables}", *command],
    }
