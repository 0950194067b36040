"""A small pod: 8 processes train with a state of 8 GB; then 4 processes restore it, then one.

The corpus has 20 GB. Each start makes some steps and saves after each. It prints the peak resident
memory of a process beside its share of the state, the seconds of encoding, restoring and saving,
and the bytes that a process read and wrote in that time. At the end everything is deleted.

Command: make bench WHAT=pod ARGS="--folder /tmp"
A smaller pod: --state 1 --corpus 0.5 --processes 4 2 1
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from experiments.bench.corpus_memory import generate
from experiments.launch.pod_sim import free_port

D, F = 1024, 2816
EXPERIMENT = """
from jaxformer.data.corpus import Corpus
from jaxformer.models import ModelConfig
from jaxformer.parallel import Mesh
from jaxformer.training import Checkpoints, Experiment
experiment = Experiment(
    name="pod",
    model=ModelConfig(vocab_size=256, num_layers={layers}, d_model={D}, num_heads=8, \
d_ff={F}, context_length=32, remat="full"),
    data=Corpus(path="text", cache="cache", jobs=1), \
steps=99, batch_size=8, eval_every=100, eval_batches=1, log_every=1,
    mesh=Mesh(data=1, fsdp=-1), checkpoints=Checkpoints(every=2, keep_latest=1, keep_best=0),
)
"""
RUN = """
import os, signal, sys, time
from jaxformer import cli
from jaxformer.runs import checkpoint, checks, loop
read = lambda: {line.split(":")[0]: int(line.split()[1]) for line in open("/proc/self/io")}
def measured(name, function):
    def call(*arguments, **options):
        before, began = read(), time.monotonic()
        result = function(*arguments, **options)
        after = read()
        moved = " ".join(f"{after[kind] - before[kind]}" for kind in ("rchar", "wchar"))
        print("MEASURED", name, f"{time.monotonic() - began:.1f}", moved, flush=True)
        return result
    return call
checks.open_data = measured("data", checks.open_data)
checkpoint.Manager.restore = measured("restore", checkpoint.Manager.restore)
save, stopped = checkpoint.Manager.save, []
def stop(*all, **options):
    save(*all, **options | {"wait": True})
    if not stopped:
        stopped.append(os.kill(os.getpid(), signal.SIGTERM))
checkpoint.Manager.save = measured("save", stop)
code = cli.main(["train", "pod.py", "--runs", "runs"])
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print("PEAK", int(status["VmHWM"].split()[0]) * 1024, flush=True)
raise SystemExit(code != 143)
"""


def start(count: int, folder: Path) -> tuple[float, list[str]]:
    """(seconds of a start, the output of each process)."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "JAXFORMER_COORDINATOR": f"127.0.0.1:{free_port()}",
        "JAXFORMER_PROCESSES": str(count),
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "JAXFORMER_STEP_LIMIT": "3000",
    }
    began, processes = time.monotonic(), []
    for index in range(count):
        with (folder / f"out-{index}").open("w") as out:
            command = [sys.executable, "-c", RUN]
            own = environment | {"JAXFORMER_PROCESS": str(index)}
            processes.append(
                subprocess.Popen(command, cwd=folder, env=own, stdout=out, stderr=subprocess.STDOUT)
            )
    codes = [process.wait() for process in processes]
    said = [(folder / f"out-{index}").read_text() for index in range(count)]
    if any(codes):
        raise SystemExit(f"exit codes {codes}\n{said[0][-3000:]}")
    return time.monotonic() - began, said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=float, default=8.0, help="GB")
    parser.add_argument("--corpus", type=float, default=20.0, help="GB")
    parser.add_argument("--processes", type=int, nargs="+", default=[8, 4, 1])
    parser.add_argument("--folder", default=tempfile.gettempdir())
    options = parser.parse_args()
    layers = round(options.state * 1e9 / 12 / (4 * D * D + 2 * D * F))
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        (folder / "text").mkdir()
        (folder / "pod.py").write_text(EXPERIMENT.format(layers=layers, D=D, F=F))
        generate(folder / "text", int(1000 * options.corpus))
        print(
            "processes  peak GB  share GB  seconds  part      seconds   GB read  GB written "
            "(by a process, at most)"
        )
        for count in options.processes:
            seconds, said = start(count, folder)
            found = [re.findall(r"MEASURED (\w+) ([\d.]+) (\d+) (\d+)", text) for text in said]
            peak = max(int(re.findall(r"PEAK (\d+)", text)[0]) for text in said)
            share = options.state * 1e9 / count
            print(f"{count:9}  {peak / 1e9:7.2f}  {share / 1e9:8.2f}  {seconds:7.0f}", flush=True)
            for rows in zip(*found, strict=True):
                took, read, written = (max(float(row[i]) for row in rows) for i in (1, 2, 3))
                print(
                    f"{'':39}{rows[0][0]:8} {took:8.1f}  {read / 1e9:8.3f}  {written / 1e9:8.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
