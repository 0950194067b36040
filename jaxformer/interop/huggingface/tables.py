"""The description of a Hugging Face family, and the mapping between its tensors and our parameters."""

import math
import re
import reprlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxformer import models
from jaxformer.errors import ConfigError
from jaxformer.models.config import ModelConfig
from jaxformer.ops.feedforward import GATES
from jaxformer.params import Spec, paths

Json = dict[str, Any]
REQUIRED: Any = ...

# The layout of their module. linear: [out, in] of torch; conv1d: [in, out] of GPT-2; patches: a convolution; leaf: one
# tensor, unchanged; leaf1, leaf2: 1 or 2 axes of length 1 in front; lines, columns: an axis of length 1 after, or before, the
# first axis; unread: a number for each row of our leaf, which their model never uses.
Kind = Literal["linear", "conv1d", "patches", "norm", "leaf", "leaf1", "leaf2", "lines", "columns", "unread"]


class Rule(NamedTuple):
    """Our module (or several that they fuse) and theirs. The first `{}` in theirs is the layer, the second the expert."""

    ours: str | tuple[str, ...]
    theirs: str
    kind: Kind
    layers: tuple[tuple[int, int], ...] | None = None  # pairs (our layer, their layer), if the numbers differ


@dataclass(frozen=True)
class Conventions:
    """Defaults of transformers' `forward` that change numbers. `Checkpoint.apply` uses them.

    `positions`: "slots" counts all tokens of a row; "not_pad" (RoBERTa, Longformer) skips the pad id, which has position -1.
    `global_tokens` of a Longformer: those of its config, those before the first separator, or those after the second.
    """

    positions: Literal["slots", "not_pad"] = "slots"
    global_tokens: Literal["none", "question", "choice"] = "none"
    choices: bool = False  # tokens are [B, choices, T]


class Family(NamedTuple):
    """One `model_type`.

    `read` makes our config from config.json and the tensor names. It raises ConfigError for an unsupported setting that changes
    numbers. `write` is its inverse.
    """

    read: Callable[[Json, Collection[str]], Any]
    write: Callable[[Any], Json]
    rules: Callable[[Any], list[Rule]]
    prefix: str = ""  # files of base models leave it out of names
    ignored: str = r"position_ids$|\.rotary_emb\.inv_freq$"  # buffers
    aliases: dict[str, str] = {}  # noqa: RUF012 (never written to): {second name of a tied tensor: its first name}
    conventions: Callable[[Json], Conventions] = lambda c: Conventions()


# Names that most families share: {theirs: (ours, default)}.
SIZES_AND_WIDTHS = {
    "vocab_size": ("vocab_size", REQUIRED), "num_hidden_layers": ("num_layers", REQUIRED),
    "hidden_size": ("d_model", REQUIRED), "num_attention_heads": ("num_heads", REQUIRED),
    "max_position_embeddings": ("context_length", REQUIRED), "intermediate_size": ("d_ff", REQUIRED),
    "initializer_range": ("init_std", 0.02),
}  # fmt: skip
PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}
ACTIVATION = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "relu": "relu",
    "silu": "silu", "swish": "silu", "tanh": "tanh", "sigmoid": "sigmoid", "gelu_python": "gelu", "gelu_10": "gelu_10",
    "gelu_python_tanh": "gelu_tanh", "gelu_accurate": "gelu_tanh", "quick_gelu": "quick_gelu", "relu2": "relu2",
    "relu6": "relu6", "leaky_relu": "leaky_relu", "hardswish": "hardswish", "mish": "mish", "laplace": "laplace",
    "linear": "identity",
}  # fmt: skip
NAME = {ours: theirs for theirs, ours in reversed(ACTIVATION.items())}
GATE = {activation: gate for gate, activation in GATES.items()}


def read_fields(c: Json, table: dict[str, tuple[str, Any]], gated: bool = False) -> dict[str, Any]:
    """Our fields from a table {theirs: (ours, default)}. An activation has our name, or that of its gate if `gated`."""
    missing = [theirs for theirs, (_, default) in table.items() if default is REQUIRED and c.get(theirs) is None]
    if missing:
        raise ConfigError(f"config.json has no {', '.join(missing)}, which a {c.get('model_type')} model needs")
    fields = {ours: c.get(theirs, default) for theirs, (ours, default) in table.items()}
    for theirs, (ours, _) in table.items():
        if ours == "feedforward":
            name = activation(c, theirs, fields[ours])
            fields[ours] = GATE.get(name) if gated else name
    return fields


