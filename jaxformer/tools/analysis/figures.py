"""Pictures: functions that return a matplotlib figure.

`png` draws a figure for light or dark pages, `save` writes it into a file. matplotlib is imported
only when a picture is drawn, because the import takes half a second.
"""

import io
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from jaxformer import config
from jaxformer.errors import check_whole
from jaxformer.masks import Mask
from jaxformer.runs.reporter import unit_of_loss
from jaxformer.tools.analysis.costs import Part
from jaxformer.tools.analysis.labels import plain, short
from jaxformer.tools.analysis.scaling import HOFFMANN, Law, Numbers

MOST_TICKS = 6  # of an axis
COLORS = ["#1f77b4", "#d1495b", "#2a9d5c", "#e08e0b", "#7b5ea7", "#5f6b73"]
NOT_CURVES = {"step", "loss", "skipped", "loss_scale", "examples"}
DARK = dict.fromkeys(
    ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), "#c9d1d9"
)


def png(draw: Callable[[], Any], dark: bool = False) -> bytes:
    """The bytes of a PNG file of the figure that `draw` returns.

    The background is transparent if `dark`, else white.
    """
    from matplotlib import rc_context

    # the curve of a long run is too long to be drawn in one piece
    settings: dict[str, Any] = {"agg.path.chunksize": 10_000}
    settings |= DARK | {"figure.facecolor": "none", "axes.facecolor": "none"} if dark else {}
    with rc_context(settings), warnings.catch_warnings(), io.BytesIO() as file:
        # missing letters are drawn as boxes; there would be one warning for each
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        draw().savefig(file, format="png", dpi=120)
        return file.getvalue()


def save(
    draw: Callable[[], Any], path: epath.PathLike, root: epath.PathLike | None = None
) -> epath.Path:
    """Writes the figure that `draw` returns into a PNG file, and makes its folder.

    A link of that name is replaced. No link below `root` is followed.
    """
    path = epath.Path(path)
    config.write_atomically(path, png(draw), root)
    return path


def loss_report(result: Any, records: Sequence[dict]) -> str:
    """Draws the loss curves of a finished run into its folder; returns a line to print.

    `records` are the lines of metrics.jsonl.
    """

    def draw():
        return losses(
            {f"{result.name}: {result.parameters:,} parameters": records},
            result.baseline,
            unit_of_loss(result.validation),
        )

    folder = epath.Path(result.folder)
    return f"loss curve: {save(draw, folder / 'figures' / 'loss.png', folder)}"


def losses(
    runs: Mapping[str, Sequence[dict]], baseline: float | None = None, unit: str = ""
) -> Any:
    """Training and validation loss against step, of one run or several.

    `baseline` is a loss in nats a token, drawn as a horizontal line. `unit` is that of the loss,
    such as "nats a token" or "an image".
    """
    unit = "nats a token" if baseline is not None else unit
    axes = _axes(xlabel="step", ylabel=f"loss ({unit})" if unit else "loss")
    # the legend gets its labels explicitly: matplotlib leaves out a label that begins with _
    alone = len(runs) == 1
    legend = []
    for color, (name, records) in zip(_colors(len(runs)), runs.items(), strict=True):
        train = points(records, "loss")
        validation = points(records, "validation_loss")
        if train:
            steps, values = zip(*train, strict=True)
            (line,) = axes.plot(
                steps, values, marker(values), color=color, alpha=0.5, linewidth=0.8, markersize=4
            )
            if alone:
                legend.append((line, "training, each logged step"))
            (line,) = axes.plot(steps, smooth(values), color=color, linewidth=1.6)
            legend.append((line, "training, smoothed" if alone else name))
            draw_lost(axes, steps, values, color)
        if validation:
            steps, values = zip(*validation, strict=True)
            point_color = COLORS[1] if alone else color
            (line,) = axes.plot(steps, values, "o-", color=point_color, markersize=4, linewidth=1.2)
            draw_lost(axes, steps, values, point_color)
            if alone or not train:
                legend.append((line, "validation" if alone else name))
            place = dict(textcoords="offset points", xytext=(-4, 8), ha="right", color=point_color)
            axes.annotate(f"{values[-1]:.3f}", validation[-1], **place)
    if baseline is not None:
        line = axes.axhline(baseline, color="#888888", linestyle=":", linewidth=1)
        legend.append((line, f"unigram entropy {baseline:.3f}"))
    axes.set_title(
        plain("\n".join(runs)) if alone else "training (lines) and validation (points)", fontsize=10
    )
    axes.legend([line for line, _ in legend], [plain(label) for _, label in legend], frameon=False)
    return axes.figure


