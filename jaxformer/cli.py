"""python -m jaxformer {train,evaluate,generate,show,plan}: the only place that reads argv.

    train EXPERIMENT [--runs DIR] [--key.path=value ...]      trains, or resumes, experiments/EXPERIMENT.py
    evaluate RUN [--step N]                                   scores a run's checkpoint on its validation split
    generate RUN --prompt TEXT [--tokens N] [--temperature X] [--top-k K] [--top-p P] [--min-p P] [--seed S] [--step N]
    show EXPERIMENT|PRESET [--key.path=value ...]             the final config, parameters and cost; nothing is computed
    show EXPERIMENT|PRESET --sharding [--devices N] [--mesh.fsdp=N ...]
                                                              how each parameter is split, and its bytes on a device
    plan EXPERIMENT|PRESET --topology NAME [--search] [--fast] [--json] [--key.path=value ...]
                                                              the train step compiled for TPUs or GPUs that are not here

EXPERIMENT is a name in experiments/ or a path to a .py file; RUN a folder in runs/, or an experiment's name for its
run. `train EXPERIMENT --help` lists every option of that experiment. Several processes train as one on TPU pods, GKE, Slurm
and MPI, or where JAXFORMER_COORDINATOR=HOST:PORT, JAXFORMER_PROCESSES=COUNT and JAXFORMER_PROCESS=INDEX say so.
Exit codes: 0 done, 2 a mistake in what was asked (one line says which), 3 the numbers went bad or the plan does not fit,
4 another process died or never came, 5 a step did not end (JAXFORMER_STEP_LIMIT seconds), 130/143 stopped by a signal with
everything saved.
"""

import argparse
import logging
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxformer import config
from jaxformer.config import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    commands = {"train": train, "evaluate": evaluate, "generate": generate, "show": show, "plan": plan}
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("jaxformer").setLevel(logging.INFO)
    try:
        if not argv or argv[0] in ("-h", "--help"):
            print(__doc__)
            return 0
        if argv[0] not in commands:
            raise ConfigError(f"{argv[0]}: no such command; expected one of {', '.join(commands)}")
        return commands[argv[0]](argv[1:])
    except (ConfigError, NotImplementedError) as error:  # a mixer refuses what it cannot do by name
        print(f"jaxformer: {error}", file=sys.stderr)
        return 2


def train(argv: list[str]) -> int:
    argv, runs = _take(argv, "--runs", "runs")
    if "://" in runs:
        raise ConfigError(f"--runs={runs}: a run's folder is a path; mount the bucket (gcsfuse) and give its path")
    name, arguments = _name(argv, "train EXPERIMENT")
    experiment = config.load(name)
    if "--help" in arguments or "-h" in arguments:
        print(config.help_text(experiment, prog=f"python -m jaxformer train {name}"))
        return 0
    experiment = config.override(experiment, arguments)

    from jaxformer.parallel import processes
    from jaxformer.training import loop
    from jaxformer.training.metrics import NonFinite
    from jaxformer.training.signals import Interrupted

    def body() -> int:
        try:
            loop.train(experiment, Path(runs))
        except (NonFinite, Interrupted) as error:
            print(f"jaxformer: {error}", file=sys.stderr)
            return 3 if isinstance(error, NonFinite) else error.exit_code
        return 0

    try:
        processes.initialize()
    except processes.Lost as error:
        print(f"jaxformer: {error}", file=sys.stderr)
        return processes.LOST
    return processes.together(body)


def evaluate(argv: list[str]) -> int:
    parser = _parser("evaluate")
    options = parser.parse_args(argv)
    folder, experiment = _run(options)

    import json

    from jaxformer.training import loop

    dataset = loop.open_data(experiment)
    loop.use_compilation_cache(folder.path.parent)
    step, params, metadata = loop.load_params(folder, experiment, options.step)
    loop.check_data(folder, metadata, dataset)
    print(json.dumps({"run": str(folder.path), "step": step, **loop.score(experiment, dataset, params)}))
    return 0


def generate(argv: list[str]) -> int:
    parser = _parser("generate")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--min-p", type=float)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    folder, experiment = _run(options)

    from dataclasses import replace

    from jaxformer.data import tokenizers
    from jaxformer.decoding import Sampling
    from jaxformer.training import loop

    how = Sampling(options.temperature, options.top_k, options.top_p, options.min_p)
    if not folder.tokenizer.is_file():
        raise ConfigError(f"{folder.path}: has no tokenizer; a generated task has no text to continue")
    loop.use_compilation_cache(folder.path.parent)
    _, params, _ = loop.load_params(folder, experiment, options.step)
    request = replace(experiment.sample, prompt=options.prompt, tokens=options.tokens, how=how)
    experiment = replace(experiment, sample=request, seed=options.seed)
    print(loop.sample(experiment, tokenizers.load(folder.tokenizer), params))
    return 0


