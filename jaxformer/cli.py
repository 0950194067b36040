"""python -m jaxformer COMMAND: the only place that reads argv.

    train EXPERIMENT [--runs DIR] [--key.path=value ...]      trains, or resumes, experiments/EXPERIMENT.py
    evaluate RUN [--step N] [--average N] [--int8] [--mesh.tensor=N ...]
                                                              scores a run's checkpoint, or the mean of its last N, on its
                                                              validation split
    generate RUN --prompt TEXT | --prompts FILE.jsonl --out FILE.jsonl [--tokens N] [--temperature X] [--top-k K] [--top-p P]
             [--min-p P] [--typical P] [--filter "Repetition(1.2)"] [--beams N [--n-best N] [--length-penalty X]]
             [--stop TEXT] [--seed S] [--step N] [--average N] [--mesh.tensor=N ...]
    harness RUN --tasks NAME,... [--include DIR] [--limit N] [--step N] [--mesh.tensor=N ...]
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

EXPERIMENT is a name in experiments/ or a path to a .py file; RUN a folder in runs/, or an experiment's name for its newest
run. `train EXPERIMENT --help` lists every option of that experiment. To open a run is to run the code in its folder: one that
you did not train on this machine needs --trust, once. Several processes train as one on TPU pods, GKE, Slurm and MPI, or where
JAXFORMER_COORDINATOR=HOST:PORT, JAXFORMER_PROCESSES=COUNT and JAXFORMER_PROCESS=INDEX say so.
Exit codes: 0 done, 2 a mistake in what was asked (one line says which), 3 the numbers went bad or the plan does not fit,
4 another process died or never came, 5 a step did not end (JAXFORMER_STEP_LIMIT seconds), 130/143 stopped by a signal with
everything saved.
"""

import argparse
import errno
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from jaxformer import __version__, config
from jaxformer.errors import ConfigError, did_you_mean


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    commands = {
        "train": train, "evaluate": evaluate, "generate": generate, "list": list_all, "runs": runs, "compare": compare,
        "show": show, "plan": plan, "harness": run_harness, "inspect": inspect, "report": write_report,
        "cost": show_cost, "draw": draw,
    }  # fmt: skip
    if not argv or argv[0] in ("-h", "--help", "--version"):
        print(__version__ if argv == ["--version"] else __doc__)
        return 0
    if argv[0] not in commands:
        near = did_you_mean(argv[0], commands)
        return _refused(ConfigError(f"{argv[0]}: no such command{near}; expected one of {', '.join(commands)}"), 2)
    return run(commands[argv[0]], argv[1:])


