"""Attention against its definition in float64 NumPy, loop by loop, and against the attentions of
jax.nn and Flax."""

import inspect
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import masks
from jaxformer.ops.attention import attention
from jaxformer.ops.dropout import dropout

# float64 sums of at most a few hundred terms of order one: 1e-12 leaves three digits for the order
# of summation.
FLOAT64 = dict(rtol=1e-12, atol=1e-12)
# float32 unit roundoff is 6e-8; scores are sums of <= 8 products of order one, and exp keeps their
# absolute error.
FLOAT32 = dict(rtol=5e-6, atol=5e-6)

HEADS = [(1, 1), (4, 4), (4, 2), (6, 2), (4, 1)]


def witness(query, key, value, visible, bias=0.0, scale=None, softcap=None, sinks=None):
    """The definition in float64: one query, one head at a time. Returns output and weights."""
    query, key, value = (np.asarray(a, np.float64) for a in (query, key, value))
    (B, T, N, H), (S, K) = query.shape, key.shape[1:3]
    scale = H**-0.5 if scale is None else scale
    bias = np.broadcast_to(np.asarray(bias, np.float64), (B, N, T, S))
    out, weights = np.zeros((B, T, N, value.shape[-1])), np.zeros((B, N, T, S))
    for b in range(B):
        for n in range(N):
            k = n // (N // K)
            for t in range(T):
                keys = [s for s in range(S) if visible[b, t, s]]
                if not keys:
                    continue
                score = np.array(
                    [scale * sum(query[b, t, n] * key[b, s, k]) + bias[b, n, t, s] for s in keys]
                )
                if softcap is not None:
                    score = softcap * np.tanh(score / softcap)
                top = max(score.max(), -np.inf if sinks is None else sinks[n])
                total = np.exp(score - top).sum() + (
                    0 if sinks is None else np.exp(np.float64(sinks[n]) - top)
                )
                weights[b, n, t, keys] = np.exp(score - top) / total
                out[b, t, n] = sum(weights[b, n, t, s] * value[b, s, k] for s in keys)
    return out, weights


