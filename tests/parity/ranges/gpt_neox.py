"""GPT-NeoX."""

from tests.parity.draws import pick, rope

FAMILIES = {"gpt_neox": "GPTNeoX"}
RANGE = {
    "use_parallel_residual": [True, False],
    "attention_bias": [True, False],
    "is_decoder": [True],
}
NO_NUMBER = {"hidden_dropout", "classifier_dropout"}


def sizes(family: str, r, common: dict) -> dict:
    """Heads of which an even number of features is rotated, named as now or as before."""
    common["hidden_size"] = common["num_attention_heads"] * r.choice([8, 8, 8, 12])
    if r.random() < 0.7:
        common["hidden_size"] = common["num_attention_heads"] * r.choice([8, 12])
        common["rope_parameters"] = rope(r)
        common["rope_parameters"].setdefault("partial_rotary_factor", 0.5)
        return common
    return common | pick(r, rotary_pct=[0.5, 0.25, 1.0], rotary_emb_base=[50.0, 10_000])