def run(command: Callable[[list[str]], int], argv: list[str]) -> int:
    """The exit code of a command; what the user can mend is one line on stderr."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("jaxformer").setLevel(logging.INFO)
    try:
        return command(argv)
    except (ConfigError, NotImplementedError) as error:  # a mixer refuses what it cannot do by name
        return _refused(error, 2)
    except SystemExit as end:  # the options were asked for
        return int(end.code or 0)
    except KeyboardInterrupt:  # at a start, or while a text is sampled
        return _refused("stopped by SIGINT", 130)
    except BrokenPipeError:  # whoever read our output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        return _refused(error, 2)


def train(argv: list[str]) -> int:
    parser = _parser("train", "EXPERIMENT")
    parser.add_argument("--runs", default="runs")
    options, overrides = parser.parse_known_args(argv)
    source, experiment = read_experiment(options.name, overrides)

    from jaxformer.analysis import report
    from jaxformer.parallel import peers, processes
    from jaxformer.training import goodput, loop
    from jaxformer.training.metrics import NonFinite
    from jaxformer.training.signals import Interrupted

    def body() -> int:
        try:
            refresh, reports = report.refresh, [report.run_report]
            loop.train(experiment, options.runs, source, reports, refresh, began=goodput.program_began())
        except (NonFinite, Interrupted) as error:
            return _refused(error, 3 if isinstance(error, NonFinite) else error.exit_code)
        except RuntimeError as error:
            from jaxformer.planning import out_of_memory

            if not out_of_memory.is_out_of_memory(error):
                raise
            print(out_of_memory.explain(experiment), file=sys.stderr)
            first = str(error).splitlines()[0][:200]
            raise ConfigError(f"out of device memory: {first} What would help is above; checkpoints are as they were") from None
        return 0

    try:
        processes.initialize()
    except peers.MissingProcess as error:
        return _refused(error, peers.LOST)
    return processes.run_together(body)


def _refused(error: Exception | str, code: int) -> int:
    print(f"jaxformer: {error}", file=sys.stderr)
    return code


def read_experiment(name: str, overrides: list[str]):
    """(the source, the experiment with its options). Ends the program where the options are asked for."""
    if name not in config.available() and not name.endswith(".py"):
        from jaxformer.models import PRESETS

        if name in PRESETS:
            raise ConfigError(f"{name} is a preset, a model without data; train it in an experiment (--model {name})")
        near = did_you_mean(name, [*config.available(), *PRESETS])
        raise ConfigError(f"{name}: no experiment or preset of that name{near}; the command `list` shows all")
    source = config.read(name)
    if "--help" in overrides or "-h" in overrides:
        print(config.help_text(source.experiment, f"python -m jaxformer train {name}"))
        raise SystemExit(0)

    from jaxformer.training.experiment import Experiment
    from jaxformer.training.names import NAMES

    if not isinstance(source.experiment, Experiment):
        found = type(source.experiment).__name__
        raise ConfigError(f"{source.path}: experiment is a {found}; expected jaxformer.training.experiment.Experiment")
    experiment = config.override(source.experiment, overrides, {**NAMES, "": source.names})
    return replace(source, overrides=tuple(overrides)), experiment


def evaluate(argv: list[str]) -> int:
    parser = _run_parser("evaluate")
    parser.add_argument("--int8", action="store_true", help="also with weights in 8 bits")
    parser.add_argument("--replay", action="store_true", help="the bad step that ended the run, computed again")
    options, overrides = parser.parse_known_args(argv)
    run = _run(options, overrides)

    from jaxformer.training import reproduction

    found = reproduction.replay(run) if options.replay else run.evaluate(options.int8)
    print(json.dumps({"run": str(run.folder.path), **found}))
    return 0


def generate(argv: list[str]) -> int:
    parser = _run_parser("generate")
    parser.add_argument("--prompt")
    parser.add_argument("--prompts", help='a file of lines {"prompt": "..."}')
    parser.add_argument("--out", help="where the lines with their texts go")
    parser.add_argument("--seed", type=int, default=0)
    kinds: dict[type, str] = {int: "tokens top-k beams n-best", float: "temperature top-p min-p typical length-penalty"}
    for kind, names in kinds.items():
        for name in names.split():
            parser.add_argument(f"--{name}", type=kind)
    for option in ("--filter", "--stop"):
        parser.add_argument(option, action="append", default=[])
    options, overrides = parser.parse_known_args(argv)
    if (options.prompt is None) == (options.prompts is None) or (options.out is None) != (options.prompts is None):
        raise ConfigError("generate: give --prompt TEXT, or --prompts FILE.jsonl with --out FILE.jsonl")
    run = _run(options, overrides)

    from jaxformer.decoding import Beams, Sampling, filters

    names = {name: getattr(filters, name) for name in filters.__all__}
    given = lambda names: {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    how: dict[str, Any] = given(("seed", "tokens", "stop"))
    how["filters"] = [config.expressions.evaluate(text, names) for text in options.filter]
    picks, search = given(("temperature", "top_k", "top_p", "min_p", "typical")), given(("beams", "n_best", "length_penalty"))
    if picks or search:  # otherwise as the experiment says
        picks.setdefault("temperature", 0.8)
        how["sampling"] = Beams(**search) if search else Sampling(**picks)
    if options.prompts is not None:
        _generate_file(run, options.prompts, options.out, **how)
    elif options.n_best is not None:
        for text in run.continue_all([options.prompt], **how)[0]:
            print(run.opening(options.prompt) + text)
    else:
        pieces = run.stream(options.prompt, **how)
        print(run.opening(options.prompt) + next(pieces, ""), end="", flush=True)  # together: a log may come before the first
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
    return 0


def _generate_file(run, source: str, target: str, **how) -> None:
    """Continues each line of a file, {"prompt": ...}, as a line {"prompt": ..., "texts": [...]} of another."""
    from etils import epath

    try:
        prompts = [json.loads(line)["prompt"] for line in epath.Path(source).read_text().splitlines() if line.strip()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f'{source}: {error!r}; each line must be {{"prompt": "..."}}') from error
    lines = zip(prompts, run.continue_all(prompts, **how), strict=True)
    config.write_atomically(epath.Path(target), "".join(json.dumps({"prompt": p, "texts": texts}) + "\n" for p, texts in lines))
    print(f"{len(prompts)} prompts continued in {target}")


def run_harness(argv: list[str]) -> int:
    parser = _run_parser("harness")
    parser.add_argument("--tasks", required=True, help="names, with commas between them")
    parser.add_argument("--include", help="a folder with YAML files of tasks")
    parser.add_argument("--limit", type=int, help="only so many examples of each task")
    options, overrides = parser.parse_known_args(argv)
    run = _run(options, overrides)

    from jaxformer import models
    from jaxformer.evaluation import harness

    if run.tokenizer is None:
        raise ConfigError(f"{run.folder.path}: has no tokenizer, so there is no text to score")
    end = [run.tokenizer.end_of_text] if hasattr(run.experiment.data, "end_of_text") else []  # of a corpus of documents
    with run.on_mesh():
        model = models.evaluation(run.experiment.model)
        lm = harness.model(model, run.params, run.tokenizer, end=end, precision=run.experiment.precision)
        results, table = harness.evaluate(lm, options.tasks.split(","), options.include, options.limit)
    print(table)
    path = run.folder.path / "harness.json"
    written = {"step": run.checkpoint[0], "limit": options.limit, **results}
    config.write_atomically(path, json.dumps(written, default=str, indent=2))
    print(f"all results: {path}")
    return 0


def inspect(argv: list[str]) -> int:
    parser = _run_parser("inspect")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--html", help="a file for a page with pictures")
    options = parser.parse_args(argv)

    import shutil

    from jaxformer.analysis import inspection

    run = _run(options)
    with run.on_mesh():
        found = inspection.inspect(run.experiment.model, run.params, run.tokenizer, options.prompt)
    print(inspection.table(found, shutil.get_terminal_size((120, 24)).columns))
    if options.html is not None:
        config.write_atomically(options.html, inspection.page_of(found, run.folder.path.name))
        print(f"page: {options.html}")
    return 0


def write_report(argv: list[str]) -> int:
    parser = _parser("report", "RUN", nargs="+")
    parser.add_argument("--runs", default="runs")
    parser.add_argument("--out")
    parser.add_argument("--trust", action="store_true")
    options = parser.parse_args(argv)
    folders = [_folder(name, options.runs) for name in options.name]

    from jaxformer.analysis import gallery, report
    from jaxformer.training import run_folder

    for folder in folders if options.trust else ():
        run_folder.allow(folder)
    path = options.out or folders[0].path / "report.html"
    print(f"report: {report.write(path, folders, [gallery.run_pictures(folder) for folder in folders])}")
    return 0


def draw(argv: list[str]) -> int:
    parser = _parser("draw", "EXPERIMENT|PRESET")
    parser.add_argument("--out")
    options, overrides = parser.parse_known_args(argv)

    from etils import epath

    from jaxformer.analysis import gallery, page, report

    model = _shown_model(options.name, overrides, "draw")
    path = epath.Path(options.out or f"figures/{options.name}.html")
    drawn = gallery.model_pictures(model, options.name)
    parts = [report.section(title, {options.name: drawn[title]}, path.parent) for title in gallery.NOTES if title in drawn]
    config.write_atomically(path, page.page(options.name, parts))
    print(f"page: {path}")
    return 0


def list_all(argv: list[str]) -> int:
    import ast

    from jaxformer.models import PRESETS

    print("experiments")
    for name, path in config.available().items():
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        print(f"  {name:<24} {' '.join(text.split(chr(10) * 2)[0].split())}")
    print("presets")
    for name, preset in PRESETS.items():
        print(f"  {name:<24} {type(preset).__name__}")
    return 0


def runs(argv: list[str]) -> int:
    parser = _parser("runs", "EXPERIMENT", nargs="?")
    parser.add_argument("--runs", default="runs")
    options = parser.parse_args(argv)

    from jaxformer.training.run_folder import runs_of

    for folder in runs_of(options.name, options.runs):
        print(f"{folder.path}  {_scores(folder)}")
    return 0


def _scores(folder) -> str:
    """How far a run is, and its last validation scores, in words."""
    from jaxformer.training.metrics import read_records

    records = read_records(folder.metrics)
    steps = folder.description().get("steps")
    done = max((record["step"] + ("loss" in record) for record in records), default=0)
    last = next((record for record in reversed(records) if "validation_loss" in record), {})
    scores = ", ".join(f"{name} {value:.4g}" for name, value in last.items() if name != "step")
    return f"{done}/{steps} steps{', ' + scores if scores else ''}"


def compare(argv: list[str]) -> int:
    parser = _parser("compare", "RUN", nargs=2)
    parser.add_argument("--runs", default="runs")
    options = parser.parse_args(argv)

    from jaxformer.training import run_folder

    folders = [_folder(name, options.runs) for name in options.name]
    for folder in folders:
        print(f"{folder.path}  {_scores(folder)}")
    one, other = (folder.description() for folder in folders)
    print("\n".join(run_folder.compare(one, other)) or "the same experiment")
    return 0


def show(argv: list[str]) -> int:
    parser = _parser("show", "EXPERIMENT|PRESET")
    parser.add_argument("--sharding", action="store_true")
    parser.add_argument("--devices", type=int)
    options, overrides = parser.parse_known_args(argv)

    from jaxformer import models
    from jaxformer.models import cost
    from jaxformer.training.experiment import Experiment

    if options.sharding:
        from jaxformer.planning.plan import of_preset, sharding_table

        print(sharding_table(_shown(options.name, overrides, of_preset), options.devices))
        return 0
    shown = _shown(options.name, overrides, lambda _, model: model)
    model = shown.model if isinstance(shown, Experiment) else shown
    print(json.dumps(config.describe(shown), indent=2))
    if models.is_config(model):
        print(cost.table(model))
    if isinstance(shown, Experiment):
        from jaxformer.training.run_folder import run_folder

        print(f"run folder: {run_folder(shown, 'runs').path}")
    return 0


def show_cost(argv: list[str]) -> int:
    parser = _parser("cost", "EXPERIMENT|PRESET")
    parser.add_argument("--length", type=int)
    options, overrides = parser.parse_known_args(argv)

    from jaxformer import models
    from jaxformer.analysis import costs

    model = _shown_model(options.name, overrides, "cost")
    print(costs.table(model, options.length or models.last_stack(model).context_length))
    return 0


def _shown_model(name: str, overrides: list[str], command: str):
    """The model of an experiment, or a preset. Raises ConfigError for one of the user's own."""
    from jaxformer import models
    from jaxformer.training.experiment import Experiment

    shown = _shown(name, overrides, lambda _, model: model)
    model = shown.model if isinstance(shown, Experiment) else shown
    if not models.is_config(model):
        raise ConfigError(f"{command}: {name} has a model of its own; only a ModelConfig or an EncoderDecoder can be read")
    return model


