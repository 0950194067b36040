"""An experiment trained with every combination of some options; at the end one table and one figure.

    python -m experiments.launch.sweep EXPERIMENT --grid "--a.b=1,2 --c=x,y" [--parallel N] [--runs DIR] [--key.path=value ...]

Each combination is an ordinary run: a killed sweep goes on where it was. With --parallel there are N runs at a time, each in a
process of its own that sees one GPU or TPU chip, by number. Exit codes are those of `python -m jaxformer`.
"""

import argparse
import hashlib
import io
import itertools
import math
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
from typing import Any, NamedTuple

import jax
from etils import epath

from jaxformer import cli, config
from jaxformer.cli.arguments import Parser, place, positive
from jaxformer.data.batching import BadBatch
from jaxformer.errors import ConfigError
from jaxformer.families.initial import HuggingFace
from jaxformer.runs import checks, loop
from jaxformer.runs.initial import check_initial
from jaxformer.runs.metrics import NonFinite
from jaxformer.runs.run_folder import other_text, run_folder
from jaxformer.runs.signals import Interrupted
from jaxformer.tools.analysis import figures
from jaxformer.tools.planning.out_of_memory import is_out_of_memory
from jaxformer.training.experiment import Experiment
from jaxformer.training.recipe import build

CLOSING = {"(": ")", "[": "]", "{": "}"}


class Trial(NamedTuple):
    """One combination of a grid, and how it ended."""

    options: dict[str, str]  # as typed, without the hyphens in front
    source: config.Source
    experiment: Experiment
    scores: dict[str, Any] = {}  # noqa: RUF012 (never changed); the final ones
    problem: str = ""  # why it failed

    @property
    def rank(self) -> float:
        """The final score that checkpoints.best names, lowest first; infinite where the trial failed or has no such number."""
        best = self.experiment.checkpoints.best
        score = self.scores.get(best.removeprefix("-"))
        if self.problem or not isinstance(score, int | float) or not math.isfinite(score):
            return math.inf
        return -score if best.startswith("-") else score


def combinations(grid: str) -> list[dict[str, str]]:
    """Every combination of "--a=1,2 --b=x,y", the last option varies first: [{"a": "1", "b": "x"}, ...].

    A comma or a space inside brackets or quotes separates nothing. Quotes around a whole value are taken away, as by a shell.
    """
    values: dict[str, list[str]] = {}
    for word in filter(None, _split(grid, " \t\n")):
        name, _, text = word.partition("=")
        some = [value[1:-1] if value[:1] in ("'", '"') and value[-1:] == value[:1] else value for value in _split(text, ",")]
        if not name.startswith("--") or name[2:] in values or "" in some:
            raise ConfigError(f'--grid: {word}: expected each option once with its values, such as "--seed=0,1 --steps=100"')
        values[name[2:]] = some
    if not values:
        raise ConfigError('--grid is empty; expected options with values: "--optimizer.learning-rate=1e-4,3e-4 --seed=0,1"')
    return [dict(zip(values, some, strict=True)) for some in itertools.product(*values.values())]


def _split(text: str, separators: str) -> list[str]:
    """The parts of a text between separators that stand outside of brackets and quotes."""
    parts, awaited = [""], ""
    for letter in text:
        if not awaited and letter in separators:
            parts.append("")
            continue
        if awaited and letter == awaited[-1]:
            awaited = awaited[:-1]
        elif awaited[-1:] not in ("'", '"') and letter in "([{'\"":
            awaited += CLOSING.get(letter, letter)
        parts[-1] += letter
    if awaited:
        raise ConfigError(f"--grid: {text}: its end comes before {awaited[-1]}")
    return parts


Train = Callable[[Trial], dict[str, Any]]  # -> final scores; raises what `attempt` catches, or Interrupted


