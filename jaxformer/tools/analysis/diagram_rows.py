"""The rows of an architecture diagram: its boxes, frames and residual lines, without a drawing.

`rows` is the function to read; `diagram` draws what it lists. Layers that repeat are listed once.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

from jaxformer import masks, params
from jaxformer.models import ModelConfig, blocks, heads, transformer
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
from jaxformer.models.feedforward import feed
from jaxformer.models.stacks import layout
from jaxformer.ops.positions import Rope

# positions that are added to the embedding
ADDED: dict[type, str] = {
    Learned: "learned",
    Sinusoidal: "sinusoidal",
    Axial: "axial",
}
# positions that attention uses
SCORED = {
    Rope: "rotary positions",
    Alibi: "ALiBi",
    Relative: "relative positions",
    AttentionPositions: "positions at queries and keys",
}
NORMS = {"layer_norm": "Layer norm", "rms_norm": "RMS norm"}


class Box(NamedTuple):
    """A box: a part of the model, with its sizes."""

    fill: str  # a name of `diagram.FILLS`
    title: str
    detail: str = ""
    parameters: int = 0
    copies: int = 1  # experts, drawn as a pile


class Mark(NamedTuple):
    """A row that is not a box.

    `branch` and `add` begin and end a residual line, `sum` adds boxes that stand side by side,
    `open` and `close` begin and end a frame, `label` is a text.
    """

    kind: str
    text: str = ""


Row = list[Box] | Mark  # boxes side by side, or a mark


class LayerKind(NamedTuple):
    """The fields by which the layers of a stack may differ."""

    mixer: Any
    mask: masks.Mask
    positions: Any
    feedforward: Any
    block: Any


def rows(
    config: ModelConfig, source: ModelConfig | None = None, label: str = "tokens"
) -> Iterator[Row]:
    """The rows of one stack from bottom to top.

    `source` is the encoder that the stack reads, `label` the name of its inputs.
    """
    source_width = None if source is None else source.d_model
    spec = transformer.spec(config, source_width)
    layers = layout.kinds(config, source_width)
    yield from _inputs(config, spec.get("embedding", {}), label)
    yield from _layers(config, [layer.spec for layer in layers], reads_source=source is not None)
    for name, tree in (layers[0].block.stack_spec or {}).items():
        if name == "final_norm":
            yield [_norm(config, tree)]
        else:
            yield [Box("norm", _name(name), "", params.count(tree))]
    if config.heads:
        names = heads.heads(config)
        head_specs = spec.get("heads", {})
        yield [
            _head(config, name, head, head_specs)
            for name, head in zip(names, config.heads, strict=True)
        ]


def _inputs(config: ModelConfig, tree: dict, label: str) -> Iterator[Row]:
    """The name of the inputs, and the parts of the embedding."""
    embedding = config.embedding
    D = config.d_model

    def box(title, detail, *names):
        count = sum(params.count(tree.get(name, {})) for name in names)
        return Box("embedding", title, detail, count)

    if isinstance(embedding, Patches):
        label = f"images of {embedding.image[0]} × {embedding.image[1]}"
        detail = f"{embedding.channels} × {embedding.patch[0]} × {embedding.patch[1]} → {D:,}"
        detail += ", class token" * embedding.class_token
        names = "patches", "class_token", "mask_token", "extra_tokens"
        boxes = [box("Patches", detail, *names)]
    elif isinstance(embedding, Embedding):
        boxes = [box("Tokens", f"{config.vocab_size:,} × {D:,}", "tokens")]
        if embedding.token_types:
            boxes.append(box("Token types", f"{embedding.token_types} × {D:,}", "token_types"))
    else:
        label = "inputs"
        names = [name for name in tree if name != "positions"]
        boxes = [box(_name(embedding).capitalize(), f"→ {D:,}", *names)]
    if type(config.positions) in ADDED:
        width = getattr(embedding, "width", None) or D
        detail = f"{ADDED[type(config.positions)]}, {config.context_length:,} × {width:,}"
        boxes.append(box("Positions", detail, "positions"))
    yield Mark("label", label)
    yield boxes
    if len(boxes) > 1:
        yield Mark("sum")
    if "norm" in tree:
        yield [_norm(config, tree["norm"])]


def _layers(config: ModelConfig, specs: list[dict], reads_source: bool) -> Iterator[Row]:
    """Each kind of layer once, in frames that say how often it repeats.

    `specs` are the parameters of the kinds; layer i has those of kind i modulo their number.
    """
    patterns = [
        layout.as_pattern(each)
        for each in (config.mixer, config.masks, config.positions, config.feedforward, config.block)
    ]
    L = config.num_layers
    kinds = [LayerKind(*(each[i % len(each)] for each in patterns)) for i in range(L)]
    period = next(p for p in range(1, L + 1) if all(kinds[i] == kinds[i % p] for i in range(L)))
    groups = [list(equal) for _, equal in groupby(range(period), kinds.__getitem__)]
    if len(groups) > 1:
        yield Mark("open", f"in turn:\n{L} layers" if L % period else f"× {L // period}")
    for group in groups:
        count = L if len(groups) == 1 else len(group)
        yield Mark("open", f"× {count}" if count > 1 else "")
        yield from _layer(config, kinds[group[0]], specs[group[0] % len(specs)], reads_source)
        yield Mark("close", "" if config.stack is None else _name(config.stack))
    if len(groups) > 1:
        yield Mark("close")


def _layer(config: ModelConfig, kind: LayerKind, spec: dict, reads_source: bool) -> Iterator[Row]:
    """The sub-layers of one layer, with norms and sums in the order of its block."""
    texts = {"attention": _attention(config, kind)}
    if reads_source:
        texts["cross_attention"] = ("Attention to the encoder", _heads(config))
    texts["feedforward"] = _feedforward(config, kind.feedforward)
    boxes = {}
    for name, (title, detail, *copies) in texts.items():
        boxes[name] = Box(name, title, detail, params.count(spec[name]), *copies)
    if kind.block is blocks.parallel:
        yield Mark("branch")
        yield [_norm(config, spec["norm"])]
        yield list(boxes.values())
        yield Mark("add")
        return
    drawn = set(boxes)
    for name, box in boxes.items():
        norm, out_norm = f"{name}_norm", f"{name}_out_norm"
        drawn |= {norm, out_norm}
        norm_rows = [[_norm(config, spec[norm])]] if norm in spec else []
        out_norm_rows = [[_norm(config, spec[out_norm])]] if out_norm in spec else []
        if kind.block is blocks.post_norm:
            yield from (Mark("branch"), [box], Mark("add"), *norm_rows, *out_norm_rows)
        else:
            yield from (Mark("branch"), *norm_rows, [box], *out_norm_rows, Mark("add"))
    if others := [params.count(tree) for name, tree in spec.items() if name not in drawn]:
        yield [Box("norm", _name(kind.block), "parameters of the block", sum(others))]


def _attention(config: ModelConfig, kind: LayerKind) -> tuple[str, str]:
    """(title, detail): the sizes of a mixer, its mask, heads and positions."""
    mixer = kind.mixer
    facts = []
    for field in fields(mixer) if is_dataclass(mixer) else ():
        value = getattr(mixer, field.name)
        if type(value) is int and value:
            facts.append(f"{field.name.replace('_', ' ')} {value}")
    known_masks = {
        masks.full(): "" if mixer else "all tokens see each other",
        masks.causal(): "causal",
    }
    facts += [known_masks.get(kind.mask, f"sees {kind.mask}"), _heads(config)]
    if kind.positions is None:
        facts.append("no positions")
    elif type(kind.positions) not in ADDED:
        facts.append(SCORED.get(type(kind.positions), _name(kind.positions)))
    title = f"{_name(mixer)} self-attention" if mixer else "Self-attention"
    return title, ", ".join(filter(None, facts))


def _heads(config: ModelConfig) -> str:
    text = f"{config.num_heads} heads of {config.head_size}"
    if config.kv_heads != config.num_heads:
        text += f", {config.kv_heads} for keys and values"
    return text


def _feedforward(config: ModelConfig, feedforward: Any) -> tuple:
    """(title, detail), and for experts their number."""

    def widths(F):
        return f"{config.d_model:,} → {F:,} → {config.d_model:,}"

    if isinstance(feedforward, str):
        return "Feed-forward", f"{widths(config.ff_width)}, {feedforward}"
    parts = feed(replace(config, feedforward=feedforward))
    if parts.visited is None:
        return "Feed-forward", _name(feedforward)
    leaves = params.paths(parts.spec)
    of_experts = next(leaf for leaf in leaves.values() if leaf.axes[:2] == ("expert", "mlp"))
    E, F, _ = of_experts.shape
    shared = ", one for all" if "shared" in parts.spec else ""
    activation = getattr(feedforward, "activation", _name(feedforward))
    detail = f"{E}, {parts.visited} for each token{shared}: {widths(F)}, {activation}"
    return "Experts", detail, E


def _norm(config: ModelConfig, spec: dict) -> Box:
    title = NORMS[config.norm] if isinstance(config.norm, str) else _name(config.norm)
    return Box("norm", title, parameters=params.count(spec))


def _head(config: ModelConfig, name: str, head: Any, specs: dict) -> Box:
    steps = []
    match head:
        case LanguageModel():
            tied = ", the matrix of the tokens" * config.tie_embeddings
            steps = [
                _transform(head.transform),
                f"{config.vocab_size:,}{tied}",
            ]
        case Classification():
            classes = f"{head.classes:,} classes" if head.classes else ""
            steps = [
                f"{head.pool.replace('position_0', 'first')} position",
                head.pooler or "",
                classes,
            ]
    detail = " → ".join([f"{config.hidden_width:,}", *filter(None, steps)])
    title = name.replace("_", " ").capitalize()
    return Box("head", title, detail, params.count(specs.get(name, {})))


def _transform(transform: Any) -> str:
    """What comes before the product with the vocabulary's rows."""
    if transform is None:
        return ""
    return f"{transform} and a norm" if isinstance(transform, str) else _name(transform)


def _name(value: Any) -> str:
    """The name of a function, of a class by its object, or the string itself, in words."""
    if not isinstance(value, str):
        value = getattr(value, "__name__", type(value).__name__)
    return value.replace("_", " ")
