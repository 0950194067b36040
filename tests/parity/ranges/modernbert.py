"""ModernBERT."""

from tests.parity.draws import rope

FAMILIES = {"modernbert": "ModernBert"}
KINDS = "full_attention", "sliding_attention"
RANGE = {
    # a first position of padding sees a token with these: theirs means all padding where it does
    # not, and ours is zero
    "local_attention": [6, 7, 12],
    "hidden_activation": ["gelu", "silu", "relu", "gelu_new", "quick_gelu"],
    "classifier_activation": ["gelu", "silu", "relu", "tanh"],
    "classifier_pooling": ["mean", "cls"],
    "classifier_bias": [True],
    "decoder_bias": [False],
    "norm_bias": [True],
    "norm_eps": [1e-6, 1e-2],
}
NO_NUMBER = (
    "cls_token_id",
    "classifier_dropout",
    "deterministic_flash_attn",
    "embedding_dropout",
    "initializer_cutoff_factor",
    "mlp_dropout",
    "sparse_prediction",
    "sparse_pred_ignore_index",
)


def sizes(family: str, r, common: dict) -> dict:
    """Those of a BERT; layers of two kinds, each with its rotation."""
    layers = r.randint(1, 5)
    ids = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
    found = common | ids | dict(num_hidden_layers=layers)
    if r.random() < 0.5:
        found["layer_types"] = [r.choice(KINDS) for _ in range(layers)]
    if r.random() < 0.6:
        found["rope_parameters"] = {kind: rope(r) for kind in KINDS}
    return found
