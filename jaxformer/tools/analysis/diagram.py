"""The architecture of any config as a block diagram, to be read from bottom to top. Layers that repeat are drawn once.

`rows` says what is drawn, `diagram` draws it. Lines beside the boxes are the residual stream; numbers beside them count
parameters.
"""

import textwrap
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from itertools import groupby
from typing import Any, NamedTuple

from jaxformer import masks, models, params
from jaxformer.models import EncoderDecoder, ModelConfig, blocks, heads, transformer
from jaxformer.models.config import (
    Alibi,
    AttentionPositions,
    Axial,
    Classification,
    Embedding,
    LanguageModel,
    Learned,
    Patches,
    Relative,
    Sinusoidal,
)
from jaxformer.models.mixture import Mixture
from jaxformer.models.stacks import layout
from jaxformer.ops.positions import Rope

FILLS = dict(
    embedding="#e08e0b", attention="#1f77b4", cross_attention="#2a9d5c", feedforward="#d1495b", norm="#8a949e", head="#7b5ea7"
)  # fmt: skip
ADDED: dict[type, str] = {Learned: "learned", Sinusoidal: "sinusoidal", Axial: "axial"}  # to the embedding
SCORED = {  # in attention
    Rope: "rotary positions",
    Alibi: "ALiBi",
    Relative: "relative positions",
    AttentionPositions: "positions at queries and keys",
}
NORMS = {"layer_norm": "Layer norm", "rms_norm": "RMS norm"}
WIDTH, GAP, LINE = 3.2, 0.17, 0.145  # inches: width of a box, room between two, height of a line of text


class Box(NamedTuple):
    """A box: what it is, and its widths."""

    fill: str  # a name of FILLS
    title: str
    detail: str = ""
    parameters: int = 0
    copies: int = 1  # experts, drawn as a pile


class Mark(NamedTuple):
    """Not a box. branch, add: of a residual line; sum: of boxes side by side; open, close: of a frame; label: a text."""

    kind: str
    text: str = ""


Row = list[Box] | Mark  # boxes side by side


def rows(config: ModelConfig, source: ModelConfig | None = None, label: str = "tokens") -> Iterator[Row]:
    """One stack from bottom to top. A `source` is the encoder that it reads, a `label` the name of its inputs."""
    width = None if source is None else source.d_model
    spec, L = transformer.spec(config, width), config.num_layers
    layers = layout.kinds(config, width)
    yield from _inputs(config, spec["embedding"], label)
    turns = [layout.as_pattern(each) for each in (config.mixer, config.masks, config.positions, config.feedforward)]
    kinds: list[Any] = [tuple(each[i % len(each)] for each in turns) for i in range(L)]
    period = next(p for p in range(1, L + 1) if all(kinds[i] == kinds[i % p] for i in range(L)))
    groups = [list(same) for _, same in groupby(range(period), kinds.__getitem__)]
    if len(groups) > 1:
        yield Mark("open", f"in turn:\n{L} layers" if L % period else f"× {L // period}")
    for group in groups:
        times = L if len(groups) == 1 else len(group)
        yield Mark("open", f"× {times}" if times > 1 else "")
        layer = layers[group[0] % len(layers)].spec
        *seen, fed = kinds[group[0]]
        parts = {"attention": _attention(config, *seen), "cross_attention": ("Attention to the encoder", _heads(config))}
        if source is None:
            del parts["cross_attention"]
        parts["feedforward"] = _feedforward(config, fed)
        yield from _layer(config, layer, parts)
        yield Mark("close", "" if config.stack is None else _name(config.stack))
    if len(groups) > 1:
        yield Mark("close")
    for name, tree in (layers[0].block.stack_spec or {}).items():
        yield [_norm(config, tree) if name == "final_norm" else Box("norm", _name(name), "", params.count(tree))]
    if config.heads:
        yield [_head(config, *each, spec.get("heads", {})) for each in zip(heads.heads(config), config.heads, strict=True)]


