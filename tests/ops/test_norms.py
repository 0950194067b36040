"""Norms against float64, against Flax's layers, and against the cancellation that the one-pass
variance suffers."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxformer.ops import layer_norm, rms_norm

# Two means of D <= 64 terms, a root and two products, all float32, of values below ten.
FLOAT32 = dict(rtol=5e-6, atol=5e-6)
ROUNDOFF = {jnp.bfloat16: 2.0**-8, jnp.float16: 2.0**-11}


def layer_norm64(x, scale, bias=0.0, eps=1e-5):
    x = np.asarray(x, np.float64)
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + eps) * np.float64(
        scale
    ) + np.float64(bias)


def rms_norm64(x, scale, eps=1e-6):
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * np.float64(scale)


def random(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


@pytest.mark.thorough
@settings(deadline=None, max_examples=8)
@given(
    st.integers(0, 2**31),
    st.sampled_from([(4,), (3, 8), (2, 3, 64), (2, 2, 2, 6)]),
    st.sampled_from([1e-12, 1e-5, 0.5]),
)
def test_by_definition(seed, shape, eps):
    x, scale, bias = random(seed, shape, shape[-1:], shape[-1:])
    both = jax.jit(
        lambda x, s, b: (layer_norm(x, s, b, eps), layer_norm(x, s, None, eps), rms_norm(x, s, eps))
    )
    ours, unbiased, rms = both(x, scale, bias)
    np.testing.assert_allclose(ours, layer_norm64(x, scale, bias, eps), **FLOAT32)
    np.testing.assert_allclose(unbiased, layer_norm64(x, scale, eps=eps), **FLOAT32)
    np.testing.assert_allclose(rms, rms_norm64(x, scale, eps), **FLOAT32)


def test_default_epsilons():
    """LayerNorm 1e-5 (2017, GPT-2), RMSNorm 1e-6 (LLaMA-1): rows this small would show any
    other."""
    x, scale = random(0, (3, 8), (8,))
    np.testing.assert_allclose(
        layer_norm(x * 1e-3, scale), layer_norm64(x * 1e-3, scale, eps=1e-5), **FLOAT32
    )
    np.testing.assert_allclose(
        rms_norm(x * 1e-3, scale), rms_norm64(x * 1e-3, scale, eps=1e-6), **FLOAT32
    )


# float32 error of one row mean is a few roundings 6e-8 of it, then divided by a spread of one;
# worst of 64 x 256 entries
@pytest.mark.parametrize(("mean", "error"), [(10, 3e-6), (100, 3e-5), (1000, 3e-4)])
def test_a_large_mean_costs_only_its_own_rounding(mean, error):
    """The one-pass variance E[x^2] - E[x]^2 loses a hundred to a thousand times more, and
    everything at 1000."""
    x = np.float32(np.random.default_rng(0).normal(size=(64, 256)) + mean)
    ones = jnp.ones(256)
    ours = jax.jit(layer_norm)(jnp.asarray(x), ones)
    assert np.abs(ours - layer_norm64(x, 1.0)).max() < error
    one_pass = nn.LayerNorm(epsilon=1e-5, use_fast_variance=True)
    theirs = jax.jit(one_pass.apply)({"params": {"scale": ones, "bias": 0 * ones}}, jnp.asarray(x))
    assert np.abs(theirs - layer_norm64(x, 1.0)).max() > 5 * error


def test_agrees_with_flax():
    x, scale, bias = random(1, (2, 3, 16), (16,), (16,))
    for eps in (1e-12, 1e-6, 1e-5):
        theirs = nn.LayerNorm(epsilon=eps, use_fast_variance=False).apply(
            {"params": {"scale": scale, "bias": bias}}, x
        )
        np.testing.assert_allclose(layer_norm(x, scale, bias, eps), theirs, **FLOAT32)
        theirs = nn.RMSNorm(epsilon=eps).apply({"params": {"scale": scale}}, x)
        np.testing.assert_allclose(rms_norm(x, scale, eps), theirs, **FLOAT32)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_inputs_are_rounded_once_at_the_end(dtype):
    """Statistics, scale and bias act in float32; only the result is narrow."""
    x, scale, bias = random(2, (4, 64), (64,), (64,))
    x = (x + 30).astype(dtype)
    both = jax.jit(lambda x, s, b: (layer_norm(x, s, b), rms_norm(x, s)))
    for ours, theirs in zip(
        both(x, scale, bias), (layer_norm64(x, scale, bias), rms_norm64(x, scale)), strict=True
    ):
        assert ours.dtype == dtype
        # one rounding of the result; 2e-5 is the float32 error at a mean of 30
        assert (np.abs(np.float64(ours) - theirs) <= ROUNDOFF[dtype] * np.abs(theirs) + 2e-5).all()


def test_float16_squares_do_not_overflow():
    x = jnp.full((2, 8), 6e4, jnp.float16)
    # float16 result
    np.testing.assert_allclose(np.float32(rms_norm(x, jnp.ones(8))), 1.0, rtol=2.0**-11)
    assert np.isfinite(np.float32(layer_norm(x, jnp.ones(8)))).all()


def test_float64_value_and_gradients():
    """dx = (g - mean(g) - xhat mean(g xhat)) / s for LayerNorm, g = scale dy; without the middle
    term for RMSNorm."""
    rng = np.random.default_rng(3)
    x, dy = rng.normal(size=(2, 4, 6))
    scale, bias = rng.normal(size=(2, 6))
    g = dy * scale
    mean = lambda a: a.mean(-1, keepdims=True)
    with jax.enable_x64(True):

        @jax.jit
        def run(dy, x, scale, bias):
            out, pullback = jax.vjp(layer_norm, x, scale, bias)
            rms, rms_pullback = jax.vjp(rms_norm, x, scale)
            return (out, *pullback(dy)), (rms, *rms_pullback(dy))

        ours, ours_rms = run(*map(jnp.asarray, (dy, x, scale, bias)))
    s = np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    hat = (x - mean(x)) / s
    layer = (
        layer_norm64(x, scale, bias),
        (g - mean(g) - hat * mean(g * hat)) / s,
        (dy * hat).sum(0),
        dy.sum(0),
    )
    s = np.sqrt(mean(x**2) + 1e-6)
    hat = x / s
    rms = rms_norm64(x, scale), (g - hat * mean(g * hat)) / s, (dy * hat).sum(0)
    for got, wanted in zip((*ours, *ours_rms), (*layer, *rms), strict=True):
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-13)  # float64 sums of six terms


@pytest.mark.thorough
def test_constant_and_zero_rows_are_finite():
    scale, bias = jnp.full(4, 2.0), jnp.arange(4.0)
    np.testing.assert_array_equal(layer_norm(jnp.full((1, 4), 3.0), scale, bias)[0], bias)
    np.testing.assert_array_equal(rms_norm(jnp.zeros((1, 4)), scale)[0], jnp.zeros(4))
    for f in (layer_norm, rms_norm):
        assert jnp.isfinite(jax.grad(lambda x, f=f: f(x, scale).sum())(jnp.zeros((1, 4)))).all()


def test_invariances():
    """LayerNorm ignores a shift and a positive factor of its input, RMSNorm a positive factor (up
    to eps)."""
    x, scale = random(4, (5, 32), (32,))
    np.testing.assert_allclose(
        layer_norm(4 * x + 2, scale, eps=0.0), layer_norm(x, scale, eps=0.0), **FLOAT32
    )
    np.testing.assert_allclose(
        rms_norm(4 * x, scale, eps=0.0), rms_norm(x, scale, eps=0.0), **FLOAT32
    )


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what XLA:CPU makes of sums")
@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
def test_a_batch_of_one_is_no_axis_of_a_sum(norm):
    """XLA:CPU takes ten times as long for a scale's gradient over [1, T] as over [T]: a tenth of
    GPT-2's step of one row."""
    x, scale = random(0, (1, 64, 128), (128,))
    text = (
        jax.jit(jax.grad(lambda x, scale: jnp.sum(jnp.square(norm(x, scale))), (0, 1)))
        .lower(x, scale)
        .compile()
        .as_text()
    )
    assert " reduce(" in text
    assert not re.findall(r"f32\[1,\d+\]\S* reduce\(", text)


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [(1, 1, 8), (1, 5, 8), (2, 1, 8), (8,), (1, 8), (0, 3, 8)])
@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
def test_axes_of_size_one_stay(norm, shape):
    """The result, and the gradients of each row alone."""
    x, scale = random(1, shape, (8,))
    rows = x.reshape(-1, 8)
    total = lambda x, scale: jnp.sum(jnp.sin(norm(x, scale)))
    assert norm(x, scale).shape == shape
    np.testing.assert_array_equal(norm(x, scale).reshape(-1, 8), norm(rows, scale))
    for ours, alone in zip(
        jax.grad(total, (0, 1))(x, scale), jax.grad(total, (0, 1))(rows, scale), strict=True
    ):
        np.testing.assert_allclose(ours.reshape(alone.shape), alone, **FLOAT32)
