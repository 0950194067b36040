"""DeBERTa, versions 2 and 3."""

FAMILIES = {"deberta-v2": "DebertaV2"}
RANGE = {
    "pooler_hidden_act": ["gelu", "tanh", "relu"],
    "type_vocab_size": [0, 2],
    "position_biased_input": [False],
    "legacy": [False],
}
# their class does not document these
CONVOLUTION = {"conv_act": ["gelu", "tanh", "relu", "sigmoid"], "conv_groups": [1, 2, 3]}
NO_NUMBER = ("pooler_dropout",)
# A padded row begins with a token: theirs gives the class of a sequence from position 0, and a
# position of padding there sees the mean of all positions.
SIDES = ("none", "right")


def sizes(family: str, r, common: dict) -> dict:
    """Those of a BERT, and relative positions in most models."""
    found = dict(common)
    if r.random() < 0.85:
        found |= dict(
            relative_attention=True,
            pos_att_type=r.choice([["c2p", "p2c"], "p2c|c2p", ["c2p"], ["p2c"]]),
            position_buckets=r.choice([-1, 4, 5, 8]),
            max_relative_positions=r.choice([-1, 9, 16]),
            share_att_key=r.random() < 0.5,
            norm_rel_ebd=r.choice(["layer_norm", "none"]),
        )
    if r.random() < 0.4:
        found["conv_kernel_size"] = r.choice([1, 3, 3, 5, 2])
        for name, values in CONVOLUTION.items():
            if r.random() < 0.5:
                found[name] = r.choice(values)
    if r.random() < 0.1:
        found["embedding_size"] = 7
    return found
