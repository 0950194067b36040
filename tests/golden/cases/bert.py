"""XLM-RoBERTa and CamemBERT."""

import numpy as np

from tests.golden.families import Case, T, _bert, tokens

TOKENS = dict(pad_token_id=1, bos_token_id=0, eos_token_id=2)


def _relative(model: str, types: int, second: int, **config) -> Case:
    """A model whose positions count tokens that are not pad. The second row has `second` tokens."""
    sizes = _bert("").config | TOKENS | dict(type_vocab_size=types)
    kinds = {"token_type_ids": np.arange(3 * T).reshape(3, T) % types}
    return Case(model, sizes | config, tokens(37, [T, second, 9], pad=1, **kinds))


CASES = {
    "xlm_roberta_mlm": _relative("XLMRobertaForMaskedLM", 1, -8, hidden_act="gelu_new"),
    "camembert_sequence": _relative("CamembertForSequenceClassification", 2, 8, num_labels=3),
}
