"""The description of a Hugging Face family, and the mapping between its tensors and our parameters."""

import math
import re
import reprlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxformer import models
from jaxformer.errors import ConfigError
from jaxformer.models.config import Classification, LanguageModel, ModelConfig, TokenClassification
from jaxformer.ops.feedforward import GATES
from jaxformer.ops.positions import NTK, Linear, Llama3, LongRoPE, Rope, YaRN, rope_frequencies
from jaxformer.params import Spec, paths

Json = dict[str, Any]

# The layout of their module. linear: torch's, [out, in] (and norms); conv1d: GPT-2's, [in, out]; patches: a convolution;
# leaf1, leaf2: 1 or 2 axes of length 1 in front; lines: an axis of length 1 after the first; unread: a number for each row of
# our leaf, which their model never uses. A rule for a leaf of ours (not a module) keeps the order of its axes.
Kind = Literal["linear", "conv1d", "patches", "leaf1", "leaf2", "lines", "unread"]


class Rule(NamedTuple):
    """Our module or leaf (or several that they fuse) and theirs. Their first `{}` is the layer, the second the expert."""

    ours: str | tuple[str, ...]
    theirs: str
    kind: Kind = "linear"
    layers: tuple[tuple[int, int], ...] | None = None  # pairs (our layer, their layer), if the numbers differ


def rules(ours: str, theirs: str, names: dict[str, str], kind: Kind = "linear") -> list[Rule]:
    """A rule for each entry of `names`, {our name: their name}, with the prefixes `ours` and `theirs`."""
    return [Rule(ours + our_name, theirs + their_name, kind) for our_name, their_name in names.items()]


class Family(NamedTuple):
    """One `model_type`. `read` raises ConfigError for an unsupported setting that changes numbers; `write` is its inverse."""

    read: Callable[[Json, Collection[str]], Any]  # (config.json, names of the tensors) -> our config
    write: Callable[[Any], Json]
    rules: Callable[[Any], list[Rule]]
    prefix: str = ""  # files of base models leave it out of names
    ignored: str = r"position_ids$|\.rotary_emb\.inv_freq$"  # buffers
    heads: str = r"^(lm_head|score|classifier|qa_outputs)\."  # modules of heads: the file may have more than its class
    aliases: dict[str, str] = {}  # noqa: RUF012 (never written to): {second name of a tied tensor: its first name}


class Key(NamedTuple):
    """An entry of config.json, see `get`. `values` translates it: {theirs: ours}; we write the first that fits."""

    name: str
    default: Any = int
    values: Mapping[Any, Any] | None = None


def get(c: Json, name: str, default: Any = int) -> Any:
    """An entry of config.json, of the type of its default (None: a whole number or null; a type: it must be there).

    A null is no entry, as old writers mean it; a flag of null is false, as Python reads it. 64.0 is a whole number.
    """
    value = c.get(name)
    if value is None:
        if name in c and name in OPTIONAL:
            return None
        if isinstance(default, type):
            raise ConfigError(f"config.json has no {name}, which this model needs")
        return False if name in c and isinstance(default, bool) else default
    kind = default if isinstance(default, type) else int if default is None else type(default)
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    least = 0 if kind is float or name in COUNTS else 1
    names = {bool: "true or false", int: f"a whole number from {least}", float: "a number from 0"}
    fits = type(value) is kind or (kind is float and type(value) is int)
    if not fits or (kind in (int, float) and not least <= value <= 2**40):
        raise ConfigError(f"config.json: {name}={reprlib.repr(value)}: expected {names.get(kind, kind.__name__)}")
    return kind(value)


def check_layers(c: Json, tensors: int) -> None:
    """Refuses more layers or experts than `tensors`, the number of tensors in the file."""
    names = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")
    for name in (*names, "num_local_experts"):
        if (get(c, name, None) or 0) > tensors:
            raise ConfigError(f"config.json: {name}={c[name]}: the file has {tensors} tensors in all")