def write_fields(config: Any, table: dict[str, tuple[str, Any]]) -> Json:
    """The inverse of `read_fields`."""
    c = {theirs: getattr(config, ours) for theirs, (ours, _) in table.items()}
    for theirs, (ours, default) in table.items():
        if ours == "feedforward":
            c[theirs] = activation_name(config.feedforward)
        elif ours == "d_ff" and default is REQUIRED:
            c[theirs] = config.ff_width
    return c


def activation_name(feedforward: Any) -> str | None:
    """Their name of an activation or of a gate's activation; None for another feed-forward."""
    return NAME.get(GATES.get(feedforward, feedforward)) if isinstance(feedforward, str) else None


def activation(c: Json, key: str, name: Any) -> str:
    if name not in ACTIVATION:
        raise ConfigError(
            f"config.json: {key}={name!r} has no counterpart here; expected one of {', '.join(ACTIVATION)}"
        )
    return ACTIVATION[name]


# The keys of config.json that we read, by the kind of their values. OPTIONAL keys may be null.
LAYERS = {
    "num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers",
    "num_local_experts",
}  # fmt: skip
SIZES = {
    "vocab_size", "hidden_size", "num_attention_heads", "intermediate_size", "max_position_embeddings", "n_positions",
    "n_embd", "n_head", "n_inner", "num_heads", "window_size", "num_key_value_heads", "head_dim",
    "num_experts_per_tok", "sliding_window", "d_model", "d_kv", "d_ff", "num_labels",
    "relative_attention_num_buckets", "relative_attention_max_distance", "encoder_attention_heads",
    "decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim", "decoder_vocab_size", "num_channels",
    "attention_head_size", "feed_forward_size", "block_size", "lsh_attn_chunk_length", "local_attn_chunk_length",
    "num_hashes", "original_max_position_embeddings", "pooler_output_size", "encoder_stride",
}  # fmt: skip
COUNTS = {
    "type_vocab_size", "num_random_blocks", "lsh_num_chunks_before", "lsh_num_chunks_after",
    "local_num_chunks_before", "hash_seed", "local_num_chunks_after", "max_window_layers",
}  # fmt: skip
NUMBERS = {
    "layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps", "initializer_range", "init_std", "rope_theta", "factor",
    "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor", "router_aux_loss_coef", "attention_factor", "mscale",
    "mscale_all_dim", "partial_rotary_factor",
}  # fmt: skip
FLAGS = {
    "tie_word_embeddings", "rescale_embeddings", "attention_bias", "mlp_bias", "use_sliding_window",
    "share_encoder_decoder_embeddings", "scale_embedding", "scale_decoder_outputs", "qkv_bias", "truncate", "use_bias",
    "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "is_decoder", "axial_pos_embds",
}  # fmt: skip
OPTIONAL = {
    "n_inner", "intermediate_size", "head_dim", "num_key_value_heads", "sliding_window", "hash_seed", "decoder_vocab_size",
    "num_decoder_layers", "original_max_position_embeddings", "pooler_output_size",
}  # fmt: skip


def check_kinds(c: Json, tensors: int) -> None:
    """Refuses values of the wrong kind, and more layers than `tensors`, the number of tensors in the file."""
    integer = lambda least, most: lambda value: type(value) is int and least <= value <= most
    number = lambda value: type(value) in (int, float) and 0 <= value < math.inf
    for keys, fits, expected in (
        (LAYERS, integer(1, tensors), f"a whole number from 1 to {tensors}, that of the file's tensors"),
        (SIZES, integer(1, 2**40), "a whole number above 0"),
        (COUNTS, integer(0, 2**40), "a whole number, 0 or more"),
        (NUMBERS, number, "a number, 0 or more"),
        (FLAGS, lambda value: type(value) is bool, "true or false"),
    ):
        for key in sorted(keys & c.keys()):
            if not fits(c[key]) and not (c[key] is None and key in OPTIONAL):
                raise ConfigError(f"config.json: {key}={reprlib.repr(c[key])}: expected {expected}")


