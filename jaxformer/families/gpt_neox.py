"""GPT-NeoX: Pythia and GPT-NeoX 20B.

Both sub-layers read the same residual stream, each through a norm of its own. A quarter of each
head is rotated. Black et al. 2022, arXiv:2204.06745.
"""

from collections.abc import Collection

from jaxformer.errors import ConfigError
from jaxformer.families.classes import DECODER_TASKS, heads_of_decoder, read_heads, write_heads
from jaxformer.families.decoder import NORMS, QUERY_KEY_VALUE
from jaxformer.families.family import Family, Rule, rules
from jaxformer.families.rotations import LENGTH, PARTIAL, read_rope, write_rope
from jaxformer.families.settings import (
    ACTIVATION,
    COMMON,
    Json,
    Key,
    get,
    only,
    read_fields,
    write_fields,
)
from jaxformer.models.blocks import parallel_norms
from jaxformer.models.config import ModelConfig
from jaxformer.ops.positions import Rope

PREFIX = "gpt_neox."
WITHOUT_ATTENTION = "up|down|norm"  # the maps with a bias in a model without attention_bias


FIELDS = COMMON | {
    "feedforward": Key("hidden_act", "gelu", ACTIVATION),
    "norm_eps": Key("layer_norm_eps", 1e-5),
    "block": Key("use_parallel_residual", True, {True: parallel_norms, False: None}),
    "dropout_rate": Key("hidden_dropout", 0.0),
    "attention_dropout_rate": Key("attention_dropout", 0.0),
    "tie_embeddings": Key("tie_word_embeddings", False),
}


def _read(c: Json, names: Collection[str]) -> ModelConfig:
    fields = read_fields(c, FIELDS)
    has_biases = get(c, "attention_bias", True)
    return ModelConfig(
        **fields,
        positions=_read_rotation(c, fields["d_model"] // fields["num_heads"]),
        use_bias=True if has_biases else WITHOUT_ATTENTION,
        heads=read_heads(c, "GPTNeoX", heads_of_decoder(c)),
    )


def _read_rotation(c: Json, head_width: int) -> Rope:
    """The rotation. Its base and its fraction have names of their own in older files."""
    entries = {name: c.get(name) for name in (LENGTH, "rope_parameters", "rope_scaling")}
    older = {"rope_theta": get(c, "rotary_emb_base", 1e4), PARTIAL: get(c, "rotary_pct", 0.25)}
    newer = (entries["rope_parameters"] or {}) | (entries["rope_scaling"] or {})
    rope = older | {name: value for name, value in newer.items() if value is not None}
    # transformers 5 does not read these two outside of rope_parameters
    only(c, rope_theta=rope["rope_theta"], partial_rotary_factor=rope[PARTIAL])
    if int(head_width * rope[PARTIAL]) % 2:
        raise ConfigError(
            f"config.json: {PARTIAL} or rotary_pct={rope[PARTIAL]}: expected an even number of "
            f"features of a head of {head_width} (hidden_size / num_attention_heads)"
        )
    return read_rope(entries, head_width, older["rope_theta"], fraction=older[PARTIAL])


def _write(config: ModelConfig) -> Json:
    c = write_fields(config, FIELDS) | write_heads(config.heads, "GPTNeoX", heads_of_decoder({}))
    c |= write_rope(config.positions)
    c |= {"rotary_emb_base": c["rope_theta"]}
    c |= {"rotary_pct": getattr(config.positions, "fraction", 1.0)}
    return c | {"attention_bias": config.has_bias("out")}


LAYER = PREFIX + "layers.{}."
LINEAR = {
    "attention/out": "attention.dense",
    "feedforward/up": "mlp.dense_h_to_4h",
    "feedforward/down": "mlp.dense_4h_to_h",
}
MODEL = {"embedding/tokens": "embed_in.weight", "final_norm": "final_layer_norm"}
RULES = [
    Rule(QUERY_KEY_VALUE, LAYER + "attention.query_key_value", "by_head"),
    *rules("layers/", LAYER, LINEAR | NORMS),
    *rules("", PREFIX, MODEL),
    *rules("heads/", "", DECODER_TASKS | {"language_model/kernel": "embed_out.weight"}),
]
FAMILIES = {
    "gpt_neox": Family(
        read=_read,
        write=_write,
        rules=lambda config: RULES,
        prefix=PREFIX,
        ignored=r"\.attention\.(masked_)?bias$|\.rotary_emb\.inv_freq$",  # buffers of old files
        heads=r"^(embed_out|score|classifier|qa_outputs)\.",
        aliases={"embed_out.weight": PREFIX + "embed_in.weight"},
    ),
}
