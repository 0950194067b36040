"""python -m jaxformer COMMAND: the only place that reads argv.

    train EXPERIMENT [--runs DIR] [--jax VERSION] [--key.path=value ...]
        trains, or resumes, experiments/EXPERIMENT.py; --jax refuses any other version of jax
    tokens EXPERIMENT [--key.path=value ...]
        only encodes the experiment's texts; several hosts that see one cache (--data.cache=DIR)
        divide the work
    sweep EXPERIMENT --grid "--a.b=1,2 --c=x,y" [--parallel N] [--runs DIR] [--key.path=value ...]
        trains every combination of the grid's options; one table, one figure
    evaluate RUN [--step N] [--average N] [--int8 | --stored NF4()] [--mesh.tensor=N ...]
        scores a run's checkpoint, or the mean of its last N, on its validation split; also with
        weights in 8 bits, or in blocks of 4 bits
    evaluate RUN --replay [--mesh.tensor=N ...]
        computes the bad step that ended a run again
    generate RUN --prompt TEXT | --prompts FILE.jsonl --out FILE.jsonl [--tokens N]
             [--temperature X] [--top-k K] [--top-p P] [--min-p P] [--typical P]
             [--filter "Repetition(1.2)"] [--beams N [--n-best N] [--length-penalty X]]
             [--stop TEXT] [--special-tokens] [--seed S] [--step N] [--average N]
             [--mesh.tensor=N ...]
        continues a prompt, or each prompt of a file
    generate RUN --chat [--system TEXT] [options as above]
        answers each line of the input, in one conversation
    generate RUN [--prompt TEXT] [--seed S] [--step N] [--average N] [--mesh.tensor=N ...]
        for data with a method generate(run, key, folder): what it returns, and the files it wrote
    harness RUN --tasks NAME,... [--include DIR] [--limit N] [--step N] [--average N]
            [--mesh.tensor=N ...]
        runs tasks of lm-evaluation-harness; writes harness.json into the run's folder
    export RUN FOLDER [--dtype bfloat16] [--model-type llama] [--step N] [--average N]
    export RUN FOLDER --program [options as above]
        a folder that transformers opens, with tokenizer and README; or a StableHLO program
    inspect RUN --prompt TEXT [--html FILE] [--step N] [--average N]
        losses, predictions and heads, token by token
    report RUN [RUN ...] [--out FILE.html]
        one page with curves, samples, attention, gradients and costs
    draw EXPERIMENT|PRESET [--out FILE.html] [--key.path=value ...]
        one page of a model: architecture, masks, costs
    list                all experiments and presets, each with one line about it
    env                 versions, devices, and which optional parts work: for an issue
    runs [--runs DIR]   all runs, each with its step and its scores
    compare RUN RUN     the differences between two runs, and their scores
    show EXPERIMENT|PRESET [--key.path=value ...]
        the final config, parameters and cost; nothing is computed
    show EXPERIMENT|PRESET --sharding [--devices N] [--mesh.fsdp=N ...]
        how each parameter is split, and its bytes on a device
    cost EXPERIMENT|PRESET [--length N] [--key.path=value ...]
        parameters, FLOPs and bytes of a forward pass, part by part
    plan EXPERIMENT|PRESET --topology NAME [--search] [--fast] [--json] [--key.path=value ...]
        compiles the train step for TPUs or GPUs that are not here
    plan EXPERIMENT|PRESET --topology NAME --decode [--rows N] [--length N] [--fast] [--json]
         [--key.path=value ...]
        compiles the prefill of a prompt and one step of decoding

EXPERIMENT is a name in experiments/ or a path to a .py file; `train EXPERIMENT --help` lists all
options of that experiment. PRESET is a model of jaxformer.models.presets; write preset:NAME if an
experiment has the same name. RUN is a folder in runs/, or an experiment's name for its newest run.
Opening a run executes the code in its folder: a run that you did not train on this machine needs
--trust, once. Several processes train as one on TPU pods, GKE, Slurm and MPI, or with
JAXFORMER_COORDINATOR=HOST:PORT, JAXFORMER_PROCESSES=COUNT and JAXFORMER_PROCESS=INDEX.

Exit codes:
  0         done
  2         a mistake in the command or the config; one line says which
  3         the numbers went bad, or the plan does not fit
  4         another process died or never came
  5         a step did not end (JAXFORMER_STEP_LIMIT seconds)
  6         the file system failed; the same command continues after it works again
  130, 143  stopped by a signal, with everything saved
"""

import io
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxformer import __version__
from jaxformer.cli import models, runs
from jaxformer.cli.arguments import Answered, parser_of, place, read_experiment, weights_of
from jaxformer.config import storage
from jaxformer.config.code import users_frame
from jaxformer.errors import ConfigError, did_you_mean, install_command

