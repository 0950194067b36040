"""Pictures of a run."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from etils import epath


def loss_report(result: Any, records: Sequence[dict]) -> str:
    """Draws training and validation loss (nats a token) against step into a finished run's folder; returns a line to print.

    `records` are the lines of metrics.jsonl. `result.baseline`, the unigram entropy, is a horizontal line to beat.
    """
    from matplotlib.figure import Figure  # the import takes half a second

    train = [(r["step"], r["loss"]) for r in records if "loss" in r]
    validation = [(r["step"], r["validation_loss"]) for r in records if "validation_loss" in r]
    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    if train:
        steps, losses = zip(*train, strict=True)
        axes.plot(steps, losses, color="#9db4c8", linewidth=0.8, label="training, each logged step")
        reach = len(losses) // 20  # to each side, shorter at the ends: there is no lag
        windows = [losses[max(i - reach, 0) : i + reach + 1] for i in range(len(losses))]
        axes.plot(steps, list(map(fmean, windows)), color="#1f5d8c", linewidth=1.6, label="training, smoothed")
    if validation:
        steps, losses = zip(*validation, strict=True)
        axes.plot(steps, losses, "o-", color="#c0392b", markersize=4, linewidth=1.2, label="validation")
        place = dict(textcoords="offset points", xytext=(-4, 8), ha="right", color="#c0392b")
        axes.annotate(f"{losses[-1]:.3f}", validation[-1], **place)
    if result.baseline is not None:
        label = f"unigram entropy {result.baseline:.3f}"
        axes.axhline(result.baseline, color="#777777", linestyle=":", linewidth=1, label=label)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=f"{result.name}: {result.parameters:,} parameters")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    path = epath.Path(result.folder) / "figures" / "loss.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        figure.savefig(file, format="png")
    return f"loss curve: {path}"