def sweep(trials: Sequence[Trial], runs: epath.PathLike, reports: Sequence[loop.Report] = (), parallel: int = 1) -> list[Trial]:
    """Trains each trial that is not finished, `parallel` at a time; all with their scores, best first.

    Whatever error ends one trial, the others go on; the table says which one failed, and why. `runs` gets a table and
    a figure: sweep-NAME-DIGEST.md, .png. Raises ConfigError where two trials are the same run, and Interrupted on SIGTERM:
    called again, it goes on where it was.
    """
    if parallel > 1:
        if 0 < len(gpus := visible_gpus() or []) < parallel:
            raise ConfigError(f"--parallel={parallel}: CUDA_VISIBLE_DEVICES={','.join(gpus)} has {len(gpus)} devices")
        jax.config.update("jax_platforms", "cpu")  # here; the other devices are those of the runs
    folders = [run_folder(trial.experiment, runs) for trial in trials]
    if len({folder.path for folder in folders}) < len(trials):
        raise ConfigError("--grid: two combinations are the same run; vary what decides numbers, and each value once")
    for trial, folder in zip(trials, folders, strict=True):
        if not folder.result.is_file():  # what does not fit together is refused before the first run starts
            check(trial.experiment)
    places = [f"{number}/{len(trials)}" for number in range(1, len(trials) + 1)]
    if parallel == 1:
        here = partial(train_here, runs, reports)
        ended = [attempt(here, runs, *each) for each in zip(trials, places, strict=True)]
    else:
        ended = in_processes(trials, places, runs, parallel)
    ended.sort(key=lambda trial: trial.rank)
    digest = hashlib.sha256("\n".join(sorted(folder.path.name for folder in folders)).encode()).hexdigest()[:8]
    path = epath.Path(runs) / f"sweep-{shorten(trials[0].experiment.name)}-{digest}.md"
    print(table(ended, runs), end="", flush=True)  # before it is written: the disk may be full
    config.write_atomically(path, table(ended, runs))
    try:
        drawn = figure(ended, path.with_suffix(".png"))
    except Exception as error:
        drawn = f"; no figure: {error}"
    print(f"sweep: {path}{drawn}")
    return ended


def shorten(name: str) -> str:
    """The begin of an experiment's name, so long that there is room beside it in the name of a file."""
    return name.encode()[:200].decode(errors="ignore")


def check(experiment: Experiment) -> None:
    """Raises ConfigError for what the run would refuse. Any other error is left to the trial, which it ends alone."""
    try:
        check_initial(experiment, build(experiment))
        checks.open_data(experiment)
    except (ConfigError, NotImplementedError):
        raise
    except Exception:
        return


def attempt(train: Train, runs: epath.PathLike, trial: Trial, place: str) -> Trial:
    """The trial with its scores, of a run that is finished or that `train` finishes, or with why it failed."""
    folder = run_folder(trial.experiment, runs)
    words = " ".join(f"--{name}={value}" for name, value in trial.options.items())
    print(f"sweep {place}: {words}: {folder.path}", flush=True)
    scores: dict[str, Any] = {}
    try:
        if folder.result.is_file():
            scores = folder.last_scores()
        else:
            scores = train(trial)
        checks.ranked(scores, trial.experiment.checkpoints.best)  # an earlier run may lack the score that counts now
        return trial._replace(scores=scores)
    except Interrupted:
        raise
    except (Exception, SystemExit) as error:
        problem = f"failed: {_reason(error)}"
        print(problem, flush=True)
        return trial._replace(scores=scores, problem=problem)


def _reason(error: BaseException) -> str:
    """Why a trial failed, in one line. What the user cannot foresee has a traceback on stderr, too."""
    first = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, NonFinite | ConfigError | BadBatch) or is_out_of_memory(error):
        return first or type(error).__name__
    traceback.print_exception(error)
    return f"{type(error).__name__}: {first}".removesuffix(": ")


def train_here(runs: epath.PathLike, reports: Sequence[loop.Report], trial: Trial) -> dict[str, Any]:
    """Trains in this process."""
    try:
        return loop.train(trial.experiment, runs, trial.source, reports, weights_of=HuggingFace).validation
    finally:
        jax.clear_caches()  # programs of a run that has ended


