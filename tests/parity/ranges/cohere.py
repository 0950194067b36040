"""Cohere's Command R."""

from tests.parity.draws import rope

FAMILIES = {"cohere": "Cohere"}
RANGE = {"use_qk_norm": [True], "logit_scale": [0.5, 1.0]}


def sizes(family: str, r, common: dict) -> dict:
    """Key heads of their own."""
    heads = common["num_attention_heads"]
    found = common | dict(num_key_value_heads=r.choice([None, 1, heads]))
    if r.random() < 0.3:
        found["head_dim"] = 6
    if r.random() < 0.6:
        found["rope_parameters"] = rope(r)
    return found