def witness_gradients(
    query, key, value, visible, g, bias=0.0, scale=None, softcap=None, sinks=None
):
    """dV = A^T dO; dS = A (dO V^T - rowsum(dO O)); dQ = scale dS K; dK = scale dS^T Q; d sink =
    -a_sink rowsum(dO O)."""
    query, key, value, g = (np.asarray(a, np.float64) for a in (query, key, value, g))
    (N, H), K = query.shape[2:], key.shape[2]
    scale = H**-0.5 if scale is None else scale
    out, A = witness(query, key, value, visible, bias, scale, softcap, sinks)
    keys, values = np.repeat(key, N // K, axis=2), np.repeat(value, N // K, axis=2)
    delta = np.einsum("btnh,btnh->bnt", g, out)
    dS = A * (np.einsum("btnh,bsnh->bnts", g, values) - delta[..., None])
    d_sinks = None if sinks is None else -((1 - A.sum(-1)) * delta).sum((0, 2))
    if softcap is not None:
        dS = dS * (
            1 - np.tanh((scale * np.einsum("btnh,bsnh->bnts", query, keys) + bias) / softcap) ** 2
        )
    shared = lambda x: x.reshape(*x.shape[:2], K, N // K, -1).sum(3)
    dK = shared(scale * np.einsum("bnts,btnh->bsnh", dS, query))
    return (
        scale * np.einsum("bnts,bsnh->btnh", dS, keys),
        dK,
        shared(np.einsum("bnts,btnh->bsnh", A, g)),
        dS,
        d_sinks,
    )


def random_mask(seed, rng, B, T, S):
    """A mask and, from its definition and not from its code, the `[B, T, S]` table of what it
    shows."""
    rules = [
        (masks.full(), lambda b, i, j: True),
        (masks.causal(), lambda b, i, j: j <= i),
        (masks.window(2, 1), lambda b, i, j: i - 2 <= j <= i + 1),
        (
            masks.causal() & masks.window(1) | masks.prefix(1),
            lambda b, i, j: i - 1 <= j <= i or j < 1,
        ),
        (~masks.causal(), lambda b, i, j: j > i),
    ]
    ids = np.sort(rng.integers(0, 3, (B, S)), axis=1)
    rules.append(
        (
            masks.segments(jnp.array(ids)) & masks.causal(),
            lambda b, i, j: j <= i and ids[b, i] == ids[b, j] != 0,
        )
    )
    q_len, kv_len = rng.integers(1, S + 1, (2, B))
    by_row = masks.lengths(jnp.array(q_len), jnp.array(kv_len))
    rules.append((by_row, lambda b, i, j: i < q_len[b] and j < kv_len[b]))
    rules.append(
        (masks.causal() | masks.prefix(jnp.array(kv_len)), lambda b, i, j: j <= i or j < kv_len[b])
    )
    mask, rule = rules[seed % len(rules)]
    offset = S - T if mask.offset is None else mask.offset
    return mask, np.array(
        [[[rule(b, i + offset, j) for j in range(S)] for i in range(T)] for b in range(B)]
    )


def random_case(seed, dtype=jnp.float32):
    """Shapes, mask and options from a seed: T <= S, value heads of their own width, bias of any
    broadcast shape."""
    rng = np.random.default_rng(seed)
    N, K = HEADS[seed % len(HEADS)]
    B, T, H, Hv = rng.integers(1, 4), rng.integers(1, 5), rng.integers(1, 7), rng.integers(1, 7)
    S = T + rng.integers(0, 4)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    mask, visible = random_mask(seed, rng, B, T, S)
    options = {}
    if rng.random() < 0.6:
        options["bias"] = normal(*(size if rng.random() < 0.5 else 1 for size in (B, N, T, S)))
    if rng.random() < 0.5:
        options["scale"] = float(rng.uniform(0.1, 2))
    if rng.random() < 0.5:
        options["softcap"] = float(rng.uniform(0.5, 3))
    if rng.random() < 0.5:
        options["sinks"] = normal(N)
    return (normal(B, T, N, H), normal(B, S, K, H), normal(B, S, K, Hv)), mask, visible, options


def value_and_vjp(f, g, *args):
    """f(*args) and the cotangents of args for g, as NumPy from one program: eager operations
    compile one by one."""

    @jax.jit
    def run(g, *args):
        out, pullback = jax.vjp(f, *args)
        return out, pullback(g)

    return jax.tree.map(np.asarray, run(g, *args))


def to64(options):
    return {
        k: np.asarray(v, np.float64) if isinstance(v, jax.Array) else v for k, v in options.items()
    }


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=pytest.mark.slow if n > 3 else ()) for n in range(8)]
)
def test_equals_its_definition(seed):
    arrays, mask, visible, options = random_case(seed)
    out, weights = jax.jit(lambda *a: attention(*a, mask=mask, return_weights=True, **options))(
        *arrays
    )
    expected, expected_weights = witness(*arrays, visible, **to64(options))
    np.testing.assert_allclose(out, expected, **FLOAT32)
    np.testing.assert_allclose(weights, expected_weights, **FLOAT32)
    total = np.asarray(weights).sum(-1)
    seen = np.broadcast_to(visible.any(-1)[:, None], total.shape)
    if "sinks" in options:
        assert (total < 1).all()
    else:
        np.testing.assert_allclose(total, seen, **FLOAT32)
    assert (np.asarray(out).swapaxes(1, 2)[~seen] == 0).all()


@pytest.mark.thorough_after(3)
@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=pytest.mark.slow if n > 3 else ()) for n in range(6)]
)
def test_float64_value_and_gradients(seed):
    with jax.enable_x64(True):
        arrays, mask, visible, options = random_case(100 + seed, jnp.float64)
        g = np.random.default_rng(seed).normal(size=(*arrays[0].shape[:3], arrays[2].shape[-1]))
        learned = {k: options.pop(k) for k in ("bias", "sinks") if k in options}
        f = lambda arrays, learned: attention(*arrays, mask=mask, **options, **learned)
        out, (d_arrays, d_learned) = value_and_vjp(f, jnp.asarray(g), arrays, learned)
        assert out.dtype == jnp.float64
        np.testing.assert_allclose(
            out, witness(*arrays, visible, **options, **learned)[0], **FLOAT64
        )
        *expected, dS, d_sinks = witness_gradients(*arrays, visible, g, **options, **to64(learned))
        for ours, theirs in zip(d_arrays, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, **FLOAT64)
        if "bias" in learned:
            broadcast = tuple(axis for axis in range(4) if learned["bias"].shape[axis] == 1)
            np.testing.assert_allclose(
                d_learned["bias"], dS.sum(broadcast, keepdims=True), **FLOAT64
            )
        if "sinks" in learned:
            np.testing.assert_allclose(d_learned["sinks"], d_sinks, **FLOAT64)


