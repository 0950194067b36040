"""Ministral."""

from tests.golden.families import _llama

CASES = {
    "ministral": _llama(
        "MinistralForCausalLM",
        num_hidden_layers=3,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=4,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    ),
}
