"""StarCoder2: Mistral with LayerNorm, a feed-forward without a gate, and biases.

Lozhkov et al. 2024, arXiv:2402.19173.
"""

from collections.abc import Collection

from jaxformer.families.classes import heads_of_decoder, read_heads, write_heads
from jaxformer.families.decoder import (
    FIELDS,
    decoder_family,
    decoder_rules,
    head_width,
    sliding,
    write_masks,
    write_widths,
)
from jaxformer.families.family import Rule
from jaxformer.families.rotations import read_rope, write_rope
from jaxformer.families.settings import ACTIVATION, Json, Key, get, read_fields, write_fields
from jaxformer.models.config import ModelConfig

STARCODER2 = FIELDS | {
    "num_kv_heads": Key("num_key_value_heads", 2),
    "feedforward": Key("hidden_act", "gelu_pytorch_tanh", ACTIVATION),
    "norm_eps": Key("norm_epsilon", 1e-5),
    "dropout_rate": Key("residual_dropout", 0.0),
    "init_std": Key("initializer_range", 0.018042),
    "tie_embeddings": Key("tie_word_embeddings", True),
}
FEEDFORWARD = {"up": "c_fc", "down": "c_proj"}


def _classes(c: Json) -> dict[str, tuple]:
    """{end of a class name: its heads}. No class answers questions."""
    kinds = heads_of_decoder(c)
    return {kind: heads for kind, heads in kinds.items() if kind != "ForQuestionAnswering"}


def _read(c: Json, names: Collection[str]) -> ModelConfig:
    fields = read_fields(c, STARCODER2)
    width = head_width(c)
    return ModelConfig(
        **fields,
        head_width=width,
        positions=read_rope(c, width or fields["d_model"] // fields["num_heads"]),
        masks=(sliding(get(c, "sliding_window", None)),),
        use_bias=get(c, "use_bias", True) or "norm",
        heads=read_heads(c, "Starcoder2", _classes(c)),
    )


def _write(config: ModelConfig) -> Json:
    c = write_fields(config, STARCODER2) | {"embedding_dropout": config.dropout_rate}
    c |= write_heads(config.heads, "Starcoder2", _classes({}))
    c |= write_widths(config)
    c |= write_rope(config.positions)
    c["sliding_window"] = write_masks(config)["sliding_window"]
    return c | {"use_bias": config.has_bias("query")}


def _rules(config: ModelConfig) -> list[Rule]:
    return decoder_rules(feedforward=FEEDFORWARD)


FAMILIES = {"starcoder2": decoder_family(_read, _write, _rules)}
