"""Gemma, Gemma 2 and the text model of Gemma 3."""

from tests.golden.families import LLAMA3, Case, _llama


def _gemma(model: str, **config) -> Case:
    sizes = dict(num_key_value_heads=1, head_dim=8, tie_word_embeddings=True)
    return _llama(model, **sizes | config)


# a window of 4 keys in layers of one kind, and scores and logits that the caps bend
LAYERS = dict(num_hidden_layers=3, sliding_window=4, query_pre_attn_scalar=5)
CAPS = dict(attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
ROTATIONS = {
    "full_attention": LLAMA3,
    "sliding_attention": dict(rope_type="default", rope_theta=20.0),
}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
CASES = {
    "gemma": _gemma("GemmaForCausalLM"),
    "gemma2": _gemma("Gemma2ForCausalLM", **LAYERS, **CAPS),
    "gemma3": _gemma("Gemma3ForCausalLM", **LAYERS, layer_types=KINDS, rope_parameters=ROTATIONS),
}
