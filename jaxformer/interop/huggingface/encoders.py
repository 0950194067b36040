"""BERT, RoBERTa, Longformer, BigBird, and ViT, an encoder of images."""

import re
import reprlib
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

from jaxformer.errors import ConfigError
from jaxformer.interop.huggingface import tables
from jaxformer.interop.huggingface.tables import Family, Json, Rule, modules, only
from jaxformer.masks import causal, full
from jaxformer.models import mixers
from jaxformer.models.config import (
    Classification,
    Embedding,
    LanguageModel,
    Learned,
    ModelConfig,
    Patches,
    TokenClassification,
)
from jaxformer.models.vision import Reconstruction

POOLED = Classification(None, pool="position_0", name="pooled")  # BERT pools slot 0 even if it is padding
NEXT_SENTENCE = Classification(2, pool="position_0", name="next_sentence")
FIELDS = tables.SIZES_AND_WIDTHS | {
    "hidden_act": ("feedforward", "gelu"), "layer_norm_eps": ("norm_eps", 1e-12),
    "hidden_dropout_prob": ("dropout_rate", 0.1), "attention_probs_dropout_prob": ("attention_dropout_rate", 0.1),
    "tie_word_embeddings": ("tie_embeddings", True),
}  # fmt: skip


def _heads(act: str, pooler: str, classes: int) -> dict[str, tuple]:
    """Heads by the end of the class name. `act` is for the language model's head, `pooler` for the classifier's."""
    language_model = LanguageModel(act, bias=True)
    return {
        "Model": (POOLED,),
        "ForPreTraining": (language_model, NEXT_SENTENCE),
        "ForMaskedLM": (language_model,),
        "LMHeadModel": (language_model,),
        "ForCausalLM": (language_model,),
        "ForNextSentencePrediction": (NEXT_SENTENCE,),
        "ForSequenceClassification": (Classification(classes, pool="position_0", pooler=pooler),),
        "ForMultipleChoice": (Classification(1, pool="position_0", name="multiple_choice"),),
        "ForTokenClassification": (TokenClassification(classes),),
        "ForQuestionAnswering": (TokenClassification(2, name="span"),),
    }


POOLERS = ("Model", "ForPreTraining", "ForNextSentencePrediction", "ForMultipleChoice")  # classes that use the pooler
TASKS = ("ForMaskedLM", "ForSequenceClassification", "ForMultipleChoice", "ForTokenClassification")


class Encoder(NamedTuple):
    """BERT or a relative: its names, heads and conventions."""

    name: str  # prefix of its class names
    base: str  # prefix of its base model's tensors
    kinds: tuple[str, ...]  # the rest of its class names, keys of `_heads`
    lm_head: str = "cls.predictions."
    transform: tuple[str, str] = ("transform.dense", "transform.LayerNorm")  # in the language model's head
    pooler: str = ".pooler.dense"
    classifier: tuple[str, str] = ("classifier.dense", "classifier.out_proj")
    act: str = "gelu"  # default of hidden_act
    lm_act: str | None = None  # for the language model's head; None: hidden_act
    classifier_act: str | None = "tanh"  # None: hidden_act
    positions: Literal["slots", "not_pad"] = "slots"
    global_tokens: dict[str, Any] = {}  # noqa: RUF012 (never written to): {class: see `Conventions`}
    only: Json = {}  # noqa: RUF012
    read_mixer: Callable[[Json, str], Any] = lambda c, kind: None
    write_mixer: Callable[[ModelConfig], Json] = lambda config: {}


def encoder(family: Encoder, model_type: str) -> Family:
    lm, e = family.lm_head, f"{family.base}.embeddings."
    aliases = {lm + "decoder.weight": e + "word_embeddings.weight"}
    aliases |= {lm + "decoder.bias": lm + "bias", lm + "bias": lm + "decoder.bias"}
    return Family(
        partial(_read, family),
        lambda config: _write(family, config) | {"model_type": model_type},
        partial(_rules, family),
        prefix=family.base + ".",
        ignored=Family._field_defaults["ignored"] + rf"|^{re.escape(lm)}bias$",  # an untied head uses decoder.bias
        aliases=aliases,
        conventions=partial(_conventions, family),
    )


