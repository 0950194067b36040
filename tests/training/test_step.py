"""One training step: accumulation, bad numbers, precision, averages, dropout."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import params
from jaxformer.data.tasks import Copy
from jaxformer.errors import ConfigError
from jaxformer.models import Mixture, ModelConfig
from jaxformer.models.adaptation import Lora
from jaxformer.ops.losses import LossSums
from jaxformer.training import AdamW, Constant, Experiment
from jaxformer.training.gradients import check_weight
from jaxformer.training.recipe import build
from jaxformer.training.step import (
    GROWTH_INTERVAL,
    LossScale,
    accumulate,
    init_state,
    make_train_step,
    rescale,
)

EXPERIMENT = Experiment(
    name="tiny",
    model=ModelConfig(
        vocab_size=13, num_layers=2, d_model=16, num_heads=2, context_length=8, init_std=0.2
    ),
    data=Copy(vocab_size=8, length=4),
    optimizer=AdamW(learning_rate=1e-2),
    schedule=Constant(),
    steps=20,
    batch_size=8,
)
KEY = jax.random.key(0)  # of dropout, which this model has not
AVERAGED = replace(EXPERIMENT, ema_decay=0.8, ema_warmup=2)


def make_batch(seed=0, B=8):
    """Rows of very different length: the case in which a mean of means is wrong."""
    tokens = np.random.default_rng(seed).integers(0, 13, (B, 8)).astype(np.int32)
    lengths = np.array([8, 1, 3, 8, 2, 7, 1, 5])[:B]
    return {
        "tokens": tokens,
        "labels": np.roll(tokens, -1, axis=1),
        "weights": (np.arange(8)[None] < lengths[:, None]).astype(np.float32),
    }


@cache
def step_of(experiment):
    """Compiled once for all tests."""
    return jax.jit(make_train_step(build(experiment)))


@cache
def initial(experiment):
    return jax.jit(partial(init_state, build(experiment)))()


def run(experiment, steps=3, batches=make_batch, loss_scale=None):
    step, state, metrics = step_of(experiment), initial(experiment), []
    if state.loss_scale is not None and loss_scale is not None:
        state = replace(state, loss_scale=LossScale(jnp.float32(loss_scale), jnp.int32(0)))
    for i in range(steps):
        state, values = step(state, batches(i))
        metrics.append({name: float(value) for name, value in values.items()})
    return state, metrics


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


@pytest.mark.thorough
def test_accumulated_equals_whole_with_uneven_padding():
    """1 x 8 = 8 x 1 = 2 x 4 = 4 x 2 in sums and gradient."""
    params = initial(EXPERIMENT).params
    results = []
    for count in (1, 2, 4, 8):
        f = jax.jit(partial(accumulate, build(replace(EXPERIMENT, accumulation=count))))
        results.append(f(params, make_batch(), KEY, 1.0))
    for sums, gradient in results[1:]:
        for ours, whole in zip(jax.tree.leaves(sums), jax.tree.leaves(results[0][0]), strict=True):
            np.testing.assert_allclose(ours, whole, rtol=1e-6)  # float32 sums in another order
        np.testing.assert_allclose(flat(gradient), flat(results[0][1]), rtol=1e-4, atol=1e-5)


def test_sums_in_16_bits_round_only_weights_that_products_round():
    """The router's products are in float32 or better: rounded weights would choose other
    experts."""
    made = replace(EXPERIMENT, precision="bfloat16", gradient_sums="bfloat16")
    recipe, kinds = (
        build(replace(made, model=replace(EXPERIMENT.model, feedforward=Mixture(4, 2, d_ff=16)))),
        {},
    )

    def loss(tree, batch, key, step, references):
        kinds.update({path: str(leaf.dtype) for path, leaf in params.paths(tree).items()})
        return LossSums(sum(leaf.sum() for leaf in jax.tree.leaves(tree)), jnp.float32(1), {})

    jax.eval_shape(
        lambda tree: accumulate(replace(recipe, loss=loss), tree, {}, KEY, 1.0),
        params.abstract(recipe.spec),
    )
    matrices = {path for path, leaf in params.paths(recipe.spec).items() if leaf.contracts}
    assert {path for path, kind in kinds.items() if kind == "bfloat16"} == {
        path for path in matrices if "router" not in path
    }
    assert any("router" in path for path in matrices)
    with pytest.raises(
        ConfigError, match="gradient_sums=bfloat16: rounds the weights that an adaptation merges"
    ):
        build(replace(made, adaptation=Lora()))


@pytest.mark.thorough
def test_first_loss_is_that_of_guessing_and_training_lowers_it():
    experiment = replace(EXPERIMENT, model=replace(EXPERIMENT.model, init_std=0.02))
    _, metrics = run(experiment, steps=20, batches=lambda i: make_batch(0))
    assert abs(metrics[0]["loss"] - np.log(13)) < 0.02 * np.log(13)
    assert metrics[-1]["loss"] < 0.7 * metrics[0]["loss"]


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["weights", "params"])
def test_a_step_with_bad_numbers_changes_nothing_but_its_counters(where):
    step = step_of(AVERAGED)
    state, _ = step(initial(AVERAGED), make_batch())
    bad = make_batch()
    if where == "weights":
        bad["weights"][0, 0] = np.nan
    else:
        bad["weights"] = np.where(bad["weights"] > 0, np.float32(np.inf), 0)
    after, metrics = step(state, bad)
    assert not np.isfinite(metrics["loss"]) or not np.isfinite(metrics["grad_norm"])
    for name in ("params", "opt_state", "ema"):
        jax.tree.map(np.testing.assert_array_equal, getattr(after, name), getattr(state, name))
    assert int(after.step) == 2 and int(after.skipped) == 1
    assert int(step(after, bad)[0].skipped) == 2
    assert int(step(after, make_batch())[0].skipped) == 0


@pytest.mark.thorough
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_batch_without_weight_changes_nothing_but_the_step(accumulation):
    """Weight decay, moments and averages wait, and it is no bad step either: `skipped` neither
    grows nor starts again."""
    step = step_of(replace(AVERAGED, accumulation=accumulation))
    state, _ = step(initial(AVERAGED), make_batch())
    empty = make_batch(1) | {"weights": np.zeros((8, 8), np.float32)}
    for skipped in (0, 3):
        before = replace(state, skipped=jnp.int32(skipped))
        after, metrics = step(before, empty)
        jax.tree.map(np.testing.assert_array_equal, after, replace(before, step=before.step + 1))
        assert (
            float(metrics["tokens"]) == float(metrics["grad_norm"]) == 0
            and int(metrics["skipped"]) == skipped
        )
        # 0 / 0, and no perfect model
        assert np.isnan(metrics["loss"]) and np.isnan(metrics["accuracy"])


@pytest.mark.thorough
def test_a_label_outside_of_the_vocabulary_is_a_bad_step():
    state, batch = initial(AVERAGED), make_batch()
    batch["labels"] = np.where(np.arange(8) == 3, 99999, batch["labels"])
    after, metrics = step_of(AVERAGED)(state, batch)
    assert np.isnan(metrics["loss"]) and int(after.skipped) == 1
    jax.tree.map(np.testing.assert_array_equal, after.params, state.params)


@pytest.mark.thorough
def test_clipping_bounds_the_update_and_reports_the_norm_before():
    batch = make_batch()
    _, (free,) = run(replace(EXPERIMENT, clip_norm=None), 1)
    _, (clipped,) = run(replace(EXPERIMENT, clip_norm=1e-3), 1)
    assert clipped["grad_norm"] == pytest.approx(free["grad_norm"]) and free["grad_norm"] > 1e-2
    gradient = jax.jit(partial(accumulate, build(EXPERIMENT)))(
        initial(EXPERIMENT).params, batch, KEY, 1.0
    )[1]
    mean = flat(gradient) / float(batch["weights"].sum())
    assert free["grad_norm"] == pytest.approx(np.linalg.norm(mean), rel=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "precision, tolerance",
    [
        ("bfloat16", 0.02),
        ("float8", 0.2),
        pytest.param("float16", 0.005, marks=pytest.mark.slow),
    ],
)
def test_low_precision_follows_float32(precision, tolerance):
    """The parameters stay float32; 8 and 11 bits of mantissa in the activations move the loss by
    about their rounding."""
    _, exact = run(EXPERIMENT, 6)
    state, rough = run(replace(EXPERIMENT, precision=precision), 6, loss_scale=64.0)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state.params))
    for a, b in zip(exact, rough, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=tolerance) and b["skipped"] == 0


def test_loss_scale_halves_on_overflow_and_doubles_after_enough_good_steps():
    scale = LossScale(jnp.float32(8.0), jnp.int32(GROWTH_INTERVAL - 2))
    scale = rescale(scale, jnp.array(True))
    assert (float(scale.value), int(scale.good_steps)) == (8.0, GROWTH_INTERVAL - 1)
    scale = rescale(scale, jnp.array(True))
    assert (float(scale.value), int(scale.good_steps)) == (16.0, 0)
    scale = rescale(scale, jnp.array(False))
    assert (float(scale.value), int(scale.good_steps)) == (8.0, 0)


@pytest.mark.thorough
def test_average_of_parameters_is_what_its_definition_says():
    step, state = step_of(AVERAGED), initial(AVERAGED)
    expected = flat(state.params)
    for i in range(4):
        state, _ = step(state, make_batch(i))
        decay = min(0.8, (1 + i) / (2 + i))
        expected = decay * expected + (1 - decay) * flat(state.params)
    np.testing.assert_allclose(flat(state.ema), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_dropout_is_a_function_of_seed_and_step():
    model = replace(EXPERIMENT.model, dropout_rate=0.3, attention_dropout_rate=0.3)
    experiment = replace(EXPERIMENT, model=model)
    first, again = run(experiment, 3)[1], run(experiment, 3)[1]
    assert first == again
    assert run(replace(experiment, seed=1), 1)[1][0]["loss"] != first[0]["loss"]


@pytest.mark.thorough
def test_the_state_is_donated():
    step = jax.jit(make_train_step(build(EXPERIMENT)), donate_argnums=0)
    state = initial(EXPERIMENT)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    memory = step.lower(state, make_batch()).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= size


@pytest.mark.thorough
def test_what_is_frozen_stays_and_is_in_no_norm():
    """With `frozen` the rest trains as it would by itself: the gradient's norm is over what trains
    alone."""
    experiment = replace(EXPERIMENT, frozen="embedding|attention", clip_norm=0.1)
    before, (state, metrics) = initial(experiment).params, run(experiment, steps=2)
    stays = params.mask(before, experiment.frozen)
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), before, state.params)
    assert jax.tree.all(jax.tree.map(lambda stays, moved: stays != moved, stays, moved))
    whole = jax.jit(partial(accumulate, build(replace(experiment, frozen=None))))
    _, gradient = whole(before, make_batch(), KEY, 1.0)
    weight = make_batch()["weights"].sum()
    rest = [
        g / weight for path, g in params.paths(gradient).items() if not params.paths(stays)[path]
    ]
    # float32 sums
    assert metrics[0]["grad_norm"] == pytest.approx(float(np.linalg.norm(flat(rest))), rel=1e-4)


@pytest.mark.thorough
def test_sums_may_be_plain_numbers():
    """An objective of one's own need not make arrays of the weights of its loss and its metrics."""

    def objective(model, params, batch, context):
        loss = jnp.sum(params["embedding"]["tokens"] ** 2)
        return LossSums(loss, 4, {"half": (loss, 8)})

    _, (metrics,) = run(replace(EXPERIMENT, objective=objective), steps=1)
    assert metrics["half"] == pytest.approx(metrics["loss"] / 2)


@pytest.mark.parametrize("constant", [8.0, jnp.float32(8), 1])
def test_a_weight_that_does_not_count_the_batch_is_refused_where_a_batch_has_parts(constant):
    batch = {"tokens": jnp.ones((4, 3)), "weights": jnp.ones((4, 3))}
    of = lambda make: lambda params, batch, key: LossSums(jnp.sum(batch["tokens"]), make(batch))
    with pytest.raises(
        ConfigError, match="objective: its weight is the same number however many rows a batch has"
    ):
        check_weight(of(lambda batch: jnp.asarray(constant)), {}, batch, jax.random.key(0))
    counted = (
        lambda batch: batch["tokens"].size,
        lambda batch: jnp.sum(batch["weights"]),
        lambda batch: jnp.ones(len(batch["tokens"])).sum(),
    )
    for make in counted:
        check_weight(of(make), {}, batch, jax.random.key(0))
