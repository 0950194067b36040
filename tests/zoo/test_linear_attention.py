"""Linear attention against its quadratic definition in float64, form against form, and other
people's code."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxformer import masks
from jaxformer.zoo.efficient_attention import attention as efficient_attention
from jaxformer.zoo.linear_attention import (
    State as LinearState,
    attention as linear_attention,
    elu_plus_one,
    step as linear_attention_step,
)
from jaxformer.zoo.performer import attention as favor_attention
from tests.witnesses import load

# float64 sums of some hundred terms of order one: 1e-12 leaves three digits for the order of
# summation.
FLOAT64 = dict(rtol=1e-12, atol=1e-12)
# float32 unit roundoff is 6e-8: sums of <= 100 positive products of order one, and a quotient that
# keeps relative errors.
FLOAT32 = dict(rtol=1e-5, atol=1e-5)


def elu_witness(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def witness(query, key, value, visible, phi=elu_witness, eps=1e-6):
    """The definition in float64, one query of one head at a time; `visible` is `[B, T, S]`."""
    query, key, value = (np.asarray(a, np.float64) for a in (query, key, value))
    B, T, N, _ = query.shape
    out = np.zeros((B, T, N, value.shape[-1]))
    for b, t, n in np.ndindex(B, T, N):
        k = n // (N // key.shape[2])
        weights = [
            phi(query[b, t, n]) @ phi(key[b, s, k]) * visible[b, t, s] for s in range(key.shape[1])
        ]
        if visible[b, t].any():
            out[b, t, n] = np.array(weights) @ value[b, :, k] / (sum(weights) + eps)
    return out


def quadratic(query, key, value, visible, phi, eps=1e-6):
    """The same as one product of features, for its gradient: `visible` is `[B, T, S]`."""
    group = query.shape[2] // key.shape[2]
    key, value = jnp.repeat(phi(key), group, axis=2), jnp.repeat(value, group, axis=2)
    weights = jnp.where(visible[:, None], jnp.einsum("btnm,bsnm->bnts", phi(query), key), 0)
    total = jnp.sum(weights, -1, keepdims=True) + eps
    return jnp.einsum("bnts,bsnh->btnh", weights / total, value)


def case(seed, causal, segments, lengths, T, S, heads=(4, 2), dtype=np.float64):
    """Arrays, a mask and, from its definition, the table `[B, T, S]` of what it shows; queries end
    where keys end."""
    rng = np.random.default_rng(seed)
    B, (N, K), H, Hv = 2, heads, 3, 5
    arrays = [
        rng.normal(size=shape).astype(dtype)
        for shape in ((B, T, N, H), (B, S, K, H), (B, S, K, Hv))
    ]
    i, j = (S - T + np.arange(T))[None, :, None], np.arange(S)[None, None]
    mask, visible = masks.full(), np.ones((B, T, S), bool)
    if causal:
        mask, visible = mask & masks.causal(), visible & (j <= i)
    if segments:
        ids = np.cumsum(rng.random((B, S)) < 0.3, axis=1) + 1
        ids[0, -(S // 4) :] = 0
        ids[1, S // 3] = 0  # padding inside a segment or between two does not end it
        mask = mask & masks.segments(jnp.asarray(ids))
        of_query = np.where(i < 0, 0, ids[:, :, None][:, np.maximum(i[0, :, 0], 0)])
        visible = visible & (of_query == ids[:, None]) & (ids[:, None] != 0)
    if lengths:
        end = np.array([S - 1, S // 2])
        mask, visible = (
            mask & masks.lengths(kv=jnp.asarray(end)),
            visible & (j < end[:, None, None]),
        )
    return [jnp.asarray(x) for x in arrays], mask, visible


MASKS = [(c, s, n) for c in (False, True) for s in (False, True) for n in (False, True)]
LENGTHS = [(1, 1), (5, 5), (13, 13), (4, 13), (13, 4)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("rule", "lengths"),
    [(MASKS[i], (13, 13)) for i in (1, 2, 4, 7)] + [(MASKS[7], (4, 13)), (MASKS[3], (13, 4))],
)
def test_equals_its_definition(rule, lengths):
    """float32: every mask, as many queries as keys, fewer, and more."""
    arrays, mask, visible = case(0, *rule, *lengths, dtype=np.float32)
    out = jax.jit(lambda *a: linear_attention(*a, mask=mask, chunk=4))(*arrays)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, witness(*arrays, visible), **FLOAT32)


@pytest.mark.thorough
@settings(max_examples=6, deadline=None)
@given(
    st.integers(0, 99),
    st.sampled_from(MASKS),
    st.sampled_from(LENGTHS),
    st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    st.integers(1, 20),
    st.sampled_from(
        [
            elu_plus_one,
            lambda x: jax.nn.relu(x) + 1e-3,
            lambda x: jnp.concatenate([jnp.exp(x), jnp.exp(-x)], -1),
        ]
    ),
)
def test_float64_value_and_gradients(seed, rule, lengths, heads, chunk, phi):
    with jax.enable_x64(True):
        arrays, mask, visible = case(seed, *rule, *lengths, heads)
        g = np.random.default_rng(seed).normal(size=(*arrays[0].shape[:3], arrays[2].shape[-1]))

        @jax.jit
        def both(g, *arrays):
            ours = jax.vjp(
                partial(linear_attention, mask=mask, feature_map=phi, chunk=chunk), *arrays
            )
            theirs = jax.vjp(lambda *a: quadratic(*a, jnp.asarray(visible), phi), *arrays)
            return [(out, pullback(g)) for out, pullback in (ours, theirs)]

        ours, theirs = both(g, *arrays)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10), ours, theirs
        )
        assert ours[0].dtype == jnp.float64


@pytest.mark.thorough
@pytest.mark.parametrize("prefix", [0, 7])
def test_prefix_state_and_steps_equal_the_whole(prefix):
    """The state after a prefix, then token by token or all at once, is causal attention; so is the
    state that is left."""
    arrays, mask, _ = case(1, True, False, False, 12, 12, dtype=np.float32)
    (B, _, K, H), Hv = arrays[1].shape, arrays[2].shape[-1]
    empty = LinearState(jnp.zeros((B, K, H, Hv)), jnp.zeros((B, K, H)))
    sums = lambda key, value: LinearState(jnp.einsum("bskm,bskv->bkmv", key, value), key.sum(1))

    @jax.jit
    def run(query, key, value):
        whole = linear_attention(query, key, value, mask=mask, chunk=5)
        state, _ = linear_attention_step(empty, *(x[:, :prefix] for x in (query, key, value)))
        rest = [x[:, prefix:] for x in (query, key, value)]
        tokens = [x.swapaxes(0, 1)[:, :, None] for x in rest]
        after, steps = jax.lax.scan(
            lambda state, token: linear_attention_step(state, *token), state, tokens
        )
        also_after, at_once = linear_attention_step(state, *rest, chunk=3)
        states = after, also_after, sums(elu_plus_one(key), value)
        return whole[:, prefix:], steps[:, :, 0].swapaxes(0, 1), at_once, states

    whole, steps, at_once, states = run(*arrays)
    np.testing.assert_allclose(at_once, whole, **FLOAT32)
    np.testing.assert_allclose(steps, whole, **FLOAT32)
    for state in states[:2]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **FLOAT32), state, states[2])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("f", "causal"),
    [("elu", False), ("elu", True), ("shen", False), ("shen", True), ("favor", False)],
)
def test_packed_sequences_do_not_meet_and_padding_does_not_matter(f, causal):
    """Two documents and padding in one row = each alone; NaN in the padding reaches neither values
    nor gradients.

    Row 1 is padding only: its queries see nothing, yield zeros and pass no gradient.
    """
    rng = np.random.default_rng(0)
    projection = jnp.asarray(rng.normal(size=(6, 3)), jnp.float32)
    function = {
        "elu": linear_attention,
        "shen": efficient_attention,
        # eps = 0: with a row's documents sharing one stabiliser, eps is not the same share of each
        "favor": lambda q, k, v, **options: favor_attention(
            q, k, v, projection, eps=0.0, **options
        ),
    }[f]
    query, key, value = (rng.normal(size=(2, 13, n, 3)).astype(np.float32) for n in (4, 2, 2))
    ids = np.array([[1] * 5 + [0] + [2] * 5 + [0] * 2, [0] * 13])
    rule = masks.causal() if causal else masks.full()
    dirty = [np.where(ids[..., None, None] == 0, np.float32("nan"), x) for x in (query, key, value)]

    @jax.jit
    def packed(ids, *arrays):
        out, pullback = jax.vjp(
            partial(function, mask=rule & masks.segments(ids), chunk=4), *arrays
        )
        return out, pullback(jnp.ones_like(out))

    out, gradients = jax.tree.map(np.asarray, packed(ids, *dirty))
    for x in (out, *gradients):
        assert np.isfinite(x).all() and (x[ids == 0] == 0).all() and (x[ids != 0] != 0).any()
    call = jax.jit(partial(function, mask=rule, chunk=4))
    for document in (1, 2):
        alone = call(*(x[:1, ids[0] == document] for x in (query, key, value)))
        np.testing.assert_allclose(out[:1, ids[0] == document], alone, **FLOAT32)


@pytest.mark.thorough
@pytest.mark.parametrize("rule", [masks.full(), masks.causal()], ids=str)
def test_a_row_whose_ids_come_again_is_nan(rule):
    """The sums forget a segment when the next begins; rows in runs of ids, whatever their order,
    are as the mask says."""
    ids = jnp.array(
        [[1, 1, 2, 0, 1, 1], [3, 3, 0, 3, 1, 1], [0, 0, 2, 1, 1, 0], [1, 0, 2, 2, 3, 1]]
    )
    x, mask = jax.random.normal(jax.random.key(0), (4, 6, 2, 3)), rule & masks.segments(ids)
    weights = jnp.einsum("btnm,bsnm->bnts", elu_plus_one(x), elu_plus_one(x)) * mask.dense(6, 6)
    expected = jnp.einsum("bnts,bsnm->btnm", weights / (weights.sum(-1, keepdims=True) + 1e-6), x)
    out = linear_attention(x, x, x, mask=mask, chunk=2)
    np.testing.assert_allclose(out[1:3], expected[1:3], **FLOAT32)
    for f in (linear_attention, efficient_attention):
        assert np.isnan(f(x, x, x, mask=mask)[jnp.array([0, 3])]).all()


@pytest.mark.thorough
@pytest.mark.parametrize("offset", [None, 0])
@pytest.mark.parametrize("pair", [False, True], ids=["one side", "both sides"])
@pytest.mark.parametrize("f", [linear_attention, efficient_attention])
def test_a_mask_may_be_an_argument_of_jit(f, pair, offset):
    """Both sides of `segments` are one array, which they stay as leaves of an argument."""
    (query, key, value), *_ = case(0, False, False, False, 6, 6, dtype=np.float32)
    ids = jnp.array([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1]])
    mask = masks.segments(ids, ids) if pair else masks.segments(ids)
    mask = mask if offset is None else mask.at(offset)
    call = lambda mask: f(query, key, value, mask=mask)
    np.testing.assert_array_equal(jax.jit(call)(mask), jax.jit(lambda: call(mask))())
    with pytest.raises(NotImplementedError, match="segments"):
        call(masks.segments(ids, jnp.array(ids)))


@pytest.mark.thorough
def test_query_lengths_and_offsets():
    """lengths(q=...) empties its queries; an offset moves them along the keys, to either side."""
    arrays, _, _ = case(4, True, False, False, 6, 9, dtype=np.float32)
    for offset in (-2, 5):
        mask = (masks.causal() & masks.lengths(kv=jnp.array([9, 4]))).at(offset)
        visible = np.broadcast_to(np.asarray(mask.dense(6, 9))[:, 0], (2, 6, 9))
        out = jax.jit(lambda *a, mask=mask: linear_attention(*a, mask=mask, chunk=4))(*arrays)
        np.testing.assert_allclose(out, witness(*arrays, visible), **FLOAT32)
    mask = masks.lengths(jnp.array([6, 2]), jnp.array([9, 4])) & masks.causal()
    visible = np.broadcast_to(np.asarray(mask.dense(6, 9))[:, 0], (2, 6, 9))
    out = jax.jit(lambda *a: linear_attention(*a, mask=mask, chunk=4))(*arrays)
    np.testing.assert_allclose(out, witness(*arrays, visible), **FLOAT32)
    assert (out[1, 2:] == 0).all()


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("mask", [masks.full(), masks.causal()])
def test_without_any_key_the_answer_is_zeros(mask):
    query, nothing = jnp.ones((1, 2, 4, 3)), jnp.ones((1, 0, 2, 3))
    f = jax.jit(partial(linear_attention, mask=mask))
    np.testing.assert_array_equal(f(query, nothing, nothing), np.zeros((1, 2, 4, 3)))
    assert f(query[:, :0], query, query).shape == (1, 0, 4, 3)


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("f", ["elu", "shen"])
def test_causality(f, causal):
    """Token t of keys and values changes the outputs from t on and no others; without causal(),
    all."""
    (query, key, value), _, _ = case(5, False, False, False, 11, 11, dtype=np.float32)
    mask = masks.causal() if causal else masks.full()
    call = jax.jit(
        partial({"elu": linear_attention, "shen": efficient_attention}[f], mask=mask, chunk=4)
    )
    before, t = np.asarray(call(query, key, value)), 6
    changed = [
        x + np.float32(10) * (np.arange(11) == t)[None, :, None, None].astype(np.float32)
        for x in (key, value)
    ]
    differs = (np.asarray(call(query, *changed)) != before).any(axis=(0, 2, 3))
    assert differs[t:].all() and differs[:t].any() == (not causal)


@pytest.mark.thorough
def test_memory_of_the_backward_pass_is_linear():
    """No state a token: with M = Hv = 64 that would be 64 times the size of the values.

    Compiled, so counted, not run.
    """
    T = 8192
    one = jax.ShapeDtypeStruct((1, T, 1, 64), jnp.float32)
    mask = masks.causal() & masks.segments(jnp.ones((1, T), jnp.int32))
    f = jax.grad(lambda *a: jnp.sum(jnp.square(linear_attention(*a, mask=mask))), (0, 1, 2))
    size = jax.jit(f).lower(one, one, one).compile().memory_analysis().temp_size_in_bytes
    assert size < 16 * T * 64 * 4  # sixteen arrays like the values


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("causal", [False, True])
def test_bfloat16_stays_within_its_rounding(causal):
    (query, key, value), mask, visible = case(6, causal, False, False, 33, 33, dtype=np.float32)
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in (query, key, value)]
    out = jax.jit(partial(linear_attention, mask=mask))(*arrays)
    assert out.dtype == jnp.bfloat16
    # everything inside is float32: only the answer is rounded, by half a unit in its eighth digit
    np.testing.assert_allclose(np.float64(out), witness(*arrays, visible), rtol=2.0**-8, atol=1e-5)


@pytest.mark.thorough
def test_under_transformations():
    """vmap, scan and checkpoint leave value and gradient as they are."""
    rng = np.random.default_rng(0)
    layers = [jnp.asarray(rng.normal(size=(2, 2, 5, n, 4)), jnp.float32) for n in (4, 2, 2)]
    f = lambda *a: jnp.sin(linear_attention(*a, mask=masks.causal(), chunk=3)).sum()
    step, saved = (jax.value_and_grad(f, (0, 1, 2)) for f in (f, jax.checkpoint(f)))

    @jax.jit
    def each(*layers):
        scanned = jax.lax.scan(lambda _, xs: (None, saved(*xs)), None, layers)[1]
        return step(*(x[1] for x in layers)), jax.vmap(step)(*layers), scanned

    alone, *others = each(*layers)
    for got in others:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a[1], b, **FLOAT32), got, alone)


REFUSED = [
    masks.window(3),
    masks.causal() & masks.window(3),
    masks.causal() | masks.prefix(2),
    ~masks.causal(),
    masks.segments(jnp.ones((1, 4), jnp.int32), jnp.ones((1, 4), jnp.int32)),
]


@pytest.mark.parametrize("mask", REFUSED)
@pytest.mark.parametrize(
    "f",
    [linear_attention, efficient_attention, partial(favor_attention, projection=jnp.ones((4, 2)))],
)
def test_other_masks_are_refused_by_name(f, mask):
    x = jnp.ones((1, 4, 2, 2))
    with pytest.raises(NotImplementedError) as error:
        f(x, x, x, mask=mask)
    name = f.func.__name__ if isinstance(f, partial) else f.__name__
    assert (
        name in str(error.value)
        and str(mask) in str(error.value)
        and "blockwise" in str(error.value)
    )


def test_a_traced_offset_is_refused():
    x = jnp.ones((1, 4, 2, 2))
    with pytest.raises(NotImplementedError, match="linear_attention_step"):
        jax.jit(lambda start: linear_attention(x, x, x, mask=masks.causal().at(start)))(1)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ([(2, 3, 4), (2, 3, 4, 5), (2, 3, 4, 5)], "takes"),
        ([(2, 3, 4, 5), (2, 3, 3, 5), (2, 3, 3, 5)], "3 key/value heads do not divide 4"),
        ([(2, 3, 4, 5), (2, 3, 4, 6), (2, 3, 4, 5)], "must agree"),
        ([(2, 3, 4, 5), (1, 3, 4, 5), (1, 3, 4, 5)], "must agree"),
        ([(2, 3, 4, 5), (2, 3, 4, 5), (2, 4, 4, 5)], "must agree"),
    ],
)
def test_errors_at_the_door(shapes, words):
    with pytest.raises(ValueError, match=words):
        inspect.unwrap(linear_attention)(*map(jnp.ones, shapes))


@pytest.mark.thorough
def test_katharopoulos_and_shen():
    """The recurrence of Katharopoulos et al., and linear-attention-transformer's two forms of Shen
    et al.; all float64."""
    with jax.enable_x64(True):
        w = load("linear_attention")
        arrays, padded = (
            [jnp.asarray(w[n]) for n in ("query", "key", "value")],
            masks.lengths(kv=jnp.asarray(w["lengths"])),
        )
        variants = {
            "elu": (linear_attention, masks.full()),
            "elu_causal": (linear_attention, masks.causal()),
            "shen": (efficient_attention, masks.full()),
            "shen_padded": (efficient_attention, padded),
            "shen_causal": (efficient_attention, masks.causal()),
        }
        run = jax.jit(
            lambda *a: {name: f(*a, mask=mask, chunk=4) for name, (f, mask) in variants.items()}
        )
        for name, ours in run(*arrays).items():
            np.testing.assert_allclose(ours, w[name], err_msg=name, **FLOAT64)