def _shown(name: str, overrides: list[str], preset: Callable[[str, Any], Any]):
    """An experiment with its options, or what `preset` makes of a preset's name and model."""
    from jaxformer.models import PRESETS
    from jaxformer.training.names import MODEL, NAMES

    if name in PRESETS:
        return config.override(preset(name, PRESETS[name]), overrides, {**NAMES, "": MODEL})
    return read_experiment(name, overrides)[1]


def plan(argv: list[str]) -> int:
    parser = _parser("plan", "EXPERIMENT|PRESET")
    parser.add_argument("--topology")
    for flag in ("--search", "--decode", "--fast", "--json"):
        parser.add_argument(flag, action="store_true")
    for option, default in (("--rows", 8), ("--length", 2048)):
        parser.add_argument(option, type=int, default=default)
    options, overrides = parser.parse_known_args(argv)
    if options.topology is None:
        raise ConfigError("plan: give --topology, such as v5e:2x2, v5p:8x8x8 or h200:1x4x8")

    from jaxformer.planning import topology

    topology.prepare()

    from jaxformer.planning import decode, plan as planning, search

    experiment = _shown(options.name, overrides, planning.of_preset)
    devices = topology.devices(options.topology, experiment.mesh.slices)
    if options.search:
        found = search.search(experiment, options.topology, devices)
        made = [asdict(one) | {"options": search.options(other, experiment)} for other, one in found]
        print(json.dumps(made) if options.json else search.table(found, experiment, options.name, options.topology))
        return 0 if found and found[0][1].fits else 3
    if options.decode:
        made = decode.plan_decode(experiment, options.topology, devices, options.rows, options.length, fast=options.fast)
        table = decode.table(made)
    else:
        made = planning.plan(experiment, options.topology, devices, fast=options.fast)
        table = planning.table(made)
    print(json.dumps(asdict(made)) if options.json else table)
    return 0 if made.fits else 3


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ConfigError(f"{self.prog}: {message}; {self.format_usage()}")


