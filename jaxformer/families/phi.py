"""Phi and Phi-3.

Phi (1, 1.5, 2) has parallel sub-layers after one norm, biases everywhere, and rotates a part of
each head: Gunasekar et al. 2023, arXiv:2306.11644. Phi-3 (3, 3.5, 4) is a LLaMA that stores
queries, keys and values as one matrix, and gate and up as another: Abdin et al. 2024,
arXiv:2404.14219.
"""

from collections.abc import Collection
from typing import Any

from jaxformer.errors import ConfigError
from jaxformer.families.classes import heads_of_decoder, read_heads, write_heads
from jaxformer.families.decoder import (
    ATTENTION,
    FIELDS,
    GATED_MAPS,
    decoder_family,
    decoder_rules,
    head_width,
    sliding,
    write_masks,
    write_widths,
)
from jaxformer.families.family import Rule
from jaxformer.families.rotations import LENGTH, ORIGINAL, PARTIAL, read_rope, write_rope
from jaxformer.families.settings import (
    ACTIVATION,
    Json,
    Key,
    get,
    read_fields,
    write_fields,
)
from jaxformer.models.blocks import parallel
from jaxformer.models.config import LanguageModel, ModelConfig
from jaxformer.ops.positions import LongRoPE, Rope
from jaxformer.zoo.qk_norm import qk_model_norm

# They have a rate for the embedding, too, which changes no number of a trained model.
DROPOUT = {"dropout_rate": Key("resid_pdrop", 0.0)}
PHI = (
    FIELDS
    | DROPOUT
    | {
        "feedforward": Key("hidden_act", "gelu_new", ACTIVATION),
        "norm_eps": Key("layer_norm_eps", 1e-5),
        "mixer": Key("qk_layernorm", False, {False: None, True: qk_model_norm}),
    }
)
PHI3 = FIELDS | DROPOUT | {"norm_eps": Key("rms_norm_eps", 1e-5)}
FRACTION = 0.5  # of Phi's heads that is rotated
ORIGINAL_LENGTH = 4096  # of Phi-3
PHI_MAPS = {
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "out": "dense",
    "query_norm": "q_layernorm",
    "key_norm": "k_layernorm",
}
PHI3_MAPS = {("query", "key", "value"): "qkv_proj", "out": ATTENTION["out"]}
PHI3_FEEDFORWARD = {("gate", "up"): "gate_up_proj", "down": GATED_MAPS["down"]}


def _classes(c: Json, **language_model: Any) -> dict[str, tuple]:
    """{end of a class name: its heads}. No class answers questions."""
    kinds = heads_of_decoder(c) | {"ForCausalLM": (LanguageModel(**language_model),)}
    return {kind: heads for kind, heads in kinds.items() if kind != "ForQuestionAnswering"}


def _read_phi(c: Json, names: Collection[str]) -> ModelConfig:
    fields = read_fields(c, PHI)
    width = head_width(c)
    rotated = width or fields["d_model"] // fields["num_heads"]
    return ModelConfig(
        **fields,
        head_width=width,
        block=parallel,
        positions=read_rope(c, rotated, fraction=FRACTION),
        heads=read_heads(c, "Phi", _classes(c, bias=True)),
    )


def _write_phi(config: ModelConfig) -> Json:
    c = write_fields(config, PHI) | {"embd_pdrop": config.dropout_rate}
    c |= write_heads(config.heads, "Phi", _classes({}, bias=True))
    c |= write_widths(config)
    c |= {PARTIAL: 1.0} | write_rope(config.positions)
    c["rope_parameters"] = {PARTIAL: 1.0} | c["rope_parameters"]
    return c


def _phi_rules(config: ModelConfig) -> list[Rule]:
    shared = decoder_rules(
        norms={"norm": "input_layernorm"},
        attention=PHI_MAPS,
        feedforward={"up": "fc1", "down": "fc2"},
    )
    return [
        *(rule for rule in shared if rule.ours != "final_norm"),
        Rule("final_norm", "model.final_layernorm"),
        Rule("heads/language_model/bias", "lm_head.bias"),
    ]


def _read_phi3(c: Json, names: Collection[str]) -> ModelConfig:
    fields = read_fields(c, PHI3)
    width = head_width(c)
    return ModelConfig(
        **fields,
        head_width=width,
        norm="rms_norm",
        positions=_read_rotation(c, width or fields["d_model"] // fields["num_heads"]),
        masks=(sliding(get(c, "sliding_window", None)),),
        use_bias=False,
        heads=read_heads(c, "Phi3", _classes(c)),
    )


def _read_rotation(c: Json, width: int) -> Rope:
    """The rotation of Phi-3: with LongRoPE, or without a scaling.

    The original length stands beside the entries of the rotation.
    """
    settings = {key: c.get(key) for key in ("rope_theta", PARTIAL, LENGTH)}
    settings[ORIGINAL] = get(c, ORIGINAL, ORIGINAL_LENGTH)
    for place in ("rope_parameters", "rope_scaling"):
        settings[place] = _with_newer_name(c.get(place))
    rotation = read_rope(settings, width, fraction=1.0)
    if not isinstance(rotation.scaling, LongRoPE | None):
        raise ConfigError("config.json: rope_type: expected default or longrope in a Phi-3")
    return rotation


def _with_newer_name(rope: Any) -> Any:
    """The first files of Phi-3 call LongRoPE su or yarn."""
    if not isinstance(rope, dict):
        return rope
    older = {key: "longrope" for key in ("type", "rope_type") if rope.get(key) in ("su", "yarn")}
    return rope | older


def _write_phi3(config: ModelConfig) -> Json:
    c = write_fields(config, PHI3) | {"embd_pdrop": config.dropout_rate}
    c |= write_heads(config.heads, "Phi3", _classes({}))
    c |= write_widths(config)
    c |= write_rope(config.positions)
    scaling = getattr(config.positions, "scaling", None)
    c[ORIGINAL] = getattr(scaling, "original_length", ORIGINAL_LENGTH)
    c["sliding_window"] = write_masks(config)["sliding_window"]
    return c | _older_scaling(config, c)


def _older_scaling(config: ModelConfig, c: Json) -> Json:
    """`rope_scaling` for transformers 4, whose Phi-3 takes three entries and computes the others.

    It is left alone if they would be computed otherwise.
    """
    if c["rope_scaling"] is None:
        return {}
    entries = {name: c["rope_scaling"][name] for name in ("type", "short_factor", "long_factor")}
    older = {"rope_scaling": entries}
    rotation = _read_rotation(c | older | {"rope_parameters": None}, config.head_size)
    return older if rotation == config.positions else {}


def _phi3_rules(config: ModelConfig) -> list[Rule]:
    return decoder_rules(attention=PHI3_MAPS, feedforward=PHI3_FEEDFORWARD)


FAMILIES = {
    "phi": decoder_family(_read_phi, _write_phi, _phi_rules),
    "phi3": decoder_family(_read_phi3, _write_phi3, _phi3_rules),
}
