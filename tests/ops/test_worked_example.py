"""Three tokens in two dimensions, worked by hand, and the gradient identities of a layer against
their closed forms.

The numbers are those of the lecture "Mathematical foundations", section 7, corrected: the printed
Q, K and V have one wrong entry each, which spoils what follows from them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import ops

# The figures are given to six decimals (half a unit there is 5e-7) and float32 adds about 1e-7 to
# numbers below 2.
SIX_DECIMALS = dict(rtol=0, atol=1e-6)

Z = np.array([[1.0, 0.5], [2.0, 1.0], [0.5, 2.0]])
W_QUERY = np.array([[0.5, 0.3], [0.2, 0.4]])
W_KEY = np.array([[0.3, 0.1], [0.4, 0.2]])
W_VALUE = np.array([[0.2, 0.5], [0.3, 0.1]])

QUERY = [[0.6, 0.5], [1.2, 1.0], [0.65, 0.95]]
KEY = [[0.5, 0.2], [1.0, 0.4], [0.95, 0.45]]
VALUE = [[0.35, 0.55], [0.7, 1.1], [0.7, 0.45]]
SCORES = [
    [0.282843, 0.565685, 0.562150],
    [0.565685, 1.131371, 1.124300],
    [0.364160, 0.728320, 0.738927],
]
WEIGHTS = [
    [0.274039, 0.363622, 0.362339],
    [0.221783, 0.390484, 0.387733],
    [0.256808, 0.369625, 0.373567],
]
OUTPUT = [[0.604086, 0.713758], [0.622376, 0.725993], [0.610117, 0.715937]]


@jax.jit
def worked(z):
    """One head over [B=1, T=3, D=2]: query, key, value, scores, weights and output as matrices."""
    project = lambda w: ops.einsum("btd,dnh->btnh", z, jnp.asarray(w, z.dtype)[:, None])
    query, key, value = project(W_QUERY), project(W_KEY), project(W_VALUE)
    scores = ops.einsum("btnh,bsnh->bnts", query, key) / 2**0.5
    out, weights = ops.attention(query, key, value, return_weights=True)
    return query[0, :, 0], key[0, :, 0], value[0, :, 0], scores[0, 0], weights[0, 0], out[0, :, 0]


def test_the_three_token_example():
    expected = QUERY, KEY, VALUE, SCORES, WEIGHTS, OUTPUT
    for ours, theirs in zip(worked(jnp.asarray(Z, jnp.float32)[None]), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, **SIX_DECIMALS)


def test_the_three_token_example_in_float64():
    scores = (Z @ W_QUERY) @ (Z @ W_KEY).T / np.sqrt(2)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(np.exp(scores[0]).sum(), 4.841991, **SIX_DECIMALS)
    expected = Z @ W_QUERY, Z @ W_KEY, Z @ W_VALUE, scores, weights, weights @ (Z @ W_VALUE)
    with jax.enable_x64(True):
        for ours, theirs in zip(worked(jnp.asarray(Z)[None]), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-14)  # a handful of float64 roundings


def softmax(scores):
    """Softmax of one row, as users get it from attention: scores as a bias, nothing from query and
    key."""
    zero = jnp.zeros((1, 1, 1, 1), scores.dtype)
    many = jnp.zeros((1, len(scores), 1, 1), scores.dtype)
    return ops.attention(zero, many, many, bias=scores[None, None, None], return_weights=True)[1][
        0, 0, 0
    ]


# The identities are exact; float64 leaves its own rounding. In float32 the claim is 1e-6 for values
# of order one.
PRECISIONS = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(jnp.float64, 1e-12), (jnp.float32, 1e-6)]
)


@pytest.fixture
def x64(dtype):
    with jax.enable_x64(dtype == jnp.float64):
        yield


def close(ours, theirs, tolerance):
    assert np.abs(np.asarray(ours) - theirs).max() <= tolerance * max(1.0, np.abs(theirs).max())


@PRECISIONS
def test_softmax_jacobian(x64, dtype, tolerance):
    """d a_i / d s_j = a_i (delta_ij - a_j)."""
    scores = np.random.default_rng(0).normal(size=7)
    a = np.exp(scores) / np.exp(scores).sum()
    close(jax.jit(softmax)(jnp.asarray(scores, dtype)), a, tolerance)
    close(
        jax.jit(jax.jacobian(softmax))(jnp.asarray(scores, dtype)),
        np.diag(a) - np.outer(a, a),
        tolerance,
    )


def layer_norm_jacobian(x, scale, eps):
    """J_ij = scale_i / s (delta_ij - 1/d - xhat_i xhat_j / d) with s = sqrt(var + eps)."""
    d, s = len(x), np.sqrt(x.var() + eps)
    hat = (x - x.mean()) / s
    return scale[:, None] / s * (np.eye(d) - 1 / d - np.outer(hat, hat) / d)


@PRECISIONS
def test_layer_norm_jacobian_and_its_vjp(x64, dtype, tolerance):
    rng = np.random.default_rng(0)
    eps = 0.1  # large enough that forgetting it would show
    x, scale, bias, dy = rng.normal(size=(4, 6))
    f = lambda x, scale, bias: ops.layer_norm(x, scale, bias, eps)
    arrays = [jnp.asarray(a, dtype) for a in (x, scale, bias)]
    jacobian = layer_norm_jacobian(x, scale, eps)
    close(jax.jit(jax.jacobian(f))(*arrays), jacobian, tolerance)
    off_diagonal = np.linalg.norm(jacobian - np.diag(np.diag(jacobian))) / np.linalg.norm(jacobian)
    assert off_diagonal > 0.3  # the diagonal alone is not the gradient
    s = np.sqrt(x.var() + eps)
    hat, g = (x - x.mean()) / s, scale * dy
    dx = (g - g.mean() - hat * (g * hat).mean()) / s
    pulled = jax.jit(lambda dy, *a: jax.vjp(f, *a)[1](dy))(jnp.asarray(dy, dtype), *arrays)
    for ours, theirs in zip(pulled, (dx, dy * hat, dy), strict=True):
        close(ours, theirs, tolerance)
    close(dx, dy @ jacobian, 1e-12)


@PRECISIONS
def test_attention_gradients(x64, dtype, tolerance):
    """dV = A^T dO; dS = A (dA - rowsum(dA A)), dA = dO V^T; dQ = dS K / sqrt(d); dK = dS^T Q /
    sqrt(d)."""
    rng = np.random.default_rng(0)
    q, k, v = Z @ W_QUERY, Z @ W_KEY, Z @ W_VALUE
    dO = rng.normal(size=(3, 2))
    scores = q @ k.T / np.sqrt(2)
    A = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    dA = dO @ v.T
    delta = (dA * A).sum(-1, keepdims=True)
    # rowsum(dO O), the same number
    np.testing.assert_allclose(delta, (dO * (A @ v)).sum(-1, keepdims=True), rtol=1e-12)
    dS = A * (dA - delta)
    expected = dS @ k / np.sqrt(2), dS.T @ q / np.sqrt(2), A.T @ dO, dS

    def f(q, k, v, s):
        return ops.attention(*(x[None, :, None] for x in (q, k, v)), bias=s[None, None])[0, :, 0]

    arrays = [jnp.asarray(x, dtype) for x in (dO, q, k, v, np.zeros((3, 3)))]
    gradients = jax.jit(lambda dO, *a: jax.vjp(f, *a)[1](dO))(*arrays)
    for ours, theirs in zip(gradients, expected, strict=True):
        close(ours, theirs, tolerance)


@PRECISIONS
@pytest.mark.parametrize("placement", ["none", "pre", "post"])
def test_residual_jacobian(x64, placement, dtype, tolerance):
    """x + f(x): dL/dx = dL/dy (I + J_f).

    Post-norm multiplies from the left by the Jacobian of the norm, pre-norm does not.
    """
    rng = np.random.default_rng(1)
    d, eps = 5, 1e-5
    x, scale, dy = rng.normal(size=(3, d))
    up, down = rng.normal(size=(d, 8)), rng.normal(size=(8, d)) / 4

    def f(x, scale, up, down):
        norm = lambda x: ops.layer_norm(x, scale, None, eps)
        inner = lambda x: ops.mlp(x[None, None], up, down, jax.nn.relu)[0, 0]
        if placement == "post":
            return norm(x + inner(x))
        return x + inner(norm(x) if placement == "pre" else x)

    arrays = [jnp.asarray(a, dtype) for a in (x, scale, up, down)]
    ours = jax.jit(lambda dy, *a: jax.vjp(f, *a)[1](dy)[0])(jnp.asarray(dy, dtype), *arrays)

    normed = (x - x.mean()) / np.sqrt(x.var() + eps) * scale
    hidden = (normed if placement == "pre" else x) @ up
    inner = down.T @ np.diag(hidden > 0) @ up.T
    if placement == "pre":
        inner = inner @ layer_norm_jacobian(x, scale, eps)
    total = np.eye(d) + inner
    if placement == "post":
        total = layer_norm_jacobian(x + np.maximum(hidden, 0) @ down, scale, eps) @ total
    close(ours, dy @ total, tolerance)
