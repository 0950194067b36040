"""DETR with a ResNet: images to objects. Carion et al. 2020, arXiv:2005.12872.

A backbone of timm is read under timm's names, those of torchvision. It is saved under the names of
transformers' own ResNet, which computes the same; such a folder opens without timm.

DetrForSegmentation is refused: its head of masks reads the attention and three maps of features.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from jaxformer.errors import ConfigError
from jaxformer.families.classes import count_labels, read_heads, write_heads, write_labels
from jaxformer.families.family import Family, Rule, rules
from jaxformer.families.marian import OTHER_NAMES
from jaxformer.families.settings import (
    ACTIVATION,
    PROJECTIONS,
    Json,
    Key,
    get,
    only,
    read_fields,
    write_fields,
)
from jaxformer.masks import full
from jaxformer.models.blocks import post_norm
from jaxformer.models.config import AttentionPositions, EncoderDecoder, Learned, ModelConfig
from jaxformer.zoo import resnet
from jaxformer.zoo.detr import (
    Boxes,
    FeatureMap,
    ObjectClasses,
    grid_sines,
    no_content,
    post_norm_twice,
)
from jaxformer.zoo.resnet import ResNet

NAME = "Detr"
FIELDS = {
    "d_model": Key("d_model", 256),
    "init_std": Key("init_std", 0.02),
    "feedforward": Key("activation_function", "relu", ACTIVATION),
    "dropout_rate": Key("dropout", 0.1),
    "attention_dropout_rate": Key("attention_dropout", 0.0),
}
# published files have the first; no model reads it
LENGTHS = {"encoder": ("max_position_embeddings", 1024), "decoder": ("num_queries", 100)}
RESNET_FIELDS = {
    "channels": Key("num_channels", 3),
    "stem": Key("embedding_size", 64),
    "activation": Key("hidden_act", "relu", ACTIVATION),
    "first_stride": Key("downsample_in_first_stage", False, {False: 1, True: 2}),
}
BASIC, BOTTLENECK = "basic", "bottleneck"  # layer_type
TIMM = {
    "resnet18": resnet.resnet_18,
    "resnet34": resnet.resnet_34,
    "resnet50": resnet.resnet_50,
    "resnet101": resnet.resnet_101,
    "resnet152": resnet.resnet_152,
}
TIMM_BACKBONE = "timm_backbone"  # model_type


def _kinds(c: Json) -> dict[str, tuple]:
    """Heads by the end of the class name."""
    return {"ForObjectDetection": (ObjectClasses(count_labels(c)), Boxes()), "Model": ()}


def _side(name: str) -> dict[str, Key]:
    sizes = {
        "num_layers": Key(f"{name}_layers", 6),
        "num_heads": Key(f"{name}_attention_heads", 8),
        "d_ff": Key(f"{name}_ffn_dim", 2048),
        "context_length": Key(*LENGTHS[name]),
    }
    return FIELDS | sizes


def _read(c: Json, names: Collection[str]) -> EncoderDecoder:
    heads = read_heads(c, NAME, _kinds(c))
    # a norm that theirs puts between the layers; tables of 50 lines and columns
    only(c, auxiliary_loss=False, position_embedding_type="sine")
    encoder = ModelConfig(
        **read_fields(c, _side("encoder")),
        vocab_size=0,
        block=post_norm,
        embedding=FeatureMap(_backbone(c)),
        positions=AttentionPositions(grid_sines),
        masks=(full(),),
        heads=(),
        tie_embeddings=False,
    )
    if encoder.d_model % 4:
        raise ConfigError(
            f"config.json: d_model={encoder.d_model}: "
            "sines of lines and columns need a multiple of four"
        )
    decoder = ModelConfig(
        **read_fields(c, _side("decoder")),
        vocab_size=0,
        block=post_norm_twice,
        embedding=no_content,
        positions=AttentionPositions(Learned()),
        masks=(full(),),
        heads=heads,
        tie_embeddings=False,
    )
    return EncoderDecoder(encoder, decoder, share_embeddings=False)


def _backbone(c: Json) -> ResNet:
    """The backbone of config.json: of transformers or of timm."""
    own = c.get("backbone_config")
    name = c.get("backbone")
    if own is None and get(c, "use_timm_backbone", True):
        options = c.get("backbone_kwargs") or {}
        channels = {"num_channels": get(c, "num_channels", 3)}
        own = channels | options | {"model_type": TIMM_BACKBONE, "backbone": name or "resnet50"}
    elif own is None:
        only(c, backbone=None, backbone_kwargs=None)
        own = {"model_type": "resnet"}
    kind = own.get("model_type")
    if kind == TIMM_BACKBONE:
        only(c, dilation=False)  # of the last stage; another backbone ignores it
    readers = {"resnet": _read_resnet, TIMM_BACKBONE: _read_timm}
    if kind not in readers:
        raise ConfigError(
            f"config.json: backbone_config has model_type={kind!r}; "
            f"expected one of {', '.join(readers)}"
        )
    try:
        return readers[kind](own)
    except ConfigError as error:
        raise ConfigError(f"config.json: the backbone (backbone_config): {error}") from None


def _read_resnet(c: Json) -> ResNet:
    """A `backbone_config` of transformers' own ResNet."""
    depths, widths = (
        tuple(get({name: size}, name) for size in get(c, name, list(default)))
        for name, default in (("depths", (3, 4, 6, 3)), ("hidden_sizes", (256, 512, 1024, 2048)))
    )
    early = get(c, "downsample_in_bottleneck", False)
    block = resnet.early_bottleneck if early else resnet.bottleneck
    blocks = {BOTTLENECK: block, BASIC: resnet.basic}
    fields = read_fields(c, RESNET_FIELDS | {"block": Key("layer_type", BOTTLENECK, blocks)})
    if len(depths) != len(widths):
        raise ConfigError(f"depths={depths}, hidden_sizes={widths}: expected as many of both")
    last = len(depths)
    _check_last(c, "out_features", f"stage{last}")
    _check_last(c, "out_indices", last, -1)
    return ResNet(depths, widths, **fields)


