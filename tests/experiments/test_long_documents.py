"""Long documents: what is asked stands in the text, and the models cost alike."""

from functools import partial

import jax
import numpy as np
import pytest

from experiments.theory import long_documents as long
from jaxformer import models
from jaxformer.tools.planning import flops


@pytest.mark.thorough
def test_each_label_is_the_fact_that_the_document_states():
    batch = {name: np.asarray(x) for name, x in long.draw(jax.random.key(0), 128, 8).items()}
    first = long.NOISE + long.KEYS * long.ANSWERS  # the number of the first question
    rows = (batch[name] for name in ("tokens", "labels", "weights"))
    for tokens, labels, weights in zip(*rows, strict=True):
        facts = tokens[(tokens >= long.NOISE) & (tokens < first)] - long.NOISE
        stated = dict(np.divmod(fact, long.ANSWERS) for fact in facts)
        assert sorted(stated) == list(range(long.KEYS))
        (asked,) = np.nonzero(weights)
        assert len(asked) == long.ASKED // 2 and asked.min() >= 128 - long.ASKED
        assert [stated[key] for key in tokens[asked] - first] == labels[asked].tolist()


@pytest.mark.thorough
def test_a_forward_pass_costs_each_model_the_same():
    def forward(config, params, tokens):
        return models.apply(config, params, tokens).logits

    counts = []
    for config in long.MODELS.values():
        params = jax.eval_shape(partial(models.init, config), jax.random.key(0))
        tokens = jax.ShapeDtypeStruct((1, long.LENGTHS[-1]), np.int32)
        counts.append(flops.count(partial(forward, config), params, tokens).flops)
    assert max(counts) / min(counts) < 1.07, counts
