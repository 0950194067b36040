"""The decoders of transformers have much in common: settings, masks by layer, names of weights.

A family of a decoder passes what differs. `gemma.py` is an example.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jaxformer.errors import ConfigError
from jaxformer.families.classes import DECODER_TASKS
from jaxformer.families.family import Family, Rule, rules
from jaxformer.families.settings import (
    COMMON,
    GATED,
    PROJECTIONS,
    Json,
    Key,
    get,
    layer_kinds,
    repeated,
    shortest_pattern,
)
from jaxformer.masks import Mask, causal, window
from jaxformer.models.config import ModelConfig

FULL, SLIDING = "full_attention", "sliding_attention"  # in `layer_types`
# {our field: their entry of config.json}
FIELDS = COMMON | {
    "num_kv_heads": Key("num_key_value_heads", None),
    "feedforward": Key("hidden_act", "silu", GATED),
    "norm_eps": Key("rms_norm_eps", 1e-6),
    "attention_dropout_rate": Key("attention_dropout", 0.0),
    "tie_embeddings": Key("tie_word_embeddings", False),
}
# {our name: their name} of the parameters of a layer
NORMS = {"attention_norm": "input_layernorm", "feedforward_norm": "post_attention_layernorm"}
ATTENTION = PROJECTIONS | {"out": "o_proj", "query_norm": "q_norm", "key_norm": "k_norm"}
GATED_MAPS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
EXPERT_MAPS = {"gate": "w1", "up": "w3", "down": "w2"}  # of Mixtral
ALL_BIASES = "query|key|value|out"
# of a tensor that has all three
QUERY_KEY_VALUE = tuple(f"layers/attention/{name}" for name in ("query", "key", "value"))


def decoder_rules(
    *,
    base: str = "model.",
    norms: Mapping[Any, str] = NORMS,
    attention: Mapping[Any, str] = ATTENTION,
    feedforward: Mapping[Any, str] = GATED_MAPS,
) -> list[Rule]:
    """The rules of a decoder whose layers are `{base}layers.{i}`: of norms, maps and heads."""
    layer = base + "layers.{}."
    heads = {"language_model/kernel": "lm_head.weight", "token_classification": "score"}
    return [
        *rules("", base, {"embedding/tokens": "embed_tokens.weight", "final_norm": "norm"}),
        *rules("layers/", layer, norms),
        *rules("layers/attention/", layer + "self_attn.", attention),
        *rules("layers/feedforward/", layer + "mlp.", feedforward),
        *rules("heads/", "", DECODER_TASKS | heads),
    ]


def decoder_family(read: Callable, write: Callable, rules: Callable) -> Family:
    """A family whose names begin with `model.` and whose head may be the embedding's table."""
    return Family(
        read=read,
        write=write,
        rules=rules,
        prefix="model.",
        aliases={"lm_head.weight": "model.embed_tokens.weight"},
    )


def head_width(c: Json, default: int | None = None) -> int | None:
    """Our `head_width`: their `head_dim`, or `default`; None if heads share hidden_size evenly."""
    width = get(c, "head_dim", None) or default
    if width is not None:
        return width
    heads, size = get(c, "num_attention_heads"), get(c, "hidden_size")
    return size // heads if size % heads else None


def write_widths(config: ModelConfig) -> Json:
    """`num_key_value_heads`, and `head_dim` where the config has a `head_width`."""
    c: Json = {"num_key_value_heads": config.kv_heads}
    return c | ({"head_dim": config.head_size} if config.head_width else {})


def read_biases(c: Json, flags: Mapping[str, str], always: str = "") -> str | bool:
    """Our `use_bias`: the maps `always`, and those of each flag {flag: maps} that is set."""
    maps = [always, *(maps for flag, maps in flags.items() if get(c, flag, False))]
    return "|".join(filter(None, maps)) or False


def write_biases(config: ModelConfig, flags: Mapping[str, str]) -> Json:
    """The inverse of `read_biases`."""
    return {flag: config.has_bias(maps.split("|")[-1]) for flag, maps in flags.items()}


def left_window(mask: Mask) -> int | None:
    """w of `causal() & window(w - 1)`, the number of keys that a query sees; else None."""
    sides = [conjunct.args[0] for conjunct in mask.conjuncts() if conjunct.args]
    return next((left + 1 for left in sides if mask == causal() & window(left)), None)


def sliding(width: int | None) -> Mask:
    """The mask of a layer whose queries see `width` keys, or all with None."""
    return causal() if width is None else causal() & window(width - 1)


def read_kinds(c: Json, default: list[str]) -> list[str]:
    """`layer_types`, or the default if there are none."""
    layers = get(c, "num_hidden_layers")
    return layer_kinds("layer_types", c.get("layer_types") or default, layers, FULL, SLIDING)


def read_masks(kinds: list[str], width: int | None) -> tuple[Mask, ...]:
    """The masks of layers of these kinds, as their shortest pattern. `width` is of the window."""
    if width is None and SLIDING in kinds:
        raise ConfigError("config.json: layer_types has sliding_attention; set sliding_window")
    masks = {FULL: causal(), SLIDING: sliding(width)}
    return shortest_pattern([masks[kind] for kind in kinds])


def write_masks(config: ModelConfig, default_width: int | None = None) -> Json:
    """The inverse of `read_masks`: `layer_types` and `sliding_window`.

    `default_width` is written for a model without a window, if theirs must have a number.
    """
    windows = [left_window(mask) for mask in repeated(config.masks, config)]
    kinds = [FULL if width is None else SLIDING for width in windows]
    width = next(filter(None, windows), default_width)
    return {"layer_types": kinds, "sliding_window": width}
