"""StableLM: layer norms, a rotation of a quarter of each head, and in some models parallel layers.

StableLM 2 12B has a norm for each head of queries and keys.
"""

from collections.abc import Collection

from jaxformer.families.classes import heads_of_decoder, read_heads, write_heads
from jaxformer.families.decoder import (
    FIELDS,
    NORMS,
    decoder_family,
    decoder_rules,
    read_biases,
    write_biases,
)
from jaxformer.families.family import Rule
from jaxformer.families.rotations import PARTIAL, read_rope, write_rope
from jaxformer.families.settings import PROJECTIONS, Json, Key, get, only, read_fields, write_fields
from jaxformer.models.blocks import parallel
from jaxformer.models.config import ModelConfig
from jaxformer.zoo.qk_layer_norm import qk_layer_norm

FRACTION = 0.25  # of a head that is rotated, in a config.json that does not say
BIASES = {"use_qkv_bias": "query|key|value"}
STABLELM_FIELDS = FIELDS | {
    "num_kv_heads": Key("num_key_value_heads", 32),
    "norm_eps": Key("layer_norm_eps", 1e-5),
    "dropout_rate": Key("hidden_dropout", 0.0),
}
ATTENTION = PROJECTIONS | {
    "out": "o_proj",
    # the norm of each head is a module
    "query_norm": "q_layernorm.norms.{}",
    "key_norm": "k_layernorm.norms.{}",
}


def _read(c: Json, names: Collection[str]) -> ModelConfig:
    fields = read_fields(c, STABLELM_FIELDS)
    width = fields["d_model"] // fields["num_heads"]
    only(c, head_dim=width)
    return ModelConfig(
        **fields,
        norm="layer_norm",
        block=parallel if get(c, "use_parallel_residual", False) else None,
        mixer=qk_layer_norm if get(c, "qk_layernorm", False) else None,
        positions=read_rope(c, width, fraction=FRACTION),
        use_bias=read_biases(c, BIASES, always="norm"),
        heads=read_heads(c, "StableLm", heads_of_decoder(c)),
    )


def _write(config: ModelConfig) -> Json:
    c = write_fields(config, STABLELM_FIELDS)
    c |= write_heads(config.heads, "StableLm", heads_of_decoder({}))
    c["num_key_value_heads"] = config.kv_heads
    c |= write_biases(config, BIASES) | write_rope(config.positions)
    if getattr(config.positions, "fraction", None) == 1:  # the default is another
        c[PARTIAL] = c["rope_parameters"][PARTIAL] = 1.0
    c["use_parallel_residual"] = config.block is parallel
    c["qk_layernorm"] = config.mixer is qk_layer_norm
    return c


def _rules(config: ModelConfig) -> list[Rule]:
    return decoder_rules(norms=NORMS | {"norm": "input_layernorm"}, attention=ATTENTION)


FAMILIES = {"stablelm": decoder_family(_read, _write, _rules)}
