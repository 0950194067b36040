"""DeepSeek-V3."""

from tests.golden.families import YARN, Case, _llama


def _deepseek(**config) -> Case:
    sizes = dict(
        hidden_size=20,
        num_attention_heads=3,
        kv_lora_rank=7,
        qk_rope_head_dim=4,
        qk_nope_head_dim=5,
        v_head_dim=6,
        moe_intermediate_size=11,
        n_routed_experts=8,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=3,
        first_k_dense_replace=0,
        num_mtp_layers=0,
    )
    return _llama("DeepseekV3ForCausalLM", **sizes | config)


# DeepSeek-V3's own scaling: another factor on the scores than on cos and sin
SCALED = YARN | dict(mscale=0.5, mscale_all_dim=0.8)
CASES = {
    # every layer has experts, and queries have no latent
    "deepseek_v3": _deepseek(q_lora_rank=None, attention_bias=True),
    "deepseek_v3_dense": _deepseek(
        q_lora_rank=8,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        qk_rope_head_dim=8,
        max_position_embeddings=256,
        rope_parameters=SCALED,
        rope_interleave=False,
        norm_topk_prob=False,
        hidden_act="gelu",
    ),
}