@pytest.mark.thorough
def test_gradients_equal_finite_differences():
    """A second witness for the closed forms above: central differences of our own function along
    random directions."""
    with jax.enable_x64(True):
        (query, key, value), mask, _, _ = random_case(4, jnp.float64)
        rng = np.random.default_rng(0)
        B, T, N, S = *query.shape[:3], key.shape[1]
        point = (
            *map(np.asarray, (query, key, value)),
            rng.normal(size=(B, N, T, S)),
            rng.normal(size=N),
        )
        g = jnp.asarray(rng.normal(size=(B, T, N, value.shape[-1])))
        f = jax.jit(
            lambda q, k, v, b, s: (
                attention(q, k, v, mask=mask, bias=b, sinks=s, softcap=2.0) * g
            ).sum()
        )
        gradients = jax.jit(jax.grad(f, range(5)))(*point)
        for _ in range(5):
            step = [rng.normal(size=x.shape) for x in point]
            # h = 1e-5: the truncation error h^2 and the rounding error 1e-16 / h both stay below
            # 1e-9
            ends = [
                f(*(x + sign * 1e-5 * d for x, d in zip(point, step, strict=True)))
                for sign in (1, -1)
            ]
            slope = sum(np.vdot(d, ours) for d, ours in zip(step, gradients, strict=True))
            np.testing.assert_allclose((ends[0] - ends[1]) / 2e-5, slope, rtol=1e-7, atol=1e-8)


def test_scores_are_scaled_then_biased_then_capped_then_masked():
    """The four steps do not commute: each order but ours gives other weights for these numbers."""
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(1, 4, 1, 8)), jnp.float32) for _ in range(3))
    bias = jnp.asarray(rng.normal(size=(1, 1, 4, 4)), jnp.float32)
    options = dict(mask=masks.causal(), scale=0.7, softcap=1.5, return_weights=True)
    _, weights = jax.jit(partial(attention, **options))(query, key, value, bias=bias)
    products = np.einsum("btnh,bsnh->bnts", *np.float64([query, key]))
    cap, hide, add = (
        lambda s: 1.5 * np.tanh(s / 1.5),
        lambda s: np.where(np.tri(4), s, -np.inf),
        np.float64(bias),
    )

    def normalised(s):
        return np.exp(s) / np.exp(s).sum(-1, keepdims=True)

    np.testing.assert_allclose(weights, normalised(hide(cap(0.7 * products + add))), **FLOAT32)
    for other in (
        cap(0.7 * (products + add)),
        cap(0.7 * products) + add,
        0.7 * cap(products + add),
    ):
        assert np.abs(weights - normalised(hide(other))).max() > 1e-2
    # cap before mask
    assert (np.asarray(weights)[~np.broadcast_to(np.tri(4, dtype=bool), weights.shape)] == 0).all()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("sinks", "dtype"), [(False, jnp.float32), (True, jnp.float32), (True, jnp.bfloat16)]
)
def test_a_query_that_sees_nothing_yields_zeros_and_passes_no_gradient(sinks, dtype):
    """Row 0 has queries without keys, row 1 has no keys at all; what can be seen elsewhere is
    unchanged."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    arrays = normal(2, 3, 4, 5), normal(2, 3, 2, 5), normal(2, 3, 2, 5)
    sink = normal(4) if sinks else None
    mask = masks.lengths(q=jnp.array([2, 3]), kv=jnp.array([3, 0]))
    bias = normal(2, 4, 3, 3)

    def f(query, key, value, bias, sink):
        return attention(query, key, value, mask=mask, bias=bias, sinks=sink, softcap=2.0)

    out, gradients = value_and_vjp(f, jnp.ones((2, 3, 4, 5), dtype), *arrays, bias, sink)
    assert (out[0, 2] == 0).all() and (out[1] == 0).all() and (out[0, :2] != 0).any()
    assert all(np.isfinite(np.float32(x)).all() for x in jax.tree.leaves(gradients))
    d_query, d_key, d_value, d_bias, _ = gradients
    assert (d_query[0, 2] == 0).all() and (d_query[0, :2] != 0).any()
    assert (
        all((x[1] == 0).all() for x in (d_query, d_key, d_value, d_bias))
        and (d_bias[0, :, 2] == 0).all()
    )


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_an_infinite_sink_is_a_very_large_one(implementation, dtype):
    """It takes nothing or all, also of queries that see no key; values and gradients are those of a
    finite one."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    arrays = normal(2, 5, 4, 3), normal(2, 6, 2, 3), normal(2, 6, 2, 3), normal(2, 4, 5, 6)
    mask = masks.causal() & masks.lengths(kv=jnp.array([4, 0]))
    sinks = jnp.array([-np.inf, np.inf, 0.3, np.inf], dtype)

    def f(query, key, value, bias, sinks):
        return attention(
            query, key, value, mask=mask, bias=bias, sinks=sinks, implementation=implementation
        )

    g = normal(2, 5, 4, 3)
    # at 1e4 every other weight underflows to 0, so nothing is rounded in another way
    infinite, large = (
        value_and_vjp(f, g, *arrays, each) for each in (sinks, jnp.clip(sinks, -1e4, 1e4))
    )
    jax.tree.map(np.testing.assert_array_equal, infinite, large)
    assert all(np.isfinite(np.float32(leaf)).all() for leaf in jax.tree.leaves(infinite))


