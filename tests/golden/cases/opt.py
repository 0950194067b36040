"""OPT: norms before the sub-layers, or after them."""

from tests.golden.families import Case, T, tokens


def _opt(seed: int = 0, **config) -> Case:
    sizes = dict(
        vocab_size=37,
        hidden_size=6,  # so few features that the fixed eps shows
        num_hidden_layers=2,
        num_attention_heads=3,
        ffn_dim=23,
        max_position_embeddings=96,
        word_embed_proj_dim=6,
        pad_token_id=1,
        bos_token_id=2,
        eos_token_id=2,
    )
    inputs, prompt = tokens(37, [T, -8, 9], pad=1), tokens(37, [7, -4], 7, pad=1)
    return Case("OPTForCausalLM", sizes | config, inputs, prompt, seed=seed)


CASES = {
    "opt": _opt(),
    "opt_post": _opt(
        do_layer_norm_before=False,
        enable_bias=False,
        activation_function="gelu",
        tie_word_embeddings=False,
    ),
}
