"""BERT, RoBERTa, Longformer, BigBird, and ViT, an encoder of images."""

import re
import reprlib
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

from jaxformer import zoo
from jaxformer.errors import ConfigError
from jaxformer.interop.huggingface import tables
from jaxformer.interop.huggingface.tables import ACTIVATION, COMMON, POOLED, Family, Json, Key, Rule, get, only, rules
from jaxformer.masks import causal, full
from jaxformer.models.config import Classification, Embedding, LanguageModel, Learned, ModelConfig, Patches
from jaxformer.models.vision import Reconstruction

QKV = ("query", "key", "value")
NO_QKV = "out|up|down|norm|patches"  # layers with a bias if query, key and value have none
FIELDS = COMMON | {
    "feedforward": Key("hidden_act", "gelu", ACTIVATION), "norm_eps": Key("layer_norm_eps", 1e-12),
    "dropout_rate": Key("hidden_dropout_prob", 0.1), "attention_dropout_rate": Key("attention_probs_dropout_prob", 0.1),
}  # fmt: skip
TEXT_FIELDS = FIELDS | {"masks": Key("is_decoder", False, {False: (full(),), True: (causal(),)})}
POOLERS = ("Model", "ForPreTraining", "ForNextSentencePrediction", "ForMultipleChoice")  # classes that use the pooler
# a pooler, and the modules of heads: Google's BertForMaskedLM has the pooler and the next-sentence head of pre-training, too
HEADS = r"(^|\.)pooler\.|^(cls\.predictions|cls\.seq_relationship|lm_head|classifier|qa_outputs)\."
TASKS = ("ForMaskedLM", "ForSequenceClassification", "ForMultipleChoice", "ForTokenClassification")


class Encoder(NamedTuple):
    """BERT or a relative: its names and heads."""

    name: str  # prefix of its class names
    base: str  # prefix of its base model's tensors
    kinds: tuple[str, ...]  # the rest of its class names
    lm_head: str = "cls.predictions."
    transform: tuple[str, str] = ("transform.dense", "transform.LayerNorm")  # in the language model's head
    pooler: str = ".pooler.dense"
    classifier: tuple[str, str] = ("classifier.dense", "classifier.out_proj")
    act: str = "gelu"  # default of hidden_act
    lm_act: str | None = None  # for the language model's head; None: hidden_act
    classifier_act: str | None = "tanh"  # None: hidden_act
    keeps_pooler: bool = False  # in files of classes whose head does not use it
    pad_position: bool = False  # the table has a row for each id up to the pad id before that of position 0
    read_mixer: Callable[[Json, str], Any] = lambda c, kind: None
    write_mixer: Callable[[ModelConfig], Json] = lambda config: {}


def encoder(family: Encoder) -> Family:
    lm, e = family.lm_head, f"{family.base}.embeddings."
    aliases = {lm + "decoder.weight": e + "word_embeddings.weight"}
    aliases |= {lm + "decoder.bias": lm + "bias", lm + "bias": lm + "decoder.bias"}
    ignored = Family._field_defaults["ignored"] + rf"|^{re.escape(lm)}bias$"  # an untied head uses decoder.bias
    read, write, rules = partial(_read, family), partial(_write, family), partial(_rules, family)
    return Family(read, write, rules, family.base + ".", ignored, HEADS, aliases)


def _read(family: Encoder, c: Json, names: Collection[str]) -> ModelConfig:
    only(c, position_embedding_type="absolute", add_cross_attention=False)
    fields = tables.read_fields(c, TEXT_FIELDS | {"feedforward": Key("hidden_act", family.act, ACTIVATION)})
    kind, act = tables.class_kind(c, family.name, family.kinds), fields["feedforward"]
    mixer = family.read_mixer(c, kind)
    sequence = Classification(tables.count_labels(c), pool="position_0", pooler=family.classifier_act or act)
    heads = tables.heads_by_class([kind], sequence, LanguageModel(family.lm_act or act, bias=True), (POOLED,))[kind]
    pooler = any("pooler." in name for name in names)
    if kind == "Model" and names and not pooler:
        heads = ()
    pooled = any(isinstance(head, Classification) for head in heads)
    # in a causal model slot 0 sees no token if it is padding: their result is NaN
    if c.get("is_decoder") and (pooled or mixer is not None):
        part = f"the heads of {family.name + kind}" if pooled else f"the attention of {family.name}"
        raise ConfigError(f"config.json: is_decoder=True is not supported with {part}; only a language model's head is")
    if family.keeps_pooler and kind not in POOLERS and pooler:
        heads = (*heads, POOLED)
    if family.pad_position and c.get("pad_token_id", 1) is None:
        raise ConfigError("config.json: pad_token_id=null: the first position is the one behind it; give its number")
    offset = get(c, "pad_token_id", 1) + 1 if family.pad_position else 0
    scale = c["hidden_size"] ** 0.5 if get(c, "rescale_embeddings", False) else 1.0
    return ModelConfig(
        **fields | {"context_length": fields["context_length"] - offset},
        norm_placement="post", positions=Learned(offset), use_bias=True if get(c, "use_bias", True) else NO_QKV,
        embedding=Embedding(scale, norm=True, token_types=get(c, "type_vocab_size", 2)), heads=heads, mixer=mixer,
    )  # fmt: skip


