"""ViT-MAE."""

import numpy as np

from tests.golden.families import Case, _vit


def _mae(model: str, **config) -> Case:
    """Nine patches, of which the encoder sees four."""
    sizes = _vit("", 3).config | dict(image_size=12, hidden_size=12, mask_ratio=0.5)
    sizes |= dict(
        decoder_hidden_size=8,
        decoder_num_attention_heads=2,
        decoder_num_hidden_layers=2,
        decoder_intermediate_size=11,
    )
    rng = np.random.default_rng(0)
    pixels = rng.normal(size=(2, 3, 12, 12)).astype(np.float32)
    noise = rng.random((2, 9)).astype(np.float32)
    return Case(f"ViTMAE{model}", sizes | config, dict(pixel_values=pixels, noise=noise))


CASES = {
    "vit_mae": _mae("ForPreTraining", norm_pix_loss=True),
    "vit_mae_encoder": _mae("Model", qkv_bias=False),
}
