"""GLM-4."""

from tests.golden.families import YARN, _llama

SIZES = dict(hidden_size=20, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
SIZES |= dict(pad_token_id=0)
CASES = {
    "glm4": _llama("Glm4ForCausalLM", **SIZES),
    "glm4_yarn": _llama(
        "Glm4ForCausalLM",
        generates=False,
        **SIZES | dict(head_dim=16),
        attention_bias=False,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        rope_parameters=YARN | dict(partial_rotary_factor=0.5),
    ),
}
