"""A user's own change of the parameters after each update, in a file outside of the repository."""

import jax
import pytest

from jaxformer.runs.run import open_run
from tests.joints import harness

FILES = {
    "bounded": '''
import jax
import jax.numpy as jnp
from jaxformer import models, training
from jaxformer.data.tasks import Copy


def bounded(params):
    """No number is above a bound."""
    return jax.tree.map(lambda leaf: jnp.clip(leaf, -0.1, 0.1), params)


experiment = training.Experiment(
    name="bounded",
    model=models.ModelConfig(vocab_size=9, num_layers=1, d_model=16, num_heads=2, context_length=8),
    data=Copy(vocab_size=8, length=4, validation_examples=32),
    optimizer=training.AdamW(learning_rate=1e-2),
    after_update=bounded,
    steps=8,
    batch_size=16,
)
'''
}


@pytest.mark.thorough
def test_it_is_resumed_evaluated_and_the_same_on_eight_devices(tmp_path):
    harness.assert_short(FILES)
    whole = harness.assert_resumes_to_the_same_bits(FILES, tmp_path)
    folder = harness.run_of(whole, "bounded")
    params = open_run(folder).params
    assert all(abs(leaf).max() <= 0.1 for leaf in jax.tree.leaves(params))
    assert any("validation_loss" in line for line in harness.records(folder))
    harness.assert_same_on_eight_devices(FILES, tmp_path)
