"""DeiT."""

from tests.parity.draws import hidden_patches, image_sizes, images

FAMILIES = {"deit": "DeiT"}


def sizes(family: str, r, common: dict) -> dict:
    """Those of a ViT."""
    del common["vocab_size"], common["max_position_embeddings"]
    sizes = common | image_sizes(r)
    return sizes | dict(encoder_stride=r.choice([sizes["patch_size"], 16]))


def arguments(name: str, config, r, rng) -> tuple[dict, None]:
    """Images, some with hidden patches."""
    call = dict(pixel_values=images(config, rng))
    if name == "DeiTForMaskedImageModeling" and r.random() < 0.5:
        call["bool_masked_pos"] = hidden_patches(config, rng)
    return call, None
