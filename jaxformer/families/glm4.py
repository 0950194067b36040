"""GLM-4 of 2025: norms on both sides of a sub-layer, and a rotation of half of each head.

Pairs of features are neighbours. The matrices `gate` and `up` are one tensor.
"""

from collections.abc import Collection

from jaxformer.families.classes import heads_of_decoder, read_heads, write_heads
from jaxformer.families.decoder import FIELDS, decoder_family, decoder_rules
from jaxformer.families.family import Rule
from jaxformer.families.rotations import PARTIAL, read_rope, write_rope
from jaxformer.families.settings import Json, Key, get, read_fields, write_fields
from jaxformer.models.blocks import sandwich
from jaxformer.models.config import ModelConfig

FRACTION = 0.5  # of a head that is rotated, in a config.json that does not say
BIASES = "query|key|value"
GLM4_FIELDS = FIELDS | {
    "head_width": Key("head_dim", 128),
    "num_kv_heads": Key("num_key_value_heads", 2),
    "norm_eps": Key("rms_norm_eps", 1.5625e-7),
}
SANDWICH = {
    "attention_norm": "input_layernorm",
    "attention_out_norm": "post_self_attn_layernorm",
    "feedforward_norm": "post_attention_layernorm",
    "feedforward_out_norm": "post_mlp_layernorm",
}
MAPS = {("gate", "up"): "gate_up_proj", "down": "down_proj"}


def _read(c: Json, names: Collection[str]) -> ModelConfig:
    fields = read_fields(c, GLM4_FIELDS)
    width = fields["head_width"]
    return ModelConfig(
        **fields,
        norm="rms_norm",
        block=sandwich,
        positions=read_rope(c, width, fraction=FRACTION, layout="interleaved"),
        use_bias=BIASES if get(c, "attention_bias", True) else False,
        heads=read_heads(c, "Glm4", heads_of_decoder(c)),
    )


def _write(config: ModelConfig) -> Json:
    c = write_fields(config, GLM4_FIELDS)
    c |= write_heads(config.heads, "Glm4", heads_of_decoder({}))
    c |= {"num_key_value_heads": config.kv_heads, "head_dim": config.head_size}
    c |= {"attention_bias": config.has_bias("value")} | write_rope(config.positions)
    if getattr(config.positions, "fraction", None) == 1:  # the default is another
        c[PARTIAL] = c["rope_parameters"][PARTIAL] = 1.0
    return c


def _rules(config: ModelConfig) -> list[Rule]:
    return decoder_rules(norms=SANDWICH, feedforward=MAPS)


FAMILIES = {"glm4": decoder_family(_read, _write, _rules)}
