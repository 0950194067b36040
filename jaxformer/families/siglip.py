"""The towers of SigLIP: `siglip_vision_model` and `siglip_text_model`.

They stand in folders of their own, or are the parts `vision` and `text` of a whole SigLIP.
"""

from collections.abc import Collection
from typing import Any

from jaxformer.families.classes import read_heads, without_absent, write_heads
from jaxformer.families.clip import (
    text_fields,
    text_rules,
    tower_fields,
    vision_rules,
    write_tower,
)
from jaxformer.families.family import Family, Rule, rules
from jaxformer.families.settings import PROJECTIONS, Json, get, read_fields
from jaxformer.families.vit import read_patches, write_patches
from jaxformer.masks import full
from jaxformer.models.config import ModelConfig
from jaxformer.zoo.siglip import AttentionPooling, LastPosition

VISION = tower_fields(768, 3072, 12, "gelu_pytorch_tanh", 1e-6)
TEXT = VISION | text_fields(32000, 64)


def _read_vision(c: Json, names: Collection[str]) -> ModelConfig:
    pooled = (AttentionPooling(),) if get(c, "vision_use_head", True) else ()
    patches = read_patches(c, 224, 16, class_token=False)
    return ModelConfig(
        vocab_size=0,
        context_length=patches.length,
        masks=(full(),),
        embedding=patches,
        heads=read_heads(c, "SiglipVision", {"Model": pooled}),
        **read_fields(c, VISION),
    )


def _write_vision(config: Any) -> Json:
    c = write_tower(config, VISION) | write_patches(config.embedding)
    c |= write_heads(config.heads, "SiglipVision", {"Model": config.heads})
    return c | {"vision_use_head": bool(config.heads)}


def _read_text(c: Json, names: Collection[str]) -> ModelConfig:
    fields = read_fields(c, TEXT)
    width = get(c, "projection_size", None)
    if width == fields["d_model"]:
        width = None
    kinds: dict[str, tuple] = {"Model": (LastPosition(width),)}
    return ModelConfig(
        masks=(full(),),
        heads=without_absent(read_heads(c, "SiglipText", kinds), names, "head."),
        **fields,
    )


def _write_text(config: Any) -> Json:
    width = config.heads[0].width if config.heads else None
    c = write_tower(config, TEXT) | {"projection_size": width or config.d_model}
    return c | write_heads(config.heads, "SiglipText", {"Model": config.heads})


POOLING, OUT = "vision_model.head.", PROJECTIONS["out"]
INPUTS = tuple(f"heads/pooled/{name}" for name in ("query", "key", "value"))
POOLING_RULES = [
    Rule("heads/pooled/probe", POOLING + "probe", "leaf2"),
    Rule(INPUTS, POOLING + "attention.in_proj_"),  # one tensor, as in torch.nn.MultiheadAttention
    Rule("heads/pooled/out", POOLING + "attention." + OUT),
    Rule("heads/pooled/norm", POOLING + "layernorm"),
    *rules("heads/pooled/feedforward/", POOLING + "mlp.", {"up": "fc1", "down": "fc2"}),
]
VISION_RULES = [
    *vision_rules("vision_model."),
    Rule("final_norm", "vision_model.post_layernorm"),
]
TEXT_RULES = [*text_rules("text_model."), Rule("heads/pooled", "text_model.head")]


def _vision_rules(config: Any) -> list[Rule]:
    return VISION_RULES + (POOLING_RULES if config.heads else [])


HEADS = r"(^|\.)head\."
FAMILIES = {
    "siglip_vision_model": Family(
        _read_vision, _write_vision, _vision_rules, "vision_model.", heads=HEADS
    ),
    "siglip_text_model": Family(
        _read_text, _write_text, lambda config: TEXT_RULES, "text_model.", heads=HEADS
    ),
}