def _conventions(family: Encoder, c: Json) -> tables.Conventions:
    kind = tables.class_kind(c, family.name, family.kinds)
    return tables.Conventions(family.positions, family.global_tokens.get(kind, "none"), kind == "ForMultipleChoice")


def _read(family: Encoder, c: Json, names: Collection[str]) -> ModelConfig:
    only(c, position_embedding_type="absolute", add_cross_attention=False, **family.only)
    fields = tables.read_fields(c, FIELDS | {"hidden_act": ("feedforward", family.act)})
    kind, act = tables.class_kind(c, family.name, family.kinds), fields["feedforward"]
    mixer, decoder = family.read_mixer(c, kind), c.get("is_decoder", False)
    heads = _heads(family.lm_act or act, family.classifier_act or act, tables.count_labels(c))[kind]
    pooler = any("pooler." in name for name in names)
    if kind == "Model" and names and not pooler:
        heads = ()
    pooled = any(isinstance(head, Classification) for head in heads)
    # in a causal model slot 0 sees no token if it is padding: their result is NaN
    if decoder and (pooled or mixer is not None):
        part = f"the heads of {family.name + kind}" if pooled else f"attention_type={c.get('attention_type')!r}"
        raise ConfigError(f"config.json: is_decoder=True is not supported with {part}; only a language model's head is")
    if kind not in POOLERS and pooler and family.name == "BigBird":
        heads = (*heads, POOLED)  # the file has it, but no head uses it
    offset = _offset(family, c)
    scale = c["hidden_size"] ** 0.5 if c.get("rescale_embeddings") else 1.0
    return ModelConfig(
        **fields | {"context_length": fields["context_length"] - offset},
        norm_placement="post", positions=Learned(offset), masks=(causal() if decoder else full(),),
        use_bias=True if c.get("use_bias", True) else NO_QKV,
        embedding=Embedding(scale, norm=True, token_types=c.get("type_vocab_size", 2)), heads=heads, mixer=mixer,
    )  # fmt: skip


def _offset(family: Encoder, c: Json) -> int:
    """The number of rows of the position table before position 0. The last of them belongs to the pad token."""
    if family.positions == "slots":
        return 0
    pad = c.get("pad_token_id", 1)
    if type(pad) is not int or pad < 0:
        raise ConfigError(f"config.json: pad_token_id={pad!r}: expected a token; positions begin after it")
    return pad + 1


def _write(family: Encoder, config: ModelConfig) -> Json:
    names = [getattr(head, "name", "") for head in config.heads if head != POOLED]
    decoder = config.masks == (causal(),)
    heads = _heads("gelu", "tanh", 2)
    kinds = [kind for kind in family.kinds if [head.name for head in heads[kind] if head != POOLED] == names]
    kinds.sort(key=lambda kind: (kind in ("LMHeadModel", "ForCausalLM")) != decoder)
    offset = getattr(config.positions, "offset", 0)
    classes = [head for head in config.heads if getattr(head, "name", "").endswith("classification")]
    c = tables.write_fields(config, FIELDS) | {
        "architectures": [family.name + (kinds[0] if kinds else "?")],
        "max_position_embeddings": config.context_length + offset,
        "type_vocab_size": getattr(config.embedding, "token_types", 0),
    }
    c |= {"pad_token_id": offset - 1} if offset else {}
    c |= {"is_decoder": True} if decoder else {}
    return c | family.write_mixer(config) | tables.write_labels(tables.default_labels(*classes[:1]))


# {class: default global tokens of a Longformer}, see `Conventions`
LONGFORMER_GLOBALS = {"ForQuestionAnswering": "question", "ForMultipleChoice": "choice"}


def _read_longformer(c: Json, kind: str):
    windows, layers = c.get("attention_window", 512), c["num_hidden_layers"]
    windows = windows if isinstance(windows, list) else [windows] * layers
    if len(windows) != layers or any(type(width) is not int or width < 2 or width % 2 for width in windows):
        raise ConfigError(
            f"config.json: attention_window={reprlib.repr(windows)}: expected an even number, one for each layer"
        )
    tokens = None if kind in LONGFORMER_GLOBALS else int(kind == "ForSequenceClassification")
    pattern = tuple(mixers.Longformer(width, tokens) for width in tables.shortest_pattern(windows))
    return pattern if len(pattern) > 1 else pattern[0]


