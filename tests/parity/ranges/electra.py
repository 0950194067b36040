"""ELECTRA."""

FAMILIES = {"electra": "Electra"}
RANGE = {
    "summary_type": ["first", "last", "mean"],
    "summary_activation": ["gelu", "tanh", None],
}
NO_NUMBER = ("summary_last_dropout",)


def sizes(family: str, r, common: dict) -> dict:
    """Those of a BERT. Many have an embedding of another width."""
    width = common["hidden_size"]
    return common | dict(embedding_size=width if r.random() < 0.4 else r.choice([5, width + 2]))
