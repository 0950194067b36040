"""The reversible stack against the same layers under plain autodiff, and what it leaves in
memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import masks, ops
from jaxformer.zoo.reformer import attention as lsh_attention, random_rotations
from jaxformer.zoo.reversible import reversible_stack

B, T, D, F, RATE = 2, 6, 8, 12, 0.3


def attend(layer, x, mask, gain):
    y = ops.layer_norm(x, layer["norm"])
    heads = ops.einsum("btd,dnh->btnh", y, layer["query_key"])
    out = ops.attention(heads, heads, heads, mask=mask)
    return gain * ops.dropout(
        ops.einsum("btnh,nhd->btd", out, layer["out"]), RATE, layer["keys"][0]
    )


def feed(layer, x, mask, gain):
    y = ops.mlp(ops.layer_norm(x, layer["norm"]), layer["up"], layer["down"], jnp.tanh)
    return ops.dropout(y, RATE, layer["keys"][1]) * (1 + layer["number"])


def parameters(layers, dtype=jnp.float32, width=D):
    rng = np.random.default_rng(layers)
    normal = lambda *shape: jnp.asarray((rng.normal(size=shape) / 3).astype(dtype))
    return {
        "norm": normal(layers, width),
        "query_key": normal(layers, width, 2, width // 2),
        "out": normal(layers, 2, width // 2, width),
        "up": normal(layers, width, F),
        "down": normal(layers, F, width),
        "keys": jax.random.split(jax.random.key(7), (layers, 2)),
        "number": jnp.asarray(np.arange(layers)),
    }


def plain(f, g, params, x1, x2, *extra):
    for i in range(jax.tree.leaves(params)[0].shape[0]):
        layer = jax.tree.map(lambda x, i=i: x[i], params)
        x1 = x1 + f(layer, x2, *extra)
        x2 = x2 + g(layer, x1, *extra)
    return x1, x2


def value_and_gradients(stack, params, x1, x2, mask, gain):
    """Gradients of parameters, both inputs and the extra number, for a loss that treats the two
    streams differently."""
    floats = {k: v for k, v in params.items() if jnp.issubdtype(v.dtype, jnp.floating)}

    def loss(floats, x1, x2, gain):
        y1, y2 = stack(attend, feed, params | floats, x1, x2, mask, gain)
        return jnp.sum(jnp.sin(y1)) + jnp.sum(jnp.square(y2)), (y1, y2)

    return jax.jit(jax.value_and_grad(loss, range(4), has_aux=True))(floats, x1, x2, gain)


@pytest.mark.thorough
def test_value_and_gradients_equal_autodiff():
    """Dropout included: its keys are data, so the recomputed pass drops what the first one
    dropped."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        x1, x2 = (jnp.asarray(rng.normal(size=(B, T, D))) for _ in range(2))
        mask = masks.causal() & masks.lengths(kv=jnp.array([T, 4]))
        args = (parameters(3, jnp.float64), x1, x2, mask, jnp.float64(0.7))
        ours, expected = (value_and_gradients(stack, *args) for stack in (reversible_stack, plain))
        # the streams come back through three subtractions in float64, each rounded at 1e-16 of
        # numbers of order 10
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), ours, expected
        )


@pytest.mark.thorough
def test_float32_streams_with_16_bit_layers():
    """f and g in bfloat16 between float32 streams: the gradient is the rounding of bfloat16 away,
    not more."""
    rng = np.random.default_rng(0)
    x1, x2 = (jnp.asarray(rng.normal(size=(B, T, D)), jnp.float32) for _ in range(2))
    lower = lambda h: (
        lambda layer, x, *extra: h(layer, x.astype(jnp.bfloat16), *extra).astype(jnp.bfloat16)
    )
    params = parameters(2)

    def gradients(stack):
        loss = lambda x1, x2: sum(
            map(jnp.sum, stack(lower(attend), lower(feed), params, x1, x2, masks.full(), 1.0))
        )
        return jax.jit(jax.grad(loss, (0, 1)))(x1, x2)

    for ours, expected in zip(gradients(reversible_stack), gradients(plain), strict=True):
        # a stream that comes back in float32 rounds to another bfloat16 here and there: some 2^-8
        # of the largest entry
        np.testing.assert_allclose(ours, expected, atol=0.02 * np.abs(expected).max())


@pytest.mark.thorough
def test_memory_of_activations_does_not_grow_with_depth():
    """Temporary bytes of the compiled gradient beside the parameters: flat here, a layer's
    activations a layer in autodiff."""
    x = jax.ShapeDtypeStruct((8, 128, D), jnp.float32)

    def temporary(stack, layers):
        params = parameters(layers)
        floats = {k: v for k, v in params.items() if jnp.issubdtype(v.dtype, jnp.floating)}

        def loss(floats, x1, x2):
            return sum(
                map(jnp.sum, stack(attend, feed, params | floats, x1, x2, masks.causal(), 1.0))
            )

        compiled = jax.jit(jax.grad(loss)).lower(floats, x, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    def scanned(f, g, params, x1, x2, *extra):
        def step(streams, layer):
            x1 = streams[0] + f(layer, streams[1], *extra)
            return (x1, streams[1] + g(layer, x1, *extra)), None

        return jax.lax.scan(step, (x1, x2), params)[0]

    bytes_of = {
        stack: [temporary(stack, layers) for layers in (2, 16)]
        for stack in (reversible_stack, scanned)
    }
    weights = 14 * sum(
        x.nbytes // 2 for k, x in parameters(2).items() if k not in ("keys", "number")
    )
    assert bytes_of[reversible_stack][1] - bytes_of[reversible_stack][0] <= 2 * weights
    assert bytes_of[scanned][1] > 4 * bytes_of[scanned][0]


@pytest.mark.thorough
def test_with_lsh_attention():
    """Reformer's stack: the mixer hashes with rotations that every layer shares, and recomputation
    finds the same buckets."""
    params = {
        k: v for k, v in parameters(2).items() if k in ("norm", "query_key", "out", "up", "down")
    }
    rng = np.random.default_rng(0)
    x1, x2 = (jnp.asarray(rng.normal(size=(B, 16, D)), jnp.float32) for _ in range(2))
    rotations = random_rotations(jax.random.key(0), 2, D // 2, 2, 4)

    def f(layer, x, rotations):
        heads = ops.einsum("btd,dnh->btnh", ops.layer_norm(x, layer["norm"]), layer["query_key"])
        out = lsh_attention(heads, heads, rotations, chunk=4, mask=masks.causal())
        return ops.einsum("btnh,nhd->btd", out, layer["out"])

    g = lambda layer, x, rotations: ops.mlp(x, layer["up"], layer["down"], jnp.tanh)
    loss = lambda params, stack: sum(
        map(jnp.sum, map(jnp.sin, stack(f, g, params, x1, x2, rotations)))
    )
    ours, expected = (
        jax.jit(jax.grad(loss), static_argnums=1)(params, stack)
        for stack in (reversible_stack, plain)
    )
    # float32 through two layers; a token whose hash ties within rounding would show as an error of
    # order one
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), ours, expected
    )
