"""The trials of a sweep: every combination of the values of a grid, as an experiment."""

import itertools
import math
from typing import Any, NamedTuple

from jaxformer import config
from jaxformer.cli.arguments import read_experiment
from jaxformer.errors import ConfigError
from jaxformer.training.experiment import Experiment

CLOSING = {"(": ")", "[": "]", "{": "}"}


class Trial(NamedTuple):
    """One combination of a grid, and how it ended."""

    options: dict[str, str]  # as typed, without the hyphens in front
    source: config.Source
    experiment: Experiment
    scores: dict[str, Any] = {}  # noqa: RUF012 (never changed); the final scores
    problem: str = ""  # the reason if it failed

    @property
    def rank(self) -> float:
        """The final score that checkpoints.best names, so that the lowest rank is the best.

        Infinite if the trial failed or has no such number.
        """
        best = self.experiment.checkpoints.best
        score = self.scores.get(best.removeprefix("-"))
        if self.problem or not isinstance(score, int | float) or not math.isfinite(score):
            return math.inf
        return -score if best.startswith("-") else score


def read_trials(name: str, grid: str, overrides: list[str]) -> list[Trial]:
    """A trial of the experiment for each combination of the grid.

    Raises ConfigError for options that the experiment does not have.
    """
    trials = []
    for combination in combinations(grid):
        words = [f"--{option}={value}" for option, value in combination.items()]
        trials.append(Trial(combination, *read_experiment(name, [*overrides, *words])))
    return trials


def combinations(grid: str) -> list[dict[str, str]]:
    """All combinations of "--a=1,2 --b=x,y": [{"a": "1", "b": "x"}, {"a": "1", "b": "y"}, ...].

    A comma or a space inside brackets or quotes separates nothing. Quotes around a whole value are
    removed, as by a shell.
    """
    values: dict[str, list[str]] = {}
    for word in filter(None, _split(grid, " \t\n")):
        name, _, text = word.partition("=")
        choices = [_without_quotes(value) for value in _split(text, ",")]
        if not name.startswith("--") or name[2:] in values or "" in choices:
            raise ConfigError(
                f"--grid: {word}: expected each option once with its values, "
                'such as "--seed=0,1 --steps=100"'
            )
        values[name[2:]] = choices
    if not values:
        raise ConfigError(
            "--grid is empty; expected options with values: "
            '"--optimizer.learning-rate=1e-4,3e-4 --seed=0,1"'
        )
    return [
        dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())
    ]


def _without_quotes(value: str) -> str:
    is_quoted = value[:1] in ("'", '"') and value[-1:] == value[:1]
    return value[1:-1] if is_quoted else value


def _split(text: str, separators: str) -> list[str]:
    """The parts of a text between separators; those inside brackets and quotes do not count."""
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


def joined(argv: list[str], option: str) -> list[str]:
    """`argv` with `option` and its value as one word, because the value begins like an option."""
    if option not in argv[:-1]:
        return argv
    at = argv.index(option)
    return [*argv[:at], f"{option}={argv[at + 1]}", *argv[at + 2 :]]
