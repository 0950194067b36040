"""DETR."""

import numpy as np

from tests.golden.families import Case

SIZE = 37, 52  # of images; both are cut by the strides


# The norms' eps is 1e-5 in every DETR. Narrow states have a small variance here and there, and so
# they show another eps.
NARROW = dict(d_model=4, decoder_attention_heads=2, encoder_ffn_dim=5, decoder_ffn_dim=6)


def _detr(
    model: str, inputs: dict[str, np.ndarray], backbone: dict, seed: int = 0, **config
) -> Case:
    sizes = dict(
        d_model=12,
        encoder_layers=3,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=3,
        encoder_ffn_dim=17,
        decoder_ffn_dim=14,
        num_queries=5,
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
    )
    resnet = dict(model_type="resnet", embedding_size=6, hidden_sizes=[8, 12], depths=[2, 1])
    config = sizes | dict(backbone_config=resnet | backbone) | config
    return Case(f"Detr{model}", config, inputs, seed=seed)


def _images(channels: int = 3) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(3, channels, *SIZE)).astype(np.float32)


def _padded() -> dict[str, np.ndarray]:
    """Images of several sizes, in the upper left of one array."""
    mask = np.zeros((3, *SIZE), int)
    for row, (height, width) in enumerate((SIZE, (37, 30), (20, 52))):
        mask[row, :height, :width] = 1
    return dict(pixel_values=_images() * mask[:, None].astype(np.float32), pixel_mask=mask)


CASES = {
    "detr": _detr("ForObjectDetection", _padded(), {}, num_labels=4),
    "detr_early": _detr(
        "Model",
        dict(pixel_values=_images(1)),
        dict(downsample_in_bottleneck=True, hidden_act="silu", num_channels=1),
        seed=3,
        **NARROW,
        activation_function="gelu",
    ),
    "detr_basic": _detr(
        "ForObjectDetection",
        dict(pixel_values=_images()),
        dict(layer_type="basic", downsample_in_first_stage=True),
        seed=11,
        **NARROW,
    ),
}