def marker(values: Sequence[float]) -> str:
    """The style of a curve: a line, with points if the line alone would omit a value.

    A line omits a value that has no finite neighbour.
    """
    finite = np.isfinite(values)
    previous, following = np.roll(finite, 1), np.roll(finite, -1)
    previous[:1] = False
    following[-1:] = False
    return "o-" if (finite & ~previous & ~following).any() else "-"


def smooth(values: Sequence[float]) -> np.ndarray:
    """The mean of the finite values around each value, a twentieth of all values to each side.

    The window is centred, so the curve does not lag. The first values have smaller windows, so the
    curve begins where the values do; the last ones have fewer values behind them.
    """
    numbers = np.asarray(values, np.float64)
    finite = np.isfinite(values)
    reach = len(numbers) // 20
    n = len(numbers)
    places = np.arange(n)
    reaches = np.minimum(places, reach)
    first, last = places - reaches, np.minimum(places + reaches + 1, n)
    base = numbers[finite].mean() if finite.any() else 0.0  # sums of differences lose fewer digits
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, numbers - base, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    with np.errstate(invalid="ignore", over="ignore"):
        means = base + (sums[last] - sums[first]) / (counts[last] - counts[first])
    return np.where(finite, means, np.nan)


def draw_lost(axes: Any, steps: Sequence[int], values: Sequence[float], color: Any) -> None:
    """Draws a cross at the upper edge for each value that is not finite.

    A gap in the line alone is easily missed.
    """
    lost = [step for step, value in zip(steps, values, strict=True) if not np.isfinite(value)]
    if lost:
        place = dict(transform=axes.get_xaxis_transform(), color=color, markersize=4)
        axes.plot(lost, [0.97] * len(lost), "x", **place)


def points(records: Sequence[dict], name: str) -> list[tuple[int, float]]:
    """(step, number) of each record that has this name.

    JSON has no NaN and no infinity; the record holds null instead, which is NaN here.
    """
    numbers = [(record["step"], record[name]) for record in records if name in record]
    numbers = [(step, float("nan") if number is None else number) for step, number in numbers]
    return [(step, number) for step, number in numbers if isinstance(number, int | float)]


def attention(
    weights: np.ndarray,
    tokens: Sequence[str],
    sources: Sequence[str] | None = None,
    first_layer: int = 0,
) -> Any:
    """Attention maps `[L, N, T, S]`: a row of panels for each layer, a column for each head.

    The axes show the tokens if there are at most 40.
    """
    from matplotlib.figure import Figure

    L, N, T, S = weights.shape
    size = float(np.clip(0.09 * max(T, S), 1.5, 5))
    figure = Figure(figsize=(0.5 + size * N, 0.6 + size * L), layout="constrained")
    for (layer, head), axes in np.ndenumerate(figure.subplots(L, N, squeeze=False)):
        axes.imshow(weights[layer, head], vmin=0, vmax=1, cmap="magma", aspect="auto")
        axes.set_title(f"layer {first_layer + layer}, head {head}", fontsize=8)
        words = {
            "x": (sources or tokens) if layer == L - 1 else (),
            "y": tokens if head == 0 else (),
        }
        for axis, names in words.items():
            names = [plain(repr(name)[1:-1][:8]) for name in names] if len(names) <= 40 else []
            axes.set(**{f"{axis}ticks": range(len(names)), f"{axis}ticklabels": names})
        axes.tick_params(labelsize=6, length=0)
        axes.tick_params(axis="x", rotation=90)
    figure.supxlabel("key", fontsize=8)
    figure.supylabel("query", fontsize=8)
    return figure


def curves(runs: Mapping[str, Sequence[dict]]) -> Any:
    """All numbers of the records but the loss, against step.

    Validation is drawn with points. A name rms/... has a line for each layer.
    """
    from matplotlib import colormaps

    by_title: dict[str, list[_Curve]] = {}
    for color, records in zip(_colors(len(runs)), runs.values(), strict=True):
        for title, curve in _curves(records, color):
            by_title.setdefault(title, []).append(curve)
    all_axes = panels(len(by_title), 3, 2.2, 2.1)
    for axes, (title, same_title) in zip(all_axes, by_title.items(), strict=True):
        deepest = max(_layer(curve.part) for curve in same_title)
        for curve in same_title:
            color = curve.color
            if curve.part:
                layer = _layer(curve.part)
                depth = 0.9 * layer / max(deepest, 1)
                color = "#8a949e" if layer < 0 else colormaps["viridis"](depth)
            style = "o-" if curve.is_validation else marker(curve.values)
            axes.plot(curve.steps, curve.values, style, color=color, markersize=3, linewidth=1.2)
            draw_lost(axes, curve.steps, curve.values, color)
        axes.set_title(plain(title.replace("_", " ")), fontsize=8)
        axes.set_yscale("log" if "rms/" in title else "linear")
        axes.grid(alpha=0.25)
    axes.figure.supxlabel("step", fontsize=8)
    return axes.figure