def _inputs(config: ModelConfig, tree: dict, label: str) -> Iterator[Row]:
    how, D = config.embedding, config.d_model

    def box(title, detail, *names):
        return Box("embedding", title, detail, sum(params.count(tree.get(name, {})) for name in names))

    if isinstance(how, Patches):
        label, shape = f"images of {how.image[0]} × {how.image[1]}", f"{how.channels} × {how.patch[0]} × {how.patch[1]} → {D:,}"
        boxes = [box("Patches", shape + ", class token" * how.class_token, "patches", "class_token", "mask_token")]
    elif not isinstance(how, Embedding):
        label, boxes = "inputs", [box(_name(how).capitalize(), f"→ {D:,}", *(name for name in tree if name != "positions"))]
    else:
        boxes = [box("Tokens", f"{config.vocab_size:,} × {D:,}", "tokens")]
        if how.token_types:
            boxes.append(box("Token types", f"{how.token_types} × {D:,}", "token_types"))
    if type(config.positions) in ADDED:
        boxes.append(box("Positions", f"{ADDED[type(config.positions)]}, {config.context_length:,} × {D:,}", "positions"))
    yield from (Mark("label", label), boxes)
    if len(boxes) > 1:
        yield Mark("sum")
    if "norm" in tree:
        yield [_norm(config, tree["norm"])]


def _layer(config: ModelConfig, layer: dict, parts: dict[str, tuple]) -> Iterator[Row]:
    """The sub-layers of one layer, with norms and sums in the order of its block."""
    boxes = {}
    for name, (title, detail, *copies) in parts.items():
        boxes[name] = Box(name, title, detail, params.count(layer[name]), *copies)
    if config.block is blocks.parallel:
        yield from (Mark("branch"), [_norm(config, layer["norm"])], list(boxes.values()), Mark("add"))
        return
    drawn = set(parts)
    for name, box in boxes.items():
        norms = {key: [_norm(config, layer[key])] for key in (f"{name}_norm", f"{name}_out_norm") if key in layer}
        drawn |= norms.keys()
        if config.block is blocks.post_norm:
            yield from (Mark("branch"), [box], Mark("add"), *norms.values())
        else:
            before = [row for key, row in norms.items() if not key.endswith("_out_norm")]
            behind = [row for key, row in norms.items() if key.endswith("_out_norm")]
            yield from (Mark("branch"), *before, [box], *behind, Mark("add"))
    if others := [params.count(tree) for name, tree in layer.items() if name not in drawn]:
        yield [Box("norm", _name(config.block), "parameters of the block", sum(others))]


def _attention(config: ModelConfig, mixer: Any, mask: masks.Mask, positions: Any) -> tuple[str, str]:
    words = {masks.full(): "" if mixer else "all tokens see each other", masks.causal(): "causal"}
    numbers = [(field.name, getattr(mixer, field.name)) for field in fields(mixer)] if is_dataclass(mixer) else []
    facts = [f"{name.replace('_', ' ')} {value}" for name, value in numbers if type(value) is int and value]
    facts += [words.get(mask, f"sees {mask}"), _heads(config)]
    if type(positions) not in ADDED:
        facts.append("no positions" if positions is None else SCORED.get(type(positions), _name(positions)))
    return f"{_name(mixer)} self-attention" if mixer else "Self-attention", ", ".join(filter(None, facts))


def _heads(config: ModelConfig) -> str:
    shared = f", {config.kv_heads} for keys and values" if config.kv_heads != config.num_heads else ""
    return f"{config.num_heads} heads of {config.head_size}{shared}"


def _feedforward(config: ModelConfig, how: Any) -> tuple:
    def widths(F):
        return f"{config.d_model:,} → {F:,} → {config.d_model:,}"

    if isinstance(how, Mixture):
        shared = ", one for all" if how.shared else ""
        detail = f"{how.experts}, {how.top_k} for each token{shared}: {widths(how.d_ff or config.ff_width)}, {how.activation}"
        return "Experts", detail, how.experts
    return "Feed-forward", f"{widths(config.ff_width)}, {how}" if isinstance(how, str) else _name(how)