def _write_longformer(config: ModelConfig) -> Json:
    return {"attention_window": [mixer.window for mixer in tables.repeated(config.mixer, config)]}


def _read_bigbird(c: Json, kind: str):
    if c.get("attention_type", "block_sparse") == "original_full":
        return None
    only(c, attention_type="block_sparse")
    block, random = c.get("block_size", 64), c.get("num_random_blocks", 3)
    return mixers.BigBird(block, random, layout="zero", dense_length=(5 + 2 * random) * block)


def _write_bigbird(config: ModelConfig) -> Json:
    mixer = config.mixer
    c = {
        "rescale_embeddings": getattr(config.embedding, "scale", 1.0) != 1.0,
        "attention_type": "block_sparse" if mixer else "original_full",
        "use_bias": config.has_bias("query"),
    }
    if isinstance(mixer, mixers.BigBird):
        c |= {"block_size": mixer.block, "num_random_blocks": mixer.random}
    return c


def _rules(family: Encoder, config: ModelConfig) -> list[Rule]:
    layer, e, lm = f"{family.base}.encoder.layer.{{}}.", f"{family.base}.embeddings.", family.lm_head
    projections = {name: name for name in ("query", "key", "value")}
    tables = {"tokens": "word", "positions": "position", "token_types": "token_type"}
    pooler, classifier = family.base + family.pooler, family.classifier
    return [
        *(Rule(f"embedding/{ours}", f"{e}{theirs}_embeddings.weight", "leaf") for ours, theirs in tables.items()),
        Rule("embedding/norm", e + "LayerNorm", "norm"),
        *modules("layers/attention/", layer + "attention.self.", projections),
        *modules(
            "layers/attention/global_", layer + "attention.self.", {name: f"{name}_global" for name in projections}
        ),
        Rule("layers/attention/out", layer + "attention.output.dense", "linear"),
        Rule("layers/attention_norm", layer + "attention.output.LayerNorm", "norm"),
        *modules("layers/feedforward/", layer, {"up": "intermediate.dense", "down": "output.dense"}),
        Rule("layers/feedforward_norm", layer + "output.LayerNorm", "norm"),
        *(Rule(f"heads/{name}/pooler", pooler, "linear") for name in ("pooled", "next_sentence", "multiple_choice")),
        *modules("heads/", "", {"classification/pooler": classifier[0], "classification": classifier[1]}),
        *modules("heads/", "", {"token_classification": "classifier", "multiple_choice": "classifier"}),
        *modules("heads/", "", {"span": "qa_outputs", "next_sentence": "cls.seq_relationship"}),
        Rule("heads/language_model/transform", lm + family.transform[0], "linear"),
        Rule("heads/language_model/transform/norm", lm + family.transform[1], "norm"),
        Rule("heads/language_model/bias", lm + ("bias" if config.tie_embeddings else "decoder.bias"), "leaf"),
        Rule("heads/language_model/kernel", lm + "decoder.weight", "leaf"),
    ]


NO_QKV = "out|up|down|norm|patches"  # layers with a bias if query, key and value have none
NO_IMAGE = ("vocab_size", "max_position_embeddings", "tie_word_embeddings")
VIT_FIELDS = {theirs: field for theirs, field in FIELDS.items() if theirs not in NO_IMAGE} | {
    "hidden_dropout_prob": ("dropout_rate", 0.0), "attention_probs_dropout_prob": ("attention_dropout_rate", 0.0),
}  # fmt: skip


def _read_vit(c: Json, names: Collection[str]) -> ModelConfig:
    pair = lambda value: tuple(value) if isinstance(value, list) else (value, value)
    patches = Patches(pair(c.get("image_size", 224)), pair(c.get("patch_size", 16)), c.get("num_channels", 3))
    fields, heads = tables.read_fields(c, VIT_FIELDS), ()
    kind = tables.class_kind(c, "ViT", ("Model", "ForImageClassification", "ForMaskedImageModeling"))
    if kind == "ForImageClassification":
        heads = (Classification(tables.count_labels(c), pooler=None),)
    elif kind == "ForMaskedImageModeling":
        patches, heads = replace(patches, mask_token=True), (Reconstruction(c.get("encoder_stride", 16)),)
        if patches.grid[0] != patches.grid[1]:  # transformers assumes a square grid
            raise ConfigError(
                f"config.json: image_size={c.get('image_size')}: ViT{kind} is supported for square grids only"
            )
    elif not names or any("pooler." in name for name in names):
        act, width = tables.activation(c, "pooler_act", c.get("pooler_act", "tanh")), c.get("pooler_output_size")
        width = None if width in (None, fields["d_model"]) else width
        heads = (Classification(None, pooler=act, name="pooled", pooler_width=width),)
    return ModelConfig(
        vocab_size=0, context_length=patches.length, masks=(full(),), embedding=patches, heads=heads,
        use_bias=True if c.get("qkv_bias", True) else NO_QKV, **fields,
    )  # fmt: skip


