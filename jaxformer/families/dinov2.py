"""DINOv2, without registers."""

from collections.abc import Collection
from typing import Any

from jaxformer.errors import ConfigError
from jaxformer.families.classes import count_labels, read_heads, write_heads
from jaxformer.families.family import Family, Rule, rules
from jaxformer.families.settings import Json, Key, get, read_fields, write_fields
from jaxformer.families.vit import (
    VIT_ATTENTION,
    VIT_FIELDS,
    patches_rules,
    read_patches,
    write_patches,
)
from jaxformer.masks import full
from jaxformer.models.config import Classification, ModelConfig
from jaxformer.zoo.dinov2 import ClassAndPatches
from jaxformer.zoo.layer_scale import LayerScale

NAME = "Dinov2"
NO_QKV = "out|gate|up|down|norm|patches"  # maps with a bias if query, key and value have none
# a gated feed-forward has no other activation
PLAIN = {ours: key for ours, key in VIT_FIELDS.items() if ours not in ("d_ff", "feedforward")} | {
    "norm_eps": Key("layer_norm_eps", 1e-6),
    "use_bias": Key("qkv_bias", True, {True: True, False: NO_QKV}),
}
ACTIVATED = {"feedforward": VIT_FIELDS["feedforward"]}
POOLED = Classification(None, pooler=None, name="pooled")  # the class token
RATIOS = range(1, 33)  # that are tried for a gated feed-forward's width


def _heads(c: Json) -> dict[str, tuple]:
    """Heads by the end of the class name."""
    return {
        "Model": (POOLED,),
        "ForImageClassification": (ClassAndPatches(count_labels(c)),),
        "Backbone": (),  # `zoo.dinov2.feature_maps` has its outputs
    }


def gated_width(d_model: int, ratio: int) -> int:
    """The inner width of a gated feed-forward: two thirds of D `ratio`, rounded up to eights."""
    return (d_model * ratio * 2 // 3 + 7) // 8 * 8


def _read(c: Json, names: Collection[str]) -> ModelConfig:
    patches = read_patches(c, 224, 14, mask_token=get(c, "use_mask_token", True))
    if patches.image[0] != patches.image[1]:
        raise ConfigError(
            f"config.json: image_size={c.get('image_size')}: a {NAME} reads its positions as a "
            "square grid; give a square image, and load it with vision.resize for others"
        )
    fields = read_fields(c, PLAIN)
    ratio = get(c, "mlp_ratio", 4)
    if get(c, "use_swiglu_ffn", False):
        fields |= {"feedforward": "swiglu", "d_ff": gated_width(fields["d_model"], ratio)}
    else:
        fields |= read_fields(c, ACTIVATED) | {"d_ff": fields["d_model"] * ratio}
    return ModelConfig(
        vocab_size=0,
        context_length=patches.length,
        block=LayerScale(get(c, "layerscale_value", 1.0), get(c, "drop_path_rate", 0.0)),
        masks=(full(),),
        embedding=patches,
        heads=read_heads(c, NAME, _heads(c)),
        **fields,
    )


def _write(config: Any) -> Json:
    is_gated = config.feedforward == "swiglu"
    widths = {gated_width(config.d_model, n) if is_gated else config.d_model * n: n for n in RATIOS}
    if config.ff_width not in widths:
        raise ConfigError(
            f"model.d_ff={config.ff_width}: a {NAME} has model.d_model={config.d_model} times a "
            f"whole number{', two thirds of it rounded up to eights' * is_gated}"
        )
    c = write_fields(config, PLAIN) | write_patches(config.embedding)
    c |= {} if is_gated else write_fields(config, ACTIVATED)
    c |= write_heads(config.heads, NAME, _heads({}))
    return c | {
        "mlp_ratio": widths[config.ff_width],
        "use_swiglu_ffn": is_gated,
        "layerscale_value": config.block.initial,
        "drop_path_rate": config.block.drop_path_rate,
        "qkv_bias": config.has_bias("query"),
        "use_mask_token": config.embedding.mask_token,
    }


EMBEDDING, LAYER = "dinov2.embeddings.", "dinov2.encoder.layer.{}."
GATED = ("layers/feedforward/gate", "layers/feedforward/up")  # one tensor of theirs
RULES = [
    *patches_rules(EMBEDDING),
    Rule("embedding/mask_token", EMBEDDING + "mask_token", "leaf1"),
    *rules("layers/", LAYER, {"attention_norm": "norm1", "feedforward_norm": "norm2"}),
    *rules("layers/attention/", LAYER + "attention.", VIT_ATTENTION),
    Rule("layers/attention_layer_scale/scale", LAYER + "layer_scale1.lambda1"),
    Rule("layers/feedforward_layer_scale/scale", LAYER + "layer_scale2.lambda1"),
    Rule("final_norm", "dinov2.layernorm"),
    Rule("heads/classification", "classifier"),
]
PLAIN_MAPS = rules("layers/feedforward/", LAYER + "mlp.", {"up": "fc1", "down": "fc2"})
GATED_MAPS = [
    Rule(GATED, LAYER + "mlp.weights_in"),
    Rule("layers/feedforward/down", LAYER + "mlp.weights_out"),
]


def _rules(config: Any) -> list[Rule]:
    return [*RULES, *(GATED_MAPS if config.feedforward == "swiglu" else PLAIN_MAPS)]


FAMILIES = {"dinov2": Family(_read, _write, _rules, "dinov2.", heads=r"^classifier\.")}
