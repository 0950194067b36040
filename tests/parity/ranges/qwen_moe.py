"""Qwen2 and Qwen3 with experts."""

from tests.parity.draws import rope

FAMILIES = {"qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe"}
RANGE = {
    "qkv_bias": [True, False],
    "attention_bias": [True, False],
    "norm_topk_prob": [True, False],
    "decoder_sparse_step": [1, 2, 3],
    "mlp_only_layers": [[], [0], [1], [0, 2]],
    "shared_expert_intermediate_size": [5, 12],
}


def sizes(family: str, r, common: dict) -> dict:
    """Experts of a width of their own; in qwen2_moe layers of two kinds."""
    heads = common["num_attention_heads"]
    found = common | dict(
        num_key_value_heads=r.choice([1, heads]),
        moe_intermediate_size=r.randint(5, 14),
        num_experts=r.randint(3, 5),
        num_experts_per_tok=r.randint(1, 3),
    )
    if family == "qwen2_moe":
        found["shared_expert_intermediate_size"] = r.randint(5, 14)
        if r.random() < 0.3:
            kinds = ["full_attention", "sliding_attention"]
            found["layer_types"] = [r.choice(kinds) for _ in range(common["num_hidden_layers"])]
    if r.random() < 0.3:
        found["head_dim"] = 6
    if r.random() < 0.6:
        found["rope_parameters"] = rope(r)
    return found
