"""Granite."""

from tests.golden.families import _llama

MULTIPLIERS = dict(
    attention_multiplier=0.3,
    embedding_multiplier=3.0,
    residual_multiplier=0.7,
    logits_scaling=1.3,
)
CASES = {
    "granite": _llama(
        "GraniteForCausalLM",
        **MULTIPLIERS,
        num_key_value_heads=1,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
}
