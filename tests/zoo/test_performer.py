"""FAVOR+ against the exact softmax, the distribution its projections should have, and
performer-pytorch."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import masks
from jaxformer.ops.attention import attention
from jaxformer.zoo.linear_attention import (
    State as LinearState,
    attention as linear_attention,
    step as linear_attention_step,
)
from jaxformer.zoo.performer import (
    attention as favor_attention,
    favor_features,
    favor_relu_features,
    orthogonal_projection,
)
from tests.witnesses import load

# float64 sums of some hundred terms of order one: 1e-12 leaves three digits for the order of
# summation.
FLOAT64 = dict(rtol=1e-12, atol=1e-12)
# float32 unit roundoff is 6e-8: sums of <= 100 positive products of order one, and a quotient that
# keeps relative errors.
FLOAT32 = dict(rtol=1e-5, atol=1e-5)

FEATURES = (1024, 4096, 16384)


@pytest.mark.thorough
def test_favor_error_keeps_falling_with_the_number_of_features():
    """Choromanski et al. 2021, theorem 3, where the public implementations stop at 4e-3: queries
    and keys of scale 0.25, d = 8.

    Means over 4 projections, found: 1024 features 3.5e-3, 4096 1.5e-3, 16384 7.9e-4.
    """
    rng = np.random.default_rng(0)
    scale = np.float32([0.25, 0.25, 1])[:, None, None, None, None]
    query, key, value = jnp.asarray(np.float32(rng.normal(size=(3, 2, 14, 3, 8))) * scale)
    exact = np.asarray(jax.jit(attention)(query, key, value))

    @jax.jit
    def errors_of(seed):
        def one(key_of_draw):
            # of which the first 1024 are a draw as well
            rows = orthogonal_projection(key_of_draw, 16384, 8)
            return [
                jnp.mean(jnp.abs(favor_attention(query, key, value, rows[:m]) - exact))
                for m in FEATURES
            ]

        return [jnp.mean(x) for x in jax.lax.map(one, jax.random.split(seed, 4))]

    errors = dict(zip(FEATURES, map(float, errors_of(jax.random.key(0))), strict=True))
    print(f"FAVOR+ mean error by features: { {m: f'{e:.2e}' for m, e in errors.items()} }")
    assert errors[16384] <= 1e-3
    # each four-fold number of features halves the error; a mean of 4 draws is itself off by some
    # tenth
    for few, many in ((1024, 4096), (4096, 16384)):
        assert 1.5 < errors[few] / errors[many] < 2.7


def test_projections_are_gaussian_and_orthogonal_in_blocks():
    width, features = 8, 20
    rows = np.float64(
        jax.jit(lambda k: orthogonal_projection(k, features, width))(jax.random.key(0))
    )
    assert rows.shape == (features, width)
    directions = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    for block in (directions[:8], directions[8:16], directions[16:]):
        # a float32 QR decomposition
        np.testing.assert_allclose(block @ block.T, np.eye(len(block)), atol=1e-5)


def test_projections_are_unbiased():
    """E[W] = 0 entry by entry, also on the diagonal, where QR without its signs has -0.29 ...
    +0.23; E[W^T W / n] = I."""
    blocks, width = 4096, 8
    rows = orthogonal_projection(jax.random.key(1), blocks * width, width)
    rows = np.asarray(rows, np.float64).reshape(blocks, width, width)
    # entries have variance 1: the mean of 4096 has a deviation of 1/64, and five of them leave one
    # chance in 10^4
    assert np.abs(rows.mean(0)).max() < 5 / np.sqrt(blocks)
    # of the mean square, 32768 terms with a variance of at most 2
    assert np.abs(
        np.einsum("bij,bik->jk", rows, rows) / (blocks * width) - np.eye(width)
    ).max() < 5 * np.sqrt(2 / 32768)


@pytest.mark.parametrize("seed", range(3))
def test_favor_features_estimate_the_exponential(seed):
    """phi(q) . phi(k) exp(stabilisers) has the mean exp(q . k / sqrt(H)): Choromanski et al. 2021,
    lemma 1."""
    rng = np.random.default_rng(seed)
    query, key = (jnp.asarray(0.5 * rng.normal(size=(1, 1, 1, 8)), jnp.float32) for _ in range(2))
    projection = orthogonal_projection(jax.random.key(seed), 2**15, 8)
    features = [favor_features(x, projection, eps=0.0, stabiliser=0.0) for x in (query, key)]
    terms = np.float64(features[0] * features[1]).ravel() * 2**15
    # the mean of 2^15 terms within five of its deviations; orthogonal rows only lower that
    assert abs(terms.mean() - np.exp(np.vdot(query, key) / 8**0.5)) < 5 * terms.std() / 2**7.5


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"eps": 0.0}, {"stabiliser": 0.0}])
def test_favor_is_causal_and_decodes(options):
    """With eps = 0, or a stabiliser that does not look at later keys: change a token, and earlier
    outputs stay."""
    rng = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(rng.normal(size=(2, 11, n, 3)), jnp.float32) for n in (4, 2, 2)
    )
    projection = orthogonal_projection(jax.random.key(0), 16, 3)
    call = jax.jit(
        lambda *a: favor_attention(*a, projection, mask=masks.causal(), chunk=4, **options)
    )
    before, t = np.asarray(call(query, key, value)), 6
    later = (np.arange(11) == t)[None, :, None, None].astype(np.float32)
    after = np.asarray(call(query, key + later, value))
    # float32 features that were scaled by another stabiliser
    np.testing.assert_allclose(after[:, :t], before[:, :t], **FLOAT32)
    assert (np.abs(after - before)[:, t:] > 1e-3).any(axis=(0, 2, 3)).all()
    if "stabiliser" in options:
        features = partial(favor_features, projection=projection)
        maps = dict(feature_map=(features, partial(features, stabiliser=0.0)))

        @jax.jit
        def decode(query, key, value):
            empty = LinearState(jnp.zeros((2, 2, 16, 3)), jnp.zeros((2, 2, 16)))
            state, _ = linear_attention_step(
                empty, key[:, :t], key[:, :t], value[:, :t], eps=0.0, **maps
            )
            return linear_attention_step(
                state, query[:, t:], key[:, t:], value[:, t:], eps=0.0, **maps
            )[1]

        np.testing.assert_allclose(decode(query, key, value), before[:, t:], **FLOAT32)


@pytest.mark.thorough
def test_performer_pytorch():
    """Softmax features, causal and not, and the ReLU kernel, with a projection that is given; all
    float64."""
    with jax.enable_x64(True):
        w = load("performer")
        arrays, projection = (
            [jnp.asarray(w[name]) for name in ("query", "key", "value")],
            jnp.asarray(w["projection"]),
        )
        features = partial(favor_features, projection=projection, eps=1e-4)  # its eps
        relu = partial(favor_relu_features, projection=projection)

        @jax.jit
        def run(query, key, value):
            top = jnp.max(
                jnp.einsum("btnh,mh->btnm", key * 8**-0.25, projection), axis=(1, 3), keepdims=True
            )
            maps = dict(feature_map=(features, partial(features, stabiliser=top)))
            # its causal sum of keys starts at 1e-6 instead of 0: a state like any other
            (B, _, K, Hv), M = value.shape, len(projection)
            state = LinearState(jnp.zeros((B, K, M, Hv)), jnp.full((B, K, M), 1e-6))
            return {
                "softmax": favor_attention(query, key, value, projection, eps=1e-4),
                "causal": linear_attention_step(state, query, key, value, eps=0.0, **maps)[1],
                "relu": linear_attention(query, key, value, feature_map=relu, eps=0.0),
            }

        for name, ours in run(*arrays).items():
            np.testing.assert_allclose(ours, w[name], err_msg=name, **FLOAT64)