def in_processes(trials: Sequence[Trial], places: Sequence[str], runs: epath.PathLike, parallel: int) -> list[Trial]:
    """`attempt` of each trial in a process of its own, `parallel` at a time. On SIGTERM they all save and end."""
    free: queue.Queue[int] = queue.Queue()
    for device in range(parallel):
        free.put(device)
    running: dict[int, subprocess.Popen] = {}
    stopped = threading.Event()

    def train(trial: Trial) -> dict[str, Any]:
        device = free.get()
        try:
            if stopped.is_set():
                raise Interrupted(signal.SIGTERM, 0)
            words = ["-m", "jaxformer", "train", trial.source.path, "--runs", str(runs), *trial.source.overrides]
            streams = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            running[device] = subprocess.Popen([sys.executable, *words], env=os.environ | one_device(device), **streams)
            said = running[device].communicate()[1]
            code = running[device].returncode
            if stopped.is_set() and code > 128:
                raise Interrupted(code - 128, 0)
            if code:
                print(said, file=sys.stderr, end="", flush=True)  # a traceback, the advice where memory is short
                raise ConfigError(ending(code, said))
            return run_folder(trial.experiment, runs).last_scores()
        finally:
            running.pop(device, None)
            free.put(device)

    def stop(*_):
        stopped.set()
        for process in list(running.values()):
            process.terminate()

    before = signal.signal(signal.SIGTERM, stop)
    try:
        with ThreadPoolExecutor(parallel) as pool:
            return list(pool.map(partial(attempt, train, runs), trials, places))
    finally:
        signal.signal(signal.SIGTERM, before)


def ending(code: int, said: str) -> str:
    """How a process failed, by its exit code and by what it wrote to stderr."""
    if code < 0:
        advice = "; the system does so where memory is short" if -code == signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{advice}"
    lines = said.strip().splitlines() or [f"exit code {code}, without a message"]
    return lines[-1].removeprefix("jaxformer: ")


