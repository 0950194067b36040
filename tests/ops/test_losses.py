"""Losses against float64 and optax; the chunked form against the plain one, in value, gradients and
memory."""

import importlib.util
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st

from jaxformer.ops import cross_entropy, projected_cross_entropy
from jaxformer.ops.losses import TokenSums

# float32 sums of at most 100 losses of order one to ten
FLOAT32 = dict(rtol=2e-6, atol=2e-5)


def witness(logits, labels, weights, smoothing=0.0, z_loss=0.0):
    """Token by token in float64."""
    loss = weight = correct = 0.0
    for row, label, w in zip(
        np.float64(logits).reshape(-1, logits.shape[-1]),
        labels.ravel(),
        weights.ravel(),
        strict=True,
    ):
        if w == 0:
            continue
        log_total = row.max() + math.log(np.exp(row - row.max()).sum())
        target = np.full(len(row), smoothing / len(row))
        target[label] += 1 - smoothing
        loss += float(w) * (-(target * (row - log_total)).sum() + z_loss * log_total**2)
        weight += float(w)
        correct += float(w) * (row.argmax() == label)
    return loss, weight, correct


def random(seed, B=2, T=7, V=11, D=5):
    """hidden, head, labels (with -100 and V among them) and weights, which are zero there and
    elsewhere."""
    rng = np.random.default_rng(seed)
    hidden, head = rng.normal(size=(B, T, D)) * 2, rng.normal(size=(V, D))
    labels, weights = rng.integers(0, V, (B, T)), rng.uniform(0, 2, (B, T))
    weights[rng.random((B, T)) < 0.3] = 0
    weights[0, :2] = 0
    labels[weights == 0] = rng.choice([-100, V, 0, 3], (weights == 0).sum())
    labels[0, :2] = -100, V
    return hidden, head, labels, weights


def floats(*arrays, dtype=jnp.float32):
    return [jnp.asarray(np.asarray(a).astype(dtype)) for a in arrays]


plain = jax.jit(cross_entropy, static_argnums=(3, 4))


@pytest.mark.thorough
@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**31), st.sampled_from([0.0, 0.1]), st.sampled_from([0.0, 1e-2]))
def test_cross_entropy_by_definition(seed, smoothing, z_loss):
    hidden, head, labels, weights = random(seed)
    logits, weights = floats(hidden @ head.T, weights)
    ours = plain(logits, jnp.asarray(labels), weights, smoothing, z_loss)
    np.testing.assert_allclose(
        ours, witness(logits, labels, np.float64(weights), smoothing, z_loss), **FLOAT32
    )
    assert {x.dtype for x in ours} == {jnp.dtype("float32")}


def test_without_weights_every_token_counts_once():
    hidden, head, labels, _ = random(0)
    (logits,), labels = floats(hidden @ head.T), np.clip(labels, 0, 10)
    np.testing.assert_allclose(
        plain(logits, jnp.asarray(labels)), witness(logits, labels, np.ones((2, 7))), **FLOAT32
    )


@pytest.mark.thorough
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_agrees_with_optax(smoothing):
    hidden, head, labels, weights = random(1)
    logits, weights = floats(hidden @ head.T, weights)
    labels = jnp.asarray(np.clip(labels, 0, 10))

    @jax.jit
    def theirs(logits):
        if not smoothing:
            return (optax.softmax_cross_entropy_with_integer_labels(logits, labels) * weights).sum()
        targets = optax.smooth_labels(jax.nn.one_hot(labels, 11), smoothing)
        return (optax.softmax_cross_entropy(logits, targets) * weights).sum()

    ours = jax.jit(lambda logits: cross_entropy(logits, labels, weights, smoothing).loss)
    np.testing.assert_allclose(ours(logits), theirs(logits), **FLOAT32)
    np.testing.assert_allclose(
        jax.jit(jax.grad(ours))(logits), jax.jit(jax.grad(theirs))(logits), **FLOAT32
    )


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 1e-2)])
def test_gradient_in_float64(smoothing, z_loss):
    """d loss / d logits = w (p - target + 2 z log(sum exp) p)."""
    hidden, head, labels, weights = random(2)
    logits = hidden @ head.T
    with jax.enable_x64(True):
        f = lambda logits: (
            cross_entropy(logits, jnp.asarray(labels), jnp.asarray(weights), smoothing, z_loss).loss
        )
        ours = jax.jit(jax.grad(f))(jnp.asarray(logits))
    total = np.exp(logits).sum(-1, keepdims=True)
    p, target = (
        np.exp(logits) / total,
        np.eye(11)[np.clip(labels, 0, 10)] * (1 - smoothing) + smoothing / 11,
    )
    expected = weights[..., None] * (p - target + 2 * z_loss * np.log(total) * p)
    # a handful of float64 roundings
    np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_logits_are_widened_first(dtype):
    hidden, head, labels, weights = random(3)
    (logits,), (weights,) = floats(hidden @ head.T, dtype=dtype), floats(weights)
    args = jnp.asarray(labels), weights, 0.1, 1e-2
    np.testing.assert_array_equal(plain(logits, *args), plain(logits.astype(jnp.float32), *args))


