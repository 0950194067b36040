"""DistilBERT."""

from tests.golden.families import Case, T, tokens


def _distilbert(model: str, **config) -> Case:
    sizes = dict(
        vocab_size=37,
        dim=18,
        n_layers=2,
        n_heads=3,
        hidden_dim=25,
        max_position_embeddings=16,
    )
    return Case(f"DistilBert{model}", sizes | config, tokens(37, [T, 8, 9]))


CASES = {
    "distilbert_mlm": _distilbert("ForMaskedLM", activation="relu"),
    "distilbert_sequence": _distilbert("ForSequenceClassification", num_labels=3),
}
