"""ViT: images in square patches; and what it shares with its relatives."""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

from jaxformer.errors import ConfigError
from jaxformer.families.bert import FIELDS, NO_QKV, QKV
from jaxformer.families.classes import count_labels, read_heads, without_absent, write_heads
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


class Vit(NamedTuple):
    """ViT or a relative: its names, tokens and heads."""

    name: str  # prefix of its class names
    base: str  # prefix of its base model's tensors
    extra_tokens: int = 0
    # config.json -> heads by the end of the class name, in addition to those of ViT
    more_heads: Callable[[Json], dict[str, tuple]] = lambda c: {}


def vit(model: Vit, more_rules: tuple[Rule, ...] = ()) -> Family:
    """The family of ViT or of a relative."""
    return Family(
        read=partial(_read, model),
        write=partial(_write, model),
        rules=lambda config: [*vit_rules(model.base), *more_rules],
        prefix=f"{model.base}.",
        heads=r"(^|\.)pooler\.|^\w*classifier\.",
    )


def _heads(model: Vit, c: Json) -> dict[str, tuple]:
    """Heads by the end of the class name."""
    pooler = read_fields(c, VIT_POOLER)
    if pooler["pooler_width"] == c.get("hidden_size"):
        pooler["pooler_width"] = None
    return {
        "Model": (Classification(None, **pooler, name="pooled"),),
        "ForImageClassification": (Classification(count_labels(c), pooler=None),),
        "ForMaskedImageModeling": (Reconstruction(get(c, "encoder_stride", 16)),),
    } | model.more_heads(c)


def read_pair(c: Json, name: str, default: int) -> tuple[int, int]:
    """(height, width) from an entry that is a size or a list of two."""
    value = c.get(name, default)
    height, width = value if isinstance(value, list) and len(value) == 2 else (value, value)
    return get({name: height}, name), get({name: width}, name)


def read_patches(c: Json, image: int, patch: int, **changes: Any) -> Patches:
    """The patches of config.json. `image` and `patch` are the sizes where it says none.

    As in torch, pixels that fill no whole patch are not read.
    """
    size, of_patch = read_pair(c, "image_size", image), read_pair(c, "patch_size", patch)
    if min(size[0] // of_patch[0], size[1] // of_patch[1]) < 1:
        raise ConfigError(f"config.json: patch_size={of_patch} is larger than image_size={size}")
    unread = size[0] % of_patch[0], size[1] % of_patch[1]
    return Patches(size, of_patch, get(c, "num_channels", 3), unread=unread, **changes)


def write_patches(patches: Patches) -> Json:
    """The inverse of `read_patches`."""

    def single(pair: tuple[int, int]) -> Any:
        return pair[0] if len(set(pair)) == 1 else list(pair)

    return {
        "image_size": single(patches.image),
        "patch_size": single(patches.patch),
        "num_channels": patches.channels,
    }


def _read(model: Vit, c: Json, names: Collection[str]) -> ModelConfig:
    heads = read_heads(c, model.name, _heads(model, c))
    masked = isinstance(heads[0], Reconstruction)
    patches = read_patches(c, 224, 16, mask_token=masked, extra_tokens=model.extra_tokens)
    if masked and patches.grid[0] != patches.grid[1]:  # transformers assumes a square grid
        raise ConfigError(
            f"config.json: image_size={c.get('image_size')}: "
            f"{model.name}ForMaskedImageModeling needs a square grid"
        )
    heads = without_absent(heads, names, "pooler.")
    return ModelConfig(
        vocab_size=0,
        context_length=patches.length,
        masks=(full(),),
        embedding=patches,
        heads=heads,
        **read_fields(c, VIT_FIELDS),
    )


def _write(model: Vit, config: Any) -> Json:
    head = config.heads[0] if config.heads else None
    c = write_fields(config, VIT_FIELDS) | write_patches(config.embedding)
    c |= write_heads(config.heads, model.name, _heads(model, {}))
    c |= {
        "encoder_stride": getattr(head, "stride", 16),
        "pooler_output_size": config.d_model,
        "qkv_bias": config.has_bias("query"),
    }
    if head is not None and head.name == "pooled":
        pooler = write_fields(head, VIT_POOLER)
        c |= {key: value for key, value in pooler.items() if value is not None}
    return c


# of a layer
VIT_NORMS = {"attention_norm": "layernorm_before", "feedforward_norm": "layernorm_after"}
VIT_ATTENTION = {name: f"attention.{name}" for name in QKV} | {"out": "output.dense"}
VIT_FEEDFORWARD = {"up": "intermediate.dense", "down": "output.dense"}


def patches_rules(embedding: str) -> list[Rule]:
    """The rules of the embedding of images, in a file whose names of it begin with `embedding`."""
    return [
        Rule("embedding/patches", embedding + "patch_embeddings.projection", "patches"),
        Rule("embedding/class_token", embedding + "cls_token", "leaf2"),
        Rule("embedding/positions", embedding + "position_embeddings", "leaf1"),
    ]


def vit_rules(base: str) -> list[Rule]:
    """The rules of ViT, in a file whose names begin with `base`."""
    layer = base + ".encoder.layer.{}."
    return [
        *patches_rules(base + ".embeddings."),
        Rule("embedding/mask_token", base + ".embeddings.mask_token", "leaf2"),
        *rules("layers/", layer, VIT_NORMS),
        *rules("layers/attention/", layer + "attention.", VIT_ATTENTION),
        *rules("layers/feedforward/", layer, VIT_FEEDFORWARD),
        *rules("", f"{base}.", {"final_norm": "layernorm", "heads/pooled/pooler": "pooler.dense"}),
        Rule("heads/classification", "classifier"),
        Rule("heads/reconstruction", "decoder.0", "patches"),
    ]


FAMILIES = {"vit": vit(Vit("ViT", "vit"))}