@pytest.mark.thorough
def test_uniform_logits_cost_the_logarithm_of_the_vocabulary():
    # one float32 logarithm
    np.testing.assert_allclose(
        plain(jnp.zeros((1, 4, 1000)), jnp.zeros((1, 4), int)).loss, 4 * math.log(1000), rtol=1e-6
    )


def test_huge_logits_neither_overflow_nor_vanish():
    logits = jnp.array([[[1e4, 0.0, -1e4], [1e4, 0.0, -1e4]]])
    ours = jax.jit(jax.value_and_grad(lambda l: cross_entropy(l, jnp.array([[0, 2]])).loss))(logits)
    # exactly 0 for the first token, 20,000 for the second
    np.testing.assert_array_equal(ours[0], 2e4)
    np.testing.assert_array_equal(ours[1], [[[0, 0, 0], [1, 0, -1]]])


def test_sums_do_not_care_how_the_batch_was_cut():
    hidden, head, labels, weights = random(4, B=4)
    logits, weights = floats(hidden @ head.T, weights)
    whole = plain(logits, jnp.asarray(labels), weights)
    halves = [
        plain(logits[i : i + 2], jnp.asarray(labels[i : i + 2]), weights[i : i + 2]) for i in (0, 2)
    ]
    np.testing.assert_allclose(np.sum(halves, axis=0), whole, **FLOAT32)


@pytest.mark.thorough
def test_labels_out_of_range_are_legal_where_their_weight_is_zero():
    """-100 marks padding in half the world's data sets.

    Value and gradient are as if the token were not there.
    """
    hidden, head, labels, weights = random(5)
    hidden, head, weights = floats(hidden, head, weights)

    @jax.jit
    def both(hidden, head, labels):
        first = lambda h, w: (
            cross_entropy(jnp.einsum("btd,vd->btv", h, w), labels, weights, 0.1, 1e-3).loss
        )
        second = lambda h, w: (
            projected_cross_entropy(
                h, w, labels, weights, label_smoothing=0.1, z_loss=1e-3, chunk=3
            ).loss
        )
        return [jax.value_and_grad(f, (0, 1))(hidden, head) for f in (first, second)]

    inside = both(hidden, head, jnp.asarray(np.where(weights == 0, 0, labels)))
    for ours, theirs in zip(both(hidden, head, jnp.asarray(labels)), inside, strict=True):
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
        assert (np.asarray(ours[1][0])[np.asarray(weights) == 0] == 0).all()


@jax.jit
@partial(jax.value_and_grad, has_aux=True)
def dense(logits_and_head, labels, weights):
    sums = cross_entropy(logits_and_head[0], labels, weights, 0.1, 1e-3)
    return sums.loss, sums


@jax.jit
@partial(jax.value_and_grad, has_aux=True)
def projected(hidden_and_head, labels, weights):
    sums = projected_cross_entropy(
        *hidden_and_head, labels, weights, label_smoothing=0.1, z_loss=1e-3, chunk=3
    )
    return sums.loss, sums


