"""ViT-MAE: an encoder that sees some of an image's patches, with or without its decoder."""

from collections.abc import Collection
from typing import Any

from jaxformer.errors import ConfigError
from jaxformer.families.classes import class_kind
from jaxformer.families.family import Family, Rule, rules
from jaxformer.families.settings import Json, Key, get, read_fields, write_fields
from jaxformer.families.vit import (
    VIT_ATTENTION,
    VIT_FEEDFORWARD,
    VIT_FIELDS,
    VIT_NORMS,
    read_patches,
    vit_rules,
    write_patches,
)
from jaxformer.masks import full
from jaxformer.models.config import ModelConfig
from jaxformer.zoo.masked_autoencoder import KeptPatches, PixelDecoder

NAME = "ViTMAE"
KINDS = ("ForPreTraining", "Model")
DECODER = {
    "d_model": Key("decoder_hidden_size", 512),
    "num_layers": Key("decoder_num_hidden_layers", 8),
    "num_heads": Key("decoder_num_attention_heads", 16),
    "d_ff": Key("decoder_intermediate_size", 2048),
    "normalised": Key("norm_pix_loss", False),
}


def _read(c: Json, names: Collection[str]) -> ModelConfig:
    patches = read_patches(c, 224, 16)
    has_decoder = class_kind(c, NAME, KINDS) == "ForPreTraining"
    square = patches.image[0] == patches.image[1] and patches.patch[0] == patches.patch[1]
    if has_decoder and (not square or any(patches.unread)):
        raise ConfigError(
            f"config.json: image_size={c.get('image_size')}, patch_size={c.get('patch_size')}: "
            f"{NAME}ForPreTraining needs square images that its square patches fill"
        )
    embedding = KeptPatches(patches, get(c, "mask_ratio", 0.75))
    return ModelConfig(
        vocab_size=0,
        context_length=embedding.length,
        positions=None,
        masks=(full(),),
        embedding=embedding,
        heads=(PixelDecoder(**read_fields(c, DECODER)),) if has_decoder else (),
        **read_fields(c, VIT_FIELDS),
    )


def _write(config: Any) -> Json:
    embedding = config.embedding
    c = write_fields(config, VIT_FIELDS) | write_patches(embedding.patches)
    c |= {"qkv_bias": config.has_bias("query"), "mask_ratio": embedding.ratio}
    if not config.heads:
        return c | {"architectures": [NAME + "Model"]}
    (decoder,) = config.heads
    return c | write_fields(decoder, DECODER) | {"architectures": [NAME + "ForPreTraining"]}


STACK, THEIRS = "heads/reconstruction/", "decoder."
LAYER = THEIRS + "decoder_layers.{}."  # transformers 5 writes another name, see FAMILIES
DECODER_RULES = [
    Rule(STACK + "embedding/latents", THEIRS + "decoder_embed"),
    Rule(STACK + "embedding/mask_token", THEIRS + "mask_token", "leaf2"),
    Rule(STACK + "embedding/positions", THEIRS + "decoder_pos_embed", "leaf1"),
    *rules(STACK + "layers/", LAYER, VIT_NORMS),
    *rules(STACK + "layers/attention/", LAYER + "attention.", VIT_ATTENTION),
    *rules(STACK + "layers/feedforward/", LAYER, VIT_FEEDFORWARD),
    Rule(STACK + "final_norm", THEIRS + "decoder_norm"),
    Rule(STACK + "heads/pixels", THEIRS + "decoder_pred"),
]


def _rules(config: Any) -> list[Rule]:
    return vit_rules("vit") + (DECODER_RULES if config.heads else [])


RENAMED = {r"^decoder\.decoder_encoder\.layer\.": "decoder.decoder_layers."}
FAMILIES = {"vit_mae": Family(_read, _write, _rules, "vit.", heads=r"^decoder\.", renamed=RENAMED)}