def _norm(config: ModelConfig, spec: dict) -> Box:
    title = NORMS[config.norm] if isinstance(config.norm, str) else _name(config.norm)
    return Box("norm", title, parameters=params.count(spec))


def _head(config: ModelConfig, name: str, head: Any, spec: dict) -> Box:
    steps = []
    match head:
        case LanguageModel():
            tied = ", the matrix of the tokens" * config.tie_embeddings
            steps = [f"{head.transform} and a norm" if head.transform else "", f"{config.vocab_size:,}{tied}"]
        case Classification():
            classes = f"{head.classes:,} classes" if head.classes else ""
            steps = [f"{head.pool.replace('position_0', 'first')} position", head.pooler or "", classes]
    detail = " → ".join([f"{config.hidden_width:,}", *filter(None, steps)])
    return Box("head", name.replace("_", " ").capitalize(), detail, params.count(spec.get(name, {})))


def _name(function: Any) -> str:
    name = function if isinstance(function, str) else getattr(function, "__name__", type(function).__name__)
    return name.replace("_", " ")


class Pen(NamedTuple):
    """Draws one stack around `x`; its residual lines run at `side`, -1: the left."""

    axes: Any
    ink: str
    x: float
    side: int

    def line(self, *points: tuple[float, float], color: str = "") -> None:
        """Through the points, with an arrow at the end."""
        self.axes.plot(*zip(*points[:-1], strict=True), color=color or self.ink, linewidth=1)
        style = dict(arrowstyle="-|>,head_width=0.12,head_length=0.25", color=color or self.ink, shrinkA=0, shrinkB=0)
        self.axes.annotate("", points[-1], points[-2], arrowprops=style)

    def box(self, left: float, bottom: float, width: float, height: float, **style: Any) -> None:
        from matplotlib.patches import FancyBboxPatch

        place = (left + 0.05, bottom + 0.05), width - 0.1, height - 0.1
        self.axes.add_patch(FancyBboxPatch(*place, boxstyle="round,pad=0.05", zorder=2, **style))

    def text(self, x: float, y: float, words: str, size: int | float = 7, ha: str = "center", **style: Any) -> None:
        self.axes.text(x, y, plain(words), fontsize=size, ha=ha, va="center", zorder=3, **style)

    def beside(self, side: int, distance: float) -> float:
        """x at a distance from the boxes."""
        return self.x + side * (WIDTH / 2 + distance)