def visible_gpus() -> list[str] | None:
    """Those of CUDA_VISIBLE_DEVICES, which may be empty; None where it is not set."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if given is None else [gpu.strip() for gpu in given.split(",") if gpu.strip()]


def one_device(number: int) -> dict[str, str]:
    """What makes a process see one GPU, or one chip of a TPU host."""
    gpus = visible_gpus()
    port = str(8476 + number)
    return {
        "CUDA_VISIBLE_DEVICES": str(number) if gpus is None else gpus[number] if gpus else "",
        "TPU_VISIBLE_CHIPS": str(number), "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_MESH_CONTROLLER_ADDRESS": f"localhost:{port}", "TPU_MESH_CONTROLLER_PORT": port,
    }  # fmt: skip


def table(trials: Sequence[Trial], runs: epath.PathLike) -> str:
    """Options, final scores and folder of each trial, in Markdown."""
    warning = other_text([run_folder(trial.experiment, runs) for trial in trials if trial.scores])
    hidden = [name for name in loop.UNRECORDED if not (warning and name == "tokens")]
    scores = [(name, value) for trial in trials for name, value in trial.scores.items() if name not in hidden]
    names = list(dict.fromkeys(name for name, value in scores if _is_number(value)))
    lines = [[*trials[0].options, *names, "run"], ["---"] * (len(trials[0].options) + len(names) + 1)]
    for trial in trials:
        found = [_shown(trial.scores.get(name, "")) for name in names]
        lines.append([*trial.options.values(), *found, trial.problem or str(run_folder(trial.experiment, runs).path)])
    cell = lambda text: " ".join(text.split()).replace("|", "\\|")
    rows = "".join("| " + " | ".join(map(cell, line)) + " |\n" for line in lines)
    return f"{rows}\n{warning.capitalize()}.\n" if warning else rows


def _shown(score: Any) -> str:
    return f"{score:.4g}" if _is_number(score) else str(score)


def figure(trials: Sequence[Trial], path: epath.Path) -> str:
    """Draws the score against the first option whose values are numbers, a line for each combination of the others.

    A trial that failed is a cross at the upper edge. Returns ", PATH", or nothing where no option has numbers.
    """
    from matplotlib.figure import Figure  # the import takes half a second

    several = lambda name: len({trial.options[name] for trial in trials}) > 1
    name = next((n for n in trials[0].options if several(n) and all(map(_says_number, (t.options[n] for t in trials)))), None)
    if name is None:
        return ""
    best = trials[0].experiment.checkpoints.best
    point = lambda trial: (float(trial.options[name]), -trial.rank if best.startswith("-") else trial.rank)
    lines: dict[str, list[tuple[float, float]]] = {}
    for trial in trials:
        label = ", ".join(f"{other}={value}" for other, value in trial.options.items() if other != name and several(other))
        lines.setdefault(figures.plain(label), []).append(point(trial))
    drawn = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    axes = drawn.add_subplot()
    for label, points in sorted(lines.items()):
        good = sorted(one for one in points if math.isfinite(one[1]))
        (line,) = axes.plot(*zip(*good, strict=True) if good else ([], []), "o-", markersize=4, label=label)
        failed = [x for x, y in points if not math.isfinite(y)]
        axes.plot(failed, [0.97] * len(failed), "x", color=line.get_color(), transform=axes.get_xaxis_transform())
    for values, scale in zip(zip(*map(point, trials), strict=True), (axes.set_xscale, axes.set_yscale), strict=True):
        finite = [value for value in values if math.isfinite(value)]
        if finite and 0 < 10 * min(finite) <= max(finite):
            scale("log")
    title = figures.plain(f"{trials[0].experiment.name}: {len(trials)} runs")
    axes.set(xlabel=name, ylabel=best.removeprefix("-"), title=title)
    axes.grid(alpha=0.25)
    if any(trial.problem for trial in trials):
        axes.plot([], [], "kx", label="failed")
    if len(axes.get_lines()) > 2:
        axes.legend(frameon=False, fontsize=8)
    picture = io.BytesIO()
    drawn.savefig(picture, format="png")
    config.write_atomically(path, picture.getvalue())  # a link of that name is replaced, not followed
    return f", {path}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _says_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def joined(argv: list[str], option: str) -> list[str]:
    """The same with `option` and its value, which begins like an option, as one word."""
    if option not in argv[:-1]:
        return argv
    at = argv.index(option)
    return [*argv[:at], f"{option}={argv[at + 1]}", *argv[at + 2 :]]


def read_trials(name: str, grid: str, overrides: list[str]) -> list[Trial]:
    """A trial of the experiment for every combination of the grid. Raises ConfigError for options that it does not have."""
    trials = []
    for combination in combinations(grid):
        words = [f"--{option}={value}" for option, value in combination.items()]
        trials.append(Trial(combination, *cli.read_experiment(name, [*overrides, *words])))
    return trials


def main(argv: list[str]) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser("sweep", description=__doc__, formatter_class=form, allow_abbrev=False)  # --run is no --runs
    parser.add_argument("name", metavar="EXPERIMENT")
    parser.add_argument("--runs", default="runs", type=place)
    parser.add_argument("--grid", required=True)
    parser.add_argument("--parallel", type=positive, default=1, metavar="N", help="runs at a time, each on a device of its own")
    options, overrides = parser.parse_known_args(joined(argv, "--grid"))
    trials = read_trials(options.name, options.grid, overrides)
    try:
        ended = sweep(trials, options.runs, [figures.loss_report], options.parallel)
    except Interrupted as error:
        print(f"sweep: {error}", file=sys.stderr)
        return error.exit_code
    return 3 if all(trial.problem for trial in ended) else 0


if __name__ == "__main__":
    raise SystemExit(cli.run(main, sys.argv[1:]))
