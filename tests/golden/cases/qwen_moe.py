"""Qwen2 and Qwen3 with experts."""

from tests.golden.families import Case, _llama


def _moe(model: str, **config) -> Case:
    sizes = dict(
        hidden_size=12,
        num_key_value_heads=1,
        intermediate_size=13,
        moe_intermediate_size=11,
        num_experts=5,
        num_experts_per_tok=2,
    )
    return _llama(model, **sizes | config)


CASES = {
    "qwen2_moe": _moe(
        "Qwen2MoeForCausalLM",
        num_hidden_layers=3,
        shared_expert_intermediate_size=7,
        mlp_only_layers=[0],
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=2,
    ),
    "qwen3_moe": _moe(
        "Qwen3MoeForCausalLM",
        num_hidden_layers=4,
        decoder_sparse_step=2,
        norm_topk_prob=True,
        head_dim=6,
    ),
}