def diagram(config: ModelConfig | EncoderDecoder, title: str = "") -> Any:
    """The whole architecture as a matplotlib figure: one stack, or an encoder at the left of its decoder."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    stacks, apart, end = [list(rows(config))] if isinstance(config, ModelConfig) else [], WIDTH + 2.4, 0.9
    if isinstance(config, EncoderDecoder):
        shared, end = ", in the table of the target" * config.share_embeddings, 1.2
        stacks = [list(rows(config.encoder, None, f"source{shared}")), list(rows(config.decoder, config.encoder, "target"))]
    figure = Figure()
    axes = figure.add_axes((0, 0, 1, 1))
    pens = [Pen(axes, rcParams["text.color"], i * apart, 2 * i - 1) for i in range(len(stacks))]
    tops, reads = zip(*(_draw(pen, stack) for pen, stack in zip(pens, stacks, strict=True)), strict=True)
    over, nested = tops[0] + GAP, 0.6 * any(sum(row[0] == "close" for row in stack) > 1 for stack in stacks)
    for y in reads[-1]:  # where the decoder reads the encoder
        points = (pens[0].x, tops[0]), (pens[0].x, over), (apart / 2, over), (apart / 2, y), (apart - WIDTH / 2, y)
        pens[-1].line(*points, color=FILLS["cross_attention"])
    left, right, top = pens[0].beside(-1, 1.2 + nested), pens[-1].beside(1, end + nested), max(*tops, over)
    last, count = models.last_stack(config), params.count(models.spec(config))
    pens[0].text((left + right) / 2, top + 0.6, title, 12, weight="bold")
    facts = f"{count:,} parameters · width {last.d_model:,} · {last.context_length:,} positions"
    pens[0].text((left + right) / 2, top + 0.35, facts, 8.5)
    axes.set(xlim=(left, right), ylim=(-0.3, top + 0.85))
    axes.set_axis_off()
    figure.set_size_inches(right - left, top + 1.15)
    return figure


def _draw(pen: Pen, stack: Sequence[Row]) -> tuple[float, list[float]]:
    """Draws a stack upwards; returns its top, and where it reads an encoder."""
    x, y, centers = pen.x, 0.0, [pen.x]
    branches, frames, reads = [], [], []  # frames: (bottom, how often, whether it holds others)
    for row in stack:
        match row:
            case Mark("label", words):
                pen.text(x, y - 0.13, words, 8.5)
            case Mark("add" | "sum"):
                for center in centers:
                    pen.line((center, y), (x, y + GAP))
                y += GAP + 0.09
                pen.text(x, y, "+", 8, bbox=dict(boxstyle="circle,pad=0.1", fill=False, edgecolor=pen.ink))
                if row.kind == "add":
                    start, bend = branches.pop(), pen.beside(pen.side, 0.2)
                    pen.line((x, start), (bend, start), (bend, y), (x + pen.side * 0.11, y))
                y, centers = y + 0.09, [x]
            case Mark(kind, words):
                if kind == "branch":
                    branches.append(y + GAP / 2)
                elif kind == "open":
                    frames.append((y + GAP / 2, words, sum(row[0] == "open" for row in stack) > 1 and not frames))
                else:
                    _frame(pen, y + GAP / 2, words, *frames.pop())
                pen.axes.plot([x, x], [y, y + GAP], color=pen.ink, linewidth=1)
                y += GAP
            case _:
                bottom = y + GAP if y else y
                height, middles = _boxes(pen, bottom, row)
                for middle in middles if y else ():
                    pen.line((x, y), (middle, bottom))
                reads += [bottom + height / 4] * (row[0].fill == "cross_attention")
                y, centers = bottom + height, middles
    return y, reads


def _frame(pen: Pen, top: float, words: str, bottom: float, times: str, outer: bool) -> None:
    """Around what repeats: how often, and the name of the stack."""
    near, far = pen.beside(pen.side, 0.45 + 0.55 * outer), pen.beside(-pen.side, 0.7 + 0.1 * outer)
    pen.box(min(near, far), bottom, abs(far - near), top - bottom, fill=False, edgecolor=pen.ink, alpha=0.5, linestyle="--")
    ends = ("right", "left")[:: -pen.side]
    pen.text(near + 0.08 * pen.side, (bottom + top) / 2, times, 12, ends[0], weight="bold")
    pen.text(far + 0.06 * pen.side, top - 0.1, words, 7, ends[0])


def _boxes(pen: Pen, bottom: float, boxes: Sequence[Box]) -> tuple[float, list[float]]:
    """Draws boxes side by side, and their parameters; returns their height and the middle of each."""
    width, middles = (WIDTH - 0.12 * (len(boxes) - 1)) / len(boxes), []
    details = [textwrap.wrap(box.detail.replace(" × ", "\u00a0×\u00a0"), int(16 * width)) for box in boxes]
    height = 0.2 + LINE * (1 + max(map(len, details)))
    for i, (box, lines) in enumerate(zip(boxes, details, strict=True)):
        left = pen.beside(-1, 0.0) + i * (width + 0.12)
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


def short(count: int | float) -> str:
    """7,087,872 as 7.09 M."""
    units = (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")
    size, unit = next((pair for pair in units if count >= pair[0]), (1, ""))
    return f"{count / size:.3g} {unit}".strip()


def plain(text: str) -> str:
    r"""Text for matplotlib, which takes what is between two $ as a formula, and stops at what is no character.

    A $ becomes \$, which it draws as $. Control characters and halves of surrogate pairs are drawn as escapes.
    """

    def is_drawn(letter):
        return letter == "\n" or unicodedata.category(letter) not in ("Cc", "Cs")

    return "".join(letter if is_drawn(letter) else repr(letter)[1:-1] for letter in text).replace("$", r"\$")
