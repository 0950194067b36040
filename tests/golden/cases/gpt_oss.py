"""gpt-oss."""

from tests.golden.families import YARN, _llama

# the limit bends gates, and windows are of 4 keys
CASES = {
    "gpt_oss": _llama(
        "GptOssForCausalLM",
        hidden_size=20,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=11,
        num_local_experts=5,
        num_experts_per_tok=2,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        swiglu_alpha=1.3,
        swiglu_limit=0.5,
        max_position_embeddings=256,
        rope_parameters=YARN | dict(truncate=False),
    ),
}
