"""GPT-NeoX: both sub-layers in parallel, or one after the other."""

from tests.golden.families import LLAMA3, Case, T, tokens


def _neox(seed: int = 0, **config) -> Case:
    sizes = dict(
        vocab_size=37,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=23,
        max_position_embeddings=128,
        layer_norm_eps=1e-2,
        rope_parameters=dict(rope_type="default", rope_theta=20.0, partial_rotary_factor=0.5),
        bos_token_id=1,
        eos_token_id=2,
    )
    inputs, prompt = tokens(37, [T, -8, 9]), tokens(37, [7, -4], 7)
    return Case("GPTNeoXForCausalLM", sizes | config, inputs, prompt, seed=seed)


CASES = {
    "gpt_neox": _neox(),
    "gpt_neox_serial": _neox(
        use_parallel_residual=False,
        attention_bias=False,
        hidden_act="gelu_new",
        tie_word_embeddings=True,
        rope_parameters=LLAMA3 | dict(partial_rotary_factor=0.75),
    ),
}
