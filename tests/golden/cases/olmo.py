"""OLMo 2 and OLMo 3."""

from tests.golden.families import LLAMA3, YARN, Case, _llama


def _olmo(model: str, **config) -> Case:
    sizes = dict(hidden_size=20, num_attention_heads=4, num_key_value_heads=2, head_dim=6)
    return _llama(model, **sizes | config)


KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
ROTATIONS = {
    "full_attention": YARN,
    "sliding_attention": dict(rope_type="default", rope_theta=20.0),
}
CASES = {
    "olmo2": _olmo("Olmo2ForCausalLM", rope_parameters=LLAMA3, attention_bias=True),
    "olmo3": _olmo(
        "Olmo3ForCausalLM",
        num_hidden_layers=3,
        sliding_window=4,
        layer_types=KINDS,
        head_dim=8,
        max_position_embeddings=256,
        rope_parameters=ROTATIONS,
    ),
}
