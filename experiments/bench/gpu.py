"""All checks of this library on one NVIDIA GPU, in one call of at most eight minutes.

The parts, the most important first:
    facts    the device and the versions
    tests    tests marked `gpu`: kernels, models and decoding against the reference and the CPU,
             and a killed run
    train    GPT-2 small at 1,024 tokens beside torch.compile with SDPA and fused AdamW:
             milliseconds, MFU, peak memory; our step also with deterministic kernels
    large    the same with 1.3 billion parameters
    decode   GPT-2 small, batch 1 and 64, beside transformers with a static cache
    plan     the predictions of the plan for these steps beside the measurements

It is for a bare machine: Python 3.12, jax 0.11 or later with CUDA, torch and transformers beside
it, no network. `make wheels-gpu` collects everything else. Without a GPU, `--small` runs all parts
at sizes for a CPU. Results are JSON lines.

Command: make check-gpu                       (results: runs/check-gpu.jsonl)
         make check-gpu ARGS="--parts train decode --seconds 300"
         python3 -m experiments.bench.gpu    (with the interpreter of such a machine, in a checkout)
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from experiments.bench import compare
from experiments.bench.decode import NEW
from experiments.bench.shapes import find

DETERMINISTIC = "--xla_gpu_exclude_nondeterministic_ops=true"
# the most seconds of a part if there are several parts
LIMITS = {"facts": 40, "tests": 170, "train": 150, "large": 170, "decode": 150, "plan": 60}


class Sizes(NamedTuple):
    """The sizes of all parts."""

    train: str  # name of a shape in `shapes`
    large: str
    precision: str
    rows: tuple[int, ...]  # batch sizes of decoding
    workers: int  # processes of the tests


GPU = Sizes("124m-1024", "1.3b-1024", "bfloat16", (1, 64), 12)
SMALL = Sizes("small", "quickstart", "float32", (1,), 2)


class Check:
    """One call of this script: the file of its results, and the time that is left."""

    def __init__(self, out: Path, seconds: float, sizes: Sizes, parts: list[str]):
        out.parent.mkdir(parents=True, exist_ok=True)
        self.file = out.open("w", encoding="utf-8")
        self.sizes = sizes
        self.parts = parts
        self.began, self.end = time.monotonic(), time.monotonic() + seconds
        self.part, self.part_end = "", self.end
        self.measured: dict[str, dict[str, Any]] = {}  # {shape: the figures of our step}

    def begin(self, part: str) -> None:
        """Begins a part. Its time ends with the call, or earlier if there are several parts."""
        self.part, self.part_end = part, self.end
        if len(self.parts) > 1:
            self.part_end = min(self.end, time.monotonic() + LIMITS[part])

    def left(self) -> float:
        """The seconds that are left to the part."""
        return self.part_end - time.monotonic()

    def write(self, **fields: Any) -> None:
        line = json.dumps(dict(part=self.part, at=round(time.monotonic() - self.began, 1)) | fields)
        self.file.write(line + "\n")
        self.file.flush()
        print(line, flush=True)

    def lines(self, command: list[str], **variables: str) -> Iterator[str]:
        """The lines that a command prints.

        When the part's time is over, the command is killed with all processes that it started.
        """
        environment = (
            os.environ
            | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONUNBUFFERED": "1"}
            | variables
        )
        process = subprocess.Popen(
            ["timeout", "--signal=KILL", f"{max(1.0, self.left()):.0f}", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )
        assert process.stdout
        last = []
        try:
            for line in process.stdout:
                last = [*last[-11:], line.rstrip()]
                yield line.rstrip()
            if process.wait():
                self.write(failed=process.returncode, command=" ".join(command[-8:]), last=last)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def result(self, who: str, command: list[str], **variables: str) -> dict[str, Any] | None:
        """The last line of JSON that a command prints; it is written to the results."""
        found = None
        for line in self.lines(command, **variables):
            if line.startswith("{"):
                found = json.loads(line)
        if found is not None:
            self.write(who=who, **found)
        return found


def facts(check: Check) -> None:
    """Writes the device and the versions."""
    check.result("machine", alone("facts_here"))


def alone(function: str, *arguments: str) -> list[str]:
    """The command that runs a function of this file in its own process, whose end frees the GPU."""
    return [sys.executable, "-m", "experiments.bench.gpu", "--alone", function, *arguments]


def tests(check: Check) -> None:
    """Runs all tests marked `gpu`; writes the number that passed and the names of the others."""
    counts: dict[str, int] = {}
    platforms = "cuda,cpu" if compare.platform() == "gpu" else "cpu"
    options = [
        "-p",
        "no:benchmark",
        "-v",
        "--tb=short",
        "-m",
        "gpu",
        "-n",
        str(check.sizes.workers),
        "--maxschedchunk=1",
    ]
    # long tests come first
    files = [f"tests/gpu/{name}.py" for name in ("test_runs", "test_models", "test_kernels")]
    command = [
        sys.executable,
        "-m",
        "pytest",
        *options,
        *files,
        "tests/ops/attention/test_cudnn.py",
    ]
    log = Path(check.file.name).with_suffix(".log").open("w", encoding="utf-8")
    for line in check.lines(command, JAX_PLATFORMS=platforms):
        log.write(f"{time.monotonic() - check.began:5.0f} s  {line}\n")
        log.flush()
        if match := re.search(r"\b(PASSED|FAILED|ERROR|SKIPPED) (tests/\S.*)", line):
            counts[match[1]] = counts.get(match[1], 0) + 1
            if match[1] in ("FAILED", "ERROR") and line.startswith("["):
                check.write(failed=match[2])
    check.write(**counts)


def ours(shape: str, precision: str) -> list[str]:
    return [sys.executable, "-m", "experiments.bench.train", "--one", shape, precision]


def step(check: Check, shape: str) -> None:
    """Measures our training step and torch's, and their ratio."""
    from experiments.bench.train import experiment_of
    from jaxformer.models.cost import training_flops

    precision, size = check.sizes.precision, find(shape)[0]
    own = check.result("ours", ours(shape, precision))
    peer = check.result(
        "torch compiled", compare.run_of_peer("train", shape, "compiled", precision)
    )
    if own is None:
        return
    check.measured[shape] = own
    flops = (
        size.rows
        * size.context
        * training_flops(experiment_of(shape, "float32").model, size.context)
    )
    found: dict[str, Any] = {"ms": own["ms"]}
    if "peak" in own:
        found["mfu"] = round(1e3 * flops / own["ms"] / own["peak"], 3)
    if peer is not None:
        found["torch_by_ours"] = round(peer["ms"] / own["ms"], 3)
    check.write(shape=shape, **found)


