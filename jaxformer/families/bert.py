"""BERT, RoBERTa, XLM-RoBERTa and CamemBERT, and what they share with their relatives."""

import re
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

from jaxformer.errors import ConfigError
from jaxformer.families.classes import (
    POOLED,
    class_kind,
    count_labels,
    heads_by_class,
    without_absent,
    write_heads,
)
from jaxformer.families.family import Family, Rule, rules
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
from jaxformer.masks import causal, full
from jaxformer.models.blocks import post_norm
from jaxformer.models.config import Classification, Embedding, LanguageModel, Learned, ModelConfig

QKV = ("query", "key", "value")
NO_QKV = "out|up|down|norm|patches"  # layers with a bias if query, key and value have none
FIELDS = COMMON | {
    "feedforward": Key("hidden_act", "gelu", ACTIVATION),
    "norm_eps": Key("layer_norm_eps", 1e-12),
    "dropout_rate": Key("hidden_dropout_prob", 0.1),
    "attention_dropout_rate": Key("attention_probs_dropout_prob", 0.1),
}
TEXT_FIELDS = FIELDS | {"masks": Key("is_decoder", False, {False: (full(),), True: (causal(),)})}
# classes that use the pooler
POOLERS = ("Model", "ForPreTraining", "ForNextSentencePrediction", "ForMultipleChoice")
# The pooler and the modules of heads. Google's BertForMaskedLM also has the pooler and the
# next-sentence head of pre-training.
HEADS = r"(^|\.)pooler\.|^(cls\.predictions|cls\.seq_relationship|lm_head|classifier|qa_outputs)\."
TASKS = ("ForMaskedLM", "ForSequenceClassification", "ForMultipleChoice", "ForTokenClassification")


class Encoder(NamedTuple):
    """BERT or a relative: its names and heads."""

    name: str  # prefix of its class names
    base: str  # prefix of its base model's tensors
    kinds: tuple[str, ...]  # the rest of its class names
    lm_head: str = "cls.predictions."
    # in the language model's head: a linear map and a norm
    transform: tuple[str, str] = ("transform.dense", "transform.LayerNorm")
    pooler: str = ".pooler.dense"
    classifier: tuple[str, str] = ("classifier.dense", "classifier.out_proj")
    act: str = "gelu"  # default of hidden_act
    lm_act: str | None = None  # for the language model's head; None: hidden_act
    classifier_act: str | None = "tanh"  # None: hidden_act
    keeps_pooler: bool = False  # in files of classes whose head does not use it
    # in the table of positions, the row of position 0 comes after the row of the pad id
    pad_position: bool = False
    read_mixer: Callable[[Json, str], Any] = lambda c, kind: None
    write_mixer: Callable[[ModelConfig], Json] = lambda config: {}


def encoder(family: Encoder) -> Family:
    """The family of BERT or of a relative."""
    return Family(
        read=partial(_read, family),
        write=partial(_write, family),
        rules=partial(_rules, family),
        prefix=family.base + ".",
        ignored=ignored_beside(family.lm_head),
        heads=HEADS,
        aliases=aliases_of(family.lm_head, f"{family.base}.embeddings.word_embeddings.weight"),
    )


def ignored_beside(lm: str) -> str:
    """`Family.ignored` for a masked language model whose names begin with `lm`.

    An untied head uses decoder.bias, and the file also has the other bias.
    """
    return Family._field_defaults["ignored"] + rf"|^{re.escape(lm)}bias$"


def aliases_of(lm: str, table: str) -> dict[str, str]:
    """`Family.aliases` for a masked language model that may be tied to the `table`."""
    biases = lm + "bias", lm + "decoder.bias"
    return {lm + "decoder.weight": table} | dict(zip(biases, reversed(biases), strict=True))


def _read(family: Encoder, c: Json, names: Collection[str]) -> ModelConfig:
    only(c, position_embedding_type="absolute", add_cross_attention=False)
    activation = {"feedforward": Key("hidden_act", family.act, ACTIVATION)}
    fields = read_fields(c, TEXT_FIELDS | activation)
    act = fields["feedforward"]
    kind = class_kind(c, family.name, family.kinds)
    mixer = family.read_mixer(c, kind)
    pooler_act = family.classifier_act or act
    sequence = Classification(count_labels(c), pool="position_0", pooler=pooler_act)
    language_model = LanguageModel(family.lm_act or act, bias=True)
    heads = heads_by_class([kind], sequence, language_model, (POOLED,))[kind]
    heads = without_absent(heads, names, "pooler.")
    has_pooler = any("pooler." in name for name in names)
    pooled = any(isinstance(head, Classification) for head in heads)
    # in a causal model, position 0 sees no token if it is padding: transformers gives NaN
    if c.get("is_decoder") and (pooled or mixer is not None):
        which = (
            f"the heads of {family.name + kind}" if pooled else f"the attention of {family.name}"
        )
        raise ConfigError(
            f"config.json: is_decoder=True is not supported with {which}; "
            "only a language model's head is"
        )
    if family.keeps_pooler and kind not in POOLERS and has_pooler:
        heads = (*heads, POOLED)
    if family.pad_position and c.get("pad_token_id", 1) is None:
        raise ConfigError(
            "config.json: pad_token_id=null: the first position is the one behind it; "
            "give its number"
        )
    offset = get(c, "pad_token_id", 1) + 1 if family.pad_position else 0
    scale = c["hidden_size"] ** 0.5 if get(c, "rescale_embeddings", False) else 1.0
    return ModelConfig(
        **fields | {"context_length": fields["context_length"] - offset},
        block=post_norm,
        positions=Learned(offset),
        use_bias=True if get(c, "use_bias", True) else NO_QKV,
        embedding=Embedding(scale, norm=True, token_types=get(c, "type_vocab_size", 2)),
        heads=heads,
        mixer=mixer,
    )


