"""The table and the figure of a sweep."""

import io
import math
from collections.abc import Sequence
from typing import Any

from etils import epath

from jaxformer import config
from jaxformer.cli.trials import Trial
from jaxformer.runs import loop
from jaxformer.runs.comparison import incomparable
from jaxformer.runs.run_folder import run_folder
from jaxformer.tools.analysis import figures


def table(trials: Sequence[Trial], runs: epath.PathLike) -> str:
    """Options, final scores and folder of each trial, in Markdown."""
    warning = incomparable([run_folder(trial.experiment, runs) for trial in trials if trial.scores])
    hidden = [name for name in loop.UNRECORDED if not (warning and name == "tokens")]
    names: dict[str, None] = {}  # of the scores that some trial has, in order
    for trial in trials:
        for name, value in trial.scores.items():
            if name not in hidden and _is_number(value):
                names[name] = None
    lines = [
        [*trials[0].options, *names, "run"],
        ["---"] * (len(trials[0].options) + len(names) + 1),
    ]
    for trial in trials:
        scores = [_shown(trial.scores.get(name, "")) for name in names]
        end = trial.problem or str(run_folder(trial.experiment, runs).path)
        lines.append([*trial.options.values(), *scores, end])
    text = "".join("| " + " | ".join(map(_cell, line)) + " |\n" for line in lines)
    return f"{text}\n{warning}\n" if warning else text


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _shown(score: Any) -> str:
    return f"{score:.4g}" if _is_number(score) else str(score)


def figure(trials: Sequence[Trial], path: epath.Path) -> str:
    """Draws the score against the first option with several numbers as values.

    Each combination of the other options is a line. A failed trial is a cross at the upper edge.
    Returns ", PATH", or "" if there is no such option.
    """
    name = _option_of_figure(trials)
    if name is None:
        return ""
    best = trials[0].experiment.checkpoints.best
    lines = _lines(trials, name)
    picture = io.BytesIO()
    drawn = _draw(lines)
    axes = drawn.axes[0]
    title = figures.plain(f"{trials[0].experiment.name}: {len(trials)} runs")
    axes.set(xlabel=name, ylabel=best.removeprefix("-"), title=title)
    if any(trial.problem for trial in trials):
        axes.plot([], [], "kx", label="failed")
    if len(axes.get_lines()) > 2:
        axes.legend(frameon=False, fontsize=8)
    drawn.savefig(picture, format="png")
    # a symbolic link of that name is replaced, not followed
    config.write_atomically(path, picture.getvalue())
    return f", {path}"


def _several(trials: Sequence[Trial], name: str) -> bool:
    """Whether the option has more than one value."""
    return len({trial.options[name] for trial in trials}) > 1


def _option_of_figure(trials: Sequence[Trial]) -> str | None:
    """The first option with several values, all of them numbers."""
    for name in trials[0].options:
        if _several(trials, name) and all(_says_number(trial.options[name]) for trial in trials):
            return name
    return None


def _lines(trials: Sequence[Trial], name: str) -> dict[str, list[tuple[float, float]]]:
    """{label of the other options: [(value of the option, score)]}; failed: an infinite score."""
    highest_first = trials[0].experiment.checkpoints.best.startswith("-")
    lines: dict[str, list[tuple[float, float]]] = {}
    for trial in trials:
        others = [other for other in trial.options if other != name and _several(trials, other)]
        label = ", ".join(f"{other}={trial.options[other]}" for other in others)
        score = -trial.rank if highest_first else trial.rank
        point = float(trial.options[name]), score
        lines.setdefault(figures.plain(label), []).append(point)
    return lines


def _draw(lines: dict[str, list[tuple[float, float]]]) -> Any:
    """A figure with the points of each line; its axes are logarithmic over a factor of ten."""
    from matplotlib.figure import Figure  # the import takes half a second

    drawn = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    axes = drawn.add_subplot()
    for label, points in sorted(lines.items()):
        good = sorted(point for point in points if math.isfinite(point[1]))
        x_and_y = zip(*good, strict=True) if good else ([], [])
        (line,) = axes.plot(*x_and_y, "o-", markersize=4, label=label)
        failed = [x for x, y in points if not math.isfinite(y)]
        edge = [0.97] * len(failed)
        at_edge = axes.get_xaxis_transform()
        axes.plot(failed, edge, "x", color=line.get_color(), transform=at_edge)
    points = [point for points in lines.values() for point in points]
    for values, set_scale in (
        ([x for x, _ in points], axes.set_xscale),
        ([y for _, y in points], axes.set_yscale),
    ):
        finite = [value for value in values if math.isfinite(value)]
        if finite and 0 < 10 * min(finite) <= max(finite):
            set_scale("log")
    axes.grid(alpha=0.25)
    return drawn


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _says_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
