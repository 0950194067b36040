"""ViT: images in square patches."""

from collections.abc import Collection
from typing import Any

from jaxformer.errors import ConfigError
from jaxformer.families.bert import FIELDS, NO_QKV, QKV
from jaxformer.families.classes import count_labels, read_heads, write_heads
from jaxformer.families.family import Family, Rule, rules
from jaxformer.families.settings import ACTIVATION, Json, Key, get, read_fields, write_fields
from jaxformer.masks import full
from jaxformer.models.config import Classification, ModelConfig, Patches
from jaxformer.models.vision import Reconstruction

VIT_FIELDS = {
    ours: key
    for ours, key in FIELDS.items()
    if ours not in ("vocab_size", "context_length", "tie_embeddings")
} | {
    "dropout_rate": Key("hidden_dropout_prob", 0.0),
    "attention_dropout_rate": Key("attention_probs_dropout_prob", 0.0),
    "use_bias": Key("qkv_bias", True, {True: True, False: NO_QKV}),
}
VIT_POOLER = {
    "pooler": Key("pooler_act", "tanh", ACTIVATION),
    "pooler_width": Key("pooler_output_size", None),
}


def _vit_heads(c: Json) -> dict[str, tuple]:
    """Heads by the end of the class name."""
    pooler = read_fields(c, VIT_POOLER)
    if pooler["pooler_width"] == c.get("hidden_size"):
        pooler["pooler_width"] = None
    return {
        "Model": (Classification(None, **pooler, name="pooled"),),
        "ForImageClassification": (Classification(count_labels(c), pooler=None),),
        "ForMaskedImageModeling": (Reconstruction(get(c, "encoder_stride", 16)),),
    }


def _pair(c: Json, name: str, default: int) -> tuple[int, int]:
    """(height, width) from an entry that is a size or a list of two."""
    value = c.get(name, default)
    height, width = value if isinstance(value, list) and len(value) == 2 else (value, value)
    return get({name: height}, name), get({name: width}, name)


def _read_vit(c: Json, names: Collection[str]) -> ModelConfig:
    heads = read_heads(c, "ViT", _vit_heads(c))
    masked = isinstance(heads[0], Reconstruction)
    patches = Patches(
        _pair(c, "image_size", 224),
        _pair(c, "patch_size", 16),
        get(c, "num_channels", 3),
        mask_token=masked,
    )
    if masked and patches.grid[0] != patches.grid[1]:  # transformers assumes a square grid
        raise ConfigError(
            f"config.json: image_size={c.get('image_size')}: "
            "ViTForMaskedImageModeling needs a square grid"
        )
    if heads[0].name == "pooled" and names and not any("pooler." in name for name in names):
        heads = ()
    return ModelConfig(
        vocab_size=0,
        context_length=patches.length,
        masks=(full(),),
        embedding=patches,
        heads=heads,
        **read_fields(c, VIT_FIELDS),
    )


def _write_vit(config: Any) -> Json:
    patches = config.embedding
    head = config.heads[0] if config.heads else None

    def single(pair):
        return pair[0] if len(set(pair)) == 1 else list(pair)

    c = write_fields(config, VIT_FIELDS) | write_heads(config.heads, "ViT", _vit_heads({}))
    c |= {
        "image_size": single(patches.image),
        "patch_size": single(patches.patch),
        "num_channels": patches.channels,
        "encoder_stride": getattr(head, "stride", 16),
        "pooler_output_size": config.d_model,
        "qkv_bias": config.has_bias("query"),
    }
    if head is not None and head.name == "pooled":
        pooler = write_fields(head, VIT_POOLER)
        c |= {key: value for key, value in pooler.items() if value is not None}
    return c


VIT_EMBEDDING = "vit.embeddings."
VIT_LAYER = "vit.encoder.layer.{}."
VIT_NORMS = {"attention_norm": "layernorm_before", "feedforward_norm": "layernorm_after"}
VIT_ATTENTION = {name: f"attention.{name}" for name in QKV} | {"out": "output.dense"}
VIT_FEEDFORWARD = {"up": "intermediate.dense", "down": "output.dense"}
VIT_RULES = [
    Rule("embedding/patches", VIT_EMBEDDING + "patch_embeddings.projection", "patches"),
    Rule("embedding/class_token", VIT_EMBEDDING + "cls_token", "leaf2"),
    Rule("embedding/mask_token", VIT_EMBEDDING + "mask_token", "leaf2"),
    Rule("embedding/positions", VIT_EMBEDDING + "position_embeddings", "leaf1"),
    *rules("layers/", VIT_LAYER, VIT_NORMS),
    *rules("layers/attention/", VIT_LAYER + "attention.", VIT_ATTENTION),
    *rules("layers/feedforward/", VIT_LAYER, VIT_FEEDFORWARD),
    *rules("", "vit.", {"final_norm": "layernorm", "heads/pooled/pooler": "pooler.dense"}),
    Rule("heads/classification", "classifier"),
    Rule("heads/reconstruction", "decoder.0", "patches"),
]
FAMILIES = {
    "vit": Family(
        _read_vit,
        _write_vit,
        lambda config: VIT_RULES,
        "vit.",
        heads=r"(^|\.)pooler\.|^classifier\.",
    ),
}
