"""python -m jaxformer COMMAND: the only place that reads argv.

    train EXPERIMENT [--runs DIR] [--jax VERSION] [--key.path=value ...]
                                                              trains, or resumes, experiments/EXPERIMENT.py; with another
                                                              version of jax than that, it does not start
    tokens EXPERIMENT [--key.path=value ...]                  encodes the experiment's texts and no more; on several hosts that
                                                              see one cache (--data.cache=DIR) each does its share
    evaluate RUN [--step N] [--average N] [--int8] [--mesh.tensor=N ...]
                                                              scores a run's checkpoint, or the mean of its last N, on its
                                                              validation split
    evaluate RUN --replay [--mesh.tensor=N ...]               the bad step that ended a run, computed again
    generate RUN --prompt TEXT | --prompts FILE.jsonl --out FILE.jsonl [--tokens N] [--temperature X] [--top-k K] [--top-p P]
             [--min-p P] [--typical P] [--filter "Repetition(1.2)"] [--beams N [--n-best N] [--length-penalty X]]
             [--stop TEXT] [--special-tokens] [--seed S] [--step N] [--average N] [--mesh.tensor=N ...]
    generate RUN [--prompt TEXT] [--seed S] [--step N] [--average N] [--mesh.tensor=N ...]
                                                              of data with a method generate(run, key, folder): what it returns,
                                                              and the files that it wrote
    harness RUN --tasks NAME,... [--include DIR] [--limit N] [--step N] [--average N] [--mesh.tensor=N ...]
                                                              tasks of lm-evaluation-harness; writes harness.json into the run
    inspect RUN --prompt TEXT [--html FILE] [--step N] [--average N]
                                                              losses, predictions and heads, token by token
    report RUN [RUN ...] [--out FILE.html]                    one page: curves, samples, attention, gradients, costs
    draw EXPERIMENT|PRESET [--out FILE.html] [--key.path=value ...]
                                                              one page of a model: architecture, masks, costs
    list                                                      every experiment and preset, with one line of what it is
    runs [--runs DIR]                                         every run, with its step and its scores
    compare RUN RUN                                           what differs between two runs, and their scores
    show EXPERIMENT|PRESET [--key.path=value ...]             the final config, parameters and cost; nothing is computed
    show EXPERIMENT|PRESET --sharding [--devices N] [--mesh.fsdp=N ...]
                                                              how each parameter is split, and its bytes on a device
    cost EXPERIMENT|PRESET [--length N] [--key.path=value ...]
                                                              parameters, FLOPs and bytes of a forward pass, part by part
    plan EXPERIMENT|PRESET --topology NAME [--search] [--fast] [--json] [--key.path=value ...]
                                                              the train step compiled for TPUs or GPUs that are not here
    plan EXPERIMENT|PRESET --topology NAME --decode [--rows N] [--length N] [--fast] [--json] [--key.path=value ...]
                                                              the same of a prompt and a step of its continuation

EXPERIMENT is a name in experiments/ or a path to a .py file; PRESET a model of jaxformer.models.presets, preset:NAME where an
experiment has its name; RUN a folder in runs/, or an experiment's name for its newest
run. `train EXPERIMENT --help` lists every option of that experiment. To open a run is to run the code in its folder: one that
you did not train on this machine needs --trust, once. Several processes train as one on TPU pods, GKE, Slurm and MPI, or where
JAXFORMER_COORDINATOR=HOST:PORT, JAXFORMER_PROCESSES=COUNT and JAXFORMER_PROCESS=INDEX say so.
Exit codes: 0 done, 2 a mistake in what was asked (one line says which), 3 the numbers went bad or the plan does not fit,
4 another process died or never came, 5 a step did not end (JAXFORMER_STEP_LIMIT seconds), 6 the file system failed (the same
command goes on once it works again), 130/143 stopped by a signal with everything saved.
"""

import io
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from jaxformer import __version__
from jaxformer.cli import models, runs
from jaxformer.cli.arguments import Answered, parser_of, place, read_experiment, weights_of
from jaxformer.config import storage
from jaxformer.config.code import users_frame
from jaxformer.errors import ConfigError, did_you_mean

BELOW = 600  # bytes of the longest path below the runs folder: name of the run, checkpoints, temporary names


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    commands = {
        "train": train, "tokens": tokens, "evaluate": runs.evaluate, "generate": runs.generate,
        "harness": runs.run_harness, "inspect": runs.inspect, "report": runs.write_report, "runs": runs.runs,
        "compare": runs.compare, "list": models.list_all, "show": models.show, "cost": models.show_cost, "draw": models.draw,
        "plan": models.plan,
    }  # fmt: skip
    if not argv or argv[0] in ("-h", "--help", "--version"):
        return run(lambda _: _say(__version__ if argv == ["--version"] else __doc__), argv)
    if argv[0] not in commands:
        near = did_you_mean(argv[0], commands)
        return _refused(ConfigError(f"{argv[0]}: no such command{near}; expected one of {', '.join(commands)}"), 2)
    if argv[1:] in (["-h"], ["--help"]) and argv[0] not in ("evaluate", "generate", "harness", "inspect"):
        return run(lambda _: _say(_about(argv[0])), argv)
    return run(commands[argv[0]], argv[1:])


def _say(text: str) -> int:
    print(text)
    return 0


