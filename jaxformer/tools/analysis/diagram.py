"""The architecture of any config as a block diagram, to be read from bottom to top.

`diagram` draws what `diagram_rows.rows` lists. Lines beside the boxes are the residual stream;
numbers beside the boxes count parameters.
"""

import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxformer import models, params
from jaxformer.models import EncoderDecoder, ModelConfig
from jaxformer.tools.analysis.diagram_rows import Box, Mark, Row, rows
from jaxformer.tools.analysis.labels import plain, short

FILLS = dict(
    embedding="#e08e0b",
    attention="#1f77b4",
    cross_attention="#2a9d5c",
    feedforward="#d1495b",
    norm="#8a949e",
    head="#7b5ea7",
)
# in inches
WIDTH = 3.2  # of a box
GAP = 0.17  # between two boxes
LINE = 0.145  # height of a line of text
BETWEEN = 0.12  # between boxes side by side


def diagram(config: ModelConfig | EncoderDecoder, title: str = "") -> Any:
    """The architecture as a matplotlib figure: one stack, or an encoder left of its decoder."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    if isinstance(config, EncoderDecoder):
        shared = ", in the table of the target" * config.share_embeddings
        stacks = [
            list(rows(config.encoder, None, f"source{shared}")),
            list(rows(config.decoder, config.encoder, "target")),
        ]
        margin = 1.2
    else:
        stacks = [list(rows(config))]
        margin = 0.9
    distance = WIDTH + 2.4  # between the middles of two stacks
    figure = Figure()
    axes = figure.add_axes((0, 0, 1, 1))
    pens = [Pen(axes, rcParams["text.color"], i * distance, 2 * i - 1) for i in range(len(stacks))]
    columns = [Column(pen, stack) for pen, stack in zip(pens, stacks, strict=True)]
    for column, stack in zip(columns, stacks, strict=True):
        for row in stack:
            column.draw(row)
    # lines from the top of the encoder to the boxes that read it
    encoder_top = columns[0].y
    above = encoder_top + GAP
    for y in columns[-1].reads:
        points = (
            (pens[0].x, encoder_top),
            (pens[0].x, above),
            (distance / 2, above),
            (distance / 2, y),
            (distance - WIDTH / 2, y),
        )
        pens[-1].line(*points, color=FILLS["cross_attention"])

    nested = 0.6 * any(column.has_nested_frames for column in columns)
    left = pens[0].beside(-1, 1.2 + nested)
    right = pens[-1].beside(1, margin + nested)
    top = max(*(column.y for column in columns), above)
    last = models.last_stack(config)
    count = params.count(models.spec(config))
    pens[0].text((left + right) / 2, top + 0.6, title, 12, weight="bold")
    facts = f"{count:,} parameters · width {last.d_model:,} · {last.context_length:,} positions"
    pens[0].text((left + right) / 2, top + 0.35, facts, 8.5)
    axes.set(xlim=(left, right), ylim=(-0.3, top + 0.85))
    axes.set_axis_off()
    figure.set_size_inches(right - left, top + 1.15)
    return figure


class Pen(NamedTuple):
    """Draws one stack around `x`. Its residual lines run at `side`: -1 left, 1 right."""

    axes: Any
    ink: str
    x: float
    side: int

    def line(self, *points: tuple[float, float], color: str = "") -> None:
        """A line through the points, with an arrow at its end."""
        self.axes.plot(*zip(*points[:-1], strict=True), color=color or self.ink, linewidth=1)
        style = dict(
            arrowstyle="-|>,head_width=0.12,head_length=0.25",
            color=color or self.ink,
            shrinkA=0,
            shrinkB=0,
        )
        self.axes.annotate("", points[-1], points[-2], arrowprops=style)

    def box(self, left: float, bottom: float, width: float, height: float, **style: Any) -> None:
        from matplotlib.patches import FancyBboxPatch

        place = (left + 0.05, bottom + 0.05), width - 0.1, height - 0.1
        self.axes.add_patch(FancyBboxPatch(*place, boxstyle="round,pad=0.05", zorder=2, **style))

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: int | float = 7,
        ha: str = "center",
        **style: Any,
    ) -> None:
        self.axes.text(x, y, plain(words), fontsize=size, ha=ha, va="center", zorder=3, **style)

    def beside(self, side: int, distance: float) -> float:
        """The x at a distance from the boxes."""
        return self.x + side * (WIDTH / 2 + distance)


class Frame(NamedTuple):
    """An open frame around layers that repeat."""

    bottom: float
    times: str  # the text that says how often they repeat
    outer: bool  # whether it holds other frames


class Column:
    """One stack, drawn row by row from the bottom upwards."""

    def __init__(self, pen: Pen, stack: Sequence[Row]) -> None:
        opened = [row for row in stack if isinstance(row, Mark) and row.kind == "open"]
        self.has_nested_frames = len(opened) > 1
        self.pen = pen
        self.y = 0.0  # the top of what is drawn
        self.centers = [pen.x]  # the middle of each box of the last row
        self.branches: list[float] = []  # y at which each open residual line begins
        self.frames: list[Frame] = []  # open frames
        self.reads: list[float] = []  # each y at which the stack reads an encoder

    def draw(self, row: Row) -> None:
        """Draws one row on top of the others."""
        match row:
            case Mark("label", words):
                self.pen.text(self.pen.x, self.y - 0.13, words, 8.5)
            case Mark("sum"):
                self.plus()
            case Mark("add"):
                self.plus(ends_branch=True)
            case Mark("branch"):
                self.branches.append(self.y + GAP / 2)
                self.rise()
            case Mark("open", words):
                outer = self.has_nested_frames and not self.frames
                self.frames.append(Frame(self.y + GAP / 2, words, outer))
                self.rise()
            case Mark("close", words):
                _frame(self.pen, self.y + GAP / 2, words, self.frames.pop())
                self.rise()
            case list():
                self.boxes(row)

    def rise(self) -> None:
        """Draws a piece of the vertical line."""
        x = self.pen.x
        self.pen.axes.plot([x, x], [self.y, self.y + GAP], color=self.pen.ink, linewidth=1)
        self.y += GAP

    def plus(self, ends_branch: bool = False) -> None:
        """Draws a sum of the last boxes, and of the last residual line if it ends here."""
        pen = self.pen
        for center in self.centers:
            pen.line((center, self.y), (pen.x, self.y + GAP))
        self.y += GAP + 0.09
        circle = dict(boxstyle="circle,pad=0.1", fill=False, edgecolor=pen.ink)
        pen.text(pen.x, self.y, "+", 8, bbox=circle)
        if ends_branch:
            start = self.branches.pop()
            bend = pen.beside(pen.side, 0.2)
            end = pen.x + pen.side * 0.11
            pen.line((pen.x, start), (bend, start), (bend, self.y), (end, self.y))
        self.y += 0.09
        self.centers = [pen.x]

    def boxes(self, boxes: list[Box]) -> None:
        """Draws boxes side by side, with lines to them unless they are the first row."""
        bottom = self.y + GAP if self.y else self.y
        height, middles = _boxes(self.pen, bottom, boxes)
        if self.y:
            for middle in middles:
                self.pen.line((self.pen.x, self.y), (middle, bottom))
        if boxes[0].fill == "cross_attention":
            self.reads.append(bottom + height / 4)
        self.y = bottom + height
        self.centers = middles


def _frame(pen: Pen, top: float, words: str, frame: Frame) -> None:
    """Draws a frame around repeated layers, with their number and the name of the stack."""
    near = pen.beside(pen.side, 0.45 + 0.55 * frame.outer)
    far = pen.beside(-pen.side, 0.7 + 0.1 * frame.outer)
    style = dict(fill=False, edgecolor=pen.ink, alpha=0.5, linestyle="--")
    pen.box(min(near, far), frame.bottom, abs(far - near), top - frame.bottom, **style)
    ends = ("right", "left")[:: -pen.side]
    middle = (frame.bottom + top) / 2
    pen.text(near + 0.08 * pen.side, middle, frame.times, 12, ends[0], weight="bold")
    pen.text(far + 0.06 * pen.side, top - 0.1, words, 7, ends[0])


def _boxes(pen: Pen, bottom: float, boxes: Sequence[Box]) -> tuple[float, list[float]]:
    """Draws boxes side by side with their parameter counts; returns their height and middles."""
    width = (WIDTH - BETWEEN * (len(boxes) - 1)) / len(boxes)
    middles = []
    details = [
        textwrap.wrap(box.detail.replace(" × ", "\u00a0×\u00a0"), int(16 * width)) for box in boxes
    ]
    height = 0.2 + LINE * (1 + max(map(len, details)))
    for i, (box, lines) in enumerate(zip(boxes, details, strict=True)):
        left = pen.beside(-1, 0.0) + i * (width + BETWEEN)
        for shift in range(min(box.copies, 3) - 1, -1, -1):
            place = left + 0.05 * shift, bottom + 0.05 * shift, width, height
            pen.box(*place, facecolor=pen.axes.figure.get_facecolor(), edgecolor=FILLS[box.fill])
            pen.box(*place, facecolor=FILLS[box.fill], alpha=0.22, edgecolor="none")
        middles.append(left + width / 2)
        first = bottom + height / 2 + LINE * len(lines) / 2
        pen.text(middles[-1], first, box.title, 8.5, weight="bold")
        for n, line in enumerate(lines, 1):
            pen.text(middles[-1], first - LINE * n, line)
    if count := sum(box.parameters for box in boxes):
        place = pen.beside(-pen.side, 0.16), bottom + height / 2
        pen.text(*place, short(count), 7, "left" if pen.side < 0 else "right", alpha=0.8)
    return height, middles
