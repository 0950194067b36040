"""ALBERT."""

FAMILIES = {"albert": "Albert"}
RANGE = {
    "num_hidden_groups": [1, 2, 3],
    "inner_group_num": [1, 2],
}
NO_NUMBER = ("classifier_dropout_prob",)


def sizes(family: str, r, common: dict) -> dict:
    """Those of a BERT, and the width of the embedding."""
    layers = r.randint(1, 5)
    return common | dict(embedding_size=r.choice([5, 8, 12]), num_hidden_layers=layers)
