"""Resident memory of a run on a large corpus, 4 GB by default.

It generates the corpus, encodes it, trains on it, and deletes it. It prints VmHWM (the peak
resident memory of the training process, with pages of files that it maps), RssAnon and RssFile at
the end, and the peak of an encoding process.

Command:
    python -m experiments.bench.corpus_memory [--megabytes 4000] [--steps 300] [--folder /tmp]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

EXPERIMENT = """
from jaxformer.data.corpus import Corpus
from jaxformer.models import ModelConfig
from jaxformer.training import Experiment
experiment = Experiment(
    name="corpus_memory",
    model=ModelConfig(vocab_size=256, num_layers=1, d_model=32, num_heads=2, context_length=128),
    data=Corpus(path="text", cache="cache"), \
steps={steps}, batch_size=32, eval_batches=10, log_every=50,
)
"""
RUN = """
import resource, sys
from jaxformer import cli
code = cli.main(["train", "corpus_memory.py", "--runs", "runs"])
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print("MEMORY", \
*(int(status[name].split()[0]) // 1000 for name in ("VmHWM", "RssAnon", "RssFile")), end=" ")
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1000, code)
"""


def generate(folder: Path, megabytes: int) -> None:
    """Writes JSONL files of 500 MB each, with documents of random words."""
    rng = np.random.default_rng(0)
    words = [
        "".join(chr(97 + c) for c in rng.integers(0, 26, rng.integers(2, 9))) for _ in range(5000)
    ]
    pool = " ".join(words[i] for i in rng.zipf(1.3, 4_000_000) % 5000)
    for number, start in enumerate(range(0, megabytes, 500)):
        with open(folder / f"{number:03}.jsonl", "w") as file:
            left = min(500, megabytes - start) * 10**6
            while left > 0:
                first, length = rng.integers(0, len(pool) - 20_000), rng.integers(500, 20_000)
                left -= file.write(json.dumps({"text": pool[first : first + length]}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=4000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        (folder / "text").mkdir()
        generate(folder / "text", options.megabytes)
        (folder / "corpus_memory.py").write_text(EXPERIMENT.format(steps=options.steps))
        start = time.monotonic()
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        run = subprocess.run(
            [sys.executable, "-c", RUN],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        print(run.stdout)
        *_, peak, anonymous, files, encoder, code = run.stdout.split("MEMORY")[-1].split()
        print(
            f"corpus {options.megabytes} MB, {options.steps} steps, "
            f"{time.monotonic() - start:.0f} s, exit code {code}"
        )
        print(
            f"training process: VmHWM {peak} MB; at the end RssAnon {anonymous} MB, "
            f"RssFile {files} MB"
        )
        print(f"an encoding process: at most {encoder} MB")


if __name__ == "__main__":
    main()