@pytest.mark.thorough_after(10)
@pytest.mark.parametrize(
    "implementation", ["reference", "query_blocked", "blockwise", "ring", "splash", None]
)
@pytest.mark.parametrize(("B", "T", "S"), [(2, 3, 0), (2, 0, 3), (2, 0, 0), (0, 3, 3)])
def test_no_rows_queries_or_keys_give_zeros_and_no_gradient(B, T, S, implementation):
    arrays = [jnp.ones(shape) for shape in ((B, T, 2, 3), (B, S, 1, 3), (B, S, 1, 2), (B, 2, T, S))]
    takes_bias = implementation not in ("query_blocked", "splash")

    def f(query, key, value, bias, sinks):
        options = dict(mask=masks.causal(), sinks=sinks, implementation=implementation)
        return attention(query, key, value, bias=bias if takes_bias else None, **options)

    out, gradients = value_and_vjp(f, jnp.ones((B, T, 2, 2)), *arrays, jnp.array([0.5, -np.inf]))
    assert out.shape == (B, T, 2, 2)
    for leaf in jax.tree.leaves((out, gradients)):
        np.testing.assert_array_equal(leaf, 0)


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("implementation", ["reference", "query_blocked", "blockwise"])
@pytest.mark.parametrize("narrow", ["query", "key", "value"])
def test_gradients_have_the_types_of_their_arrays(narrow, implementation):
    """One array of 16 bits beside two of 64: scores are float64 where either the query or the key
    is."""
    with jax.enable_x64(True):
        wide = {name: jnp.ones((1, 3, 2, 4), jnp.float64) for name in ("query", "key", "value")}
        arrays = wide | {narrow: wide[narrow].astype(jnp.bfloat16), "sinks": jnp.ones(2)}
        f = lambda arrays: jnp.sum(
            attention(**arrays, mask=masks.causal(), implementation=implementation), dtype=float
        )
        gradients = jax.jit(jax.grad(f))(arrays)
    assert {name: x.dtype for name, x in gradients.items()} == {
        name: x.dtype for name, x in arrays.items()
    }


def test_a_large_sink_takes_all():
    """A sink far above the scores: weights underflow to zero, and nothing overflows on the way
    there or back."""
    arrays = random_case(0)[0]
    f = lambda sinks, *arrays: attention(*arrays, sinks=sinks)
    N, g = arrays[0].shape[2], jnp.ones((*arrays[0].shape[:3], arrays[2].shape[-1]))
    out, gradients = value_and_vjp(f, g, jnp.full(N, 1e4), *arrays)
    assert (out == 0).all() and all((x == 0).all() for x in gradients)


def test_without_any_key_the_answer_is_zeros():
    query, nothing = jnp.ones((1, 2, 4, 3)), jnp.ones((1, 0, 2, 3))
    np.testing.assert_array_equal(
        jax.jit(attention)(query, nothing, nothing), np.zeros((1, 2, 4, 3))
    )
    assert jax.jit(attention)(query[:, :0], query, query).shape == (1, 0, 4, 3)


