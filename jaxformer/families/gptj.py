"""GPT-J: one norm for both sub-layers, and neighbouring features rotated together.

Wang & Komatsuzaki 2021.
"""

from collections.abc import Collection

from jaxformer.errors import ConfigError
from jaxformer.families.classes import (
    DECODER_TASKS,
    count_labels,
    heads_by_class,
    read_heads,
    write_heads,
)
from jaxformer.families.family import Family, Rule, rules
from jaxformer.families.gpt2 import OTHER_NAMES
from jaxformer.families.settings import (
    ACTIVATION,
    COMMON,
    PROJECTIONS,
    Json,
    Key,
    get,
    read_fields,
    write_fields,
)
from jaxformer.models.blocks import parallel
from jaxformer.models.config import Classification, LanguageModel, ModelConfig
from jaxformer.ops.positions import Rope

PREFIX = "transformer."
FIELDS = COMMON | {
    "context_length": Key("n_positions", 2048),
    "d_model": Key("n_embd"),
    "num_layers": Key("n_layer"),
    "num_heads": Key("n_head"),
    "d_ff": Key("n_inner", None),
    "feedforward": Key("activation_function", "gelu_new", ACTIVATION),
    "norm_eps": Key("layer_norm_epsilon", 1e-5),
    "dropout_rate": Key("resid_pdrop", 0.0),
    "attention_dropout_rate": Key("attn_pdrop", 0.0),
    "tie_embeddings": Key("tie_word_embeddings", False),
}


def _heads(c: Json) -> dict[str, tuple]:
    """{end of a class name: its heads}. The language model has a bias for each token."""
    kinds = ("ForCausalLM", "Model", "ForSequenceClassification", "ForQuestionAnswering")
    sequence = Classification(count_labels(c), pool="last", pooler=None, bias=False)
    return heads_by_class(kinds, sequence, LanguageModel(bias=True))


def _read(c: Json, names: Collection[str]) -> ModelConfig:
    fields = read_fields(c, FIELDS)
    width, rotated = fields["d_model"] // fields["num_heads"], get(c, "rotary_dim", 64)
    if rotated % 2 or rotated > width:
        raise ConfigError(
            f"config.json: rotary_dim={rotated}: expected an even number up to {width}, "
            "the width of a head"
        )
    return ModelConfig(
        **fields,
        block=parallel,
        positions=Rope(fraction=rotated / width, layout="interleaved"),
        use_bias="up|down|norm",
        heads=read_heads(c, "GPTJ", _heads(c)),
    )


def _write(config: ModelConfig) -> Json:
    c = write_fields(config, FIELDS) | write_heads(config.heads, "GPTJ", _heads({}))
    fraction = getattr(config.positions, "fraction", 1.0)
    return c | {"embd_pdrop": config.dropout_rate, "rotary_dim": round(config.head_size * fraction)}


LAYER = PREFIX + "h.{}."
MODEL = {"embedding/tokens": "wte.weight", "final_norm": "ln_f"}
HEADS = {"language_model/kernel": "lm_head.weight", "language_model/bias": "lm_head.bias"}
RULES = [
    *rules("layers/attention/", LAYER + "attn.", PROJECTIONS),
    *rules("layers/feedforward/", LAYER + "mlp.", {"up": "fc_in", "down": "fc_out"}),
    Rule("layers/norm", LAYER + "ln_1"),
    *rules("", PREFIX, MODEL),
    *rules("heads/", "", DECODER_TASKS | HEADS),
]
FAMILIES = {
    "gptj": Family(
        read=_read,
        write=_write,
        rules=lambda config: RULES,
        prefix=PREFIX,
        ignored=r"\.attn\.((masked_)?bias|embed_positions)$",  # buffers of old files
        aliases={"lm_head.weight": PREFIX + "wte.weight"},
        other_names=OTHER_NAMES,
    ),
}
