"""DeBERTa, versions 2 and 3: attention to content and to relative positions apart.

He et al. 2020, arXiv:2006.03654; 2021, arXiv:2111.09543. The model type of both is `deberta-v2`.
Version 2 has a convolution beside its first layer. A class of a sequence reads its first token;
transformers reads position 0 even if it is padding, which sees the mean of all padding.
"""

from collections.abc import Collection
from typing import Any

from jaxformer.errors import ConfigError
from jaxformer.families.bert import (
    FIELDS as BERT_FIELDS,
    TASKS,
    aliases_of,
    encoder_rules,
    ignored_beside,
)
from jaxformer.families.classes import count_labels, heads_by_class, read_heads, write_heads
from jaxformer.families.family import Family, Rule, rules
from jaxformer.families.settings import ACTIVATION, Json, Key, get, only, read_fields, write_fields
from jaxformer.masks import full
from jaxformer.models.blocks import post_norm
from jaxformer.models.config import Classification, Embedding, LanguageModel, Learned, ModelConfig
from jaxformer.models.stacks.layout import as_pattern
from jaxformer.zoo.disentangled import TERMS, Disentangled
from jaxformer.zoo.input_convolution import PostNormConvolution, beside_first

FIELDS = BERT_FIELDS | {"norm_eps": Key("layer_norm_eps", 1e-7)}
POOLER = {"pooler": Key("pooler_hidden_act", "gelu", ACTIVATION)}
CONVOLUTION = {
    "width": Key("conv_kernel_size"),
    "groups": Key("conv_groups", 1),
    "activation": Key("conv_act", "tanh", ACTIVATION),
}
NAME = "DebertaV2"
KINDS = ("Model", *TASKS, "ForQuestionAnswering")
LM, NEW_LM = "cls.predictions.", "lm_predictions.lm_head."
TABLE = "deberta.embeddings.word_embeddings.weight"
# the modules of the language model's head, and what a head that is not `legacy` calls them
NEW_NAMES = {"transform.dense": "dense", "transform.LayerNorm": "LayerNorm"}


def _heads(classes: int, activation: str, pooler: str) -> dict[str, tuple]:
    """{end of a class name: its heads}."""
    sequence = Classification(classes, pool="first", pooler=pooler)
    choice = Classification(1, pool="first", pooler=pooler, name="multiple_choice")
    found = heads_by_class(KINDS, sequence, LanguageModel(activation, bias=True))
    return found | {"ForMultipleChoice": (choice,)}


