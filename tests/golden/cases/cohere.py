"""Cohere's Command R."""

from tests.golden.families import Case, _llama


def _cohere(**config) -> Case:
    sizes = dict(layer_norm_eps=1e-2, tie_word_embeddings=True, logit_scale=0.6)
    case = _llama("CohereForCausalLM", **sizes | config)
    del case.config["rms_norm_eps"]
    return case


CASES = {
    "cohere": _cohere(num_key_value_heads=1, attention_bias=True),
    "cohere_norms": _cohere(
        hidden_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_qk_norm=True,
        tie_word_embeddings=False,
    ),
}
