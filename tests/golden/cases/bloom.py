"""BLOOM: the residual before or after the norm; a power of two of heads, or another number."""

from tests.golden.families import Case, T, tokens


def _bloom(seed: int = 0, **config) -> Case:
    sizes = dict(
        vocab_size=37,
        hidden_size=18,
        n_layer=2,
        n_head=3,
        layer_norm_epsilon=1e-2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
    )
    inputs, prompt = tokens(37, [T, -8, 9], pad=3, low=4), tokens(37, [7, -4], 7, pad=3, low=4)
    return Case("BloomForCausalLM", sizes | config, inputs, prompt, seed=seed)


CASES = {
    "bloom": _bloom(),
    "bloom_normed": _bloom(
        apply_residual_connection_post_layernorm=True,
        hidden_size=12,
        n_head=2,
        tie_word_embeddings=False,
    ),
}
