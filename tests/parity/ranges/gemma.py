"""Gemma, Gemma 2 and the text model of Gemma 3."""

from tests.parity.draws import rope

FAMILIES = {"gemma": "Gemma", "gemma2": "Gemma2", "gemma3_text": "Gemma3"}
RANGE = {
    "use_bidirectional_attention": [True, False],
    "hidden_activation": ["gelu", "silu", "gelu_pytorch_tanh"],
    "query_pre_attn_scalar": [5, 24],
    "attn_logit_softcapping": [None, 3.0],
    "final_logit_softcapping": [None, 2.5],
    "sliding_window": [1, 3, 7],
}


def sizes(family: str, r, common: dict) -> dict:
    """Heads of a width of their own; in Gemma 2 and 3 layers of two kinds."""
    heads = common["num_attention_heads"]
    found = common | dict(num_key_value_heads=heads, head_dim=r.choice([4, 6]))
    kinds = ["full_attention", "sliding_attention"]
    if family != "gemma" and r.random() < 0.5:
        found["layer_types"] = [r.choice(kinds) for _ in range(common["num_hidden_layers"])]
    if r.random() < 0.6:
        full = rope(r)
        local = dict(rope_type="default", rope_theta=r.choice([30.0, 1e4]))
        nested = {"full_attention": full, "sliding_attention": local}
        found["rope_parameters"] = nested if family == "gemma3_text" else full
    return found
