"""DistilBERT: BERT without token types, and with half of its layers.

Sanh et al. 2019, arXiv:1910.01108.
"""

from collections.abc import Collection

from jaxformer.families.bert import TASKS
from jaxformer.families.classes import count_labels, heads_by_class, read_heads, write_heads
from jaxformer.families.family import Family, Rule, rules
from jaxformer.families.settings import ACTIVATION, Json, Key, read_fields, write_fields
from jaxformer.masks import full
from jaxformer.models.blocks import post_norm
from jaxformer.models.config import Classification, Embedding, LanguageModel, Learned, ModelConfig

FIELDS = {
    "vocab_size": Key("vocab_size"),
    "num_layers": Key("n_layers"),
    "d_model": Key("dim"),
    "num_heads": Key("n_heads"),
    "d_ff": Key("hidden_dim"),
    "context_length": Key("max_position_embeddings"),
    "feedforward": Key("activation", "gelu", ACTIVATION),
    "init_std": Key("initializer_range", 0.02),
    "dropout_rate": Key("dropout", 0.1),
    "attention_dropout_rate": Key("attention_dropout", 0.1),
    "tie_embeddings": Key("tie_word_embeddings", True),
}
NAME = "DistilBert"
KINDS = ("Model", *TASKS, "ForQuestionAnswering")
# of the heads of a sequence and of a choice
POOLER = Classification(1, pool="position_0", pooler="relu", name="multiple_choice")


def _heads(classes: int, activation: str) -> dict[str, tuple]:
    """{end of a class name: its heads}."""
    sequence = Classification(classes, pool="position_0", pooler="relu")
    found = heads_by_class(KINDS, sequence, LanguageModel(activation, bias=True))
    return found | {"ForMultipleChoice": (POOLER,)}


def _read(c: Json, names: Collection[str]) -> ModelConfig:
    fields = read_fields(c, FIELDS)
    return ModelConfig(
        **fields,
        norm_eps=1e-12,
        block=post_norm,
        positions=Learned(),
        masks=(full(),),
        embedding=Embedding(norm=True),
        heads=read_heads(c, NAME, _heads(count_labels(c), fields["feedforward"])),
    )


def _write(config: ModelConfig) -> Json:
    return write_fields(config, FIELDS) | write_heads(config.heads, NAME, _heads(2, "gelu"))


def _rules(config: ModelConfig) -> list[Rule]:
    layer = "distilbert.transformer.layer.{}."
    embedding = {
        "tokens": "word_embeddings.weight",
        "positions": "position_embeddings.weight",
        "norm": "LayerNorm",
    }
    attention = {"query": "q_lin", "key": "k_lin", "value": "v_lin", "out": "out_lin"}
    norms = {"attention_norm": "sa_layer_norm", "feedforward_norm": "output_layer_norm"}
    heads = {
        "language_model/transform": "vocab_transform",
        "language_model/transform/norm": "vocab_layer_norm",
        "language_model/kernel": "vocab_projector.weight",
        "language_model/bias": "vocab_projector.bias",
        "classification/pooler": "pre_classifier",
        "classification": "classifier",
        "multiple_choice/pooler": "pre_classifier",
        "multiple_choice": "classifier",
        "token_classification": "classifier",
        "span": "qa_outputs",
    }
    return [
        *rules("embedding/", "distilbert.embeddings.", embedding),
        *rules("layers/attention/", layer + "attention.", attention),
        *rules("layers/", layer, norms),
        *rules("layers/feedforward/", layer + "ffn.", {"up": "lin1", "down": "lin2"}),
        *rules("heads/", "", heads),
    ]


OTHER_NAMES = {
    "hidden_size": "dim",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
}
FAMILY = Family(
    _read,
    _write,
    _rules,
    prefix="distilbert.",
    heads=r"^(vocab_\w+|pre_classifier|classifier|qa_outputs)\.",
    aliases={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
    other_names=OTHER_NAMES,
)
FAMILIES = {"distilbert": FAMILY}
