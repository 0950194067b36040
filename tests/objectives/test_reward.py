"""The reward model's loss, beside its equation in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import models, params as P
from jaxformer.errors import ConfigError
from jaxformer.models import Classification, ModelConfig
from jaxformer.objectives import RewardModel, StepContext

rng = np.random.default_rng(0)
B, T, V = 5, 6, 11
MODEL = ModelConfig(
    vocab_size=V, num_layers=1, d_model=8, num_heads=2, context_length=T,
    heads=(Classification(1, pool="last", pooler=None),),
)  # fmt: skip


def batch(lengths):
    """Texts of these lengths [B, 2]; the last tokens of each are its answer."""
    texts = rng.integers(0, V, (B, 2, T + 1))
    places = np.arange(T + 1)
    is_answer = (places >= 2) & (places < lengths[..., None])
    texts = np.where(places < lengths[..., None], texts, 0)
    return texts, {
        "tokens": jnp.asarray(texts[..., :-1], jnp.int32),
        "labels": jnp.asarray(texts[..., 1:], jnp.int32),
        "answers": jnp.asarray(is_answer[..., 1:], jnp.float32),
        "weights": jnp.asarray([1, 1, 0, 1, 1], jnp.float32),
    }


@pytest.mark.thorough
def test_the_objective_of_a_model():
    """Each text alone, without padding: its reward is that of its last token."""
    tree = P.init(models.spec(MODEL), jax.random.key(0))
    lengths = rng.integers(3, T + 1, (B, 2))
    texts, data = batch(lengths)
    rewards = np.zeros((B, 2))
    for b, side in np.ndindex(B, 2):
        text = jnp.asarray(texts[b, side, : lengths[b, side]], jnp.int32)[None]
        rewards[b, side] = models.apply(MODEL, tree, text).logits[0, 0]
    margins = rewards[:, 0] - rewards[:, 1]
    losses = np.log1p(np.exp(-margins)) + 0.1 * rewards.sum(1) ** 2
    weights = np.asarray(data["weights"])
    context = StepContext(jax.random.key(1))
    sums = RewardModel(centre=0.1)(MODEL, tree, data, context)
    np.testing.assert_allclose(sums.loss, losses @ weights, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(sums.metrics["margin"][0], margins @ weights, rtol=1e-3, atol=1e-5)
    assert sums.metrics["preferred"][0] == (margins > 0) @ weights
    assert (sums.unit, sums.weight) == ("pairs", 4)
    assert RewardModel(centre=0.1).evaluation() == RewardModel()


@pytest.mark.thorough
def test_a_text_of_one_token_more_than_the_context():
    """The reward is that of the last token that the model can read."""
    tree = P.init(models.spec(MODEL), jax.random.key(0))
    lengths = np.full((B, 2), T + 1)
    texts, data = batch(lengths)
    sums = RewardModel()(MODEL, tree, data, StepContext(jax.random.key(1)))
    rewards = models.apply(
        MODEL, tree, jnp.asarray(texts[..., :T].reshape(-1, T), jnp.int32)
    ).logits
    margins = np.asarray(rewards).reshape(B, 2) @ [1, -1]
    expected = np.log1p(np.exp(-margins)) @ np.asarray(data["weights"])
    np.testing.assert_allclose(sums.loss, expected, rtol=1e-4)


@pytest.mark.thorough
def test_a_model_without_such_a_head_is_refused():
    model = ModelConfig(vocab_size=V, num_layers=1, d_model=8, num_heads=2, context_length=T)
    tree = P.init(models.spec(model), jax.random.key(0))
    _, data = batch(np.full((B, 2), T))
    with pytest.raises(
        ConfigError, match=r"RewardModel: the model's first head gives \[10, 6, 11\]"
    ):
        RewardModel()(model, tree, data, StepContext(jax.random.key(1)))