def layer_kinds(key: str, kinds: Any, layers: int, *allowed: str) -> list[str]:
    """Returns `kinds` if it has one of the `allowed` kinds for each layer. Raises ConfigError."""
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in allowed for kind in kinds):
        raise ConfigError(f"config.json: {key}={reprlib.repr(kinds)}: expected {layers} of {', '.join(allowed)}")
    return kinds


def only(c: Json, **allowed: Any) -> None:
    """Refuses other values of settings that change numbers."""
    for key, value in allowed.items():
        if c.get(key, value) != value:
            raise ConfigError(f"config.json: {key}={c[key]!r} is not supported here; only {value!r} is")


def class_kind(c: Json, prefix: str, kinds: Collection[str]) -> str:
    """The class that wrote the file, without `prefix`: one of `kinds` (default: the first). Raises ConfigError."""
    names = [prefix + kind for kind in kinds]
    name = (c.get("architectures") or names)[0]
    if name not in names:
        raise ConfigError(f"config.json: architecture {name!r}; expected {' or '.join(names)}")
    return name.removeprefix(prefix)


def read_heads(c: Json, prefix: str, kinds: dict[str, tuple]) -> tuple:
    """The heads of the class that wrote the file."""
    return kinds[class_kind(c, prefix, kinds)]


def write_heads(heads: tuple, prefix: str, kinds: dict[str, tuple]) -> Json:
    """The class and labels for config.json. Raises ConfigError if no class has these heads."""
    for kind in kinds:
        if kinds[kind] == heads:
            return {"architectures": [prefix + kind]} | write_labels(default_labels(*heads[:1]))
    raise ConfigError(f"model.heads={heads}: expected those of a class {prefix}... of transformers: {kinds}")


def count_labels(c: Json) -> int:
    return c.get("num_labels") or len(c.get("id2label") or {"0": 0, "1": 1})


def default_labels(head: Any = None) -> tuple[str, ...]:
    """The class names that transformers gives to a head; none for a head without classes."""
    return tuple(f"LABEL_{i}" for i in range(getattr(head, "classes", None) or 0))


def write_labels(labels: tuple[str, ...]) -> Json:
    """The entries of config.json for the class names, if any."""
    return {"id2label": dict(enumerate(labels)), "label2id": {n: i for i, n in enumerate(labels)}} if labels else {}


def shortest_pattern(items: list) -> tuple:
    """The shortest prefix that, repeated, gives the list."""
    return next(
        tuple(items[:n]) for n in range(1, len(items) + 1) if all(x == items[i % n] for i, x in enumerate(items))
    )


def repeated(pattern: Any, config: ModelConfig) -> list:
    """The entry of the pattern for each layer."""
    pattern = pattern if isinstance(pattern, (tuple, list)) else (pattern,)
    return [pattern[i % len(pattern)] for i in range(config.num_layers)]


def modules(ours: str, theirs: str, names: dict[str, str], kind: Kind = "linear") -> list[Rule]:
    """A rule for each entry of `names`, {our module: their module}, with the prefixes `ours` and `theirs`."""
    return [Rule(ours + our_name, theirs + their_name, kind) for our_name, their_name in names.items()]