class _Curve(NamedTuple):
    """One line of `curves`."""

    part: str  # of a name rms/...: the layer or another part; "" for other names
    color: str
    is_validation: bool
    steps: tuple[int, ...]
    values: tuple[float, ...]


def _curves(records: Sequence[dict], color: str) -> Iterator[tuple[str, _Curve]]:
    """(title of the panel, curve) for each number of the records of a run."""
    for name in dict.fromkeys(name for record in records for name in record):
        words = re.sub(r"(rms/\w+)/", r"\1 ", name.removeprefix("validation_"))
        title, _, part = words.partition(" ")
        if title in NOT_CURVES:
            continue
        if numbers := points(records, name):
            steps, values = zip(*numbers, strict=True)
            yield title, _Curve(part, color, name.startswith("validation_"), steps, values)


def _layer(part: str) -> int:
    """The number of the layer in a name such as layers/3; -1 for other names."""
    return int(part.rpartition("/")[2]) if part.startswith("layers") else -1


def masks(patterns: Mapping[str, Mask], length: int) -> Any:
    """The keys that each query sees under each mask, at one length.

    A cell is a block of pairs; its colour says whether none, some or all of them are visible.
    """
    check_whole("masks: length", length)
    from matplotlib.colors import ListedColormap
    from matplotlib.ticker import MaxNLocator

    style = dict(vmin=0, vmax=2, extent=(0, length, length, 0), interpolation="none")
    for axes, (name, mask) in zip(
        panels(len(patterns), 3, 3.0, 3.4), patterns.items(), strict=True
    ):
        colors = ListedColormap(["#8a949e22", "#7fb2d8", "#1f5d8c"])
        axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True, min_n_ticks=1))
        axes.imshow(mask.blocks(length, length, -(-length // 64)), cmap=colors, **style)
        title = f"{name}: {mask}, {mask.density(length, length):.1%} visible"
        axes.set_title(plain("\n".join(textwrap.wrap(title, 40))), fontsize=8)
        axes.set(xlabel="key", ylabel="query")
    return axes.figure


def costs(parts: Mapping[int, Sequence[Part]]) -> Any:
    """The share of each part in the FLOPs and in the moved bytes of a forward pass, by length.

    The totals stand above the bars.
    """
    both = panels(2, 2, 3.2, 3.4)
    of_one_length = next(iter(parts.values()))
    drawn = [(i, part.name) for i, part in enumerate(of_one_length) if part.numbers]
    sizes = {"FLOPs": lambda part: part.flops, "bytes moved": lambda part: 2 * part.numbers}
    for axes, (title, size) in zip(both, sizes.items(), strict=True):
        numbers = np.array([[size(part) for part in at_length] for at_length in parts.values()])
        total = numbers.sum(axis=1)
        below = np.zeros(len(parts))
        for color, (i, name) in zip(_colors(len(drawn)), drawn, strict=True):
            share = numbers[:, i] / total
            style = dict(color=color, width=0.7, label=name.replace("_", " "))
            axes.bar(range(len(total)), share, bottom=below, **style)
            below = below + share
        for x, number in enumerate(total):
            axes.text(x, 1.01, short(number), ha="center", fontsize=7)
        axes.set_xticks(range(len(total)), [f"{length:,}" for length in parts])
        axes.set_title(title, fontsize=8)
        axes.set(xlabel="length (tokens)", yticks=[], ylim=(0, 1.08))
    handles, labels = both[0].get_legend_handles_labels()
    both[0].figure.legend(
        handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=7
    )
    return both[0].figure


def heat(values: np.ndarray, xlabel: str, ylabel: str, title: str = "") -> Any:
    """A matrix as colours with a colour bar, such as the scores of heads `[L, N]`."""
    from matplotlib.ticker import MaxNLocator

    axes = _axes(grid=False, xlabel=xlabel, ylabel=ylabel, title=plain(title))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    finite = values[np.isfinite(values)]
    signed = bool((finite < 0).any())
    largest = float(np.abs(finite).max(initial=0)) or 1.0
    image = axes.imshow(
        values,
        aspect="auto",
        cmap="RdBu_r" if signed else "magma",
        vmin=-largest if signed else 0,
        vmax=largest,
    )
    axes.figure.colorbar(image)
    return axes.figure


def lines(series: Mapping[str, tuple[Any, Any]], **labels: Any) -> Any:
    """Each (x, y) as a line, such as learning rates against step."""
    from matplotlib.ticker import MaxNLocator

    axes = _axes(**labels)
    for color, (x, y) in zip(_colors(len(series)), series.values(), strict=True):
        axes.plot(x, y, "o-" if len(x) < 40 else "-", color=color, markersize=4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    # explicit labels: matplotlib leaves out a label that begins with _
    axes.legend(axes.get_lines(), list(map(plain, series)), frameon=False, fontsize=8)
    return axes.figure


def scaling_law(law: Law, losses: Numbers, parameters: Numbers, tokens: Numbers) -> Any:
    """Runs and the fitted law: loss against compute 6 N D, with a line for each size.

    The title compares the growth of the best size with that of Hoffmann et al. 2022.
    """
    axes = _axes(
        xlabel="compute 6 N D (FLOPs)", ylabel="loss (nats a token)", xscale="log", yscale="log"
    )
    N, D, L = map(np.asarray, (parameters, tokens, losses))
    sizes = np.unique(N)
    for color, size in zip(_colors(len(sizes)), sizes, strict=True):
        axes.plot(6 * size * D[size == N], L[size == N], "o", color=color, label=f"N = {size:,.0f}")
        line = np.geomspace(D.min() / 1.5, D.max() * 1.5, 50)
        axes.plot(6 * size * line, law.loss(size, line), color=color, linewidth=1)
    budgets = np.geomspace(6 * (N * D).min(), 6 * (N * D).max(), 50)
    axes.plot(
        budgets, law.loss(*law.optimum(budgets)), "k--", linewidth=1.2, label="best of its budget"
    )
    ours = law.beta / (law.alpha + law.beta)
    theirs = HOFFMANN.beta / (HOFFMANN.alpha + HOFFMANN.beta)
    axes.set_title(f"best N grows as C^{ours:.2f} (Hoffmann et al.: {theirs:.2f})", fontsize=10)
    axes.legend(frameon=False, fontsize=7)
    return axes.figure


def images(
    pictures: np.ndarray, titles: Sequence[str] = (), columns: int = 8, size: float = 1.1
) -> Any:
    """Images [n, height, width, 1 or 3] from 0 to 1 in a grid, each below its title.

    A column is `size` inches wide.
    """
    pictures = np.clip(np.asarray(pictures, np.float32), 0, 1)
    ratio = pictures.shape[1] / pictures.shape[2]
    all_axes = panels(len(pictures), columns, size, size * ratio + (0.15 if titles else 0.05))
    for axes, picture, title in zip(
        all_axes, pictures, titles or [""] * len(pictures), strict=True
    ):
        axes.imshow(
            picture if picture.shape[-1] == 3 else picture[..., 0], cmap="gray", vmin=0, vmax=1
        )
        axes.set_title(title, fontsize=7)
        axes.set_axis_off()
    return all_axes[0].figure


def outline(axes: Any, box: Any, size: tuple[int, int], label: str = "", **style: Any) -> None:
    """Draws a box (x, y, width, height around its centre, fractions) on an image of this size.

    `size` is (height, width) in pixels. The label stands on the upper left corner.
    """
    height, width = size
    x, y, w, h = np.asarray(box, float) * (width, height, width, height)
    left, right, top, bottom = x - w / 2 - 0.5, x + w / 2 - 0.5, y - h / 2 - 0.5, y + h / 2 - 0.5
    axes.plot([left, right, right, left, left], [top, top, bottom, bottom, top], **style)
    axes.text(left, top, label, color=style.get("color"), fontsize=9, va="bottom")


def _axes(grid: bool = True, **labels: Any) -> Any:
    from matplotlib.figure import Figure

    axes = Figure(figsize=(5.8, 3.6), layout="constrained").add_subplot()
    axes.locator_params(nbins=MOST_TICKS - 1)
    axes.set(**labels)
    if grid:
        axes.grid(alpha=0.25)
    return axes


def panels(count: int, columns: int, width: float, height: float) -> list[Any]:
    """The axes of a new figure, row by row."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    columns = min(count, columns)
    size = 0.6 + width * columns, height * -(-count // columns)
    figure = Figure(figsize=size, layout="constrained")
    all_axes = [figure.add_subplot(-(-count // columns), columns, i + 1) for i in range(count)]
    for axes in all_axes:
        axes.tick_params(labelsize=7)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True, min_n_ticks=1))
        axes.xaxis.label.set_fontsize(8)
        axes.yaxis.label.set_fontsize(8)
    return all_axes


def _colors(count: int) -> list[str]:
    """Distinct colours: COLORS, or those of a spectrum if there are more curves."""
    from matplotlib import colormaps, colors

    if count <= len(COLORS):
        return COLORS[:count]
    return [colors.to_hex(color) for color in colormaps["turbo"](np.linspace(0.05, 0.95, count))]
