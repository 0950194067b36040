"""gpt-oss: attention sinks, experts with a clamped gate, and a window in every second layer.

Published files have 4-bit weights of experts. transformers saves them as plain tensors, which this
reads.
"""

from collections.abc import Collection
from typing import Any

from jaxformer.families.classes import heads_of_decoder, read_heads, write_heads
from jaxformer.families.decoder import (
    ALL_BIASES,
    ATTENTION,
    FIELDS,
    FULL,
    SLIDING,
    decoder_family,
    decoder_rules,
    read_biases,
    read_kinds,
    read_masks,
    write_biases,
    write_masks,
)
from jaxformer.families.family import Rule, rules
from jaxformer.families.rotations import read_rope, write_rope
from jaxformer.families.settings import Json, Key, get, read_fields, write_fields
from jaxformer.models.config import ModelConfig
from jaxformer.zoo.clamped_mixture import ClampedMixture
from jaxformer.zoo.sinks import sinks

BIASES = {"attention_bias": ALL_BIASES}
WINDOW = 128
THETA = 150_000.0
# the rotation of a file without one
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
GPT_OSS = {name: key for name, key in FIELDS.items() if name != "feedforward"} | {
    "num_kv_heads": Key("num_key_value_heads", 8),
    "norm_eps": Key("rms_norm_eps", 1e-5),
}
MIXTURE = {
    "experts": Key("num_local_experts", 128),
    "top_k": Key("num_experts_per_tok", 4),
    "alpha": Key("swiglu_alpha", 1.702),
    "limit": Key("swiglu_limit", 7.0),
    "balance_loss": Key("router_aux_loss_coef", 0.001),
}


def _read(c: Json, names: Collection[str]) -> ModelConfig:
    width = get(c, "head_dim", 64)
    kinds = read_kinds(c, [FULL if i % 2 else SLIDING for i in range(get(c, "num_hidden_layers"))])
    return ModelConfig(
        **read_fields(c, GPT_OSS),
        head_width=width,
        feedforward=ClampedMixture(**read_fields(c, MIXTURE)),
        norm="rms_norm",
        mixer=sinks,
        positions=_read_rope(c, width),
        masks=read_masks(kinds, get(c, "sliding_window", WINDOW)),
        use_bias=read_biases(c, BIASES) if "attention_bias" in c else ALL_BIASES,
        heads=read_heads(c, "GptOss", heads_of_decoder(c)),
    )


def _read_rope(c: Json, width: int) -> Any:
    """The rotation: YaRN if the file has none."""
    if c.get("rope_parameters") is None and c.get("rope_scaling") is None:
        of_file = {name: c.get(name) for name in ("rope_theta", "max_position_embeddings")}
        return read_rope(of_file | {"rope_parameters": YARN}, width, THETA)
    return read_rope(c, width, THETA)


def _write(config: ModelConfig) -> Json:
    c = write_fields(config, GPT_OSS)
    c |= write_fields(config.feedforward, MIXTURE) | {"hidden_act": "silu"}
    c |= write_heads(config.heads, "GptOss", heads_of_decoder({}))
    c |= {"num_key_value_heads": config.kv_heads, "head_dim": config.head_size}
    c |= write_rope(config.positions)
    c |= write_biases(config, BIASES)
    c |= write_masks(config, WINDOW)
    return c


def _rules(config: ModelConfig) -> list[Rule]:
    mlp = "model.layers.{}.mlp."
    experts = {
        "gate_up/kernel": "gate_up_proj",
        "gate_up/bias": "gate_up_proj_bias",
        "down/kernel": "down_proj",
        "down/bias": "down_proj_bias",
    }
    return [
        *decoder_rules(attention=ATTENTION | {"sinks": "sinks"}, feedforward={"router": "router"}),
        *rules("layers/feedforward/", mlp + "experts.", experts),
    ]


FAMILY = decoder_family(_read, _write, _rules)
FAMILIES = {"gpt_oss": FAMILY._replace(other_names={"num_experts": "num_local_experts"})}