ACTIVATION = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "relu": "relu",
    "silu": "silu", "swish": "silu", "tanh": "tanh", "sigmoid": "sigmoid", "gelu_python": "gelu", "gelu_10": "gelu_10",
    "gelu_python_tanh": "gelu_tanh", "gelu_accurate": "gelu_tanh", "quick_gelu": "quick_gelu", "relu2": "relu2",
    "relu6": "relu6", "leaky_relu": "leaky_relu", "hardswish": "hardswish", "mish": "mish", "laplace": "laplace",
    "linear": "identity",
}  # fmt: skip
GATE = {activation: gate for gate, activation in GATES.items()}
GATED = {theirs: GATE[ours] for theirs, ours in ACTIVATION.items()}
COMMON = {  # {our field: their entry}
    "vocab_size": Key("vocab_size"), "num_layers": Key("num_hidden_layers"), "d_model": Key("hidden_size"),
    "num_heads": Key("num_attention_heads"), "context_length": Key("max_position_embeddings"),
    "d_ff": Key("intermediate_size"), "init_std": Key("initializer_range", 0.02),
    "tie_embeddings": Key("tie_word_embeddings", True),
}  # fmt: skip
PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}
COUNTS = (  # may be 0
    "type_vocab_size", "num_random_blocks", "lsh_num_chunks_before", "lsh_num_chunks_after", "local_num_chunks_before",
    "local_num_chunks_after", "hash_seed", "max_window_layers", "pad_token_id",
)  # fmt: skip
OPTIONAL = ("num_key_value_heads", "sliding_window", "hash_seed")  # may be null, and have a default


def read_fields(c: Json, table: dict[str, Key]) -> dict[str, Any]:
    """Our fields. Raises ConfigError for entries that are missing or have no counterpart."""
    fields = {}
    for ours, (name, default, values) in table.items():
        value = get(c, name, default)
        if values is not None and value not in values:
            expected = ", ".join(map(str, values))
            raise ConfigError(f"config.json: {name}={value!r} has no counterpart here; expected one of {expected}")
        fields[ours] = value if values is None else values[value]
    return fields


def write_fields(config: Any, table: dict[str, Key]) -> Json:
    """The inverse of `read_fields`; None for a value without a counterpart."""
    c = {}
    for ours, (name, default, values) in table.items():
        value = getattr(config, ours)
        if value is None and default is int:
            value = getattr(config, {"d_ff": "ff_width", "head_width": "head_size"}[ours])
        if values is not None:
            value = next((theirs for theirs, mine in values.items() if mine == value), None)
        c[name] = value
    return c


def only(c: Json, **allowed: Any) -> None:
    """Refuses other values of settings that change numbers. A null is no entry."""
    for key, value in allowed.items():
        if c.get(key) not in (None, value):
            raise ConfigError(f"config.json: {key}={c[key]!r} is not supported here; only {value!r} is")


def layer_kinds(key: str, kinds: Any, layers: int, *allowed: str) -> list[str]:
    """Returns `kinds` if it has one of the `allowed` kinds for each layer. Raises ConfigError."""
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in allowed for kind in kinds):
        raise ConfigError(f"config.json: {key}={reprlib.repr(kinds)}: expected {layers} of {', '.join(allowed)}")
    return kinds


def shortest_pattern(items: list) -> tuple:
    """The shortest prefix that, repeated, gives the list."""
    fits = lambda n: all(item == items[i % n] for i, item in enumerate(items))
    return tuple(items[: next(filter(fits, range(1, len(items) + 1)))])


def repeated(pattern: Any, config: ModelConfig) -> list:
    """The entry of the pattern for each layer."""
    pattern = pattern if isinstance(pattern, tuple) else (pattern,)
    return [pattern[i % len(pattern)] for i in range(config.num_layers)]


# Heads. `kinds` has those of each class of transformers, by the rest of its name after `prefix`.
POOLED = Classification(None, pool="position_0", name="pooled")  # BERT pools slot 0 even if it is padding
NEXT_SENTENCE = Classification(2, pool="position_0", name="next_sentence")
SPAN = TokenClassification(2, name="span")


