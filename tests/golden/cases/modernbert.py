"""ModernBERT."""

from tests.golden.families import Case, T, tokens


def _modernbert(model: str, second: int = -8, **config) -> Case:
    """The second row has `second` tokens."""
    sizes = dict(
        vocab_size=37,
        hidden_size=18,
        num_hidden_layers=4,
        num_attention_heads=3,
        intermediate_size=25,
        max_position_embeddings=64,
        norm_eps=1e-2,
        local_attention=6,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 300.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
        },
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    )
    return Case(f"ModernBert{model}", sizes | config, tokens(37, [T, second, 9]))


BIASES = dict(attention_bias=True, mlp_bias=True, norm_bias=True, classifier_bias=True)
CASES = {
    "modernbert_mlm": _modernbert("ForMaskedLM"),
    "modernbert_sequence": _modernbert(
        "ForSequenceClassification", 8, num_labels=3, hidden_activation="silu", **BIASES
    ),
    "modernbert_mean": _modernbert(
        "ForSequenceClassification",
        classifier_pooling="mean",
        classifier_activation="relu",
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
}