def train(check: Check) -> None:
    """GPT-2 small, and our step again with kernels that give the same bits in every call."""
    step(check, check.sizes.train)
    check.result(
        "ours, deterministic",
        ours(check.sizes.train, check.sizes.precision),
        XLA_FLAGS=DETERMINISTIC,
    )


def large(check: Check) -> None:
    """1.3 billion parameters."""
    step(check, check.sizes.large)


def decode(check: Check) -> None:
    """Tokens a second of GPT-2 small beside transformers with a static cache."""
    module, precision = ["-m", "experiments.bench.decode", "--one"], check.sizes.precision
    peer = compare.torch_python("transformers>=5.23")
    for rows in check.sizes.rows:
        rates = {}
        for who, command in {
            "ours": [sys.executable, *module, "ours", "gpt2", precision, str(rows), "32"],
            "transformers": [
                peer,
                *module,
                "theirs",
                "gpt2",
                f"{precision} static",
                str(rows),
                "32",
            ],
        }.items():
            seconds = [
                float(line)
                for line in check.lines(command)
                if re.fullmatch(r"[\d.]+(e-?\d+)?", line)
            ]
            if seconds:
                rates[who] = rows * NEW / seconds[-1]
        ratio = {"ratio": rates["ours"] / rates["transformers"]} if len(rates) == 2 else {}
        check.write(rows=rows, tokens_per_second=rates, **ratio)


def plan(check: Check) -> None:
    """The plan of the step of `train` beside the measurement: memory and time."""
    shape = check.sizes.train
    found, measured = check.result("plan", alone("plan_here", shape)), check.measured.get(shape)
    if found and measured and found.get("step_seconds"):
        ratios = {"time": 1e3 * found["step_seconds"] / measured["ms"]}
        if "peak_bytes" in measured:
            ratios["memory"] = found["peak_bytes"] / measured["peak_bytes"]
        check.write(shape=shape, plan_by_measured=ratios)


PARTS = {part.__name__: part for part in (facts, tests, train, large, decode, plan)}


def facts_here() -> dict[str, Any]:
    """The devices of this process, and the versions of its packages."""
    import importlib.metadata

    import jax

    names = (
        "jax",
        "jaxlib",
        "jax-cuda13-plugin",
        "nvidia-cudnn-cu13",
        "torch",
        "transformers",
        "flax",
        "orbax-checkpoint",
    )
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "none"
    return dict(
        devices=[device.device_kind for device in jax.devices()],
        cores=os.cpu_count(),
        versions=versions,
    )


def plan_here(shape: str) -> dict[str, Any]:
    """The plan of a shape's step on the first device of this process."""
    from dataclasses import replace

    import jax

    from experiments.bench.train import experiment_of
    from jaxformer.data.sources import Stdlib
    from jaxformer.models.cost import CHIPS
    from jaxformer.tools.planning.plan import plan

    if jax.devices()[0].device_kind not in CHIPS:
        return dict(skipped="no data sheet of this device")
    found = plan(
        replace(experiment_of(shape, "bfloat16"), data=Stdlib()), "here", jax.devices()[:1]
    )
    return dict(
        step_seconds=found.step_seconds,
        peak_bytes=found.peak_bytes,
        seconds=found.seconds,
        moved=found.moved_bytes,
    )


ALONE = {function.__name__: function for function in (facts_here, plan_here)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=480.0, help="of all parts together")
    parser.add_argument("--out", type=Path, default=Path("runs/check-gpu.jsonl"))
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--alone", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        function, *arguments = options.alone
        print(json.dumps(ALONE[function](*arguments)))
        return
    check = Check(options.out, options.seconds, SMALL if options.small else GPU, options.parts)
    for part in options.parts:
        check.begin(part)
        if check.left() < 5:
            check.write(skipped="no time is left")
            continue
        PARTS[part](check)


if __name__ == "__main__":
    main()