@pytest.mark.thorough
@settings(deadline=None, max_examples=10)
@given(st.integers(0, 2**31), st.sampled_from([jnp.nan, jnp.inf, -jnp.inf]))
def test_a_token_of_weight_zero_does_not_matter_be_it_not_finite(seed, bad):
    """Sums and gradients, the head's too, are bit for bit those with a finite token; its own
    gradient is zero."""
    hidden, head, labels, weights = random(seed)
    hidden, head, logits, weights = floats(hidden, head, hidden @ head.T, weights)
    unused = weights[..., None] == 0
    for loss, x in ((dense, logits), (projected, hidden)):
        ours = loss((jnp.where(unused, bad, x), head), jnp.asarray(labels), weights)
        jax.tree.map(
            np.testing.assert_array_equal,
            ours,
            loss((jnp.where(unused, 1, x), head), jnp.asarray(labels), weights),
        )
        assert not np.asarray(ours[1][0])[np.asarray(weights) == 0].any()


@pytest.mark.thorough
@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**31), st.integers(2, 40), st.sampled_from([jnp.float32, jnp.bfloat16]))
def test_correct_is_the_first_argmax(seed, V, dtype):
    """Logits of few levels are full of ties. NaN is nobody's prediction."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(0, 3, (2, 6, V)).astype(np.float32)
    logits[0, 0], logits[0, 1, rng.integers(V)] = 0, np.nan
    labels = rng.integers(0, V, (2, 6))
    labels[1] = logits[1].argmax(-1)
    (weights,) = floats(rng.uniform(size=(2, 6)))
    hits = (logits.argmax(-1) == labels) & ~np.isnan(logits).any(-1)
    ours = plain(jnp.asarray(logits, dtype), jnp.asarray(labels), weights)
    # float32 sums of twelve numbers
    np.testing.assert_allclose(ours.correct, (hits * weights).sum(), rtol=1e-6)


@pytest.mark.thorough
def test_equal_logits_are_right_by_chance_alone():
    """A softcap that saturates makes ties: 30 % of random labels had the largest logit, though 1 %
    was the first with it."""
    rng = np.random.default_rng(0)
    hidden, head = floats(rng.normal(size=(4, 200, 8)) * 20, rng.normal(size=(100, 8)))
    labels = jnp.asarray(rng.integers(0, 100, (4, 200)))
    sums = jax.jit(lambda h, w: projected_cross_entropy(h, w, labels, softcap=1.0))(hidden, head)
    logits = np.tanh(np.float32(hidden) @ np.float32(head).T)
    assert ((logits == logits.max(-1, keepdims=True)).sum(-1) > 5).mean() > 0.9
    assert float(sums.correct / sums.weight) < 0.03  # 1 % and four standard deviations of 800 draws
    flat = jnp.zeros((1, 100, 10))
    assert float(plain(flat, jnp.arange(100)[None] % 10).correct) == 10


def test_labels_of_few_bits_and_of_any_rank():
    """uint8 labels beside 300 classes; one label an example, as an image has it."""
    rng = np.random.default_rng(0)
    (logits,), labels = (
        floats(rng.normal(size=(50, 300))),
        rng.integers(0, 256, 50).astype(np.uint8),
    )
    ours = plain(logits, jnp.asarray(labels))
    # float32 sums of fifty losses
    np.testing.assert_allclose(ours, witness(logits, labels, np.ones(50)), rtol=1e-5)


def value_and_gradients(loss, *args):
    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(*args)


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 100, None])
def test_the_chunked_form_is_the_plain_one(chunk):
    """In float64, where the order of sums is worth 1e-12 and a real difference is not; T = 7 is no
    multiple of 2 or 3."""
    hidden, head, labels, weights = random(6)
    softcap, smoothing, z_loss = (2.0, 0.1, 1e-2) if chunk in (3, None) else (None, 0.0, 0.0)
    with jax.enable_x64(True):
        labels, weights = jnp.asarray(labels), jnp.asarray(weights)

        def chunked(h, w):
            sums = projected_cross_entropy(
                h,
                w,
                labels,
                weights,
                softcap=softcap,
                label_smoothing=smoothing,
                z_loss=z_loss,
                chunk=chunk,
            )
            return sums.loss / sums.weight, sums

        def whole(h, w):
            logits = jnp.einsum("btd,vd->btv", h, w)
            if softcap is not None:
                logits = softcap * jnp.tanh(logits / softcap)
            sums = cross_entropy(logits, labels, weights, smoothing, z_loss)
            return sums.loss / sums.weight, sums

        ours, theirs = (
            value_and_gradients(f, jnp.asarray(hidden), jnp.asarray(head)) for f in (chunked, whole)
        )
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13), ours, theirs
        )
        assert {x.dtype for x in jax.tree.leaves(ours)} == {jnp.dtype("float64")}


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("chunk", [3, None])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_chunked_form_with_a_bias_of_the_vocabulary(chunk, softcap):
    """Logits hidden head^T + bias, before the softcap; its gradient with the others. In float64,
    where sums agree to 1e-12."""
    hidden, head, labels, weights = random(10)
    bias = np.random.default_rng(11).normal(size=11) * 2
    with jax.enable_x64(True):
        labels, weights = jnp.asarray(labels), jnp.asarray(weights)

        def chunked(h, w, b):
            sums = projected_cross_entropy(
                h, w, labels, weights, bias=b, softcap=softcap, z_loss=1e-2, chunk=chunk
            )
            return sums.loss, sums

        def whole(h, w, b):
            logits = jnp.einsum("btd,vd->btv", h, w) + b[None, None]
            if softcap is not None:
                logits = softcap * jnp.tanh(logits / softcap)
            sums = cross_entropy(logits, labels, weights, z_loss=1e-2)
            return sums.loss, sums

        args = tuple(map(jnp.asarray, (hidden, head, bias)))
        ours, theirs = (
            jax.jit(jax.value_and_grad(f, (0, 1, 2), has_aux=True))(*args) for f in (chunked, whole)
        )
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13), ours, theirs
        )
        assert np.abs(ours[1][2]).max() > 0.1


@pytest.mark.thorough
def test_a_bias_with_narrow_hidden_states_gets_a_float32_gradient():
    """2 x 600 tokens: summed in bfloat16, a gradient of their number would stop at some 256."""
    hidden, head = jnp.zeros((2, 600, 4), jnp.bfloat16), jnp.ones((3, 4))
    loss = lambda b: (
        projected_cross_entropy(hidden, head, jnp.zeros((2, 600), int), bias=b, chunk=600).loss
    )
    gradient = jax.jit(jax.grad(loss))(jnp.zeros(3))
    np.testing.assert_allclose(gradient, [-800, 400, 400], rtol=1e-4)  # 1200 (1/3 - 1), 1200 / 3


@pytest.mark.parametrize(("B", "T"), [(0, 3), (2, 0)])
def test_no_tokens_have_no_loss_and_no_gradient(B, T):
    arrays, labels = (jnp.ones((B, T, 4)), jnp.ones((5, 4)), jnp.ones(5)), jnp.zeros((B, T), int)
    f = lambda hidden, head, bias: projected_cross_entropy(hidden, head, labels, bias=bias)
    sums, pullback = jax.vjp(f, *arrays)
    for leaf in jax.tree.leaves((sums, pullback(jax.tree.map(jnp.ones_like, sums)))):
        np.testing.assert_array_equal(leaf, 0)


def test_the_chunked_form_without_a_gradient_and_without_weights():
    hidden, head, labels, _ = random(7)
    hidden, head = floats(hidden, head)
    labels = jnp.asarray(np.clip(labels, 0, 10))
    ours = jax.jit(lambda h, w: projected_cross_entropy(h, w, labels, chunk=2))(hidden, head)
    assert isinstance(ours, TokenSums)
    logits = np.float64(hidden) @ np.float64(head).T
    np.testing.assert_allclose(
        ours, witness(logits, np.asarray(labels), np.ones((2, 7))), **FLOAT32
    )


@pytest.mark.thorough
@pytest.mark.parametrize(("dtype", "roundoff"), [(jnp.bfloat16, 2.0**-8), (jnp.float16, 2.0**-11)])
def test_narrow_hidden_states_with_a_float32_head(dtype, roundoff):
    """Float32 logits, float32 gradient of the head, narrow gradient of the hidden states; 1/N stays
    float32."""
    rng = np.random.default_rng(8)
    B, T, D, V = 5, 47, 16, 200
    hidden, head = rng.normal(size=(B, T, D)), rng.normal(size=(V, D)) / 4
    labels = rng.integers(0, V, (B, T))
    (hidden,), (head,) = floats(hidden, dtype=dtype), floats(np.asarray(head).astype(dtype))

    @jax.jit
    def run(hidden, head, factor):
        loss = lambda h, w: projected_cross_entropy(h, w, jnp.asarray(labels), chunk=5)
        sums, pullback = jax.vjp(loss, hidden, head)
        return sums, *pullback(TokenSums(factor, jnp.zeros(()), jnp.zeros(())))

    sums, d_hidden, d_head = run(hidden, head, jnp.float32(1 / 235))
    assert sums.loss.dtype == d_head.dtype == jnp.float32 and d_hidden.dtype == dtype
    h, w = np.float64(hidden), np.float64(head)
    logits = h @ w.T
    # exact products, float32 sums
    np.testing.assert_allclose(sums, witness(logits, labels, np.ones((B, T))), rtol=1e-5)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    g = (p - np.eye(V)[labels]) / 235
    for ours, theirs in ((d_hidden, g @ w), (d_head, np.einsum("btv,btd->vd", g, h))):
        # the cotangent p - target, the product and its scaling are each rounded once
        assert np.linalg.norm(np.float64(ours) - theirs) <= 3 * roundoff * np.linalg.norm(theirs)
    # 1/256 is exact in any format; 1/235 is 0.31 % away from the nearest bfloat16, and must not be
    # rounded to it.
    # entries are rounded independently of one another: five standard deviations of the mean of 3760
    # errors
    exact = np.float64(run(hidden, head, jnp.float32(1 / 256))[1]) * 256 / 235
    assert (
        abs(np.vdot(np.float64(d_hidden), exact) / np.vdot(exact, exact) - 1)
        <= 5 * roundoff / exact.size**0.5
    )


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize(("head_dtype", "bound"), [(jnp.float32, 1.0), (jnp.float16, 1e3)])
def test_float16_gradients_are_formed_in_its_range(head_dtype, bound):
    """At vocabulary 50,000 most of p - target is below float16's smallest number, 6e-8, and no loss
    scale comes in time.

    Before the cotangent was scaled, 54 % of this head's gradient was zero. Weights up to 1,000 must
    not overflow either.
    """
    rng = np.random.default_rng(0)
    B, T, D, V = 1, 3, 8, 50_000
    hidden, head = floats(
        rng.normal(size=(B, T, D)) * 2, rng.normal(size=(V, D)), dtype=jnp.float16
    )
    head, weights = (
        head.astype(head_dtype),
        jnp.asarray(rng.uniform(size=(B, T)) * bound, jnp.float32),
    )
    h, w = np.float64(hidden), np.float64(head)
    logits = h @ w.T
    labels = logits.argmax(-1)
    factor = 2.0**10 / bound  # what a loss scale would be: d_hidden has float16's range itself

    @jax.jit
    def run(hidden, head):
        loss = lambda h, w: (
            projected_cross_entropy(h, w, jnp.asarray(labels), weights, chunk=2).loss * factor
        )
        return jax.grad(loss, (0, 1))(hidden, head)

    d_hidden, d_head = run(hidden, head)
    assert d_hidden.dtype == jnp.float16 and d_head.dtype == head_dtype
    p = np.exp(logits - logits.max(-1, keepdims=True))
    target = labels[..., None] == np.arange(V)
    g = (p / p.sum(-1, keepdims=True) - target) * np.float64(weights)[..., None]
    for ours, theirs in ((d_hidden, g @ w), (d_head, np.einsum("btv,btd->vd", g, h))):
        assert np.linalg.norm(np.float64(ours) / factor - theirs) <= 3 * 2.0**-11 * np.linalg.norm(
            theirs
        )
    if head_dtype == jnp.float32:
        rows = np.linalg.norm(np.float64(d_head) / factor - theirs, axis=1) / np.linalg.norm(
            theirs, axis=1
        )
        # each token's row, not the largest
        assert (np.asarray(d_head) == 0).mean() < 0.01 and np.median(rows) < 2.0**-10


@pytest.mark.thorough
def test_no_array_of_all_logits_exists():
    """Gradient for B T V = 524,288 logits, in chunks of a tenth: nothing in the compiled program is
    even half as large."""
    B, T, D, V, chunk = 2, 64, 8, 4096, 6
    shapes = jax.ShapeDtypeStruct((B, T, D), jnp.float32), jax.ShapeDtypeStruct((V, D), jnp.float32)
    labels = jnp.zeros((B, T), jnp.int32)

    def compiled(loss):
        program = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*shapes).compile()
        sizes = [
            math.prod(map(int, dims.split(",")))
            for dims in re.findall(r"f\d+\[([\d,]+)\]", program.as_text())
        ]
        return max(sizes), program.memory_analysis().temp_size_in_bytes

    largest, memory = compiled(lambda h, w: projected_cross_entropy(h, w, labels, chunk=chunk).loss)
    assert largest < B * T * V / 2 and memory < 4 * B * T * V / 2
    largest, memory = compiled(
        lambda h, w: cross_entropy(jnp.einsum("btd,vd->btv", h, w), labels).loss
    )
    # the witness: this way of looking sees them
    assert largest >= B * T * V and memory >= 4 * B * T * V


@pytest.mark.parametrize(("V", "tokens"), [(50_257, 1024), (1000, 16_000)])
def test_the_default_chunk_has_1024_tokens_or_64_mib_of_logits(V, tokens):
    B, T = 2, 16_000
    shapes = jax.ShapeDtypeStruct((B, T, 4), jnp.float32), jax.ShapeDtypeStruct((V, 4), jnp.float32)
    loss = lambda h, w: projected_cross_entropy(h, w, jnp.zeros((B, T), jnp.int32)).loss
    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(*shapes))
    sizes = [
        math.prod(map(int, dims.split(","))) for dims in re.findall(rf"f32\[(\d+,\d+,{V})\]", text)
    ]
    assert 0.9 * tokens * V <= max(sizes) <= max(tokens * V, 2**24)


@pytest.mark.thorough
def test_under_vmap_scan_and_checkpoint():
    hidden, head, labels, weights = random(9, B=4)
    hidden, head, weights = floats(hidden, head, weights)
    labels = jnp.asarray(labels)

    def loss(head, hidden, labels, weights):
        return projected_cross_entropy(hidden, head, labels, weights, chunk=3).loss

    rows = (hidden[:, None], labels[:, None], weights[:, None])

    @jax.jit
    def three(head):
        at_once = lambda head: loss(head, hidden, labels, weights)
        by_vmap = lambda head: jax.vmap(lambda *row: loss(head, *row))(*rows).sum()
        step = jax.checkpoint(lambda head, row: loss(head, *row))
        by_scan = lambda head: jax.lax.scan(
            lambda total, row: (total + step(head, row), None), 0.0, rows
        )[0]
        return [jax.value_and_grad(f)(head) for f in (at_once, by_vmap, by_scan)]

    whole, *others = three(head)
    for other in others:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **FLOAT32), other, whole)


@pytest.mark.thorough
def test_a_profile_names_the_head_and_the_loss():
    hidden, head, labels = jnp.ones((2, 8, 4)), jnp.ones((16, 4)), jnp.ones((2, 8), jnp.int32)
    projected = lambda hidden, head: projected_cross_entropy(hidden, head, labels).loss
    plain = lambda hidden, head: cross_entropy(jnp.einsum("btd,vd->btv", hidden, head), labels).loss
    for name, loss in (("head", projected), ("loss", plain)):
        text = jax.jit(jax.grad(loss, (0, 1))).lower(hidden, head).compile().as_text()
        operations = [
            re.split(r"[/()]", operation) for operation in re.findall(r'op_name="([^"]*)"', text)
        ]
        assert any(name in parts for parts in operations), operations
        products = [parts for parts in operations if "dot_general" in parts]
        assert products and (name == "loss" or all(name in parts for parts in products)), products


@pytest.mark.thorough
def test_a_gpu_computes_the_same_in_its_own_way(choose_gpu):
    """Loss, weight, correct tokens and gradients, also of equal and infinite logits, and of an
    illegal label of weight 0."""
    # many are equal
    logits = np.round(np.random.default_rng(0).normal(size=(3, 40, 7)) * 2).astype(np.float32)
    logits[0, :3, 2], logits[1, 0] = -np.inf, -np.inf
    labels, weights = np.random.default_rng(1).integers(0, 7, (3, 40)), np.ones((3, 40), np.float32)
    labels[0, :3], weights[1, 0], labels[1, 0] = 3, 0, 7

    def both():
        sums = lambda x: cross_entropy(x, jnp.asarray(labels), jnp.asarray(weights), z_loss=0.01)
        return sums(jnp.asarray(logits)), jax.grad(lambda x: sums(x).loss)(jnp.asarray(logits))

    expected = both()
    choose_gpu()
    found = both()
    assert np.isfinite(expected[0].loss) and found[0].correct == expected[0].correct > 0
    jax.tree.map(partial(np.testing.assert_allclose, **FLOAT32), found, expected)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_no_accelerator_scatters_into_logits_or_rounds_the_head_in_the_loop(platform):
    """A scatter is an array of logits more, and a rounded head as many bytes as the loop's other
    weights, once a chunk."""
    B, T, D, V = 2, 8, 16, 96
    hidden, head, labels = (
        jnp.zeros((B, T, D), jnp.bfloat16),
        jnp.zeros((V, D)),
        jnp.zeros((B, T), jnp.int32),
    )
    loss = lambda hidden, head: projected_cross_entropy(hidden, head, labels, chunk=4).loss
    text = (
        jax.jit(jax.grad(loss, (0, 1)))
        .trace(hidden, head)
        .lower(lowering_platforms=(platform,))
        .as_text()
    )
    assert "stablehlo.scatter" not in text and "stablehlo.while" in text
    rounded = [
        line
        for line in text.splitlines()
        if f"tensor<{V}x{D}xf32>) -> tensor<{V}x{D}xbf16>" in line
    ]
    indents = {len(line) - len(line.lstrip()) for line in rounded}
    assert len(rounded) == 1 and indents == {4}  # before the loop


@pytest.mark.aot
@pytest.mark.skipif(importlib.util.find_spec("tokamax") is None, reason="needs the extra kernels")
@pytest.mark.parametrize("implementation, V", [("xla", 300), ("xla", 512), ("chunked_xla", 512)])
def test_the_loss_of_tokamax_is_the_same(implementation, V):
    """With `chunked_xla` only where V fills its tiles: at V = 300 tokamax 0.0.17 counts padding as
    classes, and its loss is 1e-4 too large."""
    from tokamax import linear_softmax_cross_entropy_loss  # pyrefly: ignore[missing-import]

    D = 128
    keys = jax.random.split(jax.random.key(0), 3)
    hidden, head = jax.random.normal(keys[0], (2, 64, D)), jax.random.normal(keys[1], (V, D))
    labels = jax.random.randint(keys[2], (2, 64), 0, V)

    def theirs(hidden, head):
        rows = hidden.reshape(-1, D)
        return linear_softmax_cross_entropy_loss(
            rows, labels.reshape(-1), head.T, implementation=implementation
        )

    def ours(hidden, head):
        return projected_cross_entropy(hidden, head, labels).loss

    expected = jax.value_and_grad(theirs, (0, 1))(hidden, head)
    found = jax.value_and_grad(ours, (0, 1))(hidden, head)
    # float32 sums of 128 and 512 terms in another order; losses of some thousands
    compare = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-4)
    jax.tree.map(compare, found, expected)
