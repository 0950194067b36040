"""Parsers of the command line: options, an experiment or preset, a run's folder."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxformer import config
from jaxformer.config import storage
from jaxformer.errors import ConfigError, did_you_mean

LARGEST = 2**31 - 1  # of a count: JAX numbers tokens and devices in 32 bits
LONGEST = 1000  # digits, with leading zeros: Python refuses to read more than 4,300
PRESET = "preset:"  # prefix of a preset's name, because an experiment may have the same name


class Answered(Exception):
    """The user asked for the options, and they are printed. There is nothing more to do."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ConfigError(f"{self.prog}: {message}; {self.format_usage()}")

    def exit(self, status: int = 0, message: str | None = None):
        raise Answered


def positive(text: str) -> int:
    """The type of an option that counts something."""
    if not (text.isdecimal() and len(text) <= LONGEST and 1 <= int(text) <= LARGEST):
        raise argparse.ArgumentTypeError(
            f"{text[:40]}: expected a whole number from 1 to {LARGEST:,}"
        )
    return int(text)


def place(text: str) -> str:
    """The type of an option that names a file or folder; ~ is expanded.

    The shell does not expand the ~ of `--runs=~/runs`. An empty text would be the current folder.
    """
    if not text:
        raise argparse.ArgumentTypeError("an empty name; expected a file or folder")
    return os.path.expanduser(text)


def output_file(text: str) -> str:
    """The type of an option that names a file to write; it refuses a folder.

    So a bad name is refused before anything is computed.
    """
    text = place(text)
    if Path(text).is_dir() or any(parent.is_file() for parent in Path(text).parents):
        raise argparse.ArgumentTypeError(
            f"{text}: a folder, or in a file; expected the name of a file to write"
        )
    return text


def parser_of(command: str, name: str, nargs: int | str | None = None) -> Parser:
    """The parser of a command's own options.

    Arguments that `parse_known_args` does not know, `--help` too, are options of an experiment.
    """
    parser = Parser(prog=f"python -m jaxformer {command}", add_help=False, allow_abbrev=False)
    parser.add_argument("name", metavar=name, nargs=nargs)
    return parser


def check_needs(options, flag: str, *names: str) -> None:
    """Raises ConfigError if one of these options is given without the flag that it needs."""
    for name in names:
        if getattr(options, name) is not None and not getattr(options, flag):
            raise ConfigError(
                f"--{name}={getattr(options, name)}: goes with --{flag}; "
                f"add it, or leave --{name} out"
            )


def run_parser(command: str) -> Parser:
    parser = parser_of(command, "RUN")
    parser.add_argument("-h", "--help", action="help")
    parser.add_argument("--runs", default="runs", type=place, help="where run folders live")
    parser.add_argument("--step", type=int, help="which checkpoint; the newest by default")
    parser.add_argument(
        "--average", type=int, default=1, help="the mean of so many checkpoints up to that one"
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="run the code of a run folder of somebody else, now and later",
    )
    return parser


def run_of(options, overrides: Sequence[str] = ()):
    """The run that the command line names, on the mesh of its options."""
    from jaxformer.runs import compilation_cache
    from jaxformer.runs.run import open_run

    folder = folder_of(options.name, options.runs).path
    run = open_run(folder, options.step, overrides, options.average, options.trust, weights_of)
    compilation_cache.enable()
    return run


def weights_of(text: str) -> Callable:
    """The Hugging Face weights that `initial` or a reference of an experiment names."""
    from jaxformer.families.initial import HuggingFace

    return HuggingFace(text)


def folder_of(name: str, runs: str):
    """A run's folder, by its path or name; for an experiment's name, the newest run.

    It prints how the experiment's other runs differ from the newest.
    """
    from etils import epath

    from jaxformer.runs import run_folder

    paths = epath.Path(os.path.expanduser(name)), epath.Path(runs) / name
    for folder in map(run_folder.RunFolder, paths):
        if storage.is_file(folder.config):
            return folder
    is_experiment = name.endswith(".py") or name in config.available()
    folders = run_folder.runs_of(config.load(name).name if is_experiment else name, runs)
    if not folders:
        for path in paths:
            if storage.is_dir(path):
                raise ConfigError(
                    f"{path}: no run folder, it has no config.json; the command `runs` lists all"
                )
        near = did_you_mean(name, [str(folder.path) for folder in run_folder.runs_of(None, runs)])
        raise ConfigError(
            f"{name}: no run folder, or not trained yet: "
            f"no run of it in {runs}/{near}; `runs` lists all"
        )
    newest = folders[-1]
    for other in folders[:-1]:
        changes = (
            "; ".join(run_folder.compare(other.description(), newest.description())) or "nothing"
        )
        print(
            f"{newest.path} is the newest run; {other.path} differs in {changes}", file=sys.stderr
        )
    return newest


def read_experiment(name: str, overrides: list[str]):
    """(the source, the experiment with its options). Raises `Answered` after printing `--help`."""
    if name not in config.available() and not name.endswith(".py"):
        from jaxformer.zoo import PRESETS

        if name.removeprefix(PRESET) in PRESETS:
            name = name.removeprefix(PRESET)
            raise ConfigError(
                f"{name} is a preset, a model without data; "
                f"train it in an experiment (--model {name})"
            )
        near = did_you_mean(name, [*config.available(), *PRESETS])
        raise ConfigError(
            f"{name}: no experiment or preset of that name{near}; the command `list` shows all"
        )
    source = config.read(name)
    if "--help" in overrides or "-h" in overrides:
        print(config.help_text(source.experiment, f"python -m jaxformer train {name}"))
        raise Answered

    from jaxformer.runs.names import NAMES
    from jaxformer.training.experiment import Experiment

    if not isinstance(source.experiment, Experiment):
        kind = type(source.experiment).__name__
        raise ConfigError(
            f"{source.path}: experiment is a {kind}; "
            "expected jaxformer.training.experiment.Experiment"
        )
    experiment = config.override(source.experiment, overrides, {**NAMES, "": source.names})
    return replace(source, overrides=tuple(overrides)), experiment


def experiment_of(name: str, overrides: list[str], preset: Callable[[str, Any], Any]):
    """An experiment with its options, or `preset(name, model)` of a preset, with its options.

    A name that both have means the experiment; `preset:NAME` means the preset.
    """
    from jaxformer.runs.names import MODEL, NAMES
    from jaxformer.zoo import PRESETS

    chosen = name.removeprefix(PRESET)
    if chosen in PRESETS and (chosen != name or name not in config.available()):
        return config.override(preset(chosen, PRESETS[chosen]), overrides, {**NAMES, "": MODEL})
    return read_experiment(name, overrides)[1]


def model_of(name: str, overrides: list[str], command: str):
    """The model of an experiment, or a preset. Raises ConfigError for a user's own model class."""
    from jaxformer import models
    from jaxformer.training.experiment import Experiment

    shown = experiment_of(name, overrides, lambda _, model: model)
    model = shown.model if isinstance(shown, Experiment) else shown
    if not models.is_config(model):
        raise ConfigError(
            f"{command}: {name} has a model of its own; "
            "only a ModelConfig or an EncoderDecoder can be read"
        )
    return model
