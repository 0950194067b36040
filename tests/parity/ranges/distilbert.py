"""DistilBERT."""

FAMILIES = {"distilbert": "DistilBert"}
RANGE = {
    "activation": ["gelu", "relu", "gelu_new", "silu"],
    "sinusoidal_pos_embds": [True],  # only the first values of a trained table
}
NO_NUMBER = ("qa_dropout", "seq_classif_dropout")


def sizes(family: str, r, common: dict) -> dict:
    """Those of a BERT under other names."""
    return dict(
        vocab_size=common["vocab_size"],
        max_position_embeddings=common["max_position_embeddings"],
        dim=common["hidden_size"],
        n_layers=common["num_hidden_layers"],
        n_heads=common["num_attention_heads"],
        hidden_dim=common["intermediate_size"],
    )
