"""Commands that show experiments and presets: their config, their cost, and whether they fit."""

import ast
import warnings
from dataclasses import asdict
from pathlib import Path

from jaxformer import config
from jaxformer.cli.arguments import (
    PRESET,
    Parser,
    check_needs,
    experiment_of,
    model_of,
    output_file,
    parser_of,
    positive,
)
from jaxformer.errors import ConfigError


def list_all(argv: list[str]) -> int:
    from jaxformer.zoo import PRESETS

    Parser(prog="python -m jaxformer list").parse_args(argv)
    print("experiments")
    for name, path in config.available().items():
        print(f"  {name:<24} {_summary(path)}")
    print("presets")
    for name, preset in PRESETS.items():
        print(f"  {name:<24} {type(preset).__name__}")
    return 0


def _summary(path: Path) -> str:
    """The first paragraph of an experiment file's docstring, on one line.

    If the file cannot be read, the reason.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # the parser warns of "\\d" in a user's file
            tree = ast.parse(config.read_text(path))
    except (ConfigError, SyntaxError, ValueError, RecursionError) as error:
        return f"(cannot be read: {error})"
    return " ".join((ast.get_docstring(tree) or "").split("\n\n")[0].split())


def show(argv: list[str]) -> int:
    parser = parser_of("show", "EXPERIMENT|PRESET")
    parser.add_argument("--sharding", action="store_true")
    parser.add_argument("--devices", type=positive)
    options, overrides = parser.parse_known_args(argv)
    check_needs(options, "sharding", "devices")

    from jaxformer import models
    from jaxformer.models import cost
    from jaxformer.training.experiment import Experiment

    if options.sharding:
        from jaxformer.tools.planning.plan import of_preset, sharding_table

        print(sharding_table(experiment_of(options.name, overrides, of_preset), options.devices))
        return 0
    shown = experiment_of(options.name, overrides, lambda _, model: model)
    model = shown.model if isinstance(shown, Experiment) else shown
    print(config.to_json(config.describe(shown), indent=2))
    if models.is_config(model):
        print(cost.table(model))
    if isinstance(shown, Experiment):
        from jaxformer.runs.run_folder import run_folder

        print(f"run folder: {run_folder(shown, 'runs').path}")
    return 0


def show_cost(argv: list[str]) -> int:
    parser = parser_of("cost", "EXPERIMENT|PRESET")
    parser.add_argument("--length", type=positive)
    options, overrides = parser.parse_known_args(argv)

    from jaxformer import models
    from jaxformer.tools.analysis import costs

    model = model_of(options.name, overrides, "cost")
    print(costs.table(model, options.length or models.last_stack(model).context_length))
    return 0


def draw(argv: list[str]) -> int:
    parser = parser_of("draw", "EXPERIMENT|PRESET")
    parser.add_argument("--out", type=output_file)
    options, overrides = parser.parse_known_args(argv)

    from etils import epath

    from jaxformer.tools.analysis import gallery, page, report

    model = model_of(options.name, overrides, "draw")
    name = options.name.removeprefix(PRESET)
    if name.endswith(".py"):
        name = Path(name).stem  # ../mine.py would lead out of figures/
    path = epath.Path(options.out or f"figures/{name}.html")
    drawn = gallery.model_pictures(model, name)
    parts = [
        report.section(title, {name: drawn[title]}, path.parent)
        for title in gallery.NOTES
        if title in drawn
    ]
    config.write_atomically(path, page.page(name, parts))
    print(f"page: {path}")
    return 0


def plan(argv: list[str]) -> int:
    parser = parser_of("plan", "EXPERIMENT|PRESET")
    parser.add_argument("--topology")
    exclusive = parser.add_mutually_exclusive_group()
    exclusive.add_argument("--search", action="store_true")
    exclusive.add_argument("--decode", action="store_true")
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--json", action="store_true")
    for option in ("--rows", "--length"):
        parser.add_argument(option, type=positive)
    options, overrides = parser.parse_known_args(argv)
    check_needs(options, "decode", "rows", "length")
    if options.topology is None:
        raise ConfigError("plan: give --topology, such as v5e:2x2, v5p:8x8x8 or h200:1x4x8")

    from jaxformer.tools.planning import topology

    topology.prepare()

    from jaxformer.tools.planning import decode, plan as planning, search

    experiment = experiment_of(options.name, overrides, planning.of_preset)
    devices = topology.devices(options.topology, experiment.mesh.slices)
    if options.search:
        plans = search.search(experiment, options.topology, devices)
        if options.json:
            made = [
                asdict(one) | {"options": search.options(other, experiment)} for other, one in plans
            ]
            print(config.to_json(made))
        else:
            print(search.table(plans, experiment, options.name, options.topology, overrides))
        return 0 if plans and plans[0][1].fits else 3
    if options.decode:
        shape = {"rows": options.rows, "length": options.length}
        shape = {name: size for name, size in shape.items() if size is not None}
        made = decode.plan_decode(experiment, options.topology, devices, fast=options.fast, **shape)
        table = decode.table(made)
    else:
        made = planning.plan(experiment, options.topology, devices, fast=options.fast)
        table = planning.table(made)
    print(config.to_json(asdict(made)) if options.json else table)
    return 0 if made.fits else 3


def env(argv: list[str]) -> int:
    if argv:
        raise ConfigError(f"env: takes no arguments, not {' '.join(argv)}")

    from jaxformer.tools import environment

    print(environment.report())
    return 0
