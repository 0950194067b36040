"""ALBERT."""

from tests.golden.families import Case, _bert


def _albert(model: str, **config) -> Case:
    sizes = dict(embedding_size=7, num_hidden_layers=3, hidden_act="gelu_new")
    return _bert(f"Albert{model}", **sizes | config)


# two groups of two layers; the first group runs three times, the second twice
GROUPS = dict(num_hidden_layers=5, num_hidden_groups=2, inner_group_num=2)
CASES = {
    "albert_pretraining": _albert("ForPreTraining", **GROUPS),
    "albert_mlm": _albert("ForMaskedLM", hidden_act="gelu"),
    "albert_sequence": _albert("ForSequenceClassification", num_labels=3),
}
