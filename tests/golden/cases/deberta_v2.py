"""DeBERTa, versions 2 and 3."""

from tests.golden.families import Case, _bert

# as version 3, with few buckets: most distances are by the logarithm
DEBERTA = dict(
    type_vocab_size=2,
    relative_attention=True,
    position_buckets=4,
    max_relative_positions=9,
    norm_rel_ebd="layer_norm",
    share_att_key=True,
    pos_att_type=["c2p", "p2c"],
    position_biased_input=False,
)


def _deberta(model: str, **config) -> Case:
    return _bert(f"DebertaV2{model}", **DEBERTA | config)


CASES = {
    # not 3 heads and 3 products: then the scale of scores is that of the model's width
    "deberta_v2_mlm": _deberta("ForMaskedLM", num_attention_heads=2),
    # maps of their own, no logarithm, and fewer rows than distances
    "deberta_v2_sequence": _deberta(
        "ForSequenceClassification",
        num_labels=3,
        num_attention_heads=2,
        share_att_key=False,
        position_buckets=-1,
        max_relative_positions=5,
        norm_rel_ebd="none",
        position_biased_input=True,
    ),
    # as version 2, xlarge and xxlarge, in groups
    "deberta_v2_convolution": _deberta(
        "ForMaskedLM",
        num_attention_heads=2,
        norm_rel_ebd="none",
        conv_kernel_size=3,
        conv_groups=2,
        conv_act="gelu",
    ),
    "deberta_v2_p2c": _deberta("ForTokenClassification", pos_att_type=["p2c"], num_labels=5),
}
