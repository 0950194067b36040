"""GPT-J."""

from tests.golden.families import Case, T, tokens

CASES = {
    "gptj": Case(
        "GPTJForCausalLM",
        dict(
            vocab_size=37,
            n_positions=96,
            n_embd=24,
            n_layer=2,
            n_head=3,
            n_inner=20,
            rotary_dim=6,  # of 8 features
            layer_norm_epsilon=1e-2,
            bos_token_id=1,
            eos_token_id=2,
        ),
        tokens(37, [T, -8, 9]),
        tokens(37, [7, -4], 7),
    ),
}