# bytes of the longest path below the folder of runs: a run's name, checkpoints, temporary names
BELOW = 600
# their parsers print their help
OWN_HELP = ("evaluate", "generate", "harness", "export", "inspect")


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    commands = {
        "train": train,
        "tokens": tokens,
        "evaluate": runs.evaluate,
        "generate": runs.generate,
        "harness": runs.run_harness,
        "export": runs.export,
        "inspect": runs.inspect,
        "report": runs.write_report,
        "sweep": sweep,
        "runs": runs.runs,
        "compare": runs.compare,
        "list": models.list_all,
        "env": models.env,
        "show": models.show,
        "cost": models.show_cost,
        "draw": models.draw,
        "plan": models.plan,
    }
    if not argv or argv[0] in ("-h", "--help", "--version"):
        return run(lambda _: _say(__version__ if argv == ["--version"] else __doc__), argv)
    if argv[0] not in commands:
        near = did_you_mean(argv[0], commands)
        expected = f"expected one of {', '.join(commands)}"
        return _refused(f"{argv[0]}: no such command{near}; {expected}", 2)
    if argv[1:] in (["-h"], ["--help"]) and argv[0] not in OWN_HELP:
        return run(lambda _: _say(_about(argv[0])), argv)
    return run(commands[argv[0]], argv[1:])


def _say(text: str) -> int:
    print(text)
    return 0


def _about(command: str) -> str:
    """The text about one command on the page of commands."""
    return "".join(
        re.findall(rf"^    {command} .*?(?=^    \w|^\w)", __doc__, re.MULTILINE | re.DOTALL)
    ).rstrip()


def run(command: Callable[[list[str]], int], argv: list[str]) -> int:
    """The exit code of a command. An error that the user can fix prints one line on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without emoji shows their escapes
            stream.reconfigure(errors="backslashreplace")
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("jaxformer").setLevel(logging.INFO)
    code = _code(command, argv)
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:  # at exit Python would flush again, and change the exit code
        _discard_output()
        if code == 0 and not isinstance(error, BrokenPipeError):
            return _refused(f"stdout: {error}", 2)
    return code


def _code(command: Callable[[list[str]], int], argv: list[str]) -> int:
    try:
        return command(argv)
    except (ConfigError, NotImplementedError) as error:  # mixers raise NotImplementedError
        return _refused(error, 2)
    except Answered:  # `--help` of an experiment
        return 0
    except SystemExit as end:  # raised by the user's code or by a library
        problem = f"{_place(end)}ends the program ({end.code})"
        return _refused(f"{problem}, so the command is not done; remove that line", 2)
    except KeyboardInterrupt:  # at a start, or while a text is sampled
        return _refused("stopped by SIGINT", 130)
    except ImportError as error:  # the first use of a bucket imports gcsfs
        if "gcsfs" not in str(error):
            raise
        return _refused(f"{error}: gs:// needs `{install_command('gcs')}`", 2)
    except BrokenPipeError:  # the reader of our output has closed the pipe
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
    from jaxformer.runs.reporter import NonFinite
    from jaxformer.runs.signals import Interrupted
    from jaxformer.tools.analysis import report

    def body() -> int:
        check_host(options.runs, options.jax)
        try:
            reports = [report.run_report]
            began = goodput.program_began()
            loop.train(experiment, options.runs, source, reports, report.refresh, began, weights_of)
        except (NonFinite, Interrupted) as error:
            return _refused(error, 3 if isinstance(error, NonFinite) else error.exit_code)
        except RuntimeError as error:
            from jaxformer.tools.planning import out_of_memory

            if not out_of_memory.is_out_of_memory(error):
                raise
            print(out_of_memory.explain(experiment), file=sys.stderr)
            first = str(error).splitlines()[0][:200]
            raise ConfigError(
                f"out of device memory: {first} What would help is above; "
                "checkpoints are as they were"
            ) from None
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


def sweep(argv: list[str]) -> int:
    from jaxformer.cli import sweeps

    return sweeps.main(argv)


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
    """Raises ConfigError if this machine has another version of jax or cannot write to `runs`.

    These checks take no time. `loop.train` makes the others before it compiles.
    """
    from jaxformer.parallel.numerics import version_of

    if version is not None and (installed := version_of("jax")) != version:
        raise ConfigError(
            f"--jax={version}: this machine has jax {installed}; "
            "install that version, or build the image again"
        )
    if "://" in runs:
        return
    folder = Path(runs).absolute()
    existing = next(parent for parent in (folder, *folder.parents) if storage.exists(parent))
    try:
        storage.retry(lambda: tempfile.TemporaryFile(dir=existing).close(), existing)
    except OSError as error:
        if storage.passes(error):
            raise
        raise ConfigError(
            f"--runs={runs}: {existing} cannot be written ({error.strerror}); choose another folder"
        ) from None
    check_length(folder)


def check_length(runs: Path) -> None:
    """Raises ConfigError if the paths of checkpoints would be longer than the system allows."""
    longest = os.pathconf("/", "PC_PATH_MAX") - 1
    length = len(os.fsencode(runs))
    if length + BELOW > longest:
        advice = (
            f"expected at most {longest - BELOW}, because {BELOW} are for what a run keeps "
            "there; choose another folder"
        )
        raise ConfigError(f"--runs: its path has {length} bytes ({str(runs)[:60]}...); {advice}")


def _place(error: BaseException) -> str:
    """`FILE:LINE: ` of the user's code that raised an error; "" if it was not the user's code."""
    last = users_frame(error)
    return "" if last is None else f"{last.filename}:{last.lineno}: "


def _refused(error: Exception | str, code: int) -> int:
    print(f"jaxformer: {error}", file=sys.stderr)
    return code
