"""Phi and Phi-3."""

from tests.golden.families import Case, _llama

# half of a head is rotated; a text of 8 tokens is a long one
LONG = dict(
    rope_type="longrope",
    rope_theta=100.0,
    partial_rotary_factor=0.5,
    short_factor=[1.0, 1.5],
    long_factor=[1.3, 2.5],
)


def _phi(model: str, **config) -> Case:
    sizes = dict(hidden_size=24, num_attention_heads=3, resid_pdrop=0.0, pad_token_id=0)
    case = _llama(model, **sizes | config)
    if model.startswith("Phi3"):
        return case
    case.config["layer_norm_eps"] = case.config.pop("rms_norm_eps")
    return case


CASES = {
    "phi": _phi("PhiForCausalLM", rope_parameters=dict(rope_type="default", rope_theta=100.0)),
    "phi_qk_norm": _phi(
        "PhiForCausalLM", qk_layernorm=True, num_key_value_heads=1, tie_word_embeddings=True
    ),
    "phi3": _phi("Phi3ForCausalLM", num_key_value_heads=1, sliding_window=4),
    "phi3_long": _phi(
        "Phi3ForCausalLM",
        generates=False,  # theirs rotates tokens of short and of long texts differently
        rope_parameters=LONG,
        original_max_position_embeddings=5,
    ),
}