def _about(command: str) -> str:
    """What the page of commands says of one."""
    return "".join(re.findall(rf"^    {command} .*?(?=^    \w|^\w)", __doc__, re.MULTILINE | re.DOTALL)).rstrip()


def run(command: Callable[[list[str]], int], argv: list[str]) -> int:
    """The exit code of a command; what the user can mend is one line on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without emoji shows an escape instead
            stream.reconfigure(errors="backslashreplace")
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("jaxformer").setLevel(logging.INFO)
    code = _code(command, argv)
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:  # Python would try again when it ends, and change the exit code
        _discard_output()
        return code or (0 if isinstance(error, BrokenPipeError) else _refused(f"stdout: {error}", 2))
    return code


def _code(command: Callable[[list[str]], int], argv: list[str]) -> int:
    try:
        return command(argv)
    except (ConfigError, NotImplementedError) as error:  # a mixer refuses what it cannot do by name
        return _refused(error, 2)
    except Answered:  # the options were asked for
        return 0
    except SystemExit as end:  # of the user's code, or of a library
        return _refused(f"{_place(end)}ends the program ({end.code}), so the command is not done; remove that line", 2)
    except KeyboardInterrupt:  # at a start, or while a text is sampled
        return _refused("stopped by SIGINT", 130)
    except ImportError as error:  # of the package that reads buckets, at the first use of one
        if "gcsfs" not in str(error):
            raise
        return _refused(f"{error}: gs:// needs `pip install 'jaxformer[gcs]'`", 2)
    except BrokenPipeError:  # whoever read our output has enough
        _discard_output()
        return 0
    except OSError as error:
        if not storage.stops(error):
            raise
        return _refused(storage.message(error), storage.exit_code(error))


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def train(argv: list[str]) -> int:
    parser = parser_of("train", "EXPERIMENT")
    parser.add_argument("--runs", default="runs", type=place)
    parser.add_argument("--jax")
    options, overrides = parser.parse_known_args(argv)
    source, experiment = read_experiment(options.name, overrides)

    from jaxformer.runs import goodput, loop
    from jaxformer.runs.metrics import NonFinite
    from jaxformer.runs.signals import Interrupted
    from jaxformer.tools.analysis import report

    def body() -> int:
        check_host(options.runs, options.jax)
        try:
            refresh, reports = report.refresh, [report.run_report]
            began = goodput.program_began()
            loop.train(experiment, options.runs, source, reports, refresh, began, weights_of)
        except (NonFinite, Interrupted) as error:
            return _refused(error, 3 if isinstance(error, NonFinite) else error.exit_code)
        except RuntimeError as error:
            from jaxformer.tools.planning import out_of_memory

            if not out_of_memory.is_out_of_memory(error):
                raise
            print(out_of_memory.explain(experiment), file=sys.stderr)
            first = str(error).splitlines()[0][:200]
            raise ConfigError(f"out of device memory: {first} What would help is above; checkpoints are as they were") from None
        return 0

    return _together(body)


def tokens(argv: list[str]) -> int:
    options, overrides = parser_of("tokens", "EXPERIMENT").parse_known_args(argv)
    _, experiment = read_experiment(options.name, overrides)

    from jaxformer.runs import checks

    def body() -> int:
        print(checks.open_data(experiment).description)
        return 0

    return _together(body)


def _together(body: Callable[[], int]) -> int:
    """The exit code of `body()` in all processes of the run."""
    from jaxformer.parallel import meeting, peers, processes
    from jaxformer.runs import memory

    memory.one_heap()
    try:
        processes.initialize()
    except meeting.MissingProcess as error:
        return _refused(error, peers.LOST)
    return processes.run_together(body)


def check_host(runs: str, version: str | None) -> None:
    """What only the machine knows and takes no time to ask; `loop.train` checks the rest before it compiles. ConfigError."""
    if version is not None and (found := metadata.version("jax")) != version:
        raise ConfigError(f"--jax={version}: this machine has jax {found}; install that version, or build the image again")
    if "://" in runs:
        return
    folder = Path(runs).absolute()
    existing = next(parent for parent in (folder, *folder.parents) if storage.exists(parent))
    try:
        storage.retry(lambda: tempfile.TemporaryFile(dir=existing).close(), existing)
    except OSError as error:
        if storage.passes(error):
            raise
        raise ConfigError(f"--runs={runs}: {existing} cannot be written ({error.strerror}); choose another folder") from None
    check_length(folder)


def check_length(runs: Path) -> None:
    """Raises ConfigError where the paths of checkpoints would be longer than a path can be."""
    longest = os.pathconf("/", "PC_PATH_MAX") - 1
    length = len(os.fsencode(runs))
    if length + BELOW > longest:
        advice = f"expected at most {longest - BELOW}, because {BELOW} are for what a run keeps there; choose another folder"
        raise ConfigError(f"--runs: its path has {length} bytes ({str(runs)[:60]}...); {advice}")


def _place(error: BaseException) -> str:
    """`FILE:LINE: ` of the user's code that raised an error; nothing where it is not the user's."""
    last = users_frame(error)
    return "" if last is None else f"{last.filename}:{last.lineno}: "


def _refused(error: Exception | str, code: int) -> int:
    print(f"jaxformer: {error}", file=sys.stderr)
    return code
