"""Pictures of a run."""

import io
import os
from collections.abc import Sequence
from typing import Any

from etils import epath


def loss_report(result: Any, records: Sequence[dict]) -> str:
    """Draws the loss curve of a finished run into its folder; returns a line with its path."""
    path = result.folder / "figures" / "loss.png"
    loss_curve(records, path, f"{result.name}: {result.parameters:,} parameters", result.baseline)
    return f"loss curve: {path}"


def loss_curve(records: Sequence[dict], path: os.PathLike, title: str, baseline: float | None = None) -> None:
    """Training and validation loss (nats a token) against step, written to `path` as PNG.

    `records` are the lines of metrics.jsonl; `baseline` is a horizontal line to beat (the unigram entropy).
    """
    from matplotlib.figure import Figure  # the import takes half a second

    train = [(r["step"], r["loss"]) for r in records if "loss" in r]
    validation = [(r["step"], r["validation_loss"]) for r in records if "validation_loss" in r]
    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    if train:
        steps, losses = zip(*train, strict=True)
        axes.plot(steps, losses, color="#9db4c8", linewidth=0.8, label="training, each logged step")
        axes.plot(steps, _smooth(losses), color="#1f5d8c", linewidth=1.6, label="training, smoothed")
    if validation:
        steps, losses = zip(*validation, strict=True)
        axes.plot(steps, losses, "o-", color="#c0392b", markersize=4, linewidth=1.2, label="validation")
        place = dict(textcoords="offset points", xytext=(-4, 8), ha="right", color="#c0392b")
        axes.annotate(f"{losses[-1]:.3f}", validation[-1], **place)
    if baseline is not None:
        axes.axhline(baseline, color="#777777", linestyle=":", linewidth=1, label=f"unigram entropy {baseline:.3f}")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    path = epath.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png.getvalue())


def _smooth(values: Sequence[float]) -> list[float]:
    """Mean over a centred window, a twentieth of the record to each side, shorter at the ends: there is no lag."""
    reach = len(values) // 20
    windows = [values[max(i - reach, 0) : i + reach + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]
