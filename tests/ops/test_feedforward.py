"""Activations and feed-forward layers against float64, written with math.erf, math.exp and
math.tanh."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import ops
from jaxformer.ops import glu, mlp
from jaxformer.ops.feedforward import ACTIVATIONS, GATES


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


DEFINITIONS = {
    "relu": lambda x: max(x, 0.0),
    "gelu": lambda x: x * 0.5 * math.erfc(-x / math.sqrt(2)),
    "gelu_tanh": lambda x: (
        0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "silu": lambda x: x * sigmoid(x),
    "relu2": lambda x: max(x, 0.0) ** 2,
    "sigmoid": sigmoid,
    "tanh": np.tanh,
    "identity": lambda x: x,
    "quick_gelu": lambda x: x * sigmoid(1.702 * x),
    "gelu_10": lambda x: min(max(x * 0.5 * math.erfc(-x / math.sqrt(2)), -10.0), 10.0),
    "relu6": lambda x: min(max(x, 0.0), 6.0),
    "leaky_relu": lambda x: x if x > 0 else 0.01 * x,
    "hardswish": lambda x: x * min(max(x + 3, 0.0), 6.0) / 6,
    "mish": lambda x: x * math.tanh(math.log1p(math.exp(-abs(x))) + max(x, 0.0)),
    "laplace": lambda x: 0.5 * math.erfc(-(x - 0.707107) / (0.282095 * math.sqrt(2))),
}
KINKS = {"relu6": [6.0], "hardswish": [-3.0, 3.0], "gelu_10": [10.0]}
X = np.concatenate([np.linspace(-6, 6, 241), [-50.0, -20.0, 20.0, 50.0, 0.0]])


def apply(name, x):
    return np.vectorize(DEFINITIONS[name], otypes=[np.float64])(np.float64(x))


def test_every_activation_is_defined_here():
    assert set(ACTIVATIONS) == set(DEFINITIONS) and set(GATES.values()) <= set(DEFINITIONS)


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("name", DEFINITIONS)
def test_activations(name):
    x = np.float32(X)
    # float32 erf and tanh are good to a few 1e-7 of one, and are multiplied by x
    bound = 5e-7 * np.maximum(1, np.abs(x)) * (np.abs(x) if name == "relu2" else 1) + 1e-30
    assert (np.abs(np.float64(ACTIVATIONS[name](jnp.asarray(x))) - apply(name, x)) <= bound).all()
    with jax.enable_x64(True):
        ours, slope = jax.jit(jax.vmap(jax.value_and_grad(ACTIVATIONS[name])))(jnp.asarray(X))
        # tails of 1 + erf cancel in float64 as well: absolute error of a few 1e-16 times x
        np.testing.assert_allclose(ours, apply(name, X), rtol=1e-13, atol=1e-14)
        kinks = np.array([0.0, *KINKS.get(name, [])])  # of ReLU and its kin
        smooth = np.abs(X[:, None] - kinks).min(axis=1) > 1e-3
        h = 1e-6  # central differences: h^2 and 1e-16 |f| / h are below 1e-8
        difference = (apply(name, X + h) - apply(name, X - h)) / (2 * h)
        np.testing.assert_allclose(slope[smooth], difference[smooth], rtol=1e-7, atol=1e-8)


def test_the_two_gelus_differ_by_what_the_literature_says():
    """4.7e-4 at most: enough to break parity with a checkpoint trained with the other, so neither
    may stand for both."""
    erf, tanh = (
        np.float64(ACTIVATIONS[name](jnp.asarray(X, jnp.float32))) for name in ("gelu", "gelu_tanh")
    )
    assert 4.6e-4 < np.abs(erf - tanh).max() < 4.8e-4


def test_gelu_has_a_second_derivative():
    """Ours carries its own derivative rule: (x Phi)' = Phi + x phi, and (x Phi)'' = (2 - x^2)
    phi."""
    with jax.enable_x64(True):
        second = jax.jit(jax.vmap(jax.grad(jax.grad(ACTIVATIONS["gelu"]))))(jnp.asarray(X))
    expected = (2 - X**2) * np.exp(-(X**2) / 2) / math.sqrt(2 * math.pi)
    # a handful of float64 roundings
    np.testing.assert_allclose(second, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_activations_keep_narrow_types(dtype):
    roundoff = 2.0**-8 if dtype == jnp.bfloat16 else 2.0**-11
    x = jnp.asarray(np.linspace(-4, 4, 161).astype(dtype))
    outputs, slopes = jax.jit(
        lambda x: [
            [f(x) for f in ACTIVATIONS.values()],
            [jax.vjp(f, x)[1](x)[0] for f in ACTIVATIONS.values()],
        ]
    )(x)
    for name, out, slope in zip(ACTIVATIONS, outputs, slopes, strict=True):
        assert out.dtype == slope.dtype == dtype
        exact = apply(name, x)
        # gates are computed in the narrow type or wider: at most four roundings of numbers up to
        # |x|, or x^2
        bound = 4 * roundoff * np.maximum(np.abs(np.float64(x)), np.abs(exact)) + 4 * roundoff * (
            name == "sigmoid"
        )
        assert (np.abs(np.float64(out) - exact) <= bound).all(), name


def random(seed, *shapes, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


# sums of at most 16 products of values of order one to ten, in float32
FLOAT32 = dict(rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_mlp(name):
    x, up, down, up_bias, down_bias = random(0, (2, 3, 4), (4, 16), (16, 4), (16,), (4,))
    f = ACTIVATIONS[name]
    ours, plain = jax.jit(lambda *a: (mlp(*a[:3], f, *a[3:]), mlp(*a[:3], f)))(
        x, up, down, up_bias, down_bias
    )
    x, up, down, up_bias, down_bias = (np.float64(a) for a in (x, up, down, up_bias, down_bias))
    np.testing.assert_allclose(ours, apply(name, x @ up + up_bias) @ down + down_bias, **FLOAT32)
    np.testing.assert_allclose(plain, apply(name, x @ up) @ down, **FLOAT32)


@pytest.mark.parametrize("name", GATES)
def test_gated_family(name):
    """The activation falls on the gate, not on the other branch."""
    x, gate, up, down, gate_bias, up_bias, down_bias = random(
        1, (2, 3, 4), (4, 16), (4, 16), (16, 4), (16,), (16,), (4,)
    )
    f = ACTIVATIONS[GATES[name]]
    both = jax.jit(lambda *a: (glu(*a[:4], f, *a[4:]), glu(*a[:4], f)))
    ours, plain = both(x, gate, up, down, gate_bias, up_bias, down_bias)
    x, gate, up, down = (np.float64(a) for a in (x, gate, up, down))
    hidden = apply(GATES[name], x @ gate + np.float64(gate_bias)) * (x @ up + np.float64(up_bias))
    np.testing.assert_allclose(ours, hidden @ down + np.float64(down_bias), **FLOAT32)
    np.testing.assert_allclose(plain, (apply(GATES[name], x @ gate) * (x @ up)) @ down, **FLOAT32)


def test_published_names():
    """Shazeer 2020, table 1."""
    named = dict(glu="sigmoid", swiglu="silu", geglu="gelu", reglu="relu", bilinear="identity")
    assert named.items() <= GATES.items()
    assert GATES["quick_gelu_glu"] == "quick_gelu" and set(GATES.values()) == set(ACTIVATIONS)


@pytest.mark.thorough
def test_bfloat16_activations_with_float32_parameters():
    """Products of bfloat16 operands; the result is bfloat16, the gradients of the parameters
    float32, all near float64."""
    x, gate, up, down, bias = random(2, (2, 8, 16), (16, 32), (16, 32), (32, 16), (32,))
    x = x.astype(jnp.bfloat16)

    def f(x, gate, up, down, bias):
        return glu(x, gate, up, down, jax.nn.silu, bias)

    def run(*args):
        out, pullback = jax.vjp(f, *args)
        return out, *pullback(jnp.ones_like(out))

    ours = jax.jit(run)(x, gate, up, down, bias)
    assert [a.dtype for a in ours] == [jnp.bfloat16] * 2 + [jnp.float32] * 4
    with jax.enable_x64(True):
        exact = map(
            np.asarray,
            jax.jit(run)(*(jnp.asarray(np.float64(a)) for a in (x, gate, up, down, bias))),
        )
    for got, wanted in zip(ours, exact, strict=True):
        # about eight roundings of 2^-8 on the way, independent of one another
        assert np.linalg.norm(np.float64(got) - wanted) <= 8 * 2.0**-8 * np.linalg.norm(wanted)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["swiglu", "geglu", "reglu", "bilinear"])
def test_gated_layers_have_their_published_names(name):
    x, gate, up, down = (
        jax.random.normal(jax.random.key(i), s)
        for i, s in enumerate([(2, 3, 4), (4, 8), (4, 8), (8, 4)])
    )
    expected = glu(x, gate, up, down, ACTIVATIONS[GATES[name]])
    np.testing.assert_array_equal(getattr(ops, name)(x, gate, up, down), expected)
