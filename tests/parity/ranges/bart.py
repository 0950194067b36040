"""BART, mBART and Pegasus."""

FAMILIES = {"bart": "Bart", "mbart": "MBart", "pegasus": "Pegasus"}
PAIRS = tuple(FAMILIES)
SIDES = ("encoder", "decoder")


def sizes(family: str, r, common: dict) -> dict:
    """Those of a Marian."""
    found = {name: common[name] for name in ("vocab_size", "max_position_embeddings")}
    found["d_model"] = common["hidden_size"]
    found |= {f"{side}_attention_heads": common["num_attention_heads"] for side in SIDES}
    found |= {f"{side}_layers": r.randint(1, 2) for side in SIDES}
    found |= {f"{side}_ffn_dim": r.randint(9, 30) for side in SIDES}
    tokens = dict(pad_token_id=r.choice([1, 5]), decoder_start_token_id=2)
    return found | tokens
