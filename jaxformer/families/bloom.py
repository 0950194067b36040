"""BLOOM: Le Scao et al. 2022, arXiv:2211.05100.

ALiBi, and a norm after the embedding.
"""

from collections.abc import Collection, Sequence

from jaxformer.errors import ConfigError
from jaxformer.families.classes import DECODER_TASKS, heads_of_decoder, read_heads, write_heads
from jaxformer.families.decoder import NORMS, QUERY_KEY_VALUE
from jaxformer.families.family import Family, Rule, rules
from jaxformer.families.settings import COMMON, Json, Key, get, read_fields, write_fields
from jaxformer.models.blocks import Stream, Sublayers, add, pre_norm
from jaxformer.models.config import Alibi, Embedding, ModelConfig
from jaxformer.models.layer import Block, Context, Tree
from jaxformer.models.norm import norm


def normed_residual(config: ModelConfig, names: Sequence[str]) -> Block:
    """norm(x) + f(norm(x)) for each sub-layer f, and a norm at the end."""

    def apply(params: Tree, x: Stream, sublayers: Sublayers, context: Context) -> Stream:
        for name, f in sublayers.items():
            y = norm(config, params[f"{name}_norm"], x)
            x = add(y, f(y))
        return x

    return pre_norm(config, names)._replace(apply=apply)


PREFIX = "transformer."
FIELDS = COMMON | {
    "num_layers": Key("n_layer"),
    "num_heads": Key("n_head"),
    "context_length": Key("seq_length", 2048),  # ALiBi has no limit
    "norm_eps": Key("layer_norm_epsilon", 1e-5),
    "block": Key(
        "apply_residual_connection_post_layernorm", False, {True: normed_residual, False: None}
    ),
    "dropout_rate": Key("hidden_dropout", 0.0),
    "attention_dropout_rate": Key("attention_dropout", 0.0),
}
del FIELDS["d_ff"]  # always 4 D
OTHER_NAMES = {
    "n_embed": "hidden_size",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
}


def _read(c: Json, names: Collection[str]) -> ModelConfig:
    if get(c, "slow_but_exact", False) and get(c, "pretraining_tp", 1) > 1:
        raise ConfigError(
            "config.json: slow_but_exact with pretraining_tp above 1 leaves out biases; "
            "it is not supported here"
        )
    return ModelConfig(
        **read_fields(c, FIELDS),
        feedforward="gelu_tanh",
        positions=Alibi(),
        embedding=Embedding(norm=True),
        heads=read_heads(c, "Bloom", heads_of_decoder(c)),
    )


def _write(config: ModelConfig) -> Json:
    return write_fields(config, FIELDS) | write_heads(config.heads, "Bloom", heads_of_decoder({}))


LAYER = PREFIX + "h.{}."
LINEAR = {
    "attention/out": "self_attention.dense",
    "feedforward/up": "mlp.dense_h_to_4h",
    "feedforward/down": "mlp.dense_4h_to_h",
}
MODEL = {
    "embedding/tokens": "word_embeddings.weight",
    "embedding/norm": "word_embeddings_layernorm",
    "final_norm": "ln_f",
}
RULES = [
    Rule(QUERY_KEY_VALUE, LAYER + "self_attention.query_key_value", "by_head"),
    *rules("layers/", LAYER, LINEAR | NORMS),
    *rules("", PREFIX, MODEL),
    *rules("heads/", "", DECODER_TASKS | {"language_model/kernel": "lm_head.weight"}),
]
FAMILIES = {
    "bloom": Family(
        read=_read,
        write=_write,
        rules=lambda config: RULES,
        prefix=PREFIX,
        aliases={"lm_head.weight": PREFIX + "word_embeddings.weight"},
        other_names=OTHER_NAMES,
    ),
}
