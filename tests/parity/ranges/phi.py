"""Phi and Phi-3."""

from tests.parity.draws import rope

FAMILIES = {"phi": "Phi", "phi3": "Phi3"}
RANGE = {
    "qk_layernorm": [True],
    "original_max_position_embeddings": [4, 4096],
}


def sizes(family: str, r, common: dict) -> dict:
    """Heads of which a part is rotated; Phi-3 has LongRoPE or no scaling."""
    heads = common["num_attention_heads"]
    found = common | dict(num_key_value_heads=heads, hidden_size=heads * r.choice([6, 8, 12]))
    # theirs is 32000, beyond this vocabulary
    found |= dict(pad_token_id=r.choice([0, 7]))
    if r.random() < 0.75:
        found["rope_parameters"] = rope(r)
    if family == "phi3" and (settings := found.get("rope_parameters")):
        length = settings.get("original_max_position_embeddings", 4096)
        found["original_max_position_embeddings"] = length
    return found
