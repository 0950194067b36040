"""Tokens a second of the input pipeline, beside a training step and beside torch's DataLoader.

Three experiments, as in their files: quickstart (Python's standard library), shakespeare_char and
gpt2_small (on generated text of 1 MB and 32 MB). Our pipeline does all that a run does: order,
windows, batch, transfer to the device. The peer is a map-style data set of windows of the same
tokens in `torch.utils.data.DataLoader`, the better of no worker and two workers. Pipelines and step
take turns; figures are medians over rounds. Above 1 we are faster.

Command: make bench WHAT=data          (ten minutes on 2 cores; sets up .venv-bench on first use)
"""

import argparse
import json
import random
import statistics
import subprocess
import tempfile
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from experiments.bench import compare
from experiments.bench.train import ours, token_batch

BATCHES = 200  # batches of a measurement
MEGABYTES = {"quickstart": None, "shakespeare_char": 1, "gpt2_small": 32}
WORDS = 5000


def write_text(path: Path, megabytes: int) -> None:
    """Writes lines of random words."""
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(WORDS)]
    with path.open("w") as file:
        for _ in range(megabytes * 16):
            file.write(" ".join(draw.choices(words, k=10_000))[: 2**16 - 1] + "\n")


def experiment_of(name: str, folder: Path) -> Any:
    """The experiment on text of its size, with the batch of one micro-batch."""
    experiment: Any = import_module(f"experiments.{name}").experiment
    if megabytes := MEGABYTES[name]:
        path = folder / f"{name}.txt"
        write_text(path, megabytes)
        options = dict(path=str(path), cache=str(folder)) | (
            dict(tokenizer="bytes") if name == "gpt2_small" else {}
        )
        experiment = replace(experiment, data=replace(experiment.data, **options))
    rows = experiment.batch_size // experiment.accumulation
    return replace(experiment, batch_size=rows, accumulation=1)


def pipeline(experiment: Any, dataset: Any, seed: int) -> float:
    """Tokens a second that arrive on the device, counted from the start of the pipeline."""
    import jax

    from jaxformer.data import batching

    get = batching.batches(dataset.train, experiment.batch_size, seed).__getitem__
    tokens, began = 0, time.perf_counter()
    with batching.Prefetch(get, 0, BATCHES, put=jax.device_put) as batches:
        for batch in batches:
            tokens += jax.block_until_ready(batch)["tokens"].size
    return tokens / (time.perf_counter() - began)


def torch_loader(tokens: Path, context: int, rows: int) -> float:
    """Tokens a second of the peer."""
    done = subprocess.run(
        compare.run_of_peer("loader", str(tokens), str(context), str(rows)),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])["tokens"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--experiments", nargs="+", choices=MEGABYTES, default=list(MEGABYTES))
    options = parser.parse_args()
    import numpy as np

    from jaxformer.data import batching
    from jaxformer.runs import memory

    memory.keep()  # as in a run; before JAX starts
    for name in options.experiments:
        with tempfile.TemporaryDirectory() as folder:
            experiment = experiment_of(name, Path(folder))
            dataset = batching.open_dataset(experiment.data, experiment.model)
            file = Path(folder) / "tokens.npy"
            np.save(file, np.asarray(dataset.train.tokens[:]))
            rows, context = experiment.batch_size, experiment.model.context_length
            step, _ = ours(experiment, token_batch(rows, context, experiment.model.vocab_size))
            float(step())  # the first one does not count
            eaten, delivered, peer = [], [], []
            for turn in range(options.rounds):
                eaten.append(
                    1e3
                    * rows
                    * context
                    / compare.time_calls(lambda step=step: float(step()), 1, 0)["ms"]
                )
                delivered.append(pipeline(experiment, dataset, turn))
                peer.append(torch_loader(file, context, rows))
            ate, got, theirs = map(statistics.median, (eaten, delivered, peer))
            print(
                f"{name}: batches of {rows} x {context}, {options.rounds} rounds of {BATCHES} "
                "batches"
            )
            for who, speed, each in (
                ("pipeline", got, delivered),
                ("step", ate, eaten),
                ("torch DataLoader", theirs, peer),
            ):
                print(f"  {who:16} {speed:12,.0f} tokens/s  ({min(each):,.0f} to {max(each):,.0f})")
            print(
                (
                    f"  ratio pipeline / step: {got / ate:.1f}; ratio pipeline / DataLoader: "
                    f"{got / theirs:.2f}\n"
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
