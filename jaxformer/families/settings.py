"""The entries of config.json: read with their types and defaults, translated, and written again."""

import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxformer.errors import ConfigError
from jaxformer.models.config import ModelConfig
from jaxformer.ops.feedforward import GATES

Json = dict[str, Any]


class Key(NamedTuple):
    """An entry of config.json, see `get`.

    `values` translates it, {theirs: ours}. If several of theirs mean ours, we write the default, or
    the first.
    """

    name: str
    default: Any = int
    values: Mapping[Any, Any] | None = None


def get(c: Json, name: str, default: Any = int) -> Any:
    """An entry of config.json, checked to be of the type of its default.

    If the default is a type, the entry must be there. If it is None, the entry is a whole number or
    null. A null counts as no entry, as old writers mean it; a flag that is null is false. 64.0 is a
    whole number.
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
        raise ConfigError(
            f"config.json: {name}={reprlib.repr(value)}: expected {names.get(kind, kind.__name__)}"
        )
    return kind(value)


def with_own_names(c: Json, other_names: Mapping[str, str]) -> Json:
    """The entries under the family's own names; `other_names` are {another name: its own name}."""
    others = {name: c[name] for name in other_names if c.get(name) is not None}
    own = {name: value for name, value in c.items() if name not in other_names}
    return own | {other_names[name]: value for name, value in others.items()}


def get_list(c: Json, name: str) -> list:
    """An entry of config.json that must be a list."""
    value = c.get(name)
    if not isinstance(value, list | tuple):
        raise ConfigError(
            f"config.json: {name}={reprlib.repr(value)}: expected a list, which this model needs"
        )
    return list(value)


def check_layers(c: Json, tensors: int) -> None:
    """Refuses more layers or experts than `tensors`, the number of tensors in the file."""
    for name in LAYERS_OR_EXPERTS:
        if (get(c, name, None) or 0) > tensors:
            raise ConfigError(
                f"config.json: {name}={c[name]}: the file has {tensors} tensors in all"
            )


ACTIVATION = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu", "tanh": "tanh",
    "sigmoid": "sigmoid", "gelu_python": "gelu", "gelu_10": "gelu_10",
    "gelu_python_tanh": "gelu_tanh", "gelu_accurate": "gelu_tanh", "quick_gelu": "quick_gelu",
    "relu2": "relu2", "relu6": "relu6", "leaky_relu": "leaky_relu", "hardswish": "hardswish",
    "mish": "mish", "laplace": "laplace", "linear": "identity",
}  # fmt: skip
GATE = {activation: gate for gate, activation in GATES.items()}
GATED = {theirs: GATE[ours] for theirs, ours in ACTIVATION.items()}
# {our field: their entry}
COMMON = {
    "vocab_size": Key("vocab_size"),
    "num_layers": Key("num_hidden_layers"),
    "d_model": Key("hidden_size"),
    "num_heads": Key("num_attention_heads"),
    "context_length": Key("max_position_embeddings"),
    "d_ff": Key("intermediate_size"),
    "init_std": Key("initializer_range", 0.02),
    "tie_embeddings": Key("tie_word_embeddings", True),
}
PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}
# entries that may be 0
COUNTS = (
    "type_vocab_size",
    "num_random_blocks",
    "lsh_num_chunks_before",
    "lsh_num_chunks_after",
    "local_num_chunks_before",
    "local_num_chunks_after",
    "hash_seed",
    "max_window_layers",
    "pad_token_id",
    "first_k_dense_replace",
)
# entries that may be null although they have a default
OPTIONAL = ("num_key_value_heads", "sliding_window", "hash_seed")
# entries that are numbers of layers or of experts
LAYERS_OR_EXPERTS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "num_hidden_groups",
    "inner_group_num",
)


def read_fields(c: Json, table: dict[str, Key]) -> dict[str, Any]:
    """Our fields. Raises ConfigError for entries that are missing or have no counterpart."""
    fields = {}
    for ours, (name, default, values) in table.items():
        value = get(c, name, default)
        if values is not None and value not in values:
            expected = ", ".join(map(str, values))
            raise ConfigError(
                f"config.json: {name}={value!r} has no counterpart here; expected one of {expected}"
            )
        fields[ours] = value if values is None else values[value]
    return fields


def write_fields(config: Any, table: dict[str, Key]) -> Json:
    """The inverse of `read_fields`. A value without a counterpart becomes None."""
    c = {}
    for ours, (name, default, values) in table.items():
        value = getattr(config, ours)
        if value is None and default is int:
            value = getattr(config, {"d_ff": "ff_width", "head_width": "head_size"}[ours])
        if values is not None:
            theirs = [default, *values]  # the family's own word comes first
            value = next((word for word in theirs if values.get(word, ...) == value), None)
        c[name] = value
    return c


def only(c: Json, **allowed: Any) -> None:
    """Raises ConfigError if a setting has another value than allowed. A null is no entry."""
    for key, value in allowed.items():
        if c.get(key) not in (None, value):
            raise ConfigError(
                f"config.json: {key}={c[key]!r} is not supported here; only {value!r} is"
            )


def layer_kinds(key: str, kinds: Any, layers: int, *allowed: str) -> list[str]:
    """`kinds`, if it has an `allowed` kind for each layer. Raises ConfigError otherwise."""
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or any(kind not in allowed for kind in kinds)
    ):
        raise ConfigError(
            f"config.json: {key}={reprlib.repr(kinds)}: expected {layers} of {', '.join(allowed)}"
        )
    return kinds


def shortest_pattern(items: list) -> tuple:
    """The shortest prefix that, repeated, gives the list."""

    def fits(n):
        return all(item == items[i % n] for i, item in enumerate(items))

    return tuple(items[: next(filter(fits, range(1, len(items) + 1)))])


def pattern_of(items: list) -> Any:
    """The shortest pattern; the item itself if all are equal."""
    pattern = shortest_pattern(items)
    return pattern if len(pattern) > 1 else pattern[0]


def repeated(pattern: Any, config: ModelConfig) -> list:
    """The entry of the pattern for each layer."""
    pattern = pattern if isinstance(pattern, tuple) else (pattern,)
    return [pattern[i % len(pattern)] for i in range(config.num_layers)]
