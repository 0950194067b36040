"""BART, mBART and Pegasus."""

from tests.golden.families import Case, pair, tokens


def _pair(model: str, seed: int, width: int = 12, **config) -> Case:
    sizes = dict(
        vocab_size=33,
        d_model=width,
        encoder_layers=3,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=3,
        encoder_ffn_dim=17,
        decoder_ffn_dim=14,
        max_position_embeddings=96,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        forced_eos_token_id=None,
        decoder_start_token_id=2,
    )
    inputs = pair(33, [13, 9, 10], [8, 6, 8], pad=1, start=2)
    prompt = tokens(33, [7, 4], 7, pad=1)
    return Case(f"{model}ForConditionalGeneration", sizes | config, inputs, prompt, seed=seed)


CASES = {
    "bart": _pair("Bart", seed=17, activation_function="gelu_new"),
    "mbart": _pair("MBart", seed=23),
    "pegasus": _pair("Pegasus", seed=3, scale_embedding=True, activation_function="relu"),
}
