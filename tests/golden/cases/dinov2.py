"""DINOv2."""

import numpy as np

from tests.golden.families import Case, _vit


def _dinov2(model: str, **config) -> Case:
    """Its table of positions is that of a square grid; here 2 x 2, and a third line is not read."""
    sizes = _vit("", 3).config | dict(image_size=10, mlp_ratio=2)
    del sizes["intermediate_size"]
    pixels = np.random.default_rng(0).normal(size=(2, 3, 10, 10)).astype(np.float32)
    return Case(f"Dinov2{model}", sizes | config, {"pixel_values": pixels})


CASES = {
    "dinov2": _dinov2("Model", qkv_bias=False),
    "dinov2_swiglu": _dinov2("ForImageClassification", use_swiglu_ffn=True, num_labels=5),
}