@pytest.mark.thorough
def test_a_bias_of_minus_infinity_hides_like_a_mask():
    arrays = random_case(1)[0]
    S, T = arrays[1].shape[1], arrays[0].shape[1]
    hidden = np.where(np.tri(T, S, S - T, dtype=bool), np.float32(0), np.float32(-np.inf))[
        None, None
    ]
    hidden[0, 0, 0] = -np.inf
    hidden = jnp.asarray(hidden)
    masked = jax.jit(lambda *a: attention(*a, mask=masks.causal()))(*arrays)
    f = lambda query, bias: attention(query, *arrays[1:], bias=bias)
    out, gradients = value_and_vjp(f, jnp.ones_like(masked), arrays[0], hidden)
    assert (out[:, 0] == 0).all() and all(np.isfinite(x).all() for x in gradients)
    np.testing.assert_allclose(out[:, 1:], masked[:, 1:], **FLOAT32)


@pytest.mark.thorough
def test_sinks_are_one_more_key_with_a_value_of_zero():
    (query, key, value), mask, visible, _ = random_case(2)
    (B, _, N, _), K = query.shape, key.shape[2]
    sinks = jnp.linspace(-2.0, 3.0, N)
    wide = lambda x: np.concatenate(
        [np.repeat(x, N // K, axis=2), np.zeros((B, 1, N, x.shape[-1]), np.float32)], axis=1
    )
    column = np.broadcast_to(sinks[None, :, None, None], (B, N, query.shape[1], 1))
    shown = np.broadcast_to(
        np.where(visible, np.float32(0), np.float32(-np.inf))[:, None], (B, N, *visible.shape[1:])
    )
    bias = jnp.asarray(np.concatenate([shown, column], axis=-1))
    expected = jax.jit(lambda *a: attention(*a, bias=bias))(
        query, jnp.asarray(wide(key)), jnp.asarray(wide(value))
    )
    out = jax.jit(lambda *a: attention(*a, mask=mask, sinks=sinks))(query, key, value)
    np.testing.assert_allclose(out, expected, **FLOAT32)


@pytest.mark.thorough
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_large_scores_neither_overflow_nor_lose_the_maximum(size):
    query = jnp.full((1, 2, 1, 1), size)
    key = jnp.array([1.0, -1.0, 1.0, 0.5]).reshape(1, 4, 1, 1)
    f = lambda query, key: attention(query, key, key, sinks=jnp.zeros(1))
    out, gradients = value_and_vjp(f, jnp.ones((1, 2, 1, 1)), query, key)
    # with scores of +-1e4 the softmax is a mean over the largest; exp underflows to exactly 0 for
    # the others
    np.testing.assert_array_equal(out, np.full((1, 2, 1, 1), np.sign(size)))
    assert all(np.isfinite(x).all() for x in gradients)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [2, 4])
def test_agrees_with_jax_nn(seed):
    """jax.nn.dot_product_attention: same shapes, same GQA; its causal is top-left and rows without
    keys differ, so T = S."""
    rng = np.random.default_rng(seed)
    N, K = HEADS[seed]
    query, key, value = (jnp.asarray(rng.normal(size=(2, 6, n, 4)), jnp.float32) for n in (N, K, K))
    bias = jnp.asarray(rng.normal(size=(1, N, 6, 6)), jnp.float32)
    lengths = jnp.array([6, 3])

    @jax.jit
    def pairs(query, key, value):
        theirs = partial(jax.nn.dot_product_attention, query, key, value, implementation="xla")
        ours = partial(attention, query, key, value)
        return (
            (ours(bias=bias, scale=0.3), theirs(bias=bias, scale=0.3)),
            (ours(mask=masks.causal()), theirs(is_causal=True)),
            (ours(mask=masks.window(2, 1)), theirs(local_window_size=(2, 1))),
            (ours(mask=masks.lengths(kv=lengths)), theirs(key_value_seq_lengths=lengths)),
        )

    for ours, theirs in pairs(query, key, value):
        np.testing.assert_allclose(ours, theirs, **FLOAT32)


def test_agrees_with_flax():
    rng = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(rng.normal(size=(2, length, 4, 8)), jnp.float32) for length in (3, 5, 5)
    )
    bias = jnp.asarray(rng.normal(size=(2, 4, 3, 5)), jnp.float32)
    mask = masks.causal()
    theirs = jax.jit(partial(nn.dot_product_attention, bias=bias, mask=mask.dense(3, 5)))(
        query, key, value
    )
    ours = jax.jit(partial(attention, bias=bias, mask=mask))(query, key, value)
    np.testing.assert_allclose(ours, theirs, **FLOAT32)