def _read(c: Json, names: Collection[str]) -> ModelConfig:
    fields = read_fields(c, FIELDS)
    D, N = fields["d_model"], fields["num_heads"]
    only(c, embedding_size=D, pooler_hidden_size=D)
    only(c, attention_head_size=D // N, position_embedding_type="absolute", is_decoder=False)
    if not get(c, "legacy", True):  # its head always reads by the embedding's table
        fields["tie_embeddings"] = True
    kinds = _heads(count_labels(c), fields["feedforward"], **read_fields(c, POOLER))
    return ModelConfig(
        **fields,
        block=_read_block(c, fields["num_layers"]),
        positions=Learned() if get(c, "position_biased_input", True) else None,
        masks=(full(),),
        mixer=_read_mixer(c),
        embedding=Embedding(norm=True, token_types=get(c, "type_vocab_size", 0)),
        heads=read_heads(c, NAME, kinds),
    )


def _read_block(c: Json, num_layers: int) -> Any:
    """The order of BERT, in the first layer perhaps with a convolution."""
    if c.get("conv_kernel_size") in (None, 0):
        return post_norm
    convolution = read_fields(c, CONVOLUTION)
    width, groups = convolution["width"], convolution["groups"]
    if width % 2 == 0:
        raise ConfigError(f"config.json: conv_kernel_size={width}: expected an odd number, or 0")
    if get(c, "hidden_size") % groups:
        raise ConfigError(f"config.json: conv_groups={groups} does not divide hidden_size")
    return beside_first(num_layers, PostNormConvolution(**convolution))


def _read_mixer(c: Json) -> Disentangled | None:
    """The attention; None: that of BERT."""
    written = c.get("pos_att_type") or ()
    names = written.lower().split("|") if isinstance(written, str) else written
    terms = tuple(term for term in TERMS if term in [name.strip() for name in names])
    norms = get(c, "norm_rel_ebd", "none").lower().split("|")
    has_norm = "layer_norm" in [name.strip() for name in norms]
    if not get(c, "relative_attention", False):
        if terms or has_norm:
            raise ConfigError(
                f"config.json: pos_att_type={written!r}, norm_rel_ebd={c.get('norm_rel_ebd')!r} "
                "are not supported with relative_attention=False; delete them"
            )
        return None
    if not terms:
        raise ConfigError(
            f"config.json: pos_att_type={c.get('pos_att_type')!r} with relative_attention=True: "
            f"expected some of {', '.join(TERMS)}"
        )
    longest = c.get("max_relative_positions")
    longest = get(c, "max_position_embeddings") if longest in (None, 0, -1) else longest
    longest = get(c | {"max_relative_positions": longest}, "max_relative_positions")
    buckets = c.get("position_buckets")
    own_maps = not get(c, "share_att_key", False)
    if buckets in (None, 0, -1):
        return Disentangled(longest, None, terms, own_maps, has_norm)
    buckets = get(c, "position_buckets")
    if buckets < 2 or longest - 1 <= buckets // 2:
        raise ConfigError(
            f"config.json: position_buckets={buckets}: expected at least 2, and half of it below "
            f"max_relative_positions={longest} - 1"
        )
    return Disentangled(buckets, longest, terms, own_maps, has_norm)


def _write_mixer(mixer: Disentangled | None) -> Json:
    """The inverse of `_read_mixer`."""
    if mixer is None:
        return {"relative_attention": False}
    by_log = mixer.max_distance is not None
    return {
        "relative_attention": True,
        "max_relative_positions": mixer.max_distance if by_log else mixer.buckets,
        "position_buckets": mixer.buckets if by_log else -1,
        "pos_att_type": list(mixer.terms),
        "share_att_key": not mixer.own_maps,
        "norm_rel_ebd": "layer_norm" if mixer.norm else "none",
    }


def _write(config: Any) -> Json:
    c = write_fields(config, FIELDS) | _write_mixer(config.mixer)
    first, *_ = as_pattern(config.block)
    if isinstance(first, PostNormConvolution):
        c |= write_fields(first, CONVOLUTION)
    c |= {
        "position_biased_input": config.positions is not None,
        "type_vocab_size": config.embedding.token_types,
        "legacy": True,
    }
    for head in config.heads:
        if isinstance(head, Classification):
            c |= write_fields(head, POOLER)
    return c | write_heads(config.heads, NAME, _heads(2, "gelu", "gelu"))


def _rules(config: ModelConfig) -> list[Rule]:
    layer = "deberta.encoder.layer.{}.attention.self."
    maps = {"query": "query_proj", "key": "key_proj", "value": "value_proj"}
    maps |= {"position_key": "pos_key_proj", "position_query": "pos_query_proj"}
    heads = {
        "classification/pooler": "pooler.dense",
        "classification": "classifier",
        "multiple_choice/pooler": "pooler.dense",
        "multiple_choice": "classifier",
        "token_classification": "classifier",
        "span": "qa_outputs",
        "language_model/transform": LM + "transform.dense",
        "language_model/transform/norm": LM + "transform.LayerNorm",
        "language_model/kernel": LM + "decoder.weight",
        "language_model/bias": LM + ("bias" if config.tie_embeddings else "decoder.bias"),
    }
    inherited = [
        rule
        for rule in encoder_rules("deberta")
        if not any(rule.theirs.endswith(f"self.{name}") for name in ("query", "key", "value"))
    ]
    return [
        *inherited,
        *rules("layers/attention/", layer, maps),
        Rule("shared/relative", "deberta.encoder.rel_embeddings.weight"),
        Rule("shared/relative_norm", "deberta.encoder.LayerNorm"),
        Rule("layers/convolution", "deberta.encoder.conv.conv", "patches", layers=(0,)),
        Rule("layers/convolution_norm", "deberta.encoder.conv.LayerNorm", layers=(0,)),
        *rules("heads/", "", heads),
    ]


FAMILY = Family(
    _read,
    _write,
    _rules,
    prefix="deberta.",
    # files have the positions of another head, as version 3 does
    ignored=ignored_beside(LM) + r"|\.position_embeddings\.weight$",
    heads=r"^(cls|lm_predictions|mask_predictions|pooler|classifier|qa_outputs)\.",
    aliases={
        **aliases_of(LM, TABLE),
        **{
            f"{NEW_LM}{new}.{leaf}": f"{LM}{old}.{leaf}"
            for old, new in NEW_NAMES.items()
            for leaf in ("weight", "bias")
        },
        NEW_LM + "bias": LM + "bias",
    },
)
FAMILIES = {"deberta-v2": FAMILY}
