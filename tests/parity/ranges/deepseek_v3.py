"""DeepSeek-V3."""

from tests.parity.draws import rope

FAMILIES = {"deepseek_v3": "DeepseekV3"}
RANGE = {
    "n_shared_experts": [1, 2],
    "routed_scaling_factor": [1.0, 2.5],
    "q_lora_rank": [None, 5, 8],
    "v_head_dim": [3, 8],
    "first_k_dense_replace": [0, 1, 2, 3],
    "norm_topk_prob": [True, False],
    "rope_interleave": [True, False],
    "num_mtp_layers": [0, 1],
}
# it counts, but only in generation
NO_NUMBER = {"num_mtp_layers"}


def sizes(family: str, r, common: dict) -> dict:
    """Small latents, and experts in groups of two or three."""
    heads = common["num_attention_heads"]
    groups = r.choice([1, 2, 4])
    top_groups = r.randint(1, groups)
    experts = groups * r.choice([2, 3])
    found = common | dict(
        num_key_value_heads=r.choice([None, heads]),
        kv_lora_rank=r.choice([6, 9]),
        qk_rope_head_dim=r.choice([4, 6]),
        qk_nope_head_dim=r.choice([3, 8]),
        v_head_dim=5,
        q_lora_rank=7,
        moe_intermediate_size=r.randint(5, 12),
        n_routed_experts=experts,
        n_group=groups,
        topk_group=top_groups,
        num_experts_per_tok=r.randint(1, top_groups * experts // groups),
    )
    if r.random() < 0.6:
        found["rope_parameters"] = rope(r)
    return found
