"""mT5 and UMT5."""

FAMILIES = {"mt5": "MT5", "umt5": "UMT5"}
PAIRS = ("mt5", "umt5")


def sizes(family: str, r, common: dict) -> dict:
    """Those of a T5: heads do not share d_model."""
    return dict(
        vocab_size=common["vocab_size"],
        d_model=r.choice([12, 18]),
        d_kv=r.choice([4, 7]),
        d_ff=common["intermediate_size"],
        num_layers=common["num_hidden_layers"],
        num_heads=common["num_attention_heads"],
    )