def _check_last(c: Json, name: str, *expected: Any) -> None:
    """Raises ConfigError if the last of the maps of features is not that of the last stage."""
    found = c.get(name) or expected
    if found[-1] not in expected:
        raise ConfigError(f"{name}={found}: only the last stage is read, {expected[0]!r}")


def _read_timm(c: Json) -> ResNet:
    """A `backbone_config` of timm, or the older settings."""
    name = str(c.get("backbone")).partition(".")[0]  # the rest names the weights it began with
    if name not in TIMM:
        raise ConfigError(f"backbone={c.get('backbone')!r}: expected one of {', '.join(TIMM)}")
    only(c, output_stride=None, features_only=True)
    _check_last(c, "out_indices", 4, -1)
    channels = get(c, "in_chans", None) or get(c, "num_channels", 3)
    return replace(TIMM[name], channels=channels)


def _write_resnet(config: ResNet) -> Json:
    """The inverse of `_read_resnet`."""
    blocks = {BOTTLENECK: resnet.bottleneck, BASIC: resnet.basic}
    is_early = config.block is resnet.early_bottleneck
    kind = next((kind for kind, block in blocks.items() if block is config.block), BOTTLENECK)
    return write_fields(config, RESNET_FIELDS) | {
        "model_type": "resnet",
        "depths": list(config.depths),
        "hidden_sizes": list(config.widths),
        "layer_type": kind,
        "downsample_in_bottleneck": is_early,
        "out_features": [f"stage{len(config.depths)}"],
    }


def _write(config: Any) -> Json:
    encoder, decoder = config.encoder, config.decoder
    c = write_fields(encoder, _side("encoder")) | write_fields(decoder, _side("decoder"))
    backbone = encoder.embedding.backbone
    classes = next((head.classes for head in decoder.heads if head.name == "classes"), 0)
    return c | {
        **write_heads(decoder.heads, NAME, _kinds({})),
        **write_labels(tuple(f"LABEL_{i}" for i in range(classes))),
        "is_encoder_decoder": True,
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "backbone": None,
        "backbone_config": _write_resnet(backbone),
    }


