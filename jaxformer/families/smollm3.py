"""SmolLM3: LLaMA without a rotation in some layers, by default in every fourth.

Yang et al. 2025, arXiv:2501.18795, compare such models. Layers without a rotation may have a
window.
"""

from collections.abc import Collection
from typing import Any

from jaxformer.errors import ConfigError
from jaxformer.families.classes import SPAN, heads_of_decoder, read_heads, write_heads
from jaxformer.families.decoder import (
    ALL_BIASES,
    FIELDS,
    FULL,
    SLIDING,
    decoder_family,
    decoder_rules,
    head_width,
    read_biases,
    read_kinds,
    read_masks,
    write_biases,
    write_masks,
    write_widths,
)
from jaxformer.families.family import Rule
from jaxformer.families.rotations import read_rope, write_rope
from jaxformer.families.settings import (
    Json,
    Key,
    get,
    read_fields,
    repeated,
    shortest_pattern,
    write_fields,
)
from jaxformer.models.config import ModelConfig

SMOLLM3 = FIELDS | {
    "num_kv_heads": Key("num_key_value_heads", 4),
    "tie_embeddings": Key("tie_word_embeddings", True),
}
BIASES = {"attention_bias": ALL_BIASES, "mlp_bias": "gate|up|down"}
THETA = 2e6


def _read(c: Json, names: Collection[str]) -> ModelConfig:
    fields = read_fields(c, SMOLLM3)
    width = head_width(c)
    rotated = _read_rotated(c)
    rotation = read_rope(c, width or fields["d_model"] // fields["num_heads"], THETA)
    positions: Any = shortest_pattern([rotation if flag else None for flag in rotated])
    window = get(c, "sliding_window", None)
    has_window = get(c, "use_sliding_window", False) and window is not None
    # A given `layer_types` counts even without `use_sliding_window`, as in their eager attention.
    kinds = read_kinds(c, [SLIDING if has_window and not flag else FULL for flag in rotated])
    return ModelConfig(
        **fields,
        head_width=width,
        norm="rms_norm",
        positions=positions if len(positions) > 1 else positions[0],
        masks=read_masks(kinds, window),
        use_bias=read_biases(c, BIASES),
        heads=read_heads(c, "SmolLM3", heads_of_decoder(c)),
    )


def _read_rotated(c: Json) -> list[bool]:
    """Whether each layer has a rotation. In their `no_rope_layers`, 1 means that it has one."""
    layers = get(c, "num_hidden_layers")
    interval = get(c, "no_rope_layer_interval", 4)
    flags = c.get("no_rope_layers")
    if flags is None:
        return [(i + 1) % interval != 0 for i in range(layers)]
    is_list = isinstance(flags, list) and len(flags) >= layers
    if not is_list or any(flag not in (0, 1) for flag in flags):
        raise ConfigError(f"config.json: no_rope_layers={flags!r}: expected {layers} of 0 and 1")
    return [bool(flag) for flag in flags[:layers]]


def _write(config: ModelConfig) -> Json:
    c = write_fields(config, SMOLLM3)
    c |= write_heads(config.heads, "SmolLM3", heads_of_decoder({}))
    c |= write_widths(config)
    rotations = repeated(config.positions, config)
    c |= write_rope(next((rotation for rotation in rotations if rotation is not None), None))
    c["no_rope_layers"] = [int(rotation is not None) for rotation in rotations]
    c |= write_masks(config)
    c["use_sliding_window"] = c["sliding_window"] is not None
    return c | write_biases(config, BIASES)


def _rules(config: ModelConfig) -> list[Rule]:
    return decoder_rules(base="transformer." if SPAN in config.heads else "model.")


FAMILIES = {"smollm3": decoder_family(_read, _write, _rules)}
