"""ELECTRA."""

from tests.golden.families import Case, _bert


def _electra(model: str, **config) -> Case:
    return _bert(f"Electra{model}", **dict(embedding_size=18) | config)


CASES = {
    "electra_discriminator": _electra("ForPreTraining", hidden_act="gelu_new"),
    "electra_mlm": _electra("ForMaskedLM"),
    "electra_small_mlm": _electra("ForMaskedLM", embedding_size=7),
    "electra_sequence": _electra("ForSequenceClassification", num_labels=3),
}
