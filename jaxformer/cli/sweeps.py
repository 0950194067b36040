"""Trains an experiment with every combination of some options; writes one table and one figure.

    python -m jaxformer sweep EXPERIMENT --grid "--a.b=1,2 --c=x,y" [--parallel N]
        [--runs DIR] [--key.path=value ...]

Each combination is an ordinary run, so a killed sweep continues where it was. With --parallel there
are N runs at a time, each in its own process that sees one GPU or TPU chip, by number. Exit codes
are those of `python -m jaxformer`.
"""

import argparse
import hashlib
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
from etils import epath

from jaxformer import config
from jaxformer.cli.arguments import Parser, place, positive
from jaxformer.cli.sweep_report import figure, table
from jaxformer.cli.trials import Trial, joined, read_trials
from jaxformer.data.batching import BadBatch
from jaxformer.errors import ConfigError
from jaxformer.families.initial import HuggingFace
from jaxformer.runs import checks, loop
from jaxformer.runs.initial import check_initial
from jaxformer.runs.reporter import NonFinite
from jaxformer.runs.run_folder import run_folder
from jaxformer.runs.signals import Interrupted
from jaxformer.tools.analysis import figures
from jaxformer.tools.planning.out_of_memory import is_out_of_memory
from jaxformer.training.experiment import Experiment
from jaxformer.training.recipe import build

# trial -> final scores; raises errors that `attempt` catches, or Interrupted
Train = Callable[[Trial], dict[str, Any]]


def sweep(
    trials: Sequence[Trial],
    runs: epath.PathLike,
    reports: Sequence[loop.Report] = (),
    parallel: int = 1,
) -> list[Trial]:
    """Trains each unfinished trial, `parallel` at a time. All trials with their scores, best first.

    An error ends one trial, and the others continue; the table names the trial and the reason.
    Writes a table and a figure into `runs`: sweep-NAME-DIGEST.md and .png. Raises ConfigError if
    two trials are the same run, and Interrupted on SIGTERM. The same call again continues where it
    was.
    """
    if parallel > 1:
        if 0 < len(gpus := visible_gpus() or []) < parallel:
            raise ConfigError(
                f"--parallel={parallel}: CUDA_VISIBLE_DEVICES={','.join(gpus)} has "
                f"{len(gpus)} devices"
            )
        jax.config.update("jax_platforms", "cpu")  # the runs use the other devices
    folders = [run_folder(trial.experiment, runs) for trial in trials]
    if len({folder.path for folder in folders}) < len(trials):
        raise ConfigError(
            "--grid: two combinations are the same run; "
            "vary what decides numbers, and each value once"
        )
    for trial, folder in zip(trials, folders, strict=True):
        # a trial whose options do not fit together is refused before the first run starts
        if not folder.result.is_file():
            check(trial.experiment)
    places = [f"{number}/{len(trials)}" for number in range(1, len(trials) + 1)]
    if parallel == 1:
        here = partial(train_here, runs, reports)
        ended = [attempt(here, runs, *each) for each in zip(trials, places, strict=True)]
    else:
        ended = in_processes(trials, places, runs, parallel)
    ended.sort(key=lambda trial: trial.rank)
    digest = hashlib.sha256(
        "\n".join(sorted(folder.path.name for folder in folders)).encode()
    ).hexdigest()[:8]
    path = epath.Path(runs) / f"sweep-{shorten(trials[0].experiment.name)}-{digest}.md"
    print(table(ended, runs), end="", flush=True)  # printed before the write: the disk may be full
    config.write_atomically(path, table(ended, runs))
    try:
        drawn = figure(ended, path.with_suffix(".png"))
    except Exception as error:
        drawn = f"; no figure: {error}"
    print(f"sweep: {path}{drawn}")
    return ended


def shorten(name: str) -> str:
    """The first 200 bytes of an experiment's name: the name of a file needs room for more."""
    return name.encode()[:200].decode(errors="ignore")


def check(experiment: Experiment) -> None:
    """Raises ConfigError if the run would refuse the experiment.

    Any other error is ignored here: it will end this trial alone.
    """
    try:
        check_initial(experiment, build(experiment))
        checks.open_data(experiment)
    except (ConfigError, NotImplementedError):
        raise
    except Exception:
        return


def attempt(train: Train, runs: epath.PathLike, trial: Trial, place: str) -> Trial:
    """The trial with the scores of its run, or with the reason why it failed.

    `train` is called if the run is not finished.
    """
    folder = run_folder(trial.experiment, runs)
    words = " ".join(f"--{name}={value}" for name, value in trial.options.items())
    print(f"sweep {place}: {words}: {folder.path}", flush=True)
    scores: dict[str, Any] = {}
    try:
        if folder.result.is_file():
            scores = folder.last_scores()
        else:
            scores = train(trial)
        # a run from before may lack the score that ranks trials now
        checks.ranked(scores, trial.experiment.checkpoints.best)
        return trial._replace(scores=scores)
    except Interrupted:
        raise
    except (Exception, SystemExit) as error:
        problem = f"failed: {_reason(error)}"
        print(problem, flush=True)
        return trial._replace(scores=scores, problem=problem)


