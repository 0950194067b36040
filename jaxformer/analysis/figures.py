"""Pictures of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def loss_report(result: Any, records: Sequence[dict]) -> str:
    """The loss curve of a run that has ended, in its folder; the line that says where."""
    path = result.folder / "figures" / "loss.png"
    loss_curve(records, path, f"{result.name}: {result.parameters:,} parameters", result.baseline)
    return f"loss curve: {path}"


def loss_curve(records: Sequence[dict], path: Path, title: str, baseline: float | None = None) -> None:
    """Training and validation loss (nats a token) against step, written to `path` as PNG.

    `records` are the lines of metrics.jsonl; `baseline` is a horizontal line to beat (the unigram entropy).
    """
    from matplotlib.figure import Figure  # half a second of import that a run pays only at its end

    train = [(r["step"], r["loss"]) for r in records if "loss" in r]
    validation = [(r["step"], r["validation_loss"]) for r in records if "validation_loss" in r]
    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    if train:
        steps, losses = zip(*train, strict=True)
        axes.plot(steps, losses, color="#9db4c8", linewidth=0.8, label="training, each logged step")
        axes.plot(steps, _smooth(losses), color="#1f5d8c", linewidth=1.6, label="training, smoothed")
    if validation:
        axes.plot(
            *zip(*validation, strict=True), "o-", color="#c0392b", markersize=4, linewidth=1.2, label="validation"
        )
        axes.annotate(
            f"{validation[-1][1]:.3f}",
            validation[-1],
            textcoords="offset points",
            xytext=(-4, 8),
            ha="right",
            color="#c0392b",
        )
    if baseline is not None:
        axes.axhline(baseline, color="#777777", linestyle=":", linewidth=1, label=f"unigram entropy {baseline:.3f}")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _smooth(values: Sequence[float]) -> list[float]:
    """Mean over a centred window of a twentieth of the record on either side: no lag, and the ends stay honest."""
    reach = len(values) // 20
    windows = [values[max(i - reach, 0) : i + reach + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]
