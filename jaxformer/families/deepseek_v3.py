"""DeepSeek-V3 and R1: latent attention, and experts chosen in groups by sigmoid scores and a bias.

The modules for multi-token prediction, in files of the 61 layers as layer 61, are left out, as
transformers leaves them out.
"""

import math
from collections.abc import Collection
from typing import Any

from jaxformer.errors import ConfigError
from jaxformer.families.classes import heads_of_decoder, read_heads, write_heads
from jaxformer.families.decoder import (
    FIELDS,
    GATED_MAPS,
    decoder_family,
    decoder_rules,
    read_biases,
    write_biases,
)
from jaxformer.families.family import Rule, rules
from jaxformer.families.rotations import read_rope, write_rope
from jaxformer.families.settings import (
    GATED,
    Json,
    Key,
    get,
    only,
    read_fields,
    repeated,
    write_fields,
)
from jaxformer.models.config import ModelConfig
from jaxformer.ops.positions import Rope
from jaxformer.zoo.grouped_experts import GroupedExperts
from jaxformer.zoo.latent_attention import LatentAttention

BIASES = {"attention_bias": "query_latent|latent|shared_key|out"}
NORMS = {"attention_norm": "input_layernorm", "feedforward_norm": "post_attention_layernorm"}
ATTENTION = {
    "query_latent": "q_a_proj",
    "query_norm": "q_a_layernorm",
    ("latent", "shared_key"): "kv_a_proj_with_mqa",
    "latent_norm": "kv_a_layernorm",
    "out": "o_proj",
}
MIXER = {
    "rank": Key("kv_lora_rank", 512),
    "rotated": Key("qk_rope_head_dim", 64),
    "value_width": Key("v_head_dim", 128),
}
EXPERTS = {
    "experts": Key("n_routed_experts", 256),
    "top_k": Key("num_experts_per_tok", 8),
    "groups": Key("n_group", 8),
    "top_groups": Key("topk_group", 4),
    "activation": Key("hidden_act", "silu", GATED),
    "d_ff": Key("moe_intermediate_size", 2048),
    "normalise": Key("norm_topk_prob", True),
    "scale": Key("routed_scaling_factor", 2.5),
    "bias_rate": Key("bias_update_rate", 0.0),  # ours: for training, no other reader has it
}
QUERY_RANK, CONTENT, DENSE = 1536, 128, 3  # defaults
MSCALE = "mscale_all_dim"