BACKBONE = "model.backbone.conv_encoder.model."


def _convolution_rules(ours: str, theirs: str) -> list[Rule]:
    """The rules of a convolution and its norm."""
    ours = f"encoder/embedding/backbone/{ours}"
    norm = {"": "normalization", "/mean": "normalization.running_mean"}
    norm["/variance"] = "normalization.running_var"
    return [
        Rule(ours, f"{BACKBONE}{theirs}.convolution", "patches"),
        *rules(f"{ours}/norm", f"{BACKBONE}{theirs}.", norm),
    ]


def _backbone_rules(config: ResNet) -> list[Rule]:
    result = _convolution_rules("stem", "embedder.embedder")
    for stage, block, chain, shortcut in resnet.blocks(config):
        ours = f"{stage}/{block}/"
        numbers = [name.rpartition("_")[2] for name in (stage, block)]
        theirs = "encoder.stages.{}.layers.{}.".format(*numbers)
        for i in range(len(chain)):
            result += _convolution_rules(f"{ours}convolution_{i}", f"{theirs}layer.{i}")
        if shortcut is not None:
            result += _convolution_rules(f"{ours}shortcut", f"{theirs}shortcut")
    return result


def _rules(config: Any) -> list[Rule]:
    result = [
        *_backbone_rules(config.encoder.embedding.backbone),
        Rule("encoder/embedding/projection", "model.input_projection", "patches"),
        Rule("decoder/shared/positions", "model.query_position_embeddings.weight"),
        Rule("decoder/final_norm", "model.decoder.layernorm"),
        Rule("decoder/heads/classes", "class_labels_classifier"),
    ]
    maps = {f"map_{i}": f"layers.{i}" for i in range(3)}
    result += rules("decoder/heads/boxes/", "bbox_predictor.", maps)
    feedforward = {"/up": "fc1", "/down": "fc2", "_norm": "final_layer_norm"}
    for stack in ("encoder", "decoder"):
        ours, theirs = f"{stack}/layers/", f"model.{stack}.layers.{{}}."
        for name, module in (("attention", "self_attn"), ("cross_attention", "encoder_attn")):
            result.append(Rule(f"{ours}{name}_norm", f"{theirs}{module}_layer_norm"))
            result += rules(f"{ours}{name}/", f"{theirs}{module}.", PROJECTIONS)
        result += rules(ours + "feedforward", theirs, feedforward)
    return result


# timm's names are torchvision's
_INSIDE = r"(encoder\.stages\.\d+\.layers\.\d+)\."
RENAMED = {
    r"conv_encoder\.model\.conv1\.": "conv_encoder.model.embedder.embedder.convolution.",
    r"conv_encoder\.model\.bn1\.": "conv_encoder.model.embedder.embedder.normalization.",
    **{
        rf"conv_encoder\.model\.layer{i + 1}\.": f"conv_encoder.model.encoder.stages.{i}.layers."
        for i in range(4)
    },
    **{rf"{_INSIDE}conv{i + 1}\.": rf"\1.layer.{i}.convolution." for i in range(3)},
    **{rf"{_INSIDE}bn{i + 1}\.": rf"\1.layer.{i}.normalization." for i in range(3)},
    rf"{_INSIDE}downsample\.0\.": r"\1.shortcut.convolution.",
    rf"{_INSIDE}downsample\.1\.": r"\1.shortcut.normalization.",
}
FAMILIES = {
    "detr": Family(
        _read,
        _write,
        _rules,
        prefix="model.",
        ignored=r"\.num_batches_tracked$",
        heads=r"^(class_labels_classifier|bbox_predictor)\.",
        renamed=RENAMED,
        other_names=OTHER_NAMES,
    )
}
