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
    write_widths,
)
from jaxformer.families.family import Family, Rule
from jaxformer.families.rotations import read_rope, read_ropes, write_rope, write_ropes
from jaxformer.families.settings import (
    Json,
    Key,
    get,
    pattern_of,
    read_fields,
    repeated,
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
THETAS = {FULL: 5e5, SLIDING: 5e5}  # of OLMo 3


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
        positions = pattern_of([rotations[kind] for kind in kinds])
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
    """{kind of layer: its rotation}.

    transformers 5 applies an older file's `rope_theta` to full layers alone, so it must be the
    default. Raises ConfigError for another one.
    """
    full = (c.get("rope_parameters") or {}).get(FULL) or {}
    theta = get(c, "rope_theta", THETAS[FULL])
    if theta not in (THETAS[FULL], full.get("rope_theta")):
        raise ConfigError(
            f"config.json: rope_theta={theta}: give each kind of layer its own, in rope_parameters"
        )
    return read_ropes(c, head_width, THETAS)


def _write(olmo: Olmo, config: ModelConfig) -> Json:
    c = write_fields(config, OLMO_FIELDS)
    c |= write_heads(config.heads, olmo.prefix, heads_of_decoder({}))
    c |= write_widths(config)
    c |= write_biases(config, BIASES)
    if not olmo.has_windows:
        return c | write_rope(config.positions)
    c |= write_masks(config, WINDOW)
    ropes = dict(zip(c["layer_types"], repeated(config.positions, config), strict=True))
    return c | write_ropes(ropes, THETAS)


def _rules(config: ModelConfig) -> list[Rule]:
    return decoder_rules(norms=NORMS)


FAMILIES: dict[str, Family] = {
    kind: decoder_family(partial(_read, olmo), partial(_write, olmo), _rules)
    for kind, olmo in OLMOS.items()
}
