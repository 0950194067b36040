"""Falcon."""

from tests.parity.draws import rope

FAMILIES = {"falcon": "Falcon"}
RANGE = {"activation": ["gelu", "relu", "gelu_new", "silu", "tanh"], "ffn_hidden_size": [None, 21]}
NO_NUMBER = {"hidden_dropout"}
# The plain attention of transformers 5.23 adds ALiBi twice, once as a part of the mask.
EXACT = dict(attn_implementation="sdpa")


def sizes(family: str, r, common: dict) -> dict:
    """The old architecture or the new one, with key heads that the architecture has."""
    heads = common["num_attention_heads"] = r.choice([1, 2, 3, 4, 6])
    common["hidden_size"] = heads * r.choice([4, 6])
    common["ffn_hidden_size"] = common.pop("intermediate_size")
    is_new = r.random() < 0.4
    common |= dict(
        new_decoder_architecture=is_new,
        multi_query=r.choice([True, False]),
        parallel_attn=is_new or r.choice([True, False]),
        num_ln_in_parallel_attn=r.choice([None, 1, 2, 3]),
        num_kv_heads=r.choice([k for k in range(1, heads + 1) if heads % k == 0] + [None]),
        alibi=r.random() < 0.3,
        bias=r.choice([True, False]),
    )
    return common | (dict(rope_parameters=rope(r)) if r.random() < 0.6 else {})
