"""OLMo 2 and OLMo 3.

Norms stand behind the sub-layers, and queries and keys have norms over all heads. OLMo 3 has a
window in three layers of four, and a rotation for each kind of layer.
"""

from collections.abc import Collection
from functools import partial
from typing import Any, NamedTuple

from jaxformer.errors import ConfigError
from jaxformer.families.classes import heads_of_decoder, read_heads, write_heads
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
)
from jaxformer.families.family import Family, Rule
from jaxformer.families.rotations import read_rope, write_rope
from jaxformer.families.settings import (
    Json,
    Key,
    get,
    only,
    read_fields,
    repeated,
    shortest_pattern,
    write_fields,
)
from jaxformer.models.blocks import output_norm
from jaxformer.models.config import ModelConfig
from jaxformer.ops.positions import Rope
from jaxformer.zoo.qk_norm import qk_norm_full

BIASES = {"attention_bias": ALL_BIASES}
NORMS = {
    "attention_out_norm": "post_attention_layernorm",
    "feedforward_out_norm": "post_feedforward_layernorm",
}
OLMO_FIELDS = FIELDS | {"norm_eps": Key("rms_norm_eps", 1e-5)}
WINDOW, PERIOD = 4096, 4  # of OLMo 3: the last of four layers sees everything
THETA = 5e5  # of OLMo 3


class Olmo(NamedTuple):
    """One of the two versions."""

    prefix: str  # of its class names
    has_windows: bool = False  # whether layers are of two kinds


OLMOS = {"olmo2": Olmo("Olmo2"), "olmo3": Olmo("Olmo3", has_windows=True)}


def _read(olmo: Olmo, c: Json, names: Collection[str]) -> ModelConfig:
    fields = read_fields(c, OLMO_FIELDS)
    width = head_width(c)
    rotated = width or fields["d_model"] // fields["num_heads"]
    positions: Any
    if olmo.has_windows:
        layers = range(fields["num_layers"])
        kinds = read_kinds(c, [SLIDING if (i + 1) % PERIOD else FULL for i in layers])
        fields["masks"] = read_masks(kinds, get(c, "sliding_window", WINDOW))
        rotations = _read_rotations(c, rotated)
        pattern = shortest_pattern([rotations[kind] for kind in kinds])
        positions = pattern if len(pattern) > 1 else pattern[0]
    else:
        if SLIDING in (c.get("layer_types") or ()):
            raise ConfigError(f"config.json: layer_types={c['layer_types']}: not of an OLMo 2")
        positions = read_rope(c, rotated)
    return ModelConfig(
        **fields,
        head_width=width,
        norm="rms_norm",
        block=output_norm,
        mixer=qk_norm_full,
        positions=positions,
        use_bias=read_biases(c, BIASES),
        heads=read_heads(c, olmo.prefix, heads_of_decoder(c)),
    )


def _read_rotations(c: Json, head_width: int) -> dict[str, Rope]:
    """{kind of layer: its rotation}. Before transformers 5, only full layers had a scaling.

    transformers 5 applies an older file's `rope_theta` to full layers alone, so it must be the
    default. Raises ConfigError for another one.
    """
    rope = c.get("rope_parameters") or {}
    full = rope.get(FULL) or {}
    local = {"rope_theta": THETA} | (rope.get(SLIDING) or {})
    theta = get(c, "rope_theta", THETA)
    if theta not in (THETA, full.get("rope_theta")):
        raise ConfigError(
            f"config.json: rope_theta={theta}: give each kind of layer its own, in rope_parameters"
        )
    older = (c.get("rope_scaling") or {}) | {"rope_theta": theta}
    for entries in (older, full, local):
        only(entries, truncate=True)  # transformers 5.23 does not look for it here
    length = {"max_position_embeddings": c["max_position_embeddings"]}
    return {
        FULL: read_rope(length | {"rope_parameters": older | full}, head_width),
        SLIDING: read_rope(length | {"rope_parameters": local}, head_width),
    }


def _write(olmo: Olmo, config: ModelConfig) -> Json:
    c = write_fields(config, OLMO_FIELDS)
    c |= write_heads(config.heads, olmo.prefix, heads_of_decoder({}))
    c["num_key_value_heads"] = config.kv_heads
    if config.head_width:
        c["head_dim"] = config.head_size
    c |= write_biases(config, BIASES)
    if not olmo.has_windows:
        return c | write_rope(config.positions)
    c |= write_masks(config)
    c["sliding_window"] = c["sliding_window"] or WINDOW  # theirs refuses none
    return c | _write_rotations(config, c["layer_types"])


def _write_rotations(config: ModelConfig, kinds: list[str]) -> Json:
    """The inverse of `_read_rotations`, for transformers 5 and for older readers."""
    written = dict(zip(kinds, map(write_rope, repeated(config.positions, config)), strict=True))
    default = write_rope(Rope(THETA))
    full, local = (written.get(kind, default) for kind in (FULL, SLIDING))
    return {
        "rope_parameters": {FULL: full["rope_parameters"], SLIDING: local["rope_parameters"]},
        "rope_theta": full["rope_theta"],
        "rope_scaling": full["rope_scaling"],
    }


def _rules(config: ModelConfig) -> list[Rule]:
    return decoder_rules(norms=NORMS)


FAMILIES: dict[str, Family] = {
    kind: decoder_family(partial(_read, olmo), partial(_write, olmo), _rules)
    for kind, olmo in OLMOS.items()
}
