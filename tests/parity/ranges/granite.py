"""Granite."""

from tests.parity.draws import rope

FAMILIES = {"granite": "Granite"}
RANGE = {
    "attention_multiplier": [0.1, 1, 0.7],
    "embedding_multiplier": [12.0, 1, 0.5],
    "logits_scaling": [13.0, 4, 0.5],
    "residual_multiplier": [0.22, 1, 1.5],
}


def sizes(family: str, r, common: dict) -> dict:
    """As many key heads as heads, and any rotation."""
    found = common | dict(num_key_value_heads=common["num_attention_heads"])
    if r.random() < 0.7:
        found["rope_parameters"] = rope(r)
    return found