def _write(family: Encoder, config: Any) -> Json:
    decoder = config.masks == (causal(),)
    kinds = sorted(family.kinds, key=lambda kind: (kind in ("LMHeadModel", "ForCausalLM")) != decoder)
    kinds = tables.heads_by_class(kinds, Classification(2))
    offset = getattr(config.positions, "offset", 0)
    c = tables.write_fields(config, TEXT_FIELDS) | {
        "max_position_embeddings": config.context_length + offset, "type_vocab_size": config.embedding.token_types,
    }  # fmt: skip
    c |= {"pad_token_id": offset - 1} if offset else {}
    return c | family.write_mixer(config) | tables.write_heads(config.heads, family.name, kinds)


def _read_longformer(c: Json, kind: str):
    windows, layers = c.get("attention_window", 512), get(c, "num_hidden_layers")
    windows = windows if isinstance(windows, list) else [windows] * layers
    if len(windows) != layers or any(type(width) is not int or width < 2 or width % 2 for width in windows):
        raise ConfigError(f"config.json: attention_window={reprlib.repr(windows)}: expected an even number for each layer")
    per_call = kind in ("ForQuestionAnswering", "ForMultipleChoice")  # global tokens come with each call
    tokens = None if per_call else int(kind == "ForSequenceClassification")
    pattern = tuple(zoo.Longformer(width, tokens) for width in tables.shortest_pattern(windows))
    return pattern if len(pattern) > 1 else pattern[0]


def _read_bigbird(c: Json, kind: str):
    if c.get("attention_type", "block_sparse") == "original_full":
        return None
    only(c, attention_type="block_sparse")
    block, random = get(c, "block_size", 64), get(c, "num_random_blocks", 3)
    return zoo.BigBird(block, random, layout="zero", dense_length=(5 + 2 * random) * block)


def _write_bigbird(config: Any) -> Json:
    mixer = config.mixer
    c = {"rescale_embeddings": config.embedding.scale != 1.0, "use_bias": config.has_bias("query")}
    if mixer is None:
        return c | {"attention_type": "original_full"}
    return c | {"attention_type": "block_sparse", "block_size": mixer.block, "num_random_blocks": mixer.random}


def _rules(family: Encoder, config: ModelConfig) -> list[Rule]:
    layer, e, pooler = f"{family.base}.encoder.layer.{{}}.", f"{family.base}.embeddings.", family.base + family.pooler
    tokens = {"tokens": "word_embeddings.weight", "token_types": "token_type_embeddings.weight"}
    attention = {name: f"self.{name}" for name in QKV} | {f"global_{name}": f"self.{name}_global" for name in QKV}
    return [
        *rules("embedding/", e, tokens | {"positions": "position_embeddings.weight", "norm": "LayerNorm"}),
        *rules("layers/attention/", layer + "attention.", attention | {"out": "output.dense"}),
        *rules("layers/", layer, {"attention_norm": "attention.output.LayerNorm", "feedforward_norm": "output.LayerNorm"}),
        *rules("layers/feedforward/", layer, {"up": "intermediate.dense", "down": "output.dense"}),
        *(Rule(f"heads/{name}/pooler", pooler) for name in ("pooled", "next_sentence", "multiple_choice")),
        *rules("heads/classification", "", dict(zip(("/pooler", ""), family.classifier, strict=True))),
        *rules("heads/", "", {"token_classification": "classifier", "multiple_choice": "classifier"}),
        *rules("heads/", "", {"span": "qa_outputs", "next_sentence": "cls.seq_relationship"}),
        *rules("heads/language_model/", family.lm_head, {
            "transform": family.transform[0], "transform/norm": family.transform[1], "kernel": "decoder.weight",
            "bias": "bias" if config.tie_embeddings else "decoder.bias",
        }),
    ]  # fmt: skip


ROBERTA = Encoder(
    "Roberta", "roberta", ("Model", *TASKS, "ForCausalLM", "ForQuestionAnswering"),
    lm_head="lm_head.", transform=("dense", "layer_norm"), lm_act="gelu", pad_position=True,
)  # fmt: skip
LONGFORMER = ROBERTA._replace(
    name="Longformer", base="longformer", kinds=("Model", *TASKS, "ForQuestionAnswering"),
    read_mixer=_read_longformer,
    write_mixer=lambda config: {"attention_window": [mixer.window for mixer in tables.repeated(config.mixer, config)]},
)  # fmt: skip
BERT = Encoder(
    "Bert", "bert",
    ("Model", *TASKS, "ForPreTraining", "LMHeadModel", "ForNextSentencePrediction", "ForQuestionAnswering"),
    classifier=("bert.pooler.dense", "classifier"),
)  # fmt: skip
BIGBIRD = Encoder(  # without BigBirdForQuestionAnswering, whose head also reads the tokens
    "BigBird", "bert", ("Model", *TASKS, "ForPreTraining", "ForCausalLM"), pooler=".pooler", act="gelu_new",
    classifier_act=None, keeps_pooler=True, read_mixer=_read_bigbird, write_mixer=_write_bigbird,
)  # fmt: skip

