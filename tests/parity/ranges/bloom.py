"""BLOOM."""

FAMILIES = {"bloom": "Bloom"}
RANGE = {
    "apply_residual_connection_post_layernorm": [True, False],
    "slow_but_exact": [True, False],
}
NO_NUMBER = {"hidden_dropout"}


def sizes(family: str, r, common: dict) -> dict:
    """Heads of other numbers than a power of two too, and biases that its own option leaves out."""
    heads = r.choice([1, 2, 3, 5, 6])
    return dict(
        vocab_size=common["vocab_size"],
        n_layer=common["num_hidden_layers"],
        n_head=heads,
        hidden_size=heads * 4,
        pretraining_tp=r.choice([1, 1, 2]),
    )