def test_queries_align_with_the_last_keys_unless_told():
    rng = np.random.default_rng(0)
    T, S = 3, 5
    query, key, value = (jnp.asarray(rng.normal(size=(2, S, 2, 4)), jnp.float32) for _ in range(3))
    aligned = jax.jit(partial(attention, mask=masks.causal()))
    np.testing.assert_allclose(
        aligned(query[:, S - T :], key, value), aligned(query, key, value)[:, S - T :], **FLOAT32
    )
    at_zero = jax.jit(partial(attention, mask=masks.causal().at(0)))
    np.testing.assert_allclose(
        at_zero(query[:, :T], key, value), aligned(query, key, value)[:, :T], **FLOAT32
    )


@pytest.mark.parametrize("seed", range(3))
def test_bfloat16_stays_within_its_rounding(seed):
    arrays, mask, visible, options = random_case(200 + seed, jnp.bfloat16)
    out, weights = jax.jit(lambda *a: attention(*a, mask=mask, return_weights=True, **options))(
        *arrays
    )
    assert out.dtype == jnp.bfloat16 and weights.dtype == jnp.float32
    expected, expected_weights = witness(*arrays, visible, **to64(options))
    # the softmax is float32 from exact products
    np.testing.assert_allclose(weights, expected_weights, **FLOAT32)
    # weights rounded to 8 bits (2^-8 each), then the output: 2^-8 A|V| + 2^-8 |out| <= 2^-7 A|V|; 1
    # % for float32 sums
    bound = (
        2.0**-7
        * 1.01
        * witness(arrays[0], arrays[1], np.abs(np.float64(arrays[2])), visible, **to64(options))[0]
    )
    assert (np.abs(np.float64(out) - expected) <= bound + 1e-30).all()


@pytest.mark.thorough
def test_bfloat16_gradients():
    rng = np.random.default_rng(0)
    N, K = 4, 2
    arrays = [jnp.asarray(rng.normal(size=(2, 16, n, 8)), jnp.bfloat16) for n in (N, K, K)]
    g = jnp.asarray(rng.normal(size=(2, 16, N, 8)), jnp.bfloat16)
    gradients = value_and_vjp(lambda *a: attention(*a, mask=masks.causal()), g, *arrays)[1]
    visible = np.broadcast_to(np.tri(16, dtype=bool), (2, 16, 16))
    for ours, theirs in zip(gradients, witness_gradients(*arrays, visible, g)[:3], strict=True):
        assert ours.dtype == jnp.bfloat16
        # A, dA, dS and the result are each rounded once, by at most 2^-8 of themselves: 4 * 2^-8 in
        # norm
        assert np.linalg.norm(np.float64(ours) - theirs) <= 2.0**-6 * np.linalg.norm(theirs)


@pytest.mark.thorough
def test_dropout_on_the_weights():
    """Values are the identity matrix, so the output is the weights that were used: 0 or w / (1 -
    rate), nothing else."""
    rng = np.random.default_rng(0)
    B, T, N, rate = 4, 64, 4, 0.3
    query, key = (jnp.asarray(rng.normal(size=(B, T, N, 8)), jnp.float32) for _ in range(2))
    value = jnp.broadcast_to(jnp.eye(T)[None, :, None], (B, T, N, T))
    call = jax.jit(
        lambda k: attention(
            query, key, value, dropout_rate=rate, dropout_key=k, return_weights=True
        )
    )
    used, weights = call(jax.random.key(1))
    used = np.asarray(used).swapaxes(1, 2)
    plain, plain_weights = jax.jit(partial(attention, return_weights=True))(query, key, value)
    np.testing.assert_allclose(weights, plain_weights, **FLOAT32)  # the weights before dropout
    np.testing.assert_allclose(
        used[used != 0], (np.asarray(weights) / (1 - rate))[used != 0], **FLOAT32
    )
    # a binomial: 65,536 draws, so five standard deviations are 0.9 %
    assert abs((used != 0).mean() - (1 - rate)) < 5 * (rate * (1 - rate) / used.size) ** 0.5
    np.testing.assert_array_equal(used, np.asarray(call(jax.random.key(1))[0]).swapaxes(1, 2))
    assert (used != np.asarray(call(jax.random.key(2))[0]).swapaxes(1, 2)).any()
    np.testing.assert_allclose(call(None)[0], plain, **FLOAT32)  # no key, no dropout
    per_head = (used != 0).reshape(B * N, -1)
    assert len({row.tobytes() for row in per_head}) == B * N  # every row and head draws its own