VIT_FIELDS = {ours: key for ours, key in FIELDS.items() if ours not in ("vocab_size", "context_length", "tie_embeddings")} | {
    "dropout_rate": Key("hidden_dropout_prob", 0.0), "attention_dropout_rate": Key("attention_probs_dropout_prob", 0.0),
    "use_bias": Key("qkv_bias", True, {True: True, False: NO_QKV}),
}  # fmt: skip
VIT_POOLER = {"pooler": Key("pooler_act", "tanh", ACTIVATION), "pooler_width": Key("pooler_output_size", None)}


def _vit_heads(c: Json) -> dict[str, tuple]:
    """Heads by the end of the class name."""
    pooler = tables.read_fields(c, VIT_POOLER)
    if pooler["pooler_width"] == c.get("hidden_size"):
        pooler["pooler_width"] = None
    return {
        "Model": (Classification(None, **pooler, name="pooled"),),
        "ForImageClassification": (Classification(tables.count_labels(c), pooler=None),),
        "ForMaskedImageModeling": (Reconstruction(get(c, "encoder_stride", 16)),),
    }


def _pair(c: Json, name: str, default: int) -> tuple[int, int]:
    """Height and width: an entry that is a size, or a list of two."""
    value = c.get(name, default)
    height, width = value if isinstance(value, list) and len(value) == 2 else (value, value)
    return get({name: height}, name), get({name: width}, name)


def _read_vit(c: Json, names: Collection[str]) -> ModelConfig:
    heads = tables.read_heads(c, "ViT", _vit_heads(c))
    masked = isinstance(heads[0], Reconstruction)
    patches = Patches(_pair(c, "image_size", 224), _pair(c, "patch_size", 16), get(c, "num_channels", 3), mask_token=masked)
    if masked and patches.grid[0] != patches.grid[1]:  # transformers assumes a square grid
        raise ConfigError(f"config.json: image_size={c.get('image_size')}: ViTForMaskedImageModeling needs a square grid")
    if heads[0].name == "pooled" and names and not any("pooler." in name for name in names):
        heads = ()
    return ModelConfig(
        vocab_size=0, context_length=patches.length, masks=(full(),), embedding=patches, heads=heads,
        **tables.read_fields(c, VIT_FIELDS),
    )  # fmt: skip


def _write_vit(config: Any) -> Json:
    patches, head = config.embedding, config.heads[0] if config.heads else None
    single = lambda pair: pair[0] if len(set(pair)) == 1 else list(pair)
    c = tables.write_fields(config, VIT_FIELDS) | tables.write_heads(config.heads, "ViT", _vit_heads({})) | {
        "image_size": single(patches.image), "patch_size": single(patches.patch), "num_channels": patches.channels,
        "encoder_stride": getattr(head, "stride", 16), "pooler_output_size": config.d_model,
        "qkv_bias": config.has_bias("query"),
    }  # fmt: skip
    if head is not None and head.name == "pooled":
        c |= {key: value for key, value in tables.write_fields(head, VIT_POOLER).items() if value is not None}
    return c


VIT_LAYER, VIT_EMBEDDING = "vit.encoder.layer.{}.", "vit.embeddings."
VIT_RULES = [
    Rule("embedding/patches", VIT_EMBEDDING + "patch_embeddings.projection", "patches"),
    *rules("embedding/", VIT_EMBEDDING, {"class_token": "cls_token", "mask_token": "mask_token"}, "leaf2"),
    Rule("embedding/positions", VIT_EMBEDDING + "position_embeddings", "leaf1"),
    *rules("layers/", VIT_LAYER, {"attention_norm": "layernorm_before", "feedforward_norm": "layernorm_after"}),
    *rules("layers/attention/", VIT_LAYER + "attention.", {n: f"attention.{n}" for n in QKV} | {"out": "output.dense"}),
    *rules("layers/feedforward/", VIT_LAYER, {"up": "intermediate.dense", "down": "output.dense"}),
    *rules("", "vit.", {"final_norm": "layernorm", "heads/pooled/pooler": "pooler.dense"}),
    Rule("heads/classification", "classifier"),
    Rule("heads/reconstruction", "decoder.0", "patches"),
]
FAMILIES = {
    "bert": encoder(BERT), "roberta": encoder(ROBERTA), "longformer": encoder(LONGFORMER), "big_bird": encoder(BIGBIRD),
    "vit": Family(_read_vit, _write_vit, lambda config: VIT_RULES, "vit.", heads=r"(^|\.)pooler\.|^classifier\."),
}  # fmt: skip