def heads_by_class(
    kinds: Collection[str], sequence: Classification, language_model=LanguageModel(), base: tuple = ()
) -> dict[str, tuple]:
    """The heads of each of these classes. `sequence` classifies a sequence; `base` are the heads of a bare model."""
    heads = {
        "Model": base, "ForPreTraining": (language_model, NEXT_SENTENCE), "ForNextSentencePrediction": (NEXT_SENTENCE,),
        "ForSequenceClassification": (sequence,), "ForQuestionAnswering": (SPAN,),
        "ForMultipleChoice": (Classification(1, pool="position_0", name="multiple_choice"),),
        "ForTokenClassification": (TokenClassification(sequence.classes or 0),),
    }  # fmt: skip
    return {kind: heads.get(kind, (language_model,)) for kind in kinds}


def class_kind(c: Json, prefix: str, kinds: Collection[str]) -> str:
    """The class that wrote the file, one of `kinds` (default: the first). Raises ConfigError."""
    names = [prefix + kind for kind in kinds]
    written = (c.get("architectures") or names)[0]
    # the first conversions of LLaMA say LLaMAForCausalLM
    name = next((name for name in names if name.lower() == str(written).lower()), None)
    if name is None:
        raise ConfigError(f"config.json: architecture {written!r}; expected {' or '.join(names)}")
    return name.removeprefix(prefix)


def read_heads(c: Json, prefix: str, kinds: dict[str, tuple]) -> tuple:
    return kinds[class_kind(c, prefix, kinds)]


def write_heads(heads: tuple, prefix: str, kinds: dict[str, tuple]) -> Json:
    """The class and the labels for config.json. Raises ConfigError if no class has heads of these names."""
    names = lambda heads: [head.name for head in heads if head.name != "pooled"]
    kind = next((kind for kind in kinds if names(kinds[kind]) == names(heads)), None)
    if kind is None:
        raise ConfigError(f"model.heads={heads}: expected those of a class {prefix}... of transformers: {kinds}")
    classes = next((head.classes for head in heads if head.name.endswith("classification")), 0)
    labels = tuple(f"LABEL_{i}" for i in range(classes))  # the names that transformers gives
    return {"architectures": [prefix + kind]} | write_labels(labels)


def count_labels(c: Json) -> int:
    return get(c, "num_labels", None) or len(c.get("id2label") or {"0": 0, "1": 1})


def write_labels(labels: tuple[str, ...]) -> Json:
    """The entries of config.json for the class names, if any."""
    return {"id2label": dict(enumerate(labels)), "label2id": {n: i for i, n in enumerate(labels)}} if labels else {}


# Rotary positions: transformers 5 has `rope_parameters`; older writers and readers have `rope_theta` and `rope_scaling`
LENGTH, ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
ATTENTION = "attention_factor"
YARN = {"beta_fast": float, "beta_slow": float, "truncate": bool}
# rope_type: (our class, {their name of each of its fields: type})
SCALINGS: dict[str, tuple[Any, dict[str, type]]] = {
    "linear": (Linear, {"factor": float}),
    "dynamic": (NTK, {"factor": float, LENGTH: int}),
    "llama3": (Llama3, {"factor": float, ORIGINAL: int, "low_freq_factor": float, "high_freq_factor": float}),
    "yarn": (YaRN, {"factor": float, ORIGINAL: int, **YARN, ATTENTION: float}),
    "longrope": (LongRoPE, {"short_factor": tuple, "long_factor": tuple, ORIGINAL: int, ATTENTION: float}),
}


def read_rope(c: Json, head_width: int, theta: float = 1e4) -> Rope:
    """The rotation of a config. These models rotate the full head: they ignore a partial factor, or with scaling fail."""
    rope = _rope_settings(c)
    kind = rope.get("rope_type", "default")
    if kind != "default":
        only({"partial_rotary_factor": c.get("partial_rotary_factor") or 1.0} | rope, partial_rotary_factor=1.0)
    base = get(rope, "rope_theta", theta)
    settings = None if kind == "default" else _read_scaling(c, rope, kind)
    try:
        if head_width > 2**20:
            raise ValueError(f"expected at most {2**20} features of a head")
        scaling = None if settings is None else SCALINGS[kind][0](*settings)
        rotation = Rope(base, 1.0, "half", scaling)
        with np.errstate(all="ignore"):
            rope_frequencies(head_width, rotation)
    except ValueError as error:
        shown = f"head_dim={head_width}, rope_type={kind!r}, rope_theta={base:g}"
        raise ConfigError(f"config.json: {shown}: {error}") from None
    return rotation


