"""The towers of CLIP."""

import numpy as np

from tests.parity.draws import images

FAMILIES = {"clip_vision_model": "CLIPVision", "clip_text_model": "CLIPText"}
RANGE = {"projection_dim": [5, 16], "eos_token_id": [2, 7, 39]}


def sizes(family: str, r, common: dict) -> dict:
    """Those of a BERT, or of a ViT of square images."""
    if family == "clip_text_model":
        return common | dict(eos_token_id=r.choice([2, 7, 40]))
    del common["vocab_size"], common["max_position_embeddings"]
    patch = r.choice([2, 4])
    sizes = dict(image_size=r.choice([patch * 3, patch * 2 + 1]), patch_size=patch)
    return common | sizes | dict(num_channels=r.choice([1, 3]))


def arguments(name: str, config, r, rng) -> tuple[dict, np.ndarray | None]:
    """Images; or texts with an end token, some of them padded on the right."""
    if name.startswith("CLIPVision"):
        return dict(pixel_values=images(config, rng)), None
    T = r.choice([5, 11, 18])
    tokens = rng.integers(0, config.vocab_size, (2, T))
    real = np.ones((2, T), np.int64)
    end = config.vocab_size - 1 if config.eos_token_id == 2 else config.eos_token_id
    length = r.choice([T, T - 2])
    tokens[-1, length - 1 :] = end
    tokens[0, T // 2] = end
    real[-1, length:] = 0
    call = dict(input_ids=tokens, attention_mask=real)
    if real.all() and r.random() < 0.5:
        del call["attention_mask"]
    return call, real
