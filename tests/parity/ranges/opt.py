"""OPT."""

FAMILIES = {"opt": "OPT"}
RANGE = {
    "do_layer_norm_before": [True, False],
    "_remove_final_layer_norm": [True, False],
    "word_embed_proj_dim": [None, None, None, 7],
    "enable_bias": [True, False],
    "layer_norm_elementwise_affine": [True, False],
}
NO_NUMBER = {"layerdrop"}


def sizes(family: str, r, common: dict) -> dict:
    """As a BERT, but for the name of the width of the feed-forward."""
    return common | dict(ffn_dim=common.pop("intermediate_size"))