def _rope_settings(c: Json) -> Json:
    """The settings of all places that hold some. Raises ConfigError where two places differ."""
    top = {key: c[key] for key in ("rope_theta", ORIGINAL) if c.get(key) is not None}
    settings: Json = dict(top)
    origins = dict.fromkeys(top, "")
    for place in ("rope_parameters", "rope_scaling"):
        if not isinstance(c.get(place), dict | None):
            raise ConfigError(f"config.json: {place}={c[place]!r}: expected an object")
        found = {key: value for key, value in (c.get(place) or {}).items() if value is not None}
        if nested := [key for key, value in found.items() if isinstance(value, dict)]:
            raise ConfigError(f"config.json: {place}.{nested[0]}: one rotation for all layers is supported")
        if "type" in found:  # the older name
            found.setdefault("rope_type", found.pop("type"))
        for key, value in found.items():
            if settings.setdefault(key, value) != value:
                other = f"{origins[key]}{key}={settings[key]!r}"
                raise ConfigError(f"config.json: {place}.{key}={value!r}, but {other}: keep the right one in both places")
            origins.setdefault(key, f"{place}.")
    return settings


def _long_rope_factor(stretch: float, original: int) -> float:
    """The factor on cos and sin of a context that is `stretch` times the original one, as transformers has it."""
    if original == 1:
        raise ConfigError(f"config.json: {ORIGINAL}=1: expected at least 2, or an {ATTENTION}")
    return math.sqrt(1 + math.log(max(stretch, 1)) / math.log(original))


def _read_scaling(c: Json, rope: Json, kind: str) -> list[Any]:
    """The arguments of the class of `SCALINGS`."""
    if kind not in SCALINGS:
        raise ConfigError(f"config.json: rope_type={kind!r}: expected default, {', '.join(SCALINGS)}")
    _, fields = SCALINGS[kind]
    length = get(c, LENGTH)
    original = get(rope, ORIGINAL, length)
    stretch = get(rope, "factor", length / original)
    settings = {"truncate": True} | rope | {LENGTH: length, ORIGINAL: original}
    if kind == "yarn":
        one, two = (get(rope, key, 0.0) for key in ("mscale", "mscale_all_dim"))
        if one and two and stretch > 1:
            settings.setdefault(ATTENTION, (0.1 * one * math.log(stretch) + 1) / (0.1 * two * math.log(stretch) + 1))
        fast, slow = rope.get("beta_fast") or 32.0, rope.get("beta_slow") or 1.0
        settings |= {"factor": stretch, "beta_fast": fast, "beta_slow": slow}
    if kind == "longrope":
        settings |= {key: tuple(map(float, rope[key])) for key in ("short_factor", "long_factor")}
        if ATTENTION not in settings:
            settings[ATTENTION] = _long_rope_factor(stretch, original)
    needed = (name for name in fields if name != ATTENTION or name in settings)  # it has a default
    return [get(settings, name, fields[name]) for name in needed]


def write_rope(positions: Any) -> Json:
    """The entries of config.json for a rotation: those of transformers 5, and those that older readers look for."""
    rope = _rope_parameters(positions)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    older = None if rope["rope_type"] == "default" else scaling | {"type": rope["rope_type"]}
    return {"rope_parameters": rope, "rope_theta": rope["rope_theta"], "rope_scaling": older}


def _rope_parameters(positions: Any) -> Json:
    scaling = getattr(positions, "scaling", None)
    c = {"rope_theta": getattr(positions, "theta", 1e4), "rope_type": "default"}
    for kind, (scaling_class, fields) in SCALINGS.items():
        if isinstance(scaling, scaling_class):
            values = zip(fields, vars(scaling).values(), strict=True)
            c |= {name: value for name, value in values if value is not None} | {"rope_type": kind}
    c.pop(LENGTH, None)  # NTK's length is the config's
    return c


class Part(NamedTuple):
    """A slice of one of our leaves: `leaf[index]`, of `shape`."""

    path: str
    index: tuple[int, ...]
    shape: tuple[int, ...]