def _reason(error: BaseException) -> str:
    """The reason why a trial failed, in one line. Unexpected errors also print a traceback."""
    first = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, NonFinite | ConfigError | BadBatch) or is_out_of_memory(error):
        return first or type(error).__name__
    traceback.print_exception(error)
    return f"{type(error).__name__}: {first}".removesuffix(": ")


def train_here(
    runs: epath.PathLike, reports: Sequence[loop.Report], trial: Trial
) -> dict[str, Any]:
    """Trains in this process."""
    try:
        return loop.train(
            trial.experiment, runs, trial.source, reports, weights_of=HuggingFace
        ).validation
    finally:
        jax.clear_caches()  # no later run needs these programs


def in_processes(
    trials: Sequence[Trial], places: Sequence[str], runs: epath.PathLike, parallel: int
) -> list[Trial]:
    """`attempt` of each trial in its own process, `parallel` at a time.

    On SIGTERM all processes save and end.
    """
    processes = TrialProcesses(runs, parallel)
    handler = signal.signal(signal.SIGTERM, processes.stop)
    try:
        with ThreadPoolExecutor(parallel) as pool:
            return list(pool.map(partial(attempt, processes.train, runs), trials, places))
    finally:
        signal.signal(signal.SIGTERM, handler)


class TrialProcesses:
    """Trains trials in processes, each on a device of its own."""

    def __init__(self, runs: epath.PathLike, parallel: int):
        self.runs = runs
        self.free_devices: queue.Queue[int] = queue.Queue()
        for device in range(parallel):
            self.free_devices.put(device)
        self.running: dict[int, subprocess.Popen] = {}
        self.stopped = threading.Event()

    def train(self, trial: Trial) -> dict[str, Any]:
        """Waits for a free device and trains there; the final scores."""
        device = self.free_devices.get()
        try:
            if self.stopped.is_set():
                raise Interrupted(signal.SIGTERM, 0)
            self.running[device] = process = self.start(trial, device)
            errors = process.communicate()[1]
            code = process.returncode
            if self.stopped.is_set() and code > 128:
                raise Interrupted(code - 128, 0)
            if code:
                # stderr: a traceback, or the advice if memory is short
                print(errors, file=sys.stderr, end="", flush=True)
                raise ConfigError(ending(code, errors))
            return run_folder(trial.experiment, self.runs).last_scores()
        finally:
            self.running.pop(device, None)
            self.free_devices.put(device)

    def start(self, trial: Trial, device: int) -> subprocess.Popen:
        words = ["train", trial.source.path, "--runs", str(self.runs), *trial.source.overrides]
        return subprocess.Popen(
            [sys.executable, "-m", "jaxformer", *words],
            env=os.environ | one_device(device),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def stop(self, *_) -> None:
        """The handler of SIGTERM: all processes save and end, and no other one starts."""
        self.stopped.set()
        for process in list(self.running.values()):
            process.terminate()


def ending(code: int, errors: str) -> str:
    """How a process failed, in words, by its exit code and its stderr."""
    if code < 0:
        advice = "; the system does so where memory is short" if -code == signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{advice}"
    lines = errors.strip().splitlines() or [f"exit code {code}, without a message"]
    return lines[-1].removeprefix("jaxformer: ")


def visible_gpus() -> list[str] | None:
    """The devices of CUDA_VISIBLE_DEVICES, which may be empty; None if it is not set."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if text is None else [gpu.strip() for gpu in text.split(",") if gpu.strip()]


def one_device(number: int) -> dict[str, str]:
    """The environment that makes a process see only one GPU, or one chip of a TPU host."""
    gpus = visible_gpus()
    port = str(8476 + number)
    return {
        "CUDA_VISIBLE_DEVICES": str(number) if gpus is None else gpus[number] if gpus else "",
        "TPU_VISIBLE_CHIPS": str(number),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_MESH_CONTROLLER_ADDRESS": f"localhost:{port}",
        "TPU_MESH_CONTROLLER_PORT": port,
    }


def parser_of_trials(program: str, description: str | None) -> Parser:
    """The options that all commands with several runs have."""
    form = argparse.RawDescriptionHelpFormatter
    # without allow_abbrev=False, --run would mean --runs
    parser = Parser(program, description=description, formatter_class=form, allow_abbrev=False)
    parser.add_argument("name", metavar="EXPERIMENT")
    parser.add_argument("--runs", default="runs", type=place)
    parser.add_argument(
        "--parallel",
        type=positive,
        default=1,
        metavar="N",
        help="runs at a time, each on a device of its own",
    )
    return parser


def main(argv: list[str]) -> int:
    parser = parser_of_trials("python -m jaxformer sweep", __doc__)
    parser.add_argument("--grid", required=True)
    options, overrides = parser.parse_known_args(joined(argv, "--grid"))
    trials = read_trials(options.name, options.grid, overrides)
    try:
        ended = sweep(trials, options.runs, [figures.loss_report], options.parallel)
    except Interrupted as error:
        print(f"sweep: {error}", file=sys.stderr)
        return error.exit_code
    return 3 if all(trial.problem for trial in ended) else 0
