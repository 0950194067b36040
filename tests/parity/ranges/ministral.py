"""Ministral."""

from tests.parity.draws import rope

FAMILIES = {"ministral": "Ministral"}


def sizes(family: str, r, common: dict) -> dict:
    """Layers with and without a window. Theirs needs a head_dim."""
    found = common | dict(num_key_value_heads=common["num_attention_heads"])
    found["head_dim"] = common["hidden_size"] // common["num_attention_heads"]
    if r.random() < 0.6:
        kinds = ["full_attention", "sliding_attention"]
        found["layer_types"] = [r.choice(kinds) for _ in range(common["num_hidden_layers"])]
    if r.random() < 0.7:
        found["rope_parameters"] = rope(r)
    return found
