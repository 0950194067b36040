"""ModernBERT: an encoder with rotations, gates, and windows in two of three layers.

Warner et al. 2024, arXiv:2412.13663. Their code computes a batch without its padding; that changes
no number. A window of `local_attention` is half of it on either side.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from jaxformer.families.classes import count_labels, read_heads, write_heads
from jaxformer.families.decoder import (
    ALL_BIASES,
    FULL,
    SLIDING,
    read_biases,
    read_kinds,
    write_biases,
)
from jaxformer.families.family import Family, Rule, rules
from jaxformer.families.rotations import read_ropes, write_ropes
from jaxformer.families.settings import (
    ACTIVATION,
    COMMON,
    GATED,
    Json,
    Key,
    get,
    only,
    pattern_of,
    read_fields,
    repeated,
    shortest_pattern,
    write_fields,
)
from jaxformer.masks import Mask, full, window
from jaxformer.models.config import Embedding, LanguageModel, ModelConfig
from jaxformer.zoo.modernbert import bare_first
from jaxformer.zoo.projection import ProjectedClasses, Projection

FIELDS = COMMON | {
    "feedforward": Key("hidden_activation", "gelu", GATED),
    "norm_eps": Key("norm_eps", 1e-5),
    "attention_dropout_rate": Key("attention_dropout", 0.0),
}
BIASES = {"attention_bias": ALL_BIASES, "mlp_bias": "gate|up|down", "norm_bias": "norm"}
HEAD = {"activation": Key("classifier_activation", "gelu", ACTIVATION)}
THETAS = {FULL: 160_000.0, SLIDING: 10_000.0}
# in files of transformers before version 5
OLD_THETAS = {FULL: "global_rope_theta", SLIDING: "local_rope_theta"}
NAME = "ModernBert"
# the first position of a padded row may be padding, except in a choice
POOLS = {"cls": ("position_0", "first"), "mean": ("mean", "mean")}
CLASSES = ("classification", "token_classification", "span", "multiple_choice")


def _heads(
    classes: int, projection: Projection, bias: bool = True, pools: tuple = POOLS["cls"]
) -> dict[str, tuple]:
    """{end of a class name: its heads}. `pools` are those of a sequence and of a choice."""
    of_sequence, of_choice = pools
    sequence = ProjectedClasses(classes, of_sequence, projection)
    tokens = replace(sequence, pool=None, name="token_classification")
    choice = ProjectedClasses(1, of_choice, projection, "multiple_choice")
    return {
        "Model": (),
        "ForMaskedLM": (LanguageModel(projection, bias=bias),),
        "ForSequenceClassification": (sequence,),
        "ForTokenClassification": (tokens,),
        "ForQuestionAnswering": (replace(tokens, classes=2, name="span"),),
        "ForMultipleChoice": (choice,),
    }


def _read(c: Json, names: Collection[str]) -> ModelConfig:
    only(c, position_embedding_type="absolute", is_decoder=False, rope_scaling=None)
    fields = read_fields(c, FIELDS)
    layers = fields["num_layers"]
    period = get(c, "global_attn_every_n_layers", 3)
    kinds = read_kinds(c, [SLIDING if i % period else FULL for i in range(layers)])
    half = get(c, "local_attention", 128) // 2
    masks = {FULL: full(), SLIDING: window(half, half)}
    thetas = {kind: get(c, OLD_THETAS[kind], theta) for kind, theta in THETAS.items()}
    ropes = read_ropes(c, fields["d_model"] // fields["num_heads"], thetas)
    projection = Projection(**read_fields(c, HEAD), bias=get(c, "classifier_bias", False))
    pools = read_fields(c, {"pools": Key("classifier_pooling", "cls", POOLS)})
    heads = _heads(count_labels(c), projection, get(c, "decoder_bias", True), **pools)
    return ModelConfig(
        **fields,
        block=bare_first(layers),
        positions=pattern_of([ropes[kind] for kind in kinds]),
        masks=shortest_pattern([masks[kind] for kind in kinds]),
        use_bias=read_biases(c, BIASES),
        embedding=Embedding(norm=True),
        heads=read_heads(c, NAME, heads),
    )


def _half(mask: Mask) -> int | None:
    """The number of keys that a query sees on either side; None: all."""
    return next((conjunct.args[0] for conjunct in mask.conjuncts() if conjunct.args), None)


def _write(config: Any) -> Json:
    halves = [_half(mask) for mask in repeated(config.masks, config)]
    kinds = [FULL if half is None else SLIDING for half in halves]
    ropes = dict(zip(kinds, repeated(config.positions, config), strict=True))
    half = next((half for half in halves if half is not None), 64)
    c = write_fields(config, FIELDS) | write_biases(config, BIASES)
    c |= {"layer_types": kinds, "local_attention": max(2 * half, 1)}
    c["cls_token_id"] = None  # theirs has a default, which other vocabularies do not have
    c["rope_parameters"] = write_ropes(ropes, THETAS)["rope_parameters"]
    for kind, name in OLD_THETAS.items():
        c[name] = c["rope_parameters"][kind]["rope_theta"]
    for head in config.heads:
        projection: Any = head.transform if isinstance(head, LanguageModel) else head.projection
        c |= write_fields(projection, HEAD) | {"classifier_bias": projection.bias}
        c |= {"decoder_bias": head.bias} if isinstance(head, LanguageModel) else {}
        c["classifier_pooling"] = "mean" if getattr(head, "pool", None) == "mean" else "cls"
    return c | write_heads(config.heads, NAME, _heads(2, Projection()))


def _rules(config: ModelConfig) -> list[Rule]:
    layer = "model.layers.{}."
    embedding = {"tokens": "tok_embeddings.weight", "norm": "norm"}
    norms = {"attention_norm": "attn_norm", "feedforward_norm": "mlp_norm"}
    attention = {("query", "key", "value"): "Wqkv", "out": "Wo"}
    feedforward = {("gate", "up"): "Wi", "down": "Wo"}
    heads = {"language_model/kernel": "decoder.weight", "language_model/bias": "decoder.bias"}
    heads |= dict.fromkeys(CLASSES, "classifier")
    for name in ("language_model", *CLASSES):
        heads |= {f"{name}/transform": "head.dense", f"{name}/transform/norm": "head.norm"}
    return [
        *rules("embedding/", "model.embeddings.", embedding),
        *rules("layers/", layer, norms),
        *rules("layers/attention/", layer + "attn.", attention),
        *rules("layers/feedforward/", layer + "mlp.", feedforward),
        Rule("final_norm", "model.final_norm"),
        *rules("heads/", "", heads),
    ]


FAMILY = Family(
    _read,
    _write,
    _rules,
    prefix="model.",
    heads=r"^(head|decoder|classifier)\.",
    aliases={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
)
FAMILIES = {"modernbert": FAMILY}