def _write(family: Encoder, config: Any) -> Json:
    is_decoder = config.masks == (causal(),)
    causal_kinds = ("LMHeadModel", "ForCausalLM")
    # first the classes that are decoders if the config is one, and otherwise those that are not
    kinds = sorted(family.kinds, key=lambda kind: (kind in causal_kinds) != is_decoder)
    kinds = heads_by_class(kinds, Classification(2))
    offset = getattr(config.positions, "offset", 0)
    c = write_fields(config, TEXT_FIELDS) | {
        "max_position_embeddings": config.context_length + offset,
        "type_vocab_size": config.embedding.token_types,
    }
    c |= {"pad_token_id": offset - 1} if offset else {}
    return c | family.write_mixer(config) | write_heads(config.heads, family.name, kinds)


def encoder_rules(base: str) -> list[Rule]:
    """The rules of the embedding and of the layers, in a file whose names begin with `base`."""
    layer = f"{base}.encoder.layer.{{}}."
    embedding = {
        "tokens": "word_embeddings.weight",
        "token_types": "token_type_embeddings.weight",
        "positions": "position_embeddings.weight",
        "norm": "LayerNorm",
    }
    attention = {name: f"self.{name}" for name in QKV}
    attention |= {f"global_{name}": f"self.{name}_global" for name in QKV}
    attention |= {"out": "output.dense"}
    norms = {"attention_norm": "attention.output.LayerNorm", "feedforward_norm": "output.LayerNorm"}
    feedforward = {"up": "intermediate.dense", "down": "output.dense"}
    return [
        *rules("embedding/", f"{base}.embeddings.", embedding),
        *rules("layers/attention/", layer + "attention.", attention),
        *rules("layers/", layer, norms),
        *rules("layers/feedforward/", layer, feedforward),
    ]


def _rules(family: Encoder, config: ModelConfig) -> list[Rule]:
    return [*encoder_rules(family.base), *_head_rules(family, config)]


def _head_rules(family: Encoder, config: ModelConfig) -> list[Rule]:
    pooler, output = family.classifier
    modules = {
        "pooled/pooler": family.base + family.pooler,
        "next_sentence/pooler": family.base + family.pooler,
        "multiple_choice/pooler": family.base + family.pooler,
        "classification/pooler": pooler,
        "classification": output,
        "token_classification": "classifier",
        "multiple_choice": "classifier",
        "span": "qa_outputs",
        "next_sentence": "cls.seq_relationship",
    }
    linear, norm = family.transform
    language_model = {
        "transform": linear,
        "transform/norm": norm,
        "kernel": "decoder.weight",
        "bias": "bias" if config.tie_embeddings else "decoder.bias",
    }
    return [
        *rules("heads/", "", modules),
        *rules("heads/language_model/", family.lm_head, language_model),
    ]


ROBERTA = Encoder(
    "Roberta",
    "roberta",
    ("Model", *TASKS, "ForCausalLM", "ForQuestionAnswering"),
    lm_head="lm_head.",
    transform=("dense", "layer_norm"),
    lm_act="gelu",
    pad_position=True,
)
BERT = Encoder(
    "Bert",
    "bert",
    (
        "Model",
        *TASKS,
        "ForPreTraining",
        "LMHeadModel",
        "ForNextSentencePrediction",
        "ForQuestionAnswering",
    ),
    classifier=("bert.pooler.dense", "classifier"),
)
# RoBERTa in other languages; the tensors have RoBERTa's names
XLM_ROBERTA = ROBERTA._replace(name="XLMRoberta")
CAMEMBERT = ROBERTA._replace(name="Camembert")
FAMILIES = {
    "bert": encoder(BERT),
    "roberta": encoder(ROBERTA),
    "xlm-roberta": encoder(XLM_ROBERTA),
    "camembert": encoder(CAMEMBERT),
}
