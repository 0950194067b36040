"""ALBERT: BERT with a narrow embedding and layers that share their parameters.

Lan et al. 2019, arXiv:1909.11942. The shared layers are cut into groups; a group has
`inner_group_num` layers and runs as often as it is needed for `num_hidden_layers`.
"""

from collections.abc import Collection
from typing import Any

from jaxformer.errors import ConfigError
from jaxformer.families.bert import FIELDS as BERT_FIELDS, TASKS, aliases_of, ignored_beside
from jaxformer.families.classes import (
    POOLED,
    class_kind,
    count_labels,
    heads_by_class,
    without_absent,
    write_heads,
    write_labels,
)
from jaxformer.families.family import Family, Rule, rules
from jaxformer.families.settings import ACTIVATION, Json, Key, get, only, read_fields, write_fields
from jaxformer.masks import full
from jaxformer.models.blocks import post_norm
from jaxformer.models.config import Classification, LanguageModel, ModelConfig
from jaxformer.zoo.albert import Factorised, Repeated
from jaxformer.zoo.projection import Projection

FIELDS = BERT_FIELDS | {
    "feedforward": Key("hidden_act", "gelu_new", ACTIVATION),
    "dropout_rate": Key("hidden_dropout_prob", 0.0),
    "attention_dropout_rate": Key("attention_probs_dropout_prob", 0.0),
}
NAME = "Albert"
KINDS = ("Model", "ForPreTraining", *TASKS, "ForQuestionAnswering")
LM = "predictions."
TABLE = "albert.embeddings.word_embeddings.weight"
POOLER = "albert.pooler"


def _heads(classes: int, head: Projection) -> dict[str, tuple]:
    """{end of a class name: its heads}."""
    sequence = Classification(classes, pool="position_0")
    language_model = LanguageModel(head, bias=True)
    order = Classification(classes, pool="position_0", name="sentence_order")
    found = heads_by_class(KINDS, sequence, language_model, (POOLED,))
    return found | {"ForPreTraining": (language_model, order)}


def _times(layers: int, groups: int) -> tuple[int, ...]:
    """How often each group runs: layer i is of group int(i / (layers / groups)), as theirs."""
    numbers = [int(i / (layers / groups)) for i in range(layers)]
    return tuple(map(numbers.count, range(groups)))


def _read(c: Json, names: Collection[str]) -> ModelConfig:
    only(c, position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    fields = read_fields(c, FIELDS)
    width = get(c, "embedding_size", 128)
    groups = get(c, "num_hidden_groups", 1)
    kind = class_kind(c, NAME, KINDS)
    heads = _heads(count_labels(c), Projection(fields["feedforward"], width))[kind]
    return ModelConfig(
        **fields | {"num_layers": groups * get(c, "inner_group_num", 1)},
        block=post_norm,
        masks=(full(),),
        stack=Repeated(_times(fields["num_layers"], groups)),
        embedding=Factorised(width, get(c, "type_vocab_size", 2)),
        heads=without_absent(heads, names, "pooler."),
    )


def _write(config: Any) -> Json:
    times = config.stack.times
    layers, groups = sum(times), len(times)
    if _times(layers, groups) != times:
        raise ConfigError(f"model.stack.times={times}: expected {_times(layers, groups)}")
    c = write_fields(config, FIELDS) | {
        "num_hidden_layers": layers,
        "num_hidden_groups": groups,
        "inner_group_num": config.num_layers // groups,
        "embedding_size": config.embedding.width,
        "type_vocab_size": config.embedding.token_types,
    }
    for head in config.heads:
        if head.name == "sentence_order" and head.classes != 2:
            c |= write_labels(tuple(f"LABEL_{i}" for i in range(head.classes)))
    return c | write_heads(config.heads, NAME, _heads(2, Projection()))


def _rules(config: Any) -> list[Rule]:
    embedding = {
        "tokens": "embeddings.word_embeddings.weight",
        "token_types": "embeddings.token_type_embeddings.weight",
        "positions": "embeddings.position_embeddings.weight",
        "norm": "embeddings.LayerNorm",
        "projection": "encoder.embedding_hidden_mapping_in",
    }
    layer = {
        **{f"attention/{name}": f"attention.{name}" for name in ("query", "key", "value")},
        "attention/out": "attention.dense",
        "attention_norm": "attention.LayerNorm",
        "feedforward/up": "ffn",
        "feedforward/down": "ffn_output",
        "feedforward_norm": "full_layer_layer_norm",
    }
    heads = {
        "pooled/pooler": POOLER,
        "sentence_order/pooler": POOLER,
        "sentence_order": "sop_classifier.classifier",
        "classification/pooler": POOLER,
        "classification": "classifier",
        "multiple_choice/pooler": POOLER,
        "multiple_choice": "classifier",
        "token_classification": "classifier",
        "span": "qa_outputs",
        "language_model/transform": LM + "dense",
        "language_model/transform/norm": LM + "LayerNorm",
        "language_model/kernel": LM + "decoder.weight",
        "language_model/bias": LM + ("bias" if config.tie_embeddings else "decoder.bias"),
    }
    found = [*rules("embedding/", "albert.", embedding), *rules("heads/", "", heads)]
    size = config.num_layers // len(config.stack.times)
    for i in range(config.num_layers):
        group, number = divmod(i, size)
        theirs = f"albert.encoder.albert_layer_groups.{group}.albert_layers.{number}."
        found += [rule._replace(layers=(i,)) for rule in rules("layers/", theirs, layer)]
    return found


FAMILY = Family(
    _read,
    _write,
    _rules,
    prefix="albert.",
    ignored=ignored_beside(LM),
    heads=r"(^|\.)pooler\.|^(predictions|sop_classifier|classifier|qa_outputs)\.",
    aliases=aliases_of(LM, TABLE),
)
FAMILIES = {"albert": FAMILY}
