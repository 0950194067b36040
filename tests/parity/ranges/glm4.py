"""GLM-4."""

from tests.parity.draws import rope

FAMILIES = {"glm4": "Glm4"}
RANGE = {"attention_bias": [True, False]}


def sizes(family: str, r, common: dict) -> dict:
    """Heads of a width of their own, whose half is even."""
    heads = common["num_attention_heads"]
    found = common | dict(num_key_value_heads=r.choice([1, heads]), head_dim=r.choice([4, 8, 12]))
    found |= dict(pad_token_id=0, eos_token_id=1)  # the defaults are beyond the vocabulary
    if r.random() < 0.6:
        found["rope_parameters"] = rope(r)
    return found
