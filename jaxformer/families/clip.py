"""The towers of CLIP: `clip_vision_model` and `clip_text_model`.

They stand in folders of their own, or are the parts `vision` and `text` of a whole CLIP.
"""

from collections.abc import Collection
from typing import Any

from jaxformer.errors import ConfigError
from jaxformer.families.classes import class_kind, without_absent, write_heads
from jaxformer.families.family import Family, Rule, rules
from jaxformer.families.settings import (
    ACTIVATION,
    PROJECTIONS,
    Json,
    Key,
    get,
    read_fields,
    write_fields,
)
from jaxformer.families.vit import read_patches, write_patches
from jaxformer.masks import causal, full
from jaxformer.models.config import ModelConfig
from jaxformer.zoo.clip import ImageFeatures, TextFeatures, embedding_norm

NO_PATCHES = "query|key|value|out|up|down|norm"  # maps with a bias in the vision tower
KINDS = ("Model", "ModelWithProjection")
ANY_END = 2  # in older files, the end token of every CLIP, which pooled at the largest id


def tower_fields(width: int, inner: int, heads: int, act: str, eps: float) -> dict[str, Key]:
    """{our field: their entry} of a tower, with the defaults that transformers leaves out."""
    return {
        "num_layers": Key("num_hidden_layers", 12),
        "d_model": Key("hidden_size", width),
        "num_heads": Key("num_attention_heads", heads),
        "d_ff": Key("intermediate_size", inner),
        "init_std": Key("initializer_range", 0.02),
        "feedforward": Key("hidden_act", act, ACTIVATION),
        "norm_eps": Key("layer_norm_eps", eps),
        "attention_dropout_rate": Key("attention_dropout", 0.0),
    }


def write_tower(config: Any, table: dict[str, Key]) -> Json:
    """The inverse of `read_fields` of a tower."""
    return write_fields(config, table) | {"intermediate_size": config.ff_width}


def text_fields(vocab_size: int, context_length: int) -> dict[str, Key]:
    """{our field: their entry} of a text tower, in addition to `tower_fields`."""
    return {
        "vocab_size": Key("vocab_size", vocab_size),
        "context_length": Key("max_position_embeddings", context_length),
    }


VISION = tower_fields(768, 3072, 12, "quick_gelu", 1e-5)
TEXT = tower_fields(512, 2048, 8, "quick_gelu", 1e-5) | text_fields(49408, 77)


def _width(c: Json, prefix: str) -> tuple[str, int | None]:
    """(name of the head, width of its projection) of the class that wrote the file."""
    if class_kind(c, prefix, KINDS) == "Model":
        return "pooled", None
    return "features", get(c, "projection_dim", 512)


def _classes(head: Any) -> dict[str, tuple]:
    """Heads by the end of the class name, for `write_heads`."""
    return {"Model": (), "ModelWithProjection": (head,)}


def _write_head(config: Any, prefix: str) -> Json:
    width = config.heads[0].width if config.heads else None
    c = {"projection_dim": width} if width else {}
    return c | write_heads(config.heads, prefix, _classes(ImageFeatures()))


def _read_vision(c: Json, names: Collection[str]) -> ModelConfig:
    name, width = _width(c, "CLIPVision")
    patches = read_patches(c, 224, 32)
    return ModelConfig(
        vocab_size=0,
        context_length=patches.length,
        block=embedding_norm,
        masks=(full(),),
        use_bias=NO_PATCHES,
        embedding=patches,
        heads=without_absent((ImageFeatures(width, name),), names, "post_layernorm."),
        **read_fields(c, VISION),
    )


def _write_vision(config: Any) -> Json:
    c = write_tower(config, VISION) | write_patches(config.embedding)
    return c | _write_head(config, "CLIPVision")


def _read_text(c: Json, names: Collection[str]) -> ModelConfig:
    name, width = _width(c, "CLIPText")
    end = c.get("eos_token_id", 49407)
    if type(end) is not int or end < 0:
        raise ConfigError(
            f"config.json: eos_token_id={end!r}: the features are those of this token; "
            "expected its id"
        )
    return ModelConfig(
        masks=(causal(),),
        heads=(TextFeatures(None if end == ANY_END else end, width, name),),
        **read_fields(c, TEXT),
    )


def _write_text(config: Any) -> Json:
    end = config.heads[0].end if config.heads else None
    c = write_tower(config, TEXT) | {"eos_token_id": ANY_END if end is None else end}
    return c | _write_head(config, "CLIPText")


def tower_rules(base: str) -> list[Rule]:
    """The rules of the layers, in a file whose names begin with `base`."""
    layer = base + "encoder.layers.{}."
    return [
        *rules(
            "layers/", layer, {"attention_norm": "layer_norm1", "feedforward_norm": "layer_norm2"}
        ),
        *rules("layers/attention/", layer + "self_attn.", PROJECTIONS),
        *rules("layers/feedforward/", layer + "mlp.", {"up": "fc1", "down": "fc2"}),
    ]


def vision_rules(base: str) -> list[Rule]:
    """The rules of the layers and the embedding of a vision tower."""
    return [
        *tower_rules(base),
        Rule("embedding/patches", base + "embeddings.patch_embedding", "patches"),
        Rule("embedding/positions", base + "embeddings.position_embedding.weight"),
    ]


def text_rules(base: str) -> list[Rule]:
    """The rules of the layers, the embedding and the last norm of a text tower."""
    return [
        *tower_rules(base),
        Rule("embedding/tokens", base + "embeddings.token_embedding.weight"),
        Rule("embedding/positions", base + "embeddings.position_embedding.weight"),
        Rule("final_norm", base + "final_layer_norm"),
    ]


VISION_RULES = [
    *vision_rules("vision_model."),
    Rule("embedding/class_token", "vision_model.embeddings.class_embedding"),
    Rule("embedding_norm", "vision_model.pre_layrnorm"),  # their spelling
    Rule("heads/pooled/norm", "vision_model.post_layernorm"),
    Rule("heads/features/norm", "vision_model.post_layernorm"),
    Rule("heads/features", "visual_projection"),
]
TEXT_RULES = [*text_rules("text_model."), Rule("heads/features", "text_projection")]
FAMILIES = {
    "clip_vision_model": Family(
        _read_vision,
        _write_vision,
        lambda config: VISION_RULES,
        "vision_model.",
        heads=r"(^|\.)post_layernorm\.|^visual_projection\.",
    ),
    "clip_text_model": Family(
        _read_text,
        _write_text,
        lambda config: TEXT_RULES,
        "text_model.",
        heads=r"^text_projection\.",
    ),
}