class Tensor(NamedTuple):
    """One tensor of theirs and the parts of ours in it, next to each other in its output axis; no parts if it is unread."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...] = ()
    out_first: bool = False  # their output axis is the first, ours the last

    def ours(self, array: np.ndarray) -> list[np.ndarray]:
        """The parts of the tensor in our layout."""
        if self.out_first:
            array = np.moveaxis(array, 0, -1)
        widths = [math.prod(part.shape) * array.shape[-1] // max(array.size, 1) for part in self.parts]
        pieces = np.split(array, np.cumsum(widths)[:-1], axis=-1)
        return [piece.reshape(part.shape) for piece, part in zip(pieces, self.parts, strict=True)]

    def theirs(self, leaves: Mapping[str, Any]) -> np.ndarray:
        """The tensor, from our leaves {path: array}; zeros if it is unread."""
        if not self.parts:
            return np.zeros(self.shape, np.float32)
        pieces = [np.asarray(leaves[part.path][part.index]) for part in self.parts]
        shape = self.shape[1:] + self.shape[:1] if self.out_first else self.shape
        if len(pieces) == 1:
            array = pieces[0].reshape(shape)
        else:
            array = np.concatenate([piece.reshape(*shape[:-1], -1) for piece in pieces], axis=-1)
        return np.moveaxis(array, -1, 0) if self.out_first else array


def plan(family: Family, config: Any, allow_missing: str | None = None) -> dict[str, Tensor]:
    """All tensors of a file, by name. ConfigError for a leaf that the family's files cannot hold, unless `allow_missing`."""
    leaves = paths(models.spec(config))
    tensors: dict[str, Tensor] = {}
    for rule in family.rules(config):
        modules = (rule.ours,) if isinstance(rule.ours, str) else rule.ours
        for ours, theirs in {"": "", "/kernel": ".weight", "/scale": ".weight", "/bias": ".bias"}.items():
            names = [module + ours for module in modules]
            if names[0] in leaves:
                tensors |= _tensors(rule, rule.theirs + theirs, names, [leaves[name] for name in names])
    extra = sorted(leaves.keys() - {part.path for tensor in tensors.values() for part in tensor.parts})
    if extra := [path for path in extra if allow_missing is None or not re.search(allow_missing, path)]:
        raise ConfigError(f"this family has no place for {', '.join(extra[:4])}")
    return tensors


def _tensors(rule: Rule, theirs: str, names: list[str], specs: list[Spec]) -> dict[str, Tensor]:
    """One tensor `theirs` for each layer, or each layer and expert, of our leaves."""
    if rule.kind == "unread":
        return {theirs: Tensor(specs[0].shape[:1])}
    lead, in_module = theirs.count("{}"), theirs != rule.theirs
    matrix = in_module and rule.kind in ("linear", "conv1d")
    shapes = [_matrix_shape(spec, lead) if matrix else spec.shape[lead:] for spec in specs]
    shape = (*shapes[0][:-1], sum(shape[-1] for shape in shapes))
    out_first = in_module and rule.kind in ("linear", "patches")
    if out_first:
        shape = shape[-1:] + shape[:-1]
    shape = {"leaf1": (1, *shape), "leaf2": (1, 1, *shape), "lines": (shape[0], 1, shape[-1])}.get(rule.kind, shape)
    tensors = {}
    for index in np.ndindex(*specs[0].shape[:lead]) if rule.layers is None else rule.layers:
        ours, other = (index, index) if rule.layers is None else ((index[0],), (index[1],))
        parts = (Part(name, ours, spec.shape[lead:]) for name, spec in zip(names, specs, strict=True))
        tensors[theirs.format(*other)] = Tensor(shape, tuple(parts), out_first)
    return tensors


def _matrix_shape(spec: Spec, lead: int) -> tuple[int, ...]:
    """The shape of one layer's kernel as a matrix (in, out), or of its bias as a vector, without the first `lead` axes."""
    shape, axes = spec.shape[lead:], spec.axes[lead:]
    if not spec.contracts:
        return (math.prod(shape),)
    inputs = math.prod(n for n, axis in zip(shape, axes, strict=True) if axis in spec.contracts)
    return (inputs, math.prod(shape) // inputs)
