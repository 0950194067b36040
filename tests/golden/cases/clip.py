"""The towers of CLIP."""

import numpy as np

from tests.golden.families import Case, T, _vit, counted, tokens


def _vision(model: str, **config) -> Case:
    """Images of 10 pixels in patches of 4: the last two lines and columns are not read."""
    sizes = _vit("", 3).config | dict(image_size=10)
    pixels = np.random.default_rng(0).normal(size=(2, 3, 10, 10)).astype(np.float32)
    return Case(f"CLIPVision{model}", sizes | config, {"pixel_values": pixels})


def _text(model: str, end: int, **config) -> Case:
    """Texts whose end token stands in the middle, before other tokens or before padding."""
    sizes = dict(
        vocab_size=37,
        hidden_size=18,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=25,
        max_position_embeddings=16,
        layer_norm_eps=1e-2,
        eos_token_id=end,
    )
    inputs = counted(tokens(36, [T, 8, -9]))
    inputs["input_ids"][[0, 1, 2], [6, 7, 8]] = 36 if end == 2 else end
    inputs["input_ids"][0, 9] = inputs["input_ids"][0, 6]
    return Case(f"CLIPText{model}", sizes | config, inputs)


CASES = {
    "clip_vision": _vision("Model", hidden_act="gelu"),
    "clip_vision_projection": _vision("ModelWithProjection", projection_dim=7),
    "clip_text": _text("Model", 20),
    "clip_text_projection": _text("ModelWithProjection", 2, projection_dim=7),
}
