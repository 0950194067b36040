"""DETR."""

import numpy as np

FAMILIES = {"detr": "Detr"}
SIDES = ("encoder", "decoder")
RANGE = {
    "auxiliary_loss": [True],
    "dilation": [True],
    "position_embedding_type": ["sine", "learned"],
    "num_queries": [1, 3, 7],
}
NO_NUMBER = (
    "init_xavier_std",
    "is_encoder_decoder",
    "num_channels",  # of a backbone of timm; the other's config has its own
    # of the loss
    "class_cost",
    "bbox_cost",
    "giou_cost",
    "mask_loss_coefficient",
    "dice_loss_coefficient",
    "bbox_loss_coefficient",
    "giou_loss_coefficient",
    "eos_coefficient",
)


def sizes(family: str, r, common: dict) -> dict:
    heads = common["num_attention_heads"]
    found = {"d_model": heads * r.choice([4, 4, 8, 6])}
    found |= {f"{side}_attention_heads": heads for side in SIDES}
    found |= {f"{side}_layers": r.randint(1, 2) for side in SIDES}
    found |= {f"{side}_ffn_dim": r.randint(9, 30) for side in SIDES}
    return found | {"num_queries": r.choice([4, 9]), "backbone_config": backbone(r)}


def backbone(r) -> dict:
    """Any ResNet that transformers documents, with few stages."""
    stages = r.randint(1, 3)
    widths = [4 * r.randint(1, 4) for _ in range(stages)]
    config = dict(
        model_type="resnet",
        num_channels=r.choice([1, 3]),
        embedding_size=r.choice([5, 8]),
        hidden_sizes=widths,
        depths=[r.randint(1, 2) for _ in range(stages)],
        layer_type=r.choice(["basic", "bottleneck"]),
        hidden_act=r.choice(["relu", "gelu", "silu", "tanh", "leaky_relu"]),
        downsample_in_first_stage=r.random() < 0.3,
        downsample_in_bottleneck=r.random() < 0.5,
    )
    maps = r.choice([None, None, ["stem"], [f"stage{stages}"], ["stem", f"stage{stages}"]])
    return config | ({} if maps is None else {"out_features": maps})


def arguments(name: str, config, r, rng) -> tuple[dict, None]:
    """Images, some of several sizes, with padding below and at the right."""
    height, width = r.choice([(32, 32), (33, 50), (47, 31)])
    shape = 2, config.backbone_config.num_channels, height, width
    call = {"pixel_values": rng.normal(size=shape).astype(np.float32)}
    if r.random() < 0.6:
        mask = np.ones((2, height, width), np.int64)
        mask[1, r.randint(10, height) :] = 0
        mask[1, :, r.randint(10, width) :] = 0
        call["pixel_mask"] = mask
        call["pixel_values"] *= mask[:, None]
    return call, None
