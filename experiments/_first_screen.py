"""The picture of README's first screen: four masks beside the loss curve of a run of quickstart.

Writes docs/pictures/first_screen.png.
Expected: the picture; one line says so.
Time: seconds; the run takes a minute or two.
Command: make train, then python -m experiments._first_screen [RUNS]
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from jaxformer import masks
from jaxformer.runs.metrics import read_records
from jaxformer.runs.run_folder import RunFolder, runs_of
from jaxformer.tools.analysis import figures

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "first_screen.png"
LENGTH = 10  # queries and keys of each mask
# two colours of Okabe and Ito, which colour-blind readers tell apart, and a grey
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#666666"
HIDDEN = "#e9edf0"
THREE_TEXTS = jnp.array([[1, 1, 1, 1, 2, 2, 2, 3, 3, 3]])

# {the title: its mask}
MASKS = {
    "causal()": masks.causal(),
    "causal() & window(3)": masks.causal() & masks.window(3),
    "causal() &\n(window(3) | prefix(2))": masks.causal() & (masks.window(3) | masks.prefix(2)),
    "causal() &\nsegments(three_texts)": masks.causal() & masks.segments(THREE_TEXTS),
}


def draw(folder: RunFolder) -> Figure:
    """The masks on the left, the run on the right."""
    figure = Figure(figsize=(10, 4.9), layout="constrained")
    parts: Any = figure.subfigures(1, 2, wspace=0.04)  # its type says one part
    left, right = parts
    for axes, (title, mask) in zip(left.subplots(2, 2).flat, MASKS.items(), strict=True):
        draw_mask(axes, title, mask)
    left.supxlabel("blue: the query sees the key", fontsize=12, color=BLUE)
    draw_losses(right.subplots(), folder)
    return figure


def draw_mask(axes: Any, title: str, mask: masks.Mask) -> None:
    """A square for each pair of query and key: blue where the query sees the key."""
    dense = np.asarray(mask.dense(LENGTH, LENGTH))[0, 0]
    axes.imshow(dense, cmap=ListedColormap([HIDDEN, BLUE]), vmin=0, vmax=1)
    axes.set_title(title, fontsize=12, family="monospace")
    axes.set(xticks=[], yticks=[])
    axes.set_xlabel("key", fontsize=12, labelpad=2)
    axes.set_ylabel("query", fontsize=12, labelpad=2)
    # white lines between the squares
    edges = np.arange(-0.5, LENGTH)
    axes.set_xticks(edges, minor=True)
    axes.set_yticks(edges, minor=True)
    axes.grid(which="minor", color="white", linewidth=1.2)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)


def draw_losses(axes: Any, folder: RunFolder) -> None:
    """Training and validation loss against step, and the entropy of single bytes."""
    records = read_records(folder.metrics)
    result = json.loads(folder.result.read_text())
    steps, losses = zip(*figures.points(records, "loss"), strict=True)
    axes.plot(steps, losses, color=BLUE, linewidth=1.8, label="training")
    validation = figures.points(records, "validation_loss")
    steps, losses = zip(*validation, strict=True)
    axes.plot(steps, losses, "o-", color=ORANGE, linewidth=2, markersize=7, label="validation")
    offset = dict(textcoords="offset points", xytext=(4, 14), ha="right")
    axes.annotate(f"{losses[-1]:.3f}", validation[-1], color=ORANGE, fontsize=14, **offset)
    baseline = result["baseline"]
    label = f"every byte by its frequency: {baseline:.3f}"
    axes.axhline(baseline, color=GREY, linestyle="--", linewidth=1.5, label=label)
    axes.set_title(f"make train: {result['parameters']:,} parameters", fontsize=13)
    axes.set_xlabel("step", fontsize=13)
    axes.set_ylabel("loss (nats per byte)", fontsize=13)
    axes.tick_params(labelsize=12)
    axes.legend(frameon=False, fontsize=12, loc="upper right")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set(ylim=(1, 5.5), yticks=range(1, 6))


if __name__ == "__main__":
    newest = runs_of("quickstart", sys.argv[1] if len(sys.argv) > 1 else "runs")[-1]
    PICTURE.write_bytes(figures.png(lambda: draw(newest)))
    print(f"{PICTURE}: {PICTURE.stat().st_size:,} bytes")
