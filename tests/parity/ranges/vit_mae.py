"""ViT-MAE."""

import numpy as np

from tests.parity.draws import images

FAMILIES = {"vit_mae": "ViTMAE"}
RANGE = {
    "mask_ratio": [0.0, 0.4, 0.75],
    "norm_pix_loss": [True],
    "decoder_num_attention_heads": [1, 2],
    "decoder_num_hidden_layers": [1, 2],
    "decoder_hidden_size": [8, 12],
    "decoder_intermediate_size": [5, 14],
}


def sizes(family: str, r, common: dict) -> dict:
    """Those of a ViT of square images, whose width is a multiple of four."""
    del common["vocab_size"], common["max_position_embeddings"]
    patch = r.choice([2, 4])
    sizes = dict(image_size=r.choice([patch * 3, patch * 2 + 1, [patch * 2] * 2]), patch_size=patch)
    decoder = {name: r.choice(values) for name, values in RANGE.items() if "decoder" in name}
    heads = common["num_attention_heads"]
    return common | sizes | decoder | dict(num_channels=r.choice([1, 3]), hidden_size=4 * heads)


def arguments(name: str, config, r, rng) -> tuple[dict, None]:
    """Images, and the noise that chooses patches."""
    size = config.image_size
    side = (size[0] if isinstance(size, list | tuple) else size) // config.patch_size
    noise = rng.random((2, side**2)).astype(np.float32)
    return dict(pixel_values=images(config, rng), noise=noise), None
