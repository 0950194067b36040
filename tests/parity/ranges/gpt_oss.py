"""gpt-oss."""

from tests.parity.draws import rope

FAMILIES = {"gpt_oss": "GptOss"}
RANGE = {
    "swiglu_alpha": [0.7, 1.3],
    "swiglu_limit": [0.4, 1.5],
    "attention_bias": [True, False],
}


def sizes(family: str, r, common: dict) -> dict:
    """Experts; layers of two kinds; any rotation, or the default one."""
    heads = common["num_attention_heads"]
    found = common | dict(
        num_key_value_heads=r.choice([1, heads]),
        head_dim=6,
        num_local_experts=r.randint(3, 5),
        num_experts_per_tok=r.randint(1, 3),
        sliding_window=r.choice([1, 3, 7]),
    )
    kinds = ["full_attention", "sliding_attention"]
    if r.random() < 0.5:
        found["layer_types"] = [r.choice(kinds) for _ in range(common["num_hidden_layers"])]
    if r.random() < 0.7:
        found["rope_parameters"] = rope(r)
    return found