@pytest.mark.thorough
def test_dropout_at_positions_by_row():
    """Positions by row drop the weights that the same positions drop without rows, each row at its
    own."""
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(2, n, 4, 8)), jnp.float32) for n in (3, 5, 5))
    call = partial(
        attention,
        query,
        key,
        value,
        mask=masks.causal(),
        dropout_rate=0.5,
        dropout_key=jax.random.key(0),
    )
    places = lambda first, n: first[:, None] + jnp.arange(n)[None]
    alike = call(positions=(places(jnp.array([2, 2]), 3), places(jnp.array([0, 0]), 5)))
    np.testing.assert_allclose(alike, call(), **FLOAT32)
    moved = call(positions=(places(jnp.array([2, 9]), 3), places(jnp.array([0, 7]), 5)))
    np.testing.assert_allclose(moved[0], alike[0], **FLOAT32)
    assert not np.allclose(moved[1], alike[1])


@pytest.mark.parametrize(
    ("rate", "dtype"), [(0.1, jnp.bfloat16), (0.3, jnp.float32), (0.9, jnp.float32)]
)
def test_dropout_keeps_the_expectation(rate, dtype):
    n = 2**18
    out = jax.jit(lambda key: dropout(jnp.ones(n, dtype), rate, key))(jax.random.key(0))
    assert out.dtype == dtype
    kept = np.float64(out)
    # what is kept is 1 / (1 - rate) rounded once: half a unit in the last place, 2^-24 or 2^-8
    np.testing.assert_allclose(
        kept[kept != 0], 1 / (1 - rate), rtol=2.0**-24 if dtype == jnp.float32 else 2.0**-8
    )
    # mean of n draws: standard deviation sqrt(rate / (1 - rate) / n); five of them, and the
    # rounding above
    assert abs(kept.mean() - 1) < 5 * (rate / (1 - rate) / n) ** 0.5 + (
        2.0**-8 if dtype == jnp.bfloat16 else 1e-6
    )
    np.testing.assert_array_equal(dropout(jnp.arange(3.0), 0.0, jax.random.key(0)), jnp.arange(3.0))


def test_dropout_does_not_round_its_own_rate():
    """0.9 in bfloat16 is 0.8984: dividing by that would raise every entry by 0.17 %, which no
    averaging removes."""
    n = 2**16
    x = np.asarray(np.random.default_rng(0).uniform(1, 2, n)).astype(jnp.bfloat16)
    kept = np.float64(jax.jit(lambda x: dropout(x, 0.1, jax.random.key(0)))(jnp.asarray(x)))
    ratio = (kept * 0.9 / np.float64(x))[kept != 0]
    # five standard deviations of roundings that are independent
    assert abs(ratio.mean() - 1) < 5 * 2.0**-8 / n**0.5


def test_dropout_passes_gradient_where_it_kept():
    x = jnp.linspace(1.0, 2.0, 100)
    out, (gradient,) = value_and_vjp(lambda x: dropout(x, 0.5, jax.random.key(3)), jnp.ones(100), x)
    # a float32 division
    np.testing.assert_allclose(gradient, np.asarray(out) / np.asarray(x), rtol=1e-6)


@pytest.mark.thorough
def test_under_transformations():
    """jit, vmap, scan and checkpoint leave value and gradient as they are."""
    rng = np.random.default_rng(0)
    layers = [jnp.asarray(rng.normal(size=(3, 2, 4, n, 8)), jnp.float32) for n in (4, 2, 2)]
    sinks = jnp.asarray(rng.normal(size=(4,)), jnp.float32)

    def f(query, key, value):
        out = attention(query, key, value, mask=masks.causal(), softcap=5.0, sinks=sinks)
        return jnp.sin(out).sum()

    step = jax.value_and_grad(f, (0, 1, 2))
    saved = jax.value_and_grad(jax.checkpoint(f), (0, 1, 2))

    @jax.jit
    def each(*layers):
        mapped = jax.vmap(step)(*layers)
        scanned = jax.lax.scan(lambda _, xs: (None, step(*xs)), None, layers)[1]
        return mapped, scanned, jax.lax.map(lambda xs: saved(*xs), layers)

    alone = jax.jit(step)
    one_by_one = [alone(*(np.asarray(x)[i] for x in layers)) for i in range(3)]
    expected = jax.tree.map(lambda *xs: np.stack(xs), *one_by_one)
    for got in each(*layers):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **FLOAT32), got, expected)


