"""PatchTST beside a second definition: NumPy in float64, one series at a time."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import models
from jaxformer.errors import ConfigError
from jaxformer.masks import full
from jaxformer.models import Classification, ModelConfig, Patches
from jaxformer.objectives import StepContext
from jaxformer.zoo.patchtst import (
    Quantiles,
    SeriesPatches,
    as_channels,
    as_rows,
    patches_of,
    quantile_loss,
    quantile_regression,
    statistics,
)
from tests.zoo.plain_layers import attention, gelu, normed

LEVELS = (0.1, 0.5, 0.8)
MODEL = ModelConfig(
    vocab_size=0,
    num_layers=2,
    d_model=16,
    num_heads=2,
    context_length=6,
    d_ff=24,
    feedforward="gelu_tanh",
    embedding=SeriesPatches(length=21, patch=5, stride=4),
    heads=(Quantiles(horizon=4, levels=LEVELS),),
    masks=(full(),),
)
apply = jax.jit(models.apply, static_argnums=0, static_argnames="dtype")


def layer(tree, x):
    x = x + attention(tree["attention"], normed(tree["attention_norm"], x))
    y = normed(tree["feedforward_norm"], x)
    up, down = tree["feedforward"]["up"], tree["feedforward"]["down"]
    return x + gelu(y @ up["kernel"] + up["bias"]) @ down["kernel"] + down["bias"]


def forecast_of(tree, series):
    """[horizon, levels] of one series."""
    mean = series.mean()
    deviation = math.sqrt(((series - mean) ** 2).mean() + (1e-5 * abs(series).max()) ** 2)
    values = [*((series - mean) / deviation)]
    values += [values[-1]] * 4
    x = []
    for start in range(0, len(values) - 4, 4):
        of_patches = tree["embedding"]["patches"]
        patch = np.array(values[start : start + 5])
        x.append(patch @ of_patches["kernel"] + of_patches["bias"])
    x = np.array(x) + tree["embedding"]["positions"]
    for i in range(2):
        x = layer(jax.tree.map(lambda leaf, i=i: leaf[i], tree["layers"]), x)
    x = normed(tree["final_norm"], x)
    head = tree["heads"]["quantiles"]
    answer = np.tensordot(x, head["kernel"], 2) + head["bias"]
    return np.sort(answer * deviation + mean, axis=-1)


def random_parameters(model, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.4 * rng.standard_normal(leaf.shape), jnp.float32),
        models.spec(model),
    )


def series(count, seed=0):
    """Random walks around different means, in different units."""
    rng = np.random.default_rng(seed)
    walks = rng.standard_normal((count, 21)).cumsum(axis=1) + 5 * rng.standard_normal((count, 1))
    return jnp.asarray(walks * rng.uniform(0.1, 10, (count, 1)), jnp.float32)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_patchtst_equals_its_definition(seed):
    params, x = random_parameters(MODEL, seed), series(5, seed)
    found = apply(MODEL, params, x).logits
    wide = jax.tree.map(np.float64, params)
    expected = np.array([forecast_of(wide, each) for each in np.float64(x)])
    # float32: sums of a hundred terms, in units of the series
    scale = np.abs(expected).max(axis=(1, 2), keepdims=True)
    np.testing.assert_allclose(found / scale, expected / scale, atol=1e-5)


@pytest.mark.parametrize(
    ("length", "patch", "stride"), [(21, 5, 4), (16, 4, 4), (7, 7, 1), (9, 2, 5)]
)
def test_patches_are_windows_of_the_padded_series(length, patch, stride):
    x = np.random.default_rng(0).standard_normal((3, length)).astype(np.float32)
    padded = np.concatenate([x, np.repeat(x[:, -1:], stride, axis=1)], axis=1)
    expected = np.lib.stride_tricks.sliding_window_view(padded, patch, axis=1)[:, ::stride]
    found = patches_of(jnp.asarray(x), patch, stride)
    np.testing.assert_array_equal(found, expected)
    assert found.shape[1] == SeriesPatches(length, patch, stride).patches


@pytest.mark.thorough
def test_channels_are_independent_and_come_back():
    params = random_parameters(MODEL)
    x = series(6).reshape(2, 3, 21).swapaxes(1, 2)  # [B, length, C]
    found = as_channels(apply(MODEL, params, as_rows(x)).logits, 3)
    assert found.shape == (2, 4, 3, 3)
    for c in range(3):
        alone = apply(MODEL, params, x[:, :, c]).logits
        # other sums of float32
        np.testing.assert_allclose(found[:, :, c], alone, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(as_channels(as_rows(x), 3), x)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_forecasts_have_the_units_of_the_series(scale):
    """A forecast of scale x + shift is scale times that of x, plus the shift."""
    params, x = random_parameters(MODEL), series(4)
    shift = 3 * scale
    found = apply(MODEL, params, scale * x + shift).logits
    expected = scale * apply(MODEL, params, x).logits + shift
    # float32: a sum of two numbers is rounded; the smallest deviation is a share of the values
    np.testing.assert_allclose(found / scale, expected / scale, rtol=1e-3, atol=1e-3)


@pytest.mark.thorough
@pytest.mark.parametrize("value", [0.0, 1.0, -3e7, 1e-12])
def test_a_constant_series_stays_near_its_value(value):
    params = random_parameters(MODEL)
    x = jnp.full((2, 21), value)
    _, deviation = statistics(x)
    assert (deviation > 0).all()
    if value:
        found = apply(MODEL, params, x).logits / value
        np.testing.assert_allclose(found, 1, atol=1e-3)  # some hundred times 1e-5
    loss = lambda x: jnp.square(models.apply(MODEL, params, x).logits).sum()
    assert np.isfinite(jax.jit(jax.grad(loss))(x)).all()


@pytest.mark.thorough
def test_bfloat16_keeps_a_small_change_of_a_large_value():
    """The series is normalised before it is rounded: 1,000.1 and 1,000.2 are one in bfloat16."""
    params = random_parameters(MODEL)
    x = 1000 + 0.1 * jnp.sin(jnp.arange(21.0))[None]
    exact, rounded = (apply(MODEL, params, x, dtype=dtype).logits for dtype in (None, jnp.bfloat16))
    spread = np.abs(exact - x.mean()).max()
    assert np.abs(rounded - exact).max() < 0.1 * spread < 1


@pytest.mark.thorough
def test_quantiles_do_not_cross():
    forecast = apply(MODEL, random_parameters(MODEL, 3), series(50)).logits
    assert (np.diff(forecast, axis=-1) >= 0).all()


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [0, 1])
def test_the_loss_is_that_of_its_definition(seed):
    params, x = random_parameters(MODEL, seed), series(5, seed)
    future = series(5, seed + 10)[:, :4]
    batch = {
        "series": x,
        "future": future.at[0].set(jnp.nan),
        "weights": jnp.array([0.0, 1, 2, 1, 1]),
    }
    run = jax.jit(lambda params: quantile_regression(MODEL, params, batch, StepContext(None)))
    sums = run(params)
    wide = jax.tree.map(np.float64, params)
    total = 0
    for i in range(1, 5):
        forecast = forecast_of(wide, np.float64(x[i]))
        losses = []
        for h in range(4):
            for q, level in enumerate(LEVELS):
                error = float(future[i, h]) - forecast[h, q]
                losses.append(level * error if error > 0 else (level - 1) * error)
        total += batch["weights"][i] * np.mean(losses)
    assert sums.weight == 5 and sums.unit == "forecasts"
    np.testing.assert_allclose(sums.loss, total, rtol=1e-4)
    gradient = jax.grad(lambda params: run(params).loss)(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("level", [0.1, 0.5, 0.9])
def test_the_best_constant_is_the_quantile(level):
    values = jnp.sort(jax.random.normal(jax.random.key(0), (200,)))
    forecasts = jnp.broadcast_to(values[:, None, None], (200, 200, 1))
    truth = jnp.broadcast_to(values[None], (200, 200))
    losses = quantile_loss(forecasts, truth, (level,)).mean(axis=1)
    below = (values < values[losses.argmin()]).mean()
    assert abs(below - level) <= 0.01


@pytest.mark.thorough
def test_what_does_not_fit_is_refused():
    params = random_parameters(MODEL)
    for shape in [(2, 20), (2, 21, 1), (21,)]:
        with pytest.raises(ConfigError, match=r"expected \[B, 21\]"):
            models.apply(MODEL, params, jnp.zeros(shape))
    with pytest.raises(ConfigError, match="without padding"):
        models.apply(MODEL, params, series(2), segment_ids=jnp.ones((2, 6), jnp.int32))
    with pytest.raises(ConfigError, match="longer than"):
        SeriesPatches(length=8, patch=9)
    for levels in [(), (0.5, 0.1), (0.0, 0.5), (0.5, 1.0), (0.5, 0.5)]:
        with pytest.raises(ConfigError, match="ascending"):
            Quantiles(levels=levels)
    with pytest.raises(ConfigError, match="SeriesPatches"):
        image = Patches(image=(4, 6), patch=(2, 2), class_token=False)
        models.spec(replace(MODEL, embedding=image))
    batch = {"series": series(2), "future": jnp.zeros((2, 5)), "weights": jnp.ones(2)}
    with pytest.raises(ConfigError, match=r"expected \[B, 4\]"):
        quantile_regression(MODEL, params, batch, StepContext(None))
    with pytest.raises(ConfigError, match=r"expected zoo\.patchtst\.Quantiles"):
        other = replace(MODEL, heads=(Classification(3),))
        quantile_regression(other, params, batch, StepContext(None))
