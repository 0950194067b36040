"""OPT: Zhang et al. 2022, arXiv:2205.01068.

A table of positions, and norms before or after the sub-layers.
"""

from collections.abc import Collection, Sequence
from typing import Any

from jaxformer.families.classes import DECODER_TASKS, heads_of_decoder, read_heads, write_heads
from jaxformer.families.family import Family, rules
from jaxformer.families.settings import (
    ACTIVATION,
    COMMON,
    PROJECTIONS,
    Json,
    Key,
    get,
    only,
    read_fields,
    write_fields,
)
from jaxformer.models.blocks import post_norm, pre_norm
from jaxformer.models.config import Learned, ModelConfig
from jaxformer.models.layer import Block, same_stream
from jaxformer.models.norm import Unscaled


def pre_norm_without_end(config: ModelConfig, names: Sequence[str]) -> Block:
    """`blocks.pre_norm` without the norm at the end: files from before transformers 4.20.1."""
    return pre_norm(config, names)._replace(stack_spec=None, end=same_stream)


PREFIX = "model."
OFFSET = 2  # rows of the table of positions in front that no token reads
FIELDS = COMMON | {
    "d_ff": Key("ffn_dim"),
    "feedforward": Key("activation_function", "relu", ACTIVATION),
    "norm": Key(
        "layer_norm_elementwise_affine", True, {True: "layer_norm", False: Unscaled("layer_norm")}
    ),
    "init_std": Key("init_std", 0.02),
    "dropout_rate": Key("dropout", 0.1),
    "attention_dropout_rate": Key("attention_dropout", 0.0),
}
BEFORE, WITHOUT_END = "do_layer_norm_before", "_remove_final_layer_norm"
# {our block: (norms before the sub-layers, no norm at the end)}
BLOCKS = {None: (True, False), pre_norm_without_end: (True, True), post_norm: (False, False)}


def _heads(c: Json) -> dict[str, tuple]:
    """{end of a class name: its heads}. OPT has no class for tokens."""
    kinds = heads_of_decoder(c)
    return {kind: heads for kind, heads in kinds.items() if kind != "ForTokenClassification"}


def _read(c: Json, names: Collection[str]) -> ModelConfig:
    fields = read_fields(c, FIELDS)
    only(c, word_embed_proj_dim=fields["d_model"])
    is_before = get(c, BEFORE, True)
    order = (is_before, is_before and get(c, WITHOUT_END, False))
    return ModelConfig(
        **fields,
        norm_eps=1e-5,
        block=next(block for block, orders in BLOCKS.items() if orders == order),
        positions=Learned(OFFSET),
        use_bias=True if get(c, "enable_bias", True) else "norm",
        heads=read_heads(c, "OPT", _heads(c)),
    )


def _write(config: Any) -> Json:
    c = write_fields(config, FIELDS) | write_heads(config.heads, "OPT", _heads({}))
    c["word_embed_proj_dim"] = config.d_model
    c |= dict(zip((BEFORE, WITHOUT_END), BLOCKS[config.block], strict=True))
    return c | {"enable_bias": config.has_bias("out")}


BASE = PREFIX + "decoder."
LAYER = BASE + "layers.{}."
MODEL = {
    "embedding/tokens": "embed_tokens.weight",
    "embedding/positions": "embed_positions.weight",
    "final_norm": "final_layer_norm",
}
NORMS = {"attention_norm": "self_attn_layer_norm", "feedforward_norm": "final_layer_norm"}
RULES = [
    *rules("layers/attention/", LAYER + "self_attn.", PROJECTIONS),
    *rules("layers/feedforward/", LAYER, {"up": "fc1", "down": "fc2"}),
    *rules("layers/", LAYER, NORMS),
    *rules("", BASE, MODEL),
    *rules("heads/", "", DECODER_TASKS | {"language_model/kernel": "lm_head.weight"}),
]
FAMILIES = {
    "opt": Family(
        read=_read,
        write=_write,
        rules=lambda config: RULES,
        prefix=PREFIX,
        aliases={"lm_head.weight": BASE + "embed_tokens.weight"},
    ),
}
