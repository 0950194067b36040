"""The towers of SigLIP."""

import numpy as np

from tests.parity.draws import images

FAMILIES = {"siglip_vision_model": "SiglipVision", "siglip_text_model": "SiglipText"}
RANGE = {"vision_use_head": [False], "projection_size": [5, 16]}


def sizes(family: str, r, common: dict) -> dict:
    """Those of a BERT, or of a ViT of square images."""
    if family == "siglip_text_model":
        return common
    del common["vocab_size"], common["max_position_embeddings"]
    patch = r.choice([2, 4])
    sizes = dict(image_size=r.choice([patch * 3, patch * 2 + 1]), patch_size=patch)
    return common | sizes | dict(num_channels=r.choice([1, 3]))


def arguments(name: str, config, r, rng) -> tuple[dict, np.ndarray | None]:
    """Images; or texts, some of them padded."""
    if name.startswith("SiglipVision"):
        return dict(pixel_values=images(config, rng)), None
    T = r.choice([5, 11, 18])
    real = np.ones((2, T), np.int64)
    if r.random() < 0.6:
        real[-1, r.choice([slice(0, 3), slice(T - 3, T)])] = 0
    call = dict(input_ids=rng.integers(0, config.vocab_size, (2, T)), attention_mask=real)
    if real.all() and r.random() < 0.5:
        del call["attention_mask"]
    return call, real
