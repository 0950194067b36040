"""StarCoder2."""

from tests.parity.draws import rope

FAMILIES = {"starcoder2": "Starcoder2"}
RANGE = {"norm_epsilon": [1e-6, 1e-2]}
NO_NUMBER = {"residual_dropout", "embedding_dropout"}


def sizes(family: str, r, common: dict) -> dict:
    """As many key heads as heads, and any rotation."""
    found = common | dict(num_key_value_heads=common["num_attention_heads"])
    if r.random() < 0.7:
        found["rope_parameters"] = rope(r)
    return found
