"""DINOv2."""

from tests.parity.draws import hidden_patches, image_sizes, images

FAMILIES = {"dinov2": "Dinov2"}
RANGE = {
    "mlp_ratio": [1, 2, 3],
    "use_swiglu_ffn": [True],
    "use_mask_token": [False],
    "layerscale_value": [0.5, 1e-5],
    "drop_path_rate": [0.3],  # of training
}
# of its backbone, whose outputs `zoo.dinov2.feature_maps` has
NO_NUMBER = ("_out_features", "_out_indices", "apply_layernorm", "reshape_hidden_states")


def sizes(family: str, r, common: dict) -> dict:
    """Those of a ViT, but for the width of the feed-forward."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    return {name: common[name] for name in names} | image_sizes(r)


def arguments(name: str, config, r, rng) -> tuple[dict, None]:
    """Images, some with hidden patches."""
    call = dict(pixel_values=images(config, rng))
    if name == "Dinov2Model" and config.use_mask_token and r.random() < 0.5:
        call["bool_masked_pos"] = hidden_patches(config, rng)
    return call, None
