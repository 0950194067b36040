"""StableLM."""

from tests.parity.draws import rope

FAMILIES = {"stablelm": "StableLm"}
RANGE = {
    "use_qkv_bias": [True],
    "qk_layernorm": [True],
    "use_parallel_residual": [True],
}
NO_NUMBER = {"hidden_dropout"}


def sizes(family: str, r, common: dict) -> dict:
    """Heads whose quarter is even."""
    heads = common["num_attention_heads"]
    width = heads * r.choice([8, 16, 24])
    found = common | dict(hidden_size=width, num_key_value_heads=r.choice([1, heads]))
    if r.random() < 0.6:
        found["rope_parameters"] = rope(r)
    return found
