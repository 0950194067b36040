"""Answers as spans: the loss by hand, the likeliest span, and what may be no answer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import models
from jaxformer.errors import ConfigError
from jaxformer.masks import full
from jaxformer.models import Classification, ModelConfig, TokenClassification
from jaxformer.objectives import StepContext
from jaxformer.objectives.spans import SpanCrossEntropy, best_spans

init, apply = jax.jit(models.init, static_argnums=0), jax.jit(models.apply, static_argnums=0)
loss = jax.jit(SpanCrossEntropy(), static_argnums=0)
CONFIG = ModelConfig(
    30, 1, 16, 2, context_length=12, masks=(full(),), heads=(TokenClassification(2),), init_std=0.5
)


def batch(rows=4, length=12, seed=0):
    """A question of four tokens, then a passage."""
    rng = np.random.default_rng(seed)
    labels = np.sort(rng.integers(4, length, (rows, 2)), axis=1)
    arrays = {
        "tokens": rng.integers(0, 30, (rows, length)),
        "passage": np.broadcast_to(np.arange(length) >= 4, (rows, length)),
        "labels": labels,
    }
    return {name: jnp.asarray(x, jnp.int32) for name, x in arrays.items()} | {
        "weights": jnp.ones(rows).at[-1].set(0)
    }


@pytest.mark.thorough
def test_the_loss_of_spans_by_hand():
    rows, params = batch(), init(CONFIG, jax.random.key(0))
    sums = loss(CONFIG, params, rows, StepContext(jax.random.key(1)))
    logits = np.asarray(apply(CONFIG, params, rows["tokens"]).logits, np.float64)[:, 4:]
    losses = [
        np.log(np.exp(logits[row, :, side]).sum())
        - logits[row, int(rows["labels"][row, side]) - 4, side]
        for row in range(3)
        for side in (0, 1)
    ]
    assert float(sums.weight) == 3
    assert float(sums.loss) == pytest.approx(sum(losses) / 2, rel=1e-5)  # float32
    gradient = jax.jit(
        jax.grad(lambda p: loss(CONFIG, p, rows, StepContext(jax.random.key(1))).loss)
    )(params)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize("seed", range(20))
def test_the_best_span_is_that_of_all_pairs(seed):
    logits = jax.random.normal(jax.random.key(seed), (3, 2, 9)).at[:, :, :2].set(-jnp.inf)
    sums = np.asarray(logits)[:, 0, :, None] + np.asarray(logits)[:, 1, None, :]
    sums[:, np.tril_indices(9, -1)[0], np.tril_indices(9, -1)[1]] = -np.inf
    expected = [np.unravel_index(np.argmax(each), each.shape) for each in sums]
    np.testing.assert_array_equal(best_spans(logits), expected)


@pytest.mark.thorough
def test_what_is_right_is_counted():
    rows, params = batch(rows=50, seed=1), init(CONFIG, jax.random.key(0))
    logits = apply(CONFIG, params, rows["tokens"]).logits
    best = best_spans(jnp.where(rows["passage"][:, None] > 0, logits.swapaxes(1, 2), -jnp.inf))
    rows["labels"] = jnp.where(jnp.arange(50)[:, None] < 20, best, jnp.roll(best, 1, axis=0))
    sums = loss(CONFIG, params, rows, StepContext(jax.random.key(1)))
    expected = np.all(best == rows["labels"], axis=1)[:49].sum()
    assert sums.metrics["exact_match"] == (expected, 49) and expected >= 20


@pytest.mark.thorough
def test_an_answer_outside_the_passage_is_left_out():
    rows, params = batch(), init(CONFIG, jax.random.key(0))
    weightless = loss(
        CONFIG,
        params,
        rows | {"weights": rows["weights"].at[0].set(0)},
        StepContext(jax.random.key(1)),
    )
    sums = loss(
        CONFIG,
        params,
        rows | {"labels": rows["labels"].at[0, 0].set(1)},
        StepContext(jax.random.key(1)),
    )
    assert (sums.loss, sums.weight) == (weightless.loss, weightless.weight) and sums.weight == 2
    assert sums.metrics["left_out"] == (1, 3) and weightless.metrics["left_out"] == (0, 2)


@pytest.mark.thorough
def test_other_heads_are_refused():
    config = ModelConfig(30, 1, 16, 2, context_length=12, heads=(Classification(2),))
    with pytest.raises(ConfigError, match=r"give the model a TokenClassification\(2\) head first"):
        SpanCrossEntropy()(
            config, init(config, jax.random.key(0)), batch(), StepContext(jax.random.key(1))
        )