def show(argv: list[str]) -> int:
    if "--sharding" in argv:
        return _show_sharding([word for word in argv if word != "--sharding"])
    name, arguments = _name(argv, "show EXPERIMENT|PRESET")

    from jaxformer.analysis import cost
    from jaxformer.models import PRESETS
    from jaxformer.training.experiment import Experiment

    shown = PRESETS[name] if name in PRESETS else config.load(name)
    shown = config.override(shown, arguments)
    model = shown.model if isinstance(shown, Experiment) else shown
    print(config.dumps(shown))
    print(cost.table(model))
    if isinstance(shown, Experiment):
        from jaxformer.training.folder import run_folder

        print(f"run folder: {run_folder(shown, Path('runs')).path}")
    return 0


def _show_sharding(argv: list[str]) -> int:
    argv, count = _take(argv, "--devices", "")
    name, arguments = _name(argv, "show EXPERIMENT|PRESET --sharding [--devices N]")

    import jax

    from jaxformer import models, parallel

    experiment = config.override(_planned(name), arguments)
    fixed = [size for axis in parallel.AXES if (size := getattr(experiment.mesh, axis)) != -1]
    if not count.isdigit() and (count or len(fixed) < len(parallel.AXES)):
        raise ConfigError(
            f"show --sharding: a mesh axis is -1, the devices left over; give --devices N (now {count!r})"
        )
    sizes = experiment.mesh.shape(int(count) if count else math.prod(fixed))
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
    print(parallel.describe(models.spec(experiment.model), mesh))
    return 0


def plan(argv: list[str]) -> int:
    argv, where = _take(argv, "--topology", "")
    flags = {flag for flag in argv if flag in ("--fast", "--json", "--search")}
    name, arguments = _name([word for word in argv if word not in flags], "plan EXPERIMENT|PRESET --topology v5e:2x2")
    if not where:
        raise ConfigError("plan: give --topology, such as v5e:2x2, v5p:8x8x8 or h200:1x4x8")

    from jaxformer.analysis import topology

    topology.prepare()

    import json

    from jaxformer.analysis import plan as planning
    from jaxformer.analysis import search

    experiment = config.override(_planned(name), arguments)
    devices = topology.devices(where, experiment.mesh.slices)
    if "--search" in flags:
        found = search.search(experiment, where, devices)
        made = [planning.as_json(one) | {"options": search.options(other, experiment)} for other, one in found]
        print(json.dumps(made) if "--json" in flags else search.table(found, experiment, name, where))
        return 0 if found and found[0][1].fits else 3
    made = planning.plan(experiment, where, devices, fast="--fast" in flags)
    print(json.dumps(planning.as_json(made)) if "--json" in flags else planning.table(made))
    return 0 if made.fits else 3


def _planned(name: str):
    """An experiment, or the one that pretrains a preset."""
    from jaxformer.analysis import plan as planning
    from jaxformer.models import PRESETS

    return planning.of_preset(name, PRESETS[name]) if name in PRESETS else config.load(name)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ConfigError(f"{self.prog}: {message}")


def _parser(command: str) -> _Parser:
    parser = _Parser(prog=f"python -m jaxformer {command}", allow_abbrev=False)
    parser.add_argument("run", help="a run folder, or the name of an experiment")
    parser.add_argument("--runs", default="runs", help="where run folders live")
    parser.add_argument("--step", type=int, help="which checkpoint; the newest by default")
    return parser


def _run(options):
    """The run folder and experiment that the command line names."""
    from jaxformer.training.folder import RunFolder, open_run, run_folder

    folder = RunFolder(Path(options.run))
    if not folder.path.is_dir():
        folder = run_folder(config.load(options.run), Path(options.runs))
        if not folder.config.is_file():
            raise ConfigError(
                f"{options.run}: not trained yet, there is no {folder.path}; python -m jaxformer train {options.run}"
            )
    return folder, open_run(folder)


def _name(argv: list[str], usage: str) -> tuple[str, list[str]]:
    if not argv or argv[0].startswith("-"):
        raise ConfigError(f"usage: python -m jaxformer {usage} [--key.path=value ...]")
    return argv[0], argv[1:]


def _take(argv: list[str], option: str, default: str) -> tuple[list[str], str]:
    """Removes `option VALUE` or `option=VALUE` from argv."""
    rest, value, pending = [], default, False
    for token in argv:
        if pending:
            value, pending = token, False
        elif token == option:
            pending = True
        elif token.startswith(option + "="):
            value = token.partition("=")[2]
        else:
            rest.append(token)
    if pending:
        raise ConfigError(f"{option}: expected a value")
    return rest, value
