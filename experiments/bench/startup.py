"""The time from the command to the first training step, and the time of compilation by depth.

First: `python -m jaxformer train experiments/quickstart.py` beside a torch script of the same model
on random numbers, eager and compiled. Each starts once with empty caches of compiled programs
(cold), and once with the caches that this start filled (warm). Then: the seconds to trace and to
compile our train step at 12, 48 and 96 layers of one width.

Command: make bench WHAT=startup          (ten minutes on 2 cores; sets up .venv-bench on first use)
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from experiments.bench import compare

DEPTHS = 12, 48, 96


def first_step(
    command: list[str], environment: dict[str, str], folder: Path | None = None
) -> dict[str, float]:
    """{"ms": time until the command ends, or until `folder` has the record of a first step}."""
    began = time.perf_counter()
    process = subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    while process.poll() is None:
        if folder is not None and any(
            path.stat().st_size for path in folder.glob("*/metrics.jsonl")
        ):
            break
        time.sleep(0.01)
    took = 1e3 * (time.perf_counter() - began)
    process.terminate()
    _, errors = process.communicate()
    if folder is None and process.returncode:
        raise RuntimeError(errors.decode()[-500:])
    return dict(ms=took)


def starts(rounds: int) -> None:
    """Measures cold and warm starts of ours and of the peer, in turns."""
    found: dict[str, dict[tuple[str, str], list[dict]]] = {"cold": {}, "warm": {}}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as caches:
            environment = dict(XDG_CACHE_HOME=caches, TORCHINDUCTOR_CACHE_DIR=f"{caches}/inductor")
            for state in found:
                for mode in ("eager", "compiled"):
                    command = compare.run_of_peer("first", "quickstart", mode, "bfloat16")
                    found[state].setdefault((f"torch {mode}", "bfloat16"), []).append(
                        first_step(command, environment)
                    )
                runs = Path(caches) / f"runs-{state}"
                options = ["--log-every=1", f"--runs={runs}"]
                command = [
                    sys.executable,
                    "-m",
                    "jaxformer",
                    "train",
                    "experiments/quickstart.py",
                    *options,
                ]
                found[state].setdefault((compare.OURS, "bfloat16"), []).append(
                    first_step(command, environment, runs)
                )
    for state, runs in found.items():
        compare.report(
            f"from the command to the first training step of the quickstart, {state}",
            runs,
            each_peer=True,
        )


def depths(shape: str = "small") -> None:
    """Measures the seconds to trace and to compile the train step of models of several depths."""
    import jax

    from experiments.bench.shapes import TRAIN
    from experiments.bench.train import experiment_of, token_batch
    from jaxformer.training.recipe import build
    from jaxformer.training.step import abstract_state, make_train_step

    experiment, sizes, seconds = experiment_of(shape, "bfloat16"), TRAIN[shape], {}
    batch = token_batch(sizes.rows, sizes.context, sizes.vocabulary)
    for layers in (DEPTHS[0], *DEPTHS):  # the first one only warms up the compiler
        model = replace(experiment.model, num_layers=layers, unroll=1)
        recipe, began = build(replace(experiment, model=model)), time.perf_counter()
        lowered = jax.jit(make_train_step(recipe), donate_argnums=0).lower(
            abstract_state(recipe), batch
        )
        traced = time.perf_counter() - began
        lowered.compile()
        seconds[layers] = time.perf_counter() - began
        print(
            (
                f"  {layers:3} layers: traced in {traced:.1f} s, compiled in "
                f"{seconds[layers] - traced:.1f} s"
            ),
            flush=True,
        )
    print(
        (
            f"  ratio {DEPTHS[-1]} / {DEPTHS[0]} layers: "
            f"{seconds[DEPTHS[-1]] / seconds[DEPTHS[0]]:.2f}"
        ),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print("our train step, 128 wide, by depth", flush=True)
    depths()
    starts(options.rounds)


if __name__ == "__main__":
    main()