def _read(c: Json, names: Collection[str]) -> ModelConfig:
    only(c, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    only(c, num_key_value_heads=get(c, "num_attention_heads"))
    fields: dict[str, Any] = read_fields(c, FIELDS)
    fields["num_kv_heads"] = None
    mixer = LatentAttention(**read_fields(c, MIXER), query_rank=_read_query_rank(c))
    width = get(c, "qk_nope_head_dim", CONTENT) + mixer.rotated
    layout = "interleaved" if get(c, "rope_interleave", True) else "half"
    positions = read_rope(c, mixer.rotated, layout=layout)
    layers, dense = fields["num_layers"], get(c, "first_k_dense_replace", DENSE)
    of_experts = read_fields(c, EXPERTS)
    if dense < layers:
        experts = _experts(c, of_experts)
        kinds = [fields["feedforward"]] * dense + [experts] * (layers - dense)
        fields["feedforward"] = tuple(kinds) if dense else experts
    return ModelConfig(
        **fields,
        head_width=width,
        norm="rms_norm",
        mixer=mixer,
        positions=positions,
        attention_scale=_read_scale(c, width),
        use_bias=read_biases(c, BIASES),
        heads=read_heads(c, "DeepseekV3", heads_of_decoder(c)),
    )


def _read_query_rank(c: Json) -> int | None:
    """`q_lora_rank`; a null is a model whose queries have no latent."""
    has_none = "q_lora_rank" in c and c["q_lora_rank"] is None
    return None if has_none else get(c, "q_lora_rank", QUERY_RANK)


def _experts(c: Json, fields: Json) -> GroupedExperts:
    """The experts of a layer. Raises ConfigError for numbers that do not fit together."""
    E, groups = fields["experts"], fields["groups"]
    if 2 * groups > E:
        raise ConfigError(
            f"config.json: n_group={groups}: expected groups of at least 2 of the "
            f"n_routed_experts={E}"
        )
    try:
        return GroupedExperts(**fields, shared=get(c, "n_shared_experts", 1) * fields["d_ff"])
    except ConfigError as error:
        shown = ", ".join(f"{key.name}={c.get(key.name)}" for key in EXPERTS.values())
        raise ConfigError(f"config.json: {error}; got {shown}") from None


def _read_scale(c: Json, width: int) -> float | None:
    """The factor of scores with `mscale_all_dim`: it grows with the factor of the context."""
    rope = (c.get("rope_scaling") or {}) | (c.get("rope_parameters") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default" or not get(rope, MSCALE, 0.0):
        return None
    if kind == "longrope":
        raise ConfigError(f"config.json: {MSCALE}={rope[MSCALE]}: not supported with longrope")
    return width**-0.5 * _mscale(get(rope, "factor", float), rope[MSCALE]) ** 2


def _mscale(factor: float, weight: float) -> float:
    """1 + 0.1 weight log(factor), and 1 for a factor below 1."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _write(config: ModelConfig) -> Json:
    kinds = repeated(config.feedforward, config)
    mixer: Any = config.mixer
    experts = kinds[-1]
    c = write_fields(config, FIELDS)
    c |= write_heads(config.heads, "DeepseekV3", heads_of_decoder({}))
    c |= write_fields(mixer, MIXER) | {"q_lora_rank": mixer.query_rank}
    c["v_head_dim"] = mixer.value_width or config.head_size
    c["qk_nope_head_dim"] = config.head_size - mixer.rotated
    c["num_key_value_heads"] = config.num_heads
    c["first_k_dense_replace"] = sum(isinstance(kind, str) for kind in kinds)
    if isinstance(experts, GroupedExperts):
        c |= write_fields(experts, EXPERTS)
        width = c["moe_intermediate_size"] = experts.d_ff or config.ff_width
        c["n_shared_experts"] = experts.shared // width
    c |= write_biases(config, BIASES) | write_rope(config.positions)
    if isinstance(config.positions, Rope):
        c["rope_interleave"] = config.positions.layout == "interleaved"
    return _with_scale(config, c) | {"num_nextn_predict_layers": 0}


def _with_scale(config: ModelConfig, c: Json) -> Json:
    """config.json with the `mscale_all_dim` of the config's factor of scores."""
    stretch = getattr(getattr(config.positions, "scaling", None), "factor", 1.0)
    if config.attention_scale is None or stretch <= 1:
        return c
    grown = math.sqrt(config.attention_scale * config.head_size**0.5)
    weight = round((grown - 1) / (0.1 * math.log(stretch)), 9)
    both = ("rope_parameters", "rope_scaling")
    return c | {name: c[name] | {MSCALE: weight} for name in both}


def _rules(config: ModelConfig) -> list[Rule]:
    layer = "model.layers.{}."
    attention, experts = layer + "self_attn.", layer + "mlp."
    of_latent = "layers/attention/key", "layers/attention/value"
    mixer: Any = config.mixer
    query = "q_proj" if mixer.query_rank is None else "q_b_proj"
    ours = "layers/feedforward/"
    return [
        *decoder_rules(attention=ATTENTION | {"query": query}, feedforward={}),
        Rule(of_latent, attention + "kv_b_proj", "by_head"),
        *_feedforward_rules(config, ours, experts),
        Rule(ours + "router", experts + "gate"),
        Rule(ours + "choice_bias", experts + "gate.e_score_correction_bias"),
        *rules(ours + "shared/", experts + "shared_experts.", GATED_MAPS),
    ]


def _feedforward_rules(config: ModelConfig, ours: str, theirs: str) -> list[Rule]:
    """The rules of dense layers and of experts, whose modules have the same names with us."""
    kinds = repeated(config.feedforward, config)
    found = []
    for module, is_dense in ((theirs, True), (theirs + "experts.{}.", False)):
        layers = tuple(i for i, kind in enumerate(kinds) if isinstance(kind, str) == is_dense)
        found += [rule._replace(layers=layers) for rule in rules(ours, module, GATED_MAPS)]
    return found


FAMILY = decoder_family(_read, _write, _rules)
FAMILIES = {
    "deepseek_v3": FAMILY._replace(
        ignored=FAMILY.ignored + r"|^model\.layers\.61\.",
        other_names={"num_local_experts": "n_routed_experts"},
    )
}
