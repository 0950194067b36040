"""StarCoder2."""

from tests.golden.families import Case, _llama


def _starcoder2(**config) -> Case:
    case = _llama("Starcoder2ForCausalLM", **config)
    case.config["norm_epsilon"] = case.config.pop("rms_norm_eps")
    return case


CASES = {
    "starcoder2": _starcoder2(num_key_value_heads=1, sliding_window=4),
    "starcoder2_plain": _starcoder2(use_bias=False, tie_word_embeddings=False),
}
