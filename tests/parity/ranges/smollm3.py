"""SmolLM3."""

from tests.parity.draws import rope

FAMILIES = {"smollm3": "SmolLM3"}
RANGE = {"no_rope_layer_interval": [1, 2, 3]}


def sizes(family: str, r, common: dict) -> dict:
    """Layers with and without a rotation, and with and without a window."""
    heads, layers = common["num_attention_heads"], common["num_hidden_layers"]
    found = common | dict(num_key_value_heads=heads, pad_token_id=r.choice([0, 7]))
    if r.random() < 0.5:
        found["no_rope_layers"] = [r.randint(0, 1) for _ in range(layers + r.randint(0, 1))]
    if r.random() < 0.3:
        kinds = ["full_attention", "sliding_attention"]
        found["layer_types"] = [r.choice(kinds) for _ in range(layers)]
    if r.random() < 0.7:
        found["rope_parameters"] = rope(r)
    return found
