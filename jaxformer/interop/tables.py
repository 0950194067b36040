"""What a Hugging Face family is, and the words that all families use to say whose weight is whose."""

from collections.abc import Callable, Collection
from typing import Any, Literal, NamedTuple

from jaxformer.config import ConfigError
from jaxformer.models.config import LanguageModel, ModelConfig
from jaxformer.ops.feedforward import GATES

Json = dict[str, Any]
REQUIRED: Any = ...

# How the leaves and axes of a module of ours and of theirs correspond. linear: [out, in] of torch; conv1d: [in, out] of GPT-2;
# patches: a convolution; norm; leaf: one tensor as it is, leaf1 and leaf2 with that many axes of length 1 before it, lines
# and columns with one behind and before the first; unread: a parameter that their model has and never uses.
Kind = Literal["linear", "conv1d", "patches", "norm", "leaf", "leaf1", "leaf2", "lines", "columns", "unread"]


class Rule(NamedTuple):
    """Our module, or several that they fused, and theirs, in which `{}` stands for a layer (and a second one for an expert)."""

    ours: str | tuple[str, ...]
    theirs: str
    kind: Kind
    layers: tuple[tuple[int, int], ...] | None = None  # (ours, theirs) where they are not counted alike


class Family(NamedTuple):
    """One `model_type`.

    read(c, names): config.json (and the names in the file) -> our config; ConfigError where a setting changes numbers in a
    way that we do not compute. write(config): the other way; `huggingface.save` reads back what it wrote and compares.
    prefix: what the files of base models leave out. ignored: buffers, a regular expression. aliases: a tied tensor's
    second name -> its first.
    """

    read: Callable[[Json, Collection[str]], Any]
    write: Callable[[Any], Json]
    rules: Callable[[Any], list[Rule]]
    prefix: str = ""
    ignored: str = r"position_ids$|\.rotary_emb\.inv_freq$"
    aliases: dict[str, str] = {}  # noqa: RUF012 (never written to)


ACTIVATION = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "relu": "relu",
    "silu": "silu", "swish": "silu", "tanh": "tanh", "sigmoid": "sigmoid",
}  # fmt: skip
NAME = {ours: theirs for theirs, ours in reversed(ACTIVATION.items())}
GATE = {activation: gate for gate, activation in GATES.items()}


def read_fields(c: Json, table: dict[str, tuple[str, Any]], gated: bool = False) -> dict[str, Any]:
    """Our fields of a table {theirs: (ours, default)}; an activation by our name, or as the gate that it makes."""
    missing = [theirs for theirs, (_, default) in table.items() if default is REQUIRED and c.get(theirs) is None]
    if missing:
        raise ConfigError(f"config.json has no {', '.join(missing)}, which a {c.get('model_type')} model needs")
    found = {ours: c.get(theirs, default) for theirs, (ours, default) in table.items()}
    for theirs, (ours, _) in table.items():
        if ours == "feedforward":
            found[ours] = GATE.get(activation(c, theirs, found[ours])) if gated else activation(c, theirs, found[ours])
    return found


def write_fields(config: Any, table: dict[str, tuple[str, Any]]) -> Json:
    """config.json's side of the same table."""
    c = {theirs: getattr(config, ours) for theirs, (ours, _) in table.items()}
    for theirs, (ours, default) in table.items():
        if ours == "feedforward":
            c[theirs] = NAME.get(GATES.get(c[theirs], c[theirs])) if isinstance(c[theirs], str) else None
        elif ours == "d_ff" and default is REQUIRED:
            c[theirs] = config.ff_width
    return c


def activation(c: Json, key: str, name: Any) -> str:
    if name not in ACTIVATION:
        raise ConfigError(
            f"config.json: {key}={name!r} has no counterpart here; expected one of {', '.join(ACTIVATION)}"
        )
    return ACTIVATION[name]


def only(c: Json, **allowed: Any) -> None:
    """Refuses settings that would change the numbers."""
    for key, value in allowed.items():
        if c.get(key, value) != value:
            raise ConfigError(f"config.json: {key}={c[key]!r} is not supported here; only {value!r} is")


def architecture(c: Json, *known: str) -> str:
    """The class that wrote the file, one of the `known` ones, the first by default. Raises ConfigError."""
    name = (c.get("architectures") or known)[0]
    if name not in known:
        raise ConfigError(f"config.json: architecture {name!r}; expected {' or '.join(known)}")
    return name


def lm_heads(c: Json, model: str, base: str, **options: Any) -> tuple[LanguageModel, ...]:
    """The heads of an architecture: a language model's, or none for the base model."""
    return (LanguageModel(**options),) if architecture(c, model, base) == model else ()


def labels(c: Json) -> int:
    return c.get("num_labels") or len(c.get("id2label") or {"0": 0, "1": 1})


def written_labels(head: Any) -> Json:
    """The classes of a head, in the words of config.json; nothing for one that only pools."""
    names = [f"LABEL_{i}" for i in range(getattr(head, "classes", None) or 0)]
    return {"id2label": dict(enumerate(names)), "label2id": {n: i for i, n in enumerate(names)}} if names else {}


def shortest_pattern(items: list) -> tuple:
    """The shortest prefix whose repetition is the list."""
    return next(
        tuple(items[:n]) for n in range(1, len(items) + 1) if all(x == items[i % n] for i, x in enumerate(items))
    )


def repeated(pattern: Any, config: ModelConfig) -> list:
    """A pattern of layers, written out."""
    pattern = pattern if isinstance(pattern, (tuple, list)) else (pattern,)
    return [pattern[i % len(pattern)] for i in range(config.num_layers)]


def modules(ours: str, theirs: str, names: dict[str, str], kind: Kind = "linear") -> list[Rule]:
    """A rule for each of `names`, {our module: their module}."""
    return [Rule(ours + one, theirs + two, kind) for one, two in names.items()]
