"""StableLM."""

from tests.golden.families import Case, _llama


def _stablelm(**config) -> Case:
    rope = dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5)
    sizes = dict(hidden_size=24, layer_norm_eps=1e-2, rope_parameters=rope)
    case = _llama("StableLmForCausalLM", **sizes | config)
    del case.config["rms_norm_eps"]
    return case


CASES = {
    "stablelm": _stablelm(num_key_value_heads=1, use_qkv_bias=True),
    "stablelm_parallel": _stablelm(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        qk_layernorm=True,
        use_parallel_residual=True,
    ),
}
