"""Falcon: one key head and one norm, or groups of heads and two norms."""

from tests.golden.families import Case, T, tokens


def _falcon(seed: int = 0, **config) -> Case:
    sizes = dict(
        vocab_size=37,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_hidden_size=23,
        max_position_embeddings=128,
        layer_norm_epsilon=1e-2,
        rope_parameters=dict(rope_type="default", rope_theta=20.0),
        bos_token_id=1,
        eos_token_id=2,
    )
    inputs, prompt = tokens(37, [T, -8, 9]), tokens(37, [7, -4], 7)
    return Case("FalconForCausalLM", sizes | config, inputs, prompt, seed=seed)


CASES = {
    "falcon": _falcon(),
    "falcon_new": _falcon(
        new_decoder_architecture=True,
        num_kv_heads=2,
        activation="gelu_new",
        bias=True,
        tie_word_embeddings=False,
    ),
    "falcon_serial": _falcon(parallel_attn=False, multi_query=False, bias=True),
}