@dataclass(frozen=True)
class Part:
    """A slice of one of our leaves: `leaf[index]`, of `shape`."""

    path: str
    index: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
    """One tensor of theirs and the parts of ours in it. Several parts are next to each other in its last axis."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    order: Literal["same", "matrix", "patches"] = "same"

    def ours(self, array: np.ndarray) -> list[np.ndarray]:
        """Its parts in our layout; none for a tensor that their model never uses."""
        if not self.parts:
            return []
        if self.order == "matrix":
            array = array.T
        elif self.order == "patches":
            array = np.moveaxis(array, 0, -1)
        widths = [math.prod(part.shape) * array.shape[-1] // max(array.size, 1) for part in self.parts]
        pieces = np.split(array, np.cumsum(widths)[:-1], axis=-1)
        return [piece.reshape(part.shape) for piece, part in zip(pieces, self.parts, strict=True)]

    def theirs(self, pieces: list[np.ndarray]) -> np.ndarray:
        """The inverse of `ours`; zeros for a tensor that their model never uses."""
        if not pieces:
            return np.zeros(self.shape, np.float32)
        if self.order == "matrix":
            return pieces[0].reshape(self.shape[::-1]).T
        if self.order == "patches":
            return np.moveaxis(pieces[0], -1, 0)
        if len(pieces) == 1:
            return pieces[0].reshape(self.shape)
        return np.concatenate([piece.reshape(*self.shape[:-1], -1) for piece in pieces], axis=-1)


KERNEL = {"kernel": "weight", "bias": "bias"}
ENDINGS = {"linear": KERNEL, "conv1d": KERNEL, "patches": KERNEL, "norm": {"scale": "weight", "bias": "bias"}}


def plan(family: Family, config: Any, allow_missing: str | None = None) -> dict[str, Tensor]:
    """All tensors, by name, of a file with this config.

    Raises ConfigError for a leaf of ours that the family's files cannot hold, unless it matches `allow_missing`.
    """
    leaves = paths(models.spec(config))
    tensors: dict[str, Tensor] = {}
    for rule in family.rules(config):
        modules = (rule.ours,) if isinstance(rule.ours, str) else rule.ours
        for ours, theirs in ENDINGS.get(rule.kind, {"": ""}).items():
            names = [f"{module}/{ours}".rstrip("/") for module in modules]
            if names[0] in leaves:
                leaf_rule = rule._replace(theirs=f"{rule.theirs}.{theirs}".rstrip("."))
                tensors |= _tensors(leaf_rule, names, [leaves[name] for name in names])
    extra = sorted(leaves.keys() - {part.path for tensor in tensors.values() for part in tensor.parts})
    if extra := [path for path in extra if allow_missing is None or not re.search(allow_missing, path)]:
        raise ConfigError(f"this family has no place for {', '.join(extra[:4])}")
    return tensors


def _tensors(rule: Rule, names: list[str], specs: list[Spec]) -> dict[str, Tensor]:
    """One tensor for each layer, or each layer and expert, of our leaves."""
    lead, kind = rule.theirs.count("{}"), rule.kind
    if kind == "unread":
        return {rule.theirs: Tensor(specs[0].shape[:1], ())}
    kernel = names[0].endswith("kernel")
    shapes = [_flat_shape(spec, lead, kind, kernel) for spec in specs]
    shape = (*shapes[0][:-1], sum(shape[-1] for shape in shapes))
    order: Literal["same", "matrix", "patches"] = "same"
    if kind == "linear" and kernel:
        shape, order = shape[::-1], "matrix"
    elif kind == "patches" and kernel:
        shape, order = (shape[-1], *shape[:-1]), "patches"
    shape = {
        "leaf1": (1, *shape), "leaf2": (1, 1, *shape), "lines": (shape[0], 1, shape[-1]), "columns": (1, *shape),
    }.get(kind, shape)  # fmt: skip
    tensors = {}
    for index in np.ndindex(*specs[0].shape[:lead]) if rule.layers is None else rule.layers:
        ours, theirs = (index, index) if rule.layers is None else ((index[0],), (index[1],))
        parts = tuple(Part(name, ours, spec.shape[lead:]) for name, spec in zip(names, specs, strict=True))
        tensors[rule.theirs.format(*theirs)] = Tensor(shape, parts, order)
    return tensors


def _flat_shape(spec: Spec, lead: int, kind: Kind, kernel: bool) -> tuple[int, ...]:
    """The shape of one layer's leaf as a matrix [in, out] or a vector, without the first `lead` axes."""
    shape, axes = spec.shape[lead:], spec.axes[lead:]
    if kind not in ("linear", "conv1d", "norm"):
        return shape
    if not kernel:
        return (math.prod(shape),)
    inputs = math.prod(n for n, axis in zip(shape, axes, strict=True) if axis in spec.contracts)
    return (inputs, math.prod(shape) // inputs)
