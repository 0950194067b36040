"""GPT-2."""

from collections.abc import Collection

from jaxformer.families.classes import DECODER_TASKS, heads_of_decoder, read_heads, write_heads
from jaxformer.families.family import Family, Rule, rules
from jaxformer.families.settings import (
    ACTIVATION,
    COMMON,
    Json,
    Key,
    only,
    read_fields,
    write_fields,
)
from jaxformer.models.config import ModelConfig
from jaxformer.zoo.temperature import inverse_depth_scale

GPT2 = COMMON | {
    "context_length": Key("n_positions"),
    "d_model": Key("n_embd"),
    "num_layers": Key("n_layer"),
    "num_heads": Key("n_head"),
    "d_ff": Key("n_inner", None),
    "dropout_rate": Key("resid_pdrop", 0.1),
    "attention_dropout_rate": Key("attn_pdrop", 0.1),
    "feedforward": Key("activation_function", "gelu_new", ACTIVATION),
    "norm_eps": Key("layer_norm_epsilon", 1e-5),
    "attention_scale": Key("scale_attn_weights", True, {True: None, False: 1.0}),
    "mixer": Key(
        "scale_attn_by_inverse_layer_idx", False, {False: None, True: inverse_depth_scale}
    ),
}


def _read_gpt2(c: Json, names: Collection[str]) -> ModelConfig:
    only(c, add_cross_attention=False)
    fields = read_fields(c, GPT2)
    heads = read_heads(c, "GPT2", heads_of_decoder(c, "LMHeadModel"))
    return ModelConfig(**fields, heads=heads)


def _write_gpt2(config: ModelConfig) -> Json:
    heads = write_heads(config.heads, "GPT2", heads_of_decoder({}, "LMHeadModel"))
    return write_fields(config, GPT2) | heads | {"embd_pdrop": config.dropout_rate}


OTHER_NAMES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
GPT2_LAYER = "transformer.h.{}."
GPT2_LINEAR = {
    "attention/out": "attn.c_proj",
    "feedforward/up": "mlp.c_fc",
    "feedforward/down": "mlp.c_proj",
}
GPT2_QKV = tuple(f"layers/attention/{name}" for name in ("query", "key", "value"))
GPT2_MODEL = {
    "embedding/tokens": "wte.weight",
    "embedding/positions": "wpe.weight",
    "final_norm": "ln_f",
}
GPT2_RULES = [
    Rule(GPT2_QKV, GPT2_LAYER + "attn.c_attn", "conv1d"),
    *rules("layers/", GPT2_LAYER, GPT2_LINEAR, "conv1d"),
    *rules("", "transformer.", GPT2_MODEL),
    *rules("layers/", GPT2_LAYER, {"attention_norm": "ln_1", "feedforward_norm": "ln_2"}),
    *rules("heads/", "", DECODER_TASKS | {"language_model/kernel": "lm_head.weight"}),
]
GPT2_MASKS = r"\.attn\.(masked_)?bias$"  # buffers of old files
FAMILIES = {
    "gpt2": Family(
        _read_gpt2,
        _write_gpt2,
        lambda config: GPT2_RULES,
        "transformer.",
        GPT2_MASKS,
        aliases={"lm_head.weight": "transformer.wte.weight"},
        other_names=OTHER_NAMES,
    ),
}