def _parser(command: str, name: str, nargs: int | str | None = None) -> _Parser:
    """Of a command's own options. What `parse_known_args` leaves over are options of an experiment, `--help` too."""
    parser = _Parser(prog=f"python -m jaxformer {command}", add_help=False, allow_abbrev=False)
    parser.add_argument("name", metavar=name, nargs=nargs)
    return parser


def _run_parser(command: str) -> _Parser:
    parser = _parser(command, "RUN")
    parser.add_argument("-h", "--help", action="help")
    parser.add_argument("--runs", default="runs", help="where run folders live")
    parser.add_argument("--step", type=int, help="which checkpoint; the newest by default")
    parser.add_argument("--average", type=int, default=1, help="the mean of so many checkpoints up to that one")
    parser.add_argument("--trust", action="store_true", help="run the code of a run folder of somebody else, now and later")
    return parser


def _run(options, overrides: Sequence[str] = ()):
    """The run that the command line names, on the mesh that it asks for."""
    from jaxformer.training import compilation_cache
    from jaxformer.training.run import open_run

    run = open_run(_folder(options.name, options.runs).path, options.step, overrides, options.average, options.trust)
    compilation_cache.enable()
    return run


def _folder(name: str, runs: str):
    """A run's folder, by its path or its name; of an experiment's name the newest run, and what the others differ in."""
    from etils import epath

    from jaxformer.training import run_folder

    for path in (epath.Path(name), epath.Path(runs) / name):
        if path.is_dir():
            return run_folder.RunFolder(path)
    is_experiment = name.endswith(".py") or name in config.available()
    found = run_folder.runs_of(config.load(name).name if is_experiment else name, runs)
    if not found:
        near = did_you_mean(name, [str(folder.path) for folder in run_folder.runs_of(None, runs)])
        raise ConfigError(f"{name}: no run folder, or not trained yet: no run of it in {runs}/{near}; `runs` lists all")
    newest = found[-1]
    for other in found[:-1]:
        changes = "; ".join(run_folder.compare(other.description(), newest.description())) or "nothing"
        print(f"{newest.path} is the newest run; {other.path} differs in {changes}", file=sys.stderr)
    return newest