def _write_vit(config: ModelConfig) -> Json:
    patches: Any = config.embedding
    head: Any = config.heads[0] if config.heads else None
    kind = "ViTForImageClassification" if getattr(head, "classes", None) else "ViTModel"
    if isinstance(head, Reconstruction):
        kind = "ViTForMaskedImageModeling"
    single = lambda pair: pair[0] if len(set(pair)) == 1 else list(pair)
    return tables.write_fields(config, VIT_FIELDS) | tables.write_labels(tables.default_labels(head)) | {
        "architectures": [kind], "model_type": "vit", "encoder_stride": getattr(head, "stride", 16),
        "image_size": single(patches.image), "patch_size": single(patches.patch), "num_channels": patches.channels,
        "qkv_bias": config.has_bias("query"), "pooler_output_size": getattr(head, "pooler_width", None) or config.d_model,
        "pooler_act": tables.activation_name(getattr(head, "pooler", None)) or "tanh",
    }  # fmt: skip


def _vit_rules(config: ModelConfig) -> list[Rule]:
    layer, e = "vit.encoder.layer.{}.", "vit.embeddings."
    return [
        Rule("embedding/patches", e + "patch_embeddings.projection", "patches"),
        *modules("embedding/", e, {"class_token": "cls_token", "mask_token": "mask_token"}, "leaf2"),
        Rule("heads/reconstruction", "decoder.0", "patches"),
        Rule("embedding/positions", e + "position_embeddings", "leaf1"),
        *modules(
            "layers/", layer, {"attention_norm": "layernorm_before", "feedforward_norm": "layernorm_after"}, "norm"
        ),
        *modules("layers/attention/", layer + "attention.attention.", {n: n for n in ("query", "key", "value")}),
        Rule("layers/attention/out", layer + "attention.output.dense", "linear"),
        *modules("layers/feedforward/", layer, {"up": "intermediate.dense", "down": "output.dense"}),
        Rule("final_norm", "vit.layernorm", "norm"),
        *modules("heads/", "", {"pooled/pooler": "vit.pooler.dense", "classification": "classifier"}),
    ]


ROBERTA = Encoder(
    "Roberta", "roberta", ("Model", *TASKS, "ForCausalLM", "ForQuestionAnswering"),
    lm_head="lm_head.", transform=("dense", "layer_norm"), lm_act="gelu", positions="not_pad",
)  # fmt: skip
LONGFORMER = ROBERTA._replace(
    name="Longformer", base="longformer", kinds=("Model", *TASKS, "ForQuestionAnswering"), only={"is_decoder": False},
    global_tokens=LONGFORMER_GLOBALS, read_mixer=_read_longformer, write_mixer=_write_longformer,
)  # fmt: skip
BERT = Encoder(
    "Bert", "bert",
    ("Model", *TASKS, "ForPreTraining", "LMHeadModel", "ForNextSentencePrediction", "ForQuestionAnswering"),
    classifier=("bert.pooler.dense", "classifier"),
)  # fmt: skip
BIGBIRD = Encoder(  # without BigBirdForQuestionAnswering, whose head also reads the tokens
    "BigBird", "bert", ("Model", *TASKS, "ForPreTraining", "ForCausalLM"), pooler=".pooler", act="gelu_new",
    classifier_act=None, read_mixer=_read_bigbird, write_mixer=_write_bigbird,
)  # fmt: skip

FAMILIES = {
    "bert": encoder(BERT, "bert"),
    "roberta": encoder(ROBERTA, "roberta"),
    "longformer": encoder(LONGFORMER, "longformer"),
    "big_bird": encoder(BIGBIRD, "big_bird"),
    "vit": Family(_read_vit, _write_vit, _vit_rules, "vit."),
}
