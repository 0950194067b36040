"""GPT-J."""

FAMILIES = {"gptj": "GPTJ"}
RANGE = {"rotary_dim": [2, 4, 6, 64]}


def sizes(family: str, r, common: dict) -> dict:
    """The names of GPT-2."""
    return dict(
        vocab_size=common["vocab_size"],
        n_positions=36,
        n_embd=common["hidden_size"],
        n_layer=common["num_hidden_layers"],
        n_head=common["num_attention_heads"],
        rotary_dim=r.choice([2, 4]),
    )
