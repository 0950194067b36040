"""The towers of SigLIP."""

import numpy as np

from tests.golden.families import Case, T, _vit, tokens


def _vision(**config) -> Case:
    """Images of 10 pixels in patches of 4: the last two lines and columns are not read."""
    sizes = _vit("", 3).config | dict(image_size=10)
    pixels = np.random.default_rng(0).normal(size=(2, 3, 10, 10)).astype(np.float32)
    return Case("SiglipVisionModel", sizes | config, {"pixel_values": pixels})


def _text() -> Case:
    """The last position of one row is padding, and is read."""
    sizes = dict(
        vocab_size=37,
        hidden_size=18,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=25,
        max_position_embeddings=16,
        layer_norm_eps=1e-2,
        projection_size=7,
    )
    inputs = tokens(37, [T, 8, -9], position_ids=np.arange(T)[None])
    return Case("SiglipTextModel", sizes, inputs)


CASES = {
    "siglip_vision": _vision(),
    "siglip_vision_bare": _vision(vision_use_head=False, hidden_act="relu"),
    "siglip_text": _text(),
}
