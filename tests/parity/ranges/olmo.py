"""OLMo 2 and OLMo 3."""

from tests.parity.draws import rope

FAMILIES = {"olmo2": "Olmo2", "olmo3": "Olmo3"}


def sizes(family: str, r, common: dict) -> dict:
    """Key heads of their own; in OLMo 3 layers of two kinds, each with its rotation."""
    heads = common["num_attention_heads"]
    found = common | dict(num_key_value_heads=r.choice([1, heads]))
    if r.random() < 0.3:
        found["head_dim"] = 6
    kinds = ["full_attention", "sliding_attention"]
    if family == "olmo3":
        found["sliding_window"] = r.choice([1, 3, 7])
        if r.random() < 0.5:
            found["layer_types"] = [r.choice(kinds) for _ in range(common["num_hidden_layers"])]
    if r.random() < 0.6:
        nested = {"full_attention": rope(r), "sliding_attention": rope(r)}
        found["rope_parameters"] = nested if family == "olmo3" else rope(r)
    return found
