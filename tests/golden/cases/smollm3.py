"""SmolLM3."""

from tests.golden.families import _llama

CASES = {
    # the second layer has no rotation, but a window of 4 keys
    "smollm3": _llama(
        "SmolLM3ForCausalLM",
        num_hidden_layers=3,
        num_key_value_heads=1,
        no_rope_layer_interval=2,
        use_sliding_window=True,
        sliding_window=4,
        pad_token_id=0,
    ),
}
