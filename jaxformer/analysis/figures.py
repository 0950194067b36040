"""Pictures. Each function returns a matplotlib figure; `png` draws it for light or dark pages, `save` into a file.

matplotlib is imported when a picture is drawn: that takes half a second.
"""

import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from etils import epath

from jaxformer.analysis.costs import Part
from jaxformer.analysis.diagram import short
from jaxformer.analysis.encodings import Encoding
from jaxformer.analysis.scaling import HOFFMANN, Law, Numbers
from jaxformer.masks import Mask

COLORS = ["#1f77b4", "#d1495b", "#2a9d5c", "#e08e0b", "#7b5ea7", "#5f6b73"]
DARK = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), "#c9d1d9")


def png(draw: Callable[[], Any], dark: bool = False) -> bytes:
    """The picture of a function that returns a figure, on a transparent ground if `dark`, else on white."""
    from matplotlib import rc_context

    colors = DARK | {"figure.facecolor": "none", "axes.facecolor": "none"} if dark else {}
    with rc_context(colors), io.BytesIO() as file:
        draw().savefig(file, format="png", dpi=120)
        return file.getvalue()


def save(draw: Callable[[], Any], path: epath.PathLike) -> epath.Path:
    """Writes a picture into a file; its folder is made."""
    path = epath.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png(draw))
    return path


def loss_report(result: Any, records: Sequence[dict]) -> str:
    """Draws the curves of a finished run into its folder; returns a line to print. `records` are those of metrics.jsonl."""
    draw = lambda: losses({f"{result.name}: {result.parameters:,} parameters": records}, result.baseline)
    return f"loss curve: {save(draw, epath.Path(result.folder) / 'figures' / 'loss.png')}"


def losses(runs: Mapping[str, Sequence[dict]], baseline: float | None = None) -> Any:
    """Training and validation loss (nats a token) against step, of one run or several; `baseline` is a line to beat."""
    axes = _axes(xlabel="step", ylabel="loss (nats per token)")
    alone = len(runs) == 1
    for color, (name, records) in zip(_colors(len(runs)), runs.items(), strict=True):
        train = [(r["step"], r["loss"]) for r in records if "loss" in r]
        validation = [(r["step"], r["validation_loss"]) for r in records if "validation_loss" in r]
        if train:
            steps, values = zip(*train, strict=True)
            axes.plot(
                steps, values, color=color, alpha=0.5, linewidth=0.8, label="training, each logged step" if alone else None
            )
            reach = len(values) // 20  # to each side, shorter at the ends: there is no lag
            windows = [values[max(i - reach, 0) : i + reach + 1] for i in range(len(values))]
            label = "training, smoothed" if alone else name
            axes.plot(steps, list(map(fmean, windows)), color=color, linewidth=1.6, label=label)
        if validation:
            steps, values = zip(*validation, strict=True)
            other = COLORS[1] if alone else color
            axes.plot(steps, values, "o-", color=other, markersize=4, linewidth=1.2, label="validation" if alone else None)
            place = dict(textcoords="offset points", xytext=(-4, 8), ha="right", color=other)
            axes.annotate(f"{values[-1]:.3f}", validation[-1], **place)
    if baseline is not None:
        axes.axhline(baseline, color="#888888", linestyle=":", linewidth=1, label=f"unigram entropy {baseline:.3f}")
    axes.set_title("\n".join(runs) if alone else "training (lines) and validation (points)", fontsize=10)
    axes.legend(frameon=False)
    return axes.figure


def attention(weights: np.ndarray, tokens: Sequence[str], sources: Sequence[str] | None = None, first_layer: int = 0) -> Any:
    """Maps `[L, N, T, S]`, a row of panels a layer, with the tokens on the axes where there are at most 40."""
    from matplotlib.figure import Figure

    L, N, T, S = weights.shape
    size = float(np.clip(0.09 * max(T, S), 1.5, 5))
    figure = Figure(figsize=(0.5 + size * N, 0.6 + size * L), layout="constrained")
    for (layer, head), axes in np.ndenumerate(figure.subplots(L, N, squeeze=False)):
        axes.imshow(weights[layer, head], vmin=0, vmax=1, cmap="magma", aspect="auto")
        axes.set_title(f"layer {first_layer + layer}, head {head}", fontsize=8)
        words = {"x": (sources or tokens) if layer == L - 1 else (), "y": tokens if head == 0 else ()}
        for axis, names in words.items():
            names = [repr(name)[1:-1][:8] for name in names] if len(names) <= 40 else []
            axes.set(**{f"{axis}ticks": range(len(names)), f"{axis}ticklabels": names})
        axes.tick_params(labelsize=6, length=0)
        axes.tick_params(axis="x", rotation=90)
    figure.supxlabel("key", fontsize=8)
    figure.supylabel("query", fontsize=8)
    return figure