def test_a_mask_may_be_traced():
    arrays, *_ = random_case(5)
    B, S = arrays[1].shape[:2]
    lengths = jnp.arange(B) % S + 1
    traced = jax.jit(lambda mask: attention(*arrays, mask=mask))(masks.lengths(kv=lengths))
    closed_over = jax.jit(lambda: attention(*arrays, mask=masks.lengths(kv=lengths)))()
    np.testing.assert_array_equal(traced, closed_over)


def test_permutation_equivariance():
    """Permuting tokens permutes the output: without a mask or positions, attention does not know
    the order."""
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(1, 7, 2, 4)), jnp.float32) for _ in range(3))
    order = rng.permutation(7)
    f = jax.jit(attention)
    permuted = f(query[:, order], key[:, order], value[:, order])
    np.testing.assert_allclose(permuted, f(query, key, value)[:, order], **FLOAT32)


@pytest.mark.parametrize(
    ("shapes", "options", "words"),
    [
        ([(2, 3, 4), (2, 3, 4, 5), (2, 3, 4, 5)], {}, "takes"),
        ([(2, 3, 4, 5), (2, 3, 3, 5), (2, 3, 3, 5)], {}, "3 key/value heads do not divide 4"),
        ([(2, 3, 4, 5), (2, 3, 4, 6), (2, 3, 4, 5)], {}, "must agree"),
        ([(2, 3, 4, 5), (1, 3, 4, 5), (1, 3, 4, 5)], {}, "must agree"),
        ([(2, 3, 4, 5), (2, 3, 4, 5), (2, 4, 4, 5)], {}, "must agree"),
        ([(2, 3, 4, 5), (2, 3, 4, 5), (2, 3, 2, 5)], {}, "must agree"),
        ([(2, 3, 4, 5)] * 3, {"bias": (3, 3)}, "bias"),
        ([(2, 3, 4, 5)] * 3, {"sinks": (2,)}, "sink"),
        ([(2, 3, 4, 5)] * 3, {"dropout_rate": 1.0}, "dropout_rate"),
        ([(2, 3, 4, 5)] * 3, {"dropout_rate": -0.1}, "dropout_rate"),
        ([(2, 3, 4, 5)] * 3, {"dropout_rate": float("nan")}, "dropout_rate"),
    ],
)
def test_errors_at_the_door(shapes, options, words):
    """The messages users meet; the suite's own annotation checks stand before that door, so they
    are taken off here."""
    options = {k: jnp.ones(v) if isinstance(v, tuple) else v for k, v in options.items()}
    with pytest.raises(ValueError, match=words):
        inspect.unwrap(attention)(*map(jnp.ones, shapes), **options)


@pytest.mark.parametrize("softcap", [0.0, -1.0, float("inf"), float("nan")])
def test_a_softcap_that_is_no_cap_is_refused(softcap):
    x = jnp.ones((1, 2, 1, 3))
    with pytest.raises(
        ValueError,
        match=f"attention: softcap is a number above 0 and finite, or None; got {softcap}",
    ):
        attention(x, x, x, softcap=softcap)


@pytest.mark.thorough
def test_an_implementation_that_does_not_exist_is_refused():
    x = jnp.ones((1, 2, 1, 2))
    with pytest.raises(NotImplementedError, match="'cudn'"):
        attention(x, x, x, implementation="cudn")
    np.testing.assert_array_equal(
        attention(x, x, x, implementation="reference"), attention(x, x, x)
    )


@pytest.mark.thorough
@pytest.mark.parametrize("with_sinks", [False, True])
def test_gradients_of_the_rounded_softmax_are_those_of_the_exact_one(with_sinks):
    """A 16-bit model keeps rounded weights for its backward pass; asking for the weights takes the
    exact path beside it."""
    keys = jax.random.split(jax.random.key(0), 4)
    query, key, value = (jax.random.normal(k, (2, 6, 4, 8)).astype(jnp.bfloat16) for k in keys[:3])
    sinks = jax.random.normal(keys[3], (4,)) if with_sinks else None

    def loss(arrays, exact):
        query, key, value, sinks = arrays
        out = attention(query, key, value, mask=masks.causal(), sinks=sinks, return_weights=exact)
        return jnp.sum(jnp.square((out[0] if exact else out).astype(jnp.float32)))

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    rounded, exact = (gradient((query, key, value, sinks), exact) for exact in (False, True))
    for a, b in zip(jax.tree.leaves(rounded), jax.tree.leaves(exact), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        # bfloat16 has 8 bits: a few of its roundings against the largest entry
        np.testing.assert_allclose(a, b, atol=2e-2 * np.abs(b).max())
