"""Products in 8-bit floats, against NumPy in float64 with the roundings of ml_dtypes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxformer import models, ops, params, zoo
from jaxformer.models import EncoderDecoder, ModelConfig, blocks
from jaxformer.models.mixture import Mixture
from jaxformer.ops.float8 import (
    GRADIENT,
    OPERAND,
    Float8Weight,
    ReadDirectly,
    in_float8,
    with_float8_weights,
)
from tests.zoo import test_mixers, test_variants

SPECS = ["btd,df->btf", "btf,fd->btd", "btd,dnh->btnh", "btnh,nhd->btd"]
SIZES = dict(b=3, t=5, d=16, f=24, n=2, h=8)


def sizes(axes):
    return tuple(SIZES[axis] for axis in axes)


def rounded(x, dtype):
    """scale * X in float64, X rounded to 8 bits: the definition."""
    scale = np.float32(np.abs(x).max() / np.float32(float(ml_dtypes.finfo(dtype).max)))
    return (x / scale).astype(dtype).astype(np.float64) * np.float64(scale)


@pytest.mark.thorough
@settings(max_examples=6, deadline=None)
@given(
    spec=st.sampled_from(SPECS),
    seed=st.integers(0, 99),
    spread=st.sampled_from([1e-20, 1e-3, 1.0, 300.0, 1e20]),
)
def test_a_product_and_its_gradients_are_those_of_the_rounded_operands(spec, seed, spread):
    x_axes, w_axes, out = ops.cpu.axes_of(spec)
    rng = np.random.default_rng(seed)
    x, g = (rng.normal(size=sizes(axes)).astype(np.float32) for axes in (x_axes, out))
    w = spread * rng.normal(size=sizes(w_axes)).astype(np.float32)
    operands = jnp.asarray(x), jnp.asarray(w)
    y, pullback = jax.vjp(lambda x, w: ops.einsum(spec, x, Float8Weight(w)), *operands)
    dx, dw = pullback(jnp.asarray(g))
    X, W, G = rounded(x, OPERAND), rounded(w, OPERAND), rounded(g, GRADIENT)
    for found, expected in (
        (y, np.einsum(spec, X, W)),
        (dx, np.einsum(f"{out},{w_axes}->{x_axes}", G, W)),
        (dw, np.einsum(f"{x_axes},{out}->{w_axes}", X, G)),
    ):
        assert found.dtype == jnp.float32
        # sums of some dozen exact products in float32
        np.testing.assert_allclose(found, expected, atol=3e-6 * np.abs(expected).max(), rtol=0)


def test_rounding_is_that_of_eight_bits():
    """e4m3 keeps a value to 1 part in 16 over 2^-6 / 448 ... 1 of the largest one."""
    x = np.exp(np.random.default_rng(0).uniform(np.log(1 / 20_000), 0, 4000)).astype(np.float32)
    values, scale = in_float8(jnp.asarray(x), OPERAND)
    assert values.dtype == OPERAND
    error = np.abs(np.asarray(values, np.float32) * float(scale) / x - 1).max()
    assert 1 / 32 < error <= 1 / 16


@pytest.mark.parametrize("x", [[0.0, 0.0], [1e-45, -1e-45], [3e38, 1.0]], ids=str)
def test_any_finite_tensor_stays_finite(x):
    values, scale = in_float8(jnp.array(x, jnp.float32), OPERAND)
    assert np.isfinite(np.asarray(values, np.float32)).all()
    assert np.isfinite(float(scale))
    assert float(scale) > 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_seen_in_the_result(bad):
    x = jnp.ones((2, 3, 16)).at[0, 0, 0].set(bad)
    y = ops.einsum("btd,df->btf", x, Float8Weight(jnp.ones((16, 8))))
    assert not np.isfinite(np.asarray(y)).all()


@pytest.mark.thorough
def test_a_product_may_be_computed_again_or_under_a_scan():
    w = Float8Weight(jax.random.normal(jax.random.key(0), (3, 16, 16)))
    x = jax.random.normal(jax.random.key(1), (2, 5, 16), jnp.bfloat16)

    def layer(x, w):
        return ops.einsum("btd,de->bte", x, w), None

    def loss(w, function):
        return jnp.sum(jax.lax.scan(function, x, w)[0].astype(jnp.float32))

    plain, again = (
        jax.grad(loss)(w, function)
        for function in (layer, jax.checkpoint(layer, prevent_cse=False))
    )
    assert plain.values.dtype == jnp.float32
    np.testing.assert_array_equal(plain.values, again.values)


BASE = ModelConfig(
    vocab_size=32, num_layers=2, d_model=16, num_heads=2, context_length=16, init_std=0.2
)
MODELS = {
    "gpt": BASE,
    "scanned, sandwich": replace(BASE, unroll=1, block=blocks.sandwich, feedforward="swiglu"),
    "experts": replace(BASE, feedforward=Mixture(experts=4)),
    "pair": EncoderDecoder(replace(BASE, heads=()), BASE),
    "dense first": replace(BASE, num_layers=3, feedforward=("swiglu", Mixture(experts=2), "gelu")),
    "linear attention": replace(BASE, mixer=zoo.Linear()),
    "gated": replace(BASE, mixer=zoo.gated.gated),
}


def loss(model, eight_bits, weights, tokens):
    read = with_float8_weights(models.spec(model), weights) if eight_bits else weights
    source = {"source": tokens} if isinstance(model, EncoderDecoder) else {}
    output = models.apply(model, read, tokens, dtype=jnp.bfloat16, **source)
    logits = next(iter(output.heads.values()))
    return -jnp.mean(jax.nn.log_softmax(logits.astype(jnp.float32))[..., 0]), logits


# compiling takes most of the time of this file, so without the backend's optimisations
quick = {"xla_backend_optimization_level": 0}
gradient = jax.jit(
    jax.value_and_grad(loss, argnums=2, has_aux=True), static_argnums=(0, 1), compiler_options=quick
)


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_close_to_its_products_in_bfloat16(name):
    """A share of 1/16 a product is lost at most, and much of it averages out."""
    model = MODELS[name]
    weights = models.init(model, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, 32)
    (_, plain), expected = gradient(model, False, weights, tokens)
    (_, rounded), found = gradient(model, True, weights, tokens)
    error = np.linalg.norm(rounded - plain) / np.linalg.norm(plain)
    assert 1e-4 < error < 0.15
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype == jnp.float32
        assert np.isfinite(a).all()


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*test_mixers.SYSTEMS, *test_variants.CONFIGS])
def test_every_mixer_reads_its_weights_by_einsum(name):
    model = (test_mixers.SYSTEMS | test_variants.CONFIGS)[name]
    weights = params.abstract(models.spec(model))
    tokens = jax.ShapeDtypeStruct((2, model.context_length), jnp.int32)
    _, gradients = jax.eval_shape(gradient, model, True, weights, tokens)
    assert jax.tree.structure(gradients) == jax.tree.structure(weights)


@pytest.mark.thorough
def test_matrices_of_layers_alone_are_in_eight_bits():
    model = MODELS["experts"]
    spec = models.spec(model)
    read = with_float8_weights(spec, models.init(model, jax.random.key(0)))

    def is_weight(leaf):
        return isinstance(leaf, Float8Weight)

    flags = params.paths(jax.tree.map(is_weight, read, is_leaf=is_weight))
    chosen = {path for path, flag in flags.items() if flag}
    assert chosen == {
        f"layers/attention/{name}/kernel" for name in ("query", "key", "value", "out")
    }


def test_a_weight_that_is_read_by_other_means_is_refused_in_one_line():
    weight = Float8Weight(jnp.ones((4, 4)))
    for read in (lambda: weight.reshape(-1), lambda: weight.T, lambda: jnp.sum(weight)):
        with pytest.raises(ReadDirectly, match=r"precision=float8: .*ops.einsum"):
            read()
    assert not hasattr(weight, "nothing")  # what JAX and flax ask for is answered as usual