def curves(runs: Mapping[str, Sequence[dict]]) -> Any:
    """Every other number of the records against step, a panel each; of validation with points."""
    from matplotlib.figure import Figure

    plain = lambda name: name.removeprefix("validation_")
    names = dict.fromkeys(plain(name) for records in runs.values() for record in records for name in record)
    names = [name for name in names if name not in ("step", "loss", "skipped", "loss_scale") and not name.startswith("rms/")][
        :9
    ]
    figure = Figure(figsize=(7, 2.1 * -(-len(names) // 3) or 1), layout="constrained")
    for i, name in enumerate(names):
        axes = figure.add_subplot(-(-len(names) // 3), 3, i + 1, title=name.replace("_", " "))
        axes.title.set_fontsize(9)
        for color, records in zip(_colors(len(runs)), runs.values(), strict=True):
            for key, style in ((name, "-"), (f"validation_{name}", "o-")):
                if points := [(r["step"], r[key]) for r in records if key in r]:
                    axes.plot(*zip(*points, strict=True), style, color=color, markersize=3, linewidth=1.2)
        axes.grid(alpha=0.25)
        axes.tick_params(labelsize=7)
    return figure


def layer_curves(records: Sequence[dict]) -> Any:
    """Root mean squares by layer, records of names such as rms/gradient/layers/3, against step: a line a layer."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    found: dict[str, dict[int, list]] = {}
    for record in records:
        for name, value in record.items():
            if name.startswith("rms/") and value > 0:
                kind, _, layer = name.removeprefix("rms/").partition("/layers/")
                found.setdefault(kind, {}).setdefault(int(layer), []).append((record["step"], value))
    figure = Figure(figsize=(7, 3), layout="constrained")
    for i, (kind, layers) in enumerate(found.items()):
        axes = figure.add_subplot(1, len(found), i + 1, title=f"{kind} RMS", yscale="log", xlabel="step")
        for layer, points in sorted(layers.items()):
            color = colormaps["viridis"](0.9 * layer / max(max(layers), 1))
            axes.plot(*zip(*points, strict=True), color=color, label=f"layer {layer}" if layer in (0, max(layers)) else None)
        axes.legend(frameon=False, fontsize=7)
        axes.grid(alpha=0.25)
    return figure


def layer_bars(norms: Mapping[str, np.ndarray]) -> Any:
    """Norms `[L]` of the gradient by sub-layer, against depth."""
    axes = _axes(xlabel="layer", ylabel="norm of the gradient", yscale="log")
    for color, (name, values) in zip(_colors(len(norms)), norms.items(), strict=True):
        axes.plot(range(len(values)), values, "o-", color=color, label=name.replace("_", " "))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False)
    return axes.figure


def masks(patterns: Mapping[str, Mask], length: int) -> Any:
    """Which keys each query sees at a length: each cell is a block of pairs, of which none, some or all are visible."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    block, many = -(-length // 64), len(patterns)
    figure = Figure(figsize=(0.6 + 3.0 * min(many, 3), 3.4 * -(-many // 3)), layout="constrained")
    for i, (name, mask) in enumerate(patterns.items()):
        axes = figure.add_subplot(-(-many // 3), min(many, 3), i + 1, xlabel="key", ylabel="query")
        edge = (0, length, length, 0)
        colors = ListedColormap(["#8a949e22", "#7fb2d8", "#1f5d8c"])
        axes.imshow(mask.blocks(length, length, block), cmap=colors, vmin=0, vmax=2, extent=edge, interpolation="none")
        title = f"{name}: {mask}, {mask.density(length, length):.1%} visible"
        axes.set_title("\n".join(textwrap.wrap(title, 40)), fontsize=8)
        axes.tick_params(labelsize=7)
    return figure


def positions(encodings: Mapping[str, Encoding]) -> Any:
    """Above what each encoding gives a position, below what it alone makes of the score of a query and a key."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(0.6 + 2.3 * max(len(encodings), 2), 4.8), layout="constrained")
    for i, (name, encoding) in enumerate(encodings.items()):
        shifts = "depends on key − query" if encoding.shift_error() < 1e-4 else "depends on both positions"
        words = ("position", encoding.rows, f"{name}"), ("key", "query", f"score: {shifts}")
        for line, (values, (x, y, title)) in enumerate(zip((encoding.values, encoding.scores), words, strict=True)):
            axes = figure.add_subplot(2, len(encodings), 1 + i + line * len(encodings), xlabel=x, ylabel=y)
            most = float(np.abs(values).max()) or 1.0
            axes.imshow(values, aspect="auto", cmap="RdBu_r", vmin=-most, vmax=most, interpolation="none")
            axes.set_title(title, fontsize=8)
            axes.tick_params(labelsize=7)
    return figure


def costs(parts: Mapping[int, Sequence[Part]]) -> Any:
    """Parts of a forward pass by length: their shares of its FLOPs and of the bytes that it moves, totals above."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.4), layout="constrained")
    names = [part.name for part in next(iter(parts.values()))]
    for i, (title, field, unit) in enumerate((("FLOPs", "flops", ""), ("bytes moved, 16-bit numbers", "numbers", "B"))):
        axes = figure.add_subplot(1, 2, i + 1, xlabel="length (tokens)", title=title)
        values = np.array([[getattr(part, field) for part in row] for row in parts.values()]) * (2 if unit else 1)
        below, totals = np.zeros(len(values)), values.sum(axis=1)
        for color, name, column in zip(_colors(len(names)), names, values.T, strict=True):
            axes.bar(range(len(values)), column / totals, bottom=below, color=color, width=0.7, label=name)
            below = below + column / totals
        for x, total in enumerate(totals):
            axes.text(x, 1.01, f"{short(total)}{unit}", ha="center", fontsize=7)
        axes.set_xticks(range(len(values)), [f"{length:,}" for length in parts])
        axes.set(yticks=[], ylim=(0, 1.08))
        axes.title.set_fontsize(9)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=7)
    return figure


def heat(values: np.ndarray, xlabel: str, ylabel: str, title: str = "") -> Any:
    """A matrix as colours with a bar: positional encodings, scores of heads `[L, N]`, gradients by layer."""
    axes = _axes(grid=False, xlabel=xlabel, ylabel=ylabel, title=title)
    signed = float(np.nanmin(values)) < 0
    most = float(np.nanmax(np.abs(values))) or 1.0
    image = axes.imshow(values, aspect="auto", cmap="RdBu_r" if signed else "magma", vmin=-most if signed else 0, vmax=most)
    axes.figure.colorbar(image)
    return axes.figure


def schedules(rates: Mapping[str, Callable[[int], Any]], steps: int) -> Any:
    """Learning rates against step."""
    axes = _axes(xlabel="step", ylabel="learning rate")
    places = np.unique(np.linspace(0, steps, 400).astype(int))
    for color, (name, rate) in zip(_colors(len(rates)), rates.items(), strict=True):
        axes.plot(places, [float(rate(int(step))) for step in places], color=color, label=name)
    axes.legend(frameon=False)
    return axes.figure


def scaling_law(law: Law, losses: Numbers, parameters: Numbers, tokens: Numbers) -> Any:
    """Runs and the fitted law: loss against compute 6 N D, a line for each size; and Hoffmann's slope of the optimum."""
    axes = _axes(xlabel="compute 6 N D (FLOPs)", ylabel="loss (nats per token)", xscale="log", yscale="log")
    N, D, L = map(np.asarray, (parameters, tokens, losses))
    sizes = np.unique(N)
    for color, size in zip(_colors(len(sizes)), sizes, strict=True):
        axes.plot(6 * size * D[size == N], L[size == N], "o", color=color, label=f"N = {size:,.0f}")
        line = np.geomspace(D.min() / 1.5, D.max() * 1.5, 50)
        axes.plot(6 * size * line, law.loss(size, line), color=color, linewidth=1)
    budgets = np.geomspace(6 * (N * D).min(), 6 * (N * D).max(), 50)
    axes.plot(budgets, law.loss(*law.optimum(budgets)), "k--", linewidth=1.2, label="best of its budget")
    ours, theirs = law.beta / (law.alpha + law.beta), HOFFMANN.beta / (HOFFMANN.alpha + HOFFMANN.beta)
    axes.set_title(f"best N grows as C^{ours:.2f} (Hoffmann et al.: {theirs:.2f})", fontsize=10)
    axes.legend(frameon=False, fontsize=7)
    return axes.figure


def _axes(grid: bool = True, **labels: Any) -> Any:
    from matplotlib.figure import Figure

    axes = Figure(figsize=(5.8, 3.6), layout="constrained").add_subplot()
    axes.set(**labels)
    if grid:
        axes.grid(alpha=0.25)
    return axes


def _colors(count: int) -> list[str]:
    return [COLORS[i % len(COLORS)] for i in range(count)]
