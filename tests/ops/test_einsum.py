"""The door of all matrix products: exact where float32 is exact, rounded once where it is not,
forward and backward."""

import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import jaxformer
from jaxformer.ops import einsum
from jaxformer.ops.einsum import add_bias
from jaxformer.ops.positions import learned
from jaxformer.ops.stored_weight import StoredWeight, int8_weight

# Unit roundoff: half the spacing at 1, for 8 and 11 significant bits. float16 adds half its
# smallest subnormal.
ROUNDOFF = {jnp.bfloat16: 2.0**-8, jnp.float16: 2.0**-11}
TINY = {jnp.bfloat16: 0.0, jnp.float16: 2.0**-25}
# float32 sums of n terms err by at most n 2^-24 of the sum of magnitudes; here n <= 200.
SUMS = 200 * 2.0**-24

SOURCE = "\n".join(path.read_text() for path in Path(jaxformer.__file__).parent.rglob("*.py"))
FOUND = sorted(set(re.findall(r'"([a-z]+,[a-z]+->[a-z]+)"', SOURCE)))
# an axis of one term alone is of a product of jnp, or of another einsum than ours
USED = [spec for spec in FOUND if min(map(spec.count, set(spec) - set(",->"))) > 1]


def operands(spec, seed, x_dtype=jnp.float32, w_dtype=jnp.float32, largest=5):
    """Random x, w and cotangent for a spec, with a random size for each of its letters; all of them
    fit x's dtype exactly."""
    rng = np.random.default_rng(seed)
    size = {letter: int(rng.integers(1, largest + 1)) for letter in spec if letter.isalpha()}
    shapes = [[size[letter] for letter in term] for term in re.split(",|->", spec)]
    x, w, g = (jnp.asarray(rng.normal(size=shape), x_dtype) for shape in shapes)
    return x, w.astype(w_dtype), g


def truth(spec, x, w, g):
    """Forward, dx, dw in float64, and the same of magnitudes: what rounding errors are measured
    by."""
    (x_axes, w_axes), out = spec.split("->")[0].split(","), spec.split("->")[1]

    def all_three(x, w, g):
        products = (
            (spec, x, w),
            (f"{out},{w_axes}->{x_axes}", g, w),
            (f"{x_axes},{out}->{w_axes}", x, g),
        )
        return [np.einsum(*p) for p in products]

    x, w, g = (np.asarray(a, np.float64) for a in (x, w, g))
    return all_three(x, w, g), all_three(*map(np.abs, (x, w, g)))


def run(spec, x, w, g, dtype=None):
    def value_and_gradients(x, w, g):
        out, pullback = jax.vjp(lambda x, w: einsum(spec, x, w, dtype), x, w)
        return out, *pullback(g.astype(out.dtype))

    return jax.jit(value_and_gradients)(x, w, g)


def test_the_library_uses_what_is_tested_here():
    assert {
        "btd,df->btf",
        "btd,vd->btv",
        "btd,dnh->btnh",
        "btnh,nhd->btd",
        "btkgh,bskh->bkgts",
    } <= set(USED)


@pytest.mark.thorough_after(11)
@pytest.mark.parametrize(  # every other one is below, in float32
    "spec",
    [pytest.param(spec, marks=() if i % 2 else pytest.mark.slow) for i, spec in enumerate(USED)],
)
def test_bfloat16_forward_and_backward(spec):
    """Each product of the library, on this platform, within one rounding of the float64 truth for
    the same operands."""
    x, w, g = operands(spec, seed=len(spec), x_dtype=jnp.bfloat16)
    results = run(spec, x, w, g)
    assert [r.dtype for r in results] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    exact, magnitude = truth(spec, x, w, g)
    for ours, theirs, size in zip(results[:2], exact, magnitude, strict=False):
        assert (
            np.abs(np.float64(ours) - theirs)
            <= ROUNDOFF[jnp.bfloat16] * np.abs(theirs) + SUMS * size
        ).all()
    # the gradient of a float32 parameter has float32 digits: nothing is rounded to bfloat16 after
    # the sum
    assert (np.abs(np.float64(results[2]) - exact[2]) <= SUMS * magnitude[2]).all()


@pytest.mark.thorough
@settings(deadline=None, max_examples=6)
@given(
    st.sampled_from(USED),
    st.integers(0, 2**31),
    st.sampled_from([jnp.bfloat16, jnp.float16]),
    st.booleans(),
)
def test_low_precision_operands(spec, seed, dtype, wide):
    """Both dtypes, parameters in either, results in either: one rounding where the result is
    narrow, none where it is wide."""
    x, w, g = operands(spec, seed, dtype, dtype if seed % 2 else jnp.float32)
    results = run(spec, x, w, g, jnp.float32 if wide else None)
    assert [r.dtype for r in results] == [jnp.float32 if wide else dtype, dtype, w.dtype]
    for ours, theirs, size in zip(results, *truth(spec, x, w, g), strict=True):
        rounding = SUMS * size
        if ours.dtype != jnp.float32:
            rounding = rounding + ROUNDOFF[dtype] * np.abs(theirs) + TINY[dtype]
        assert (np.abs(np.float64(ours) - theirs) <= rounding * (1 + 1e-3)).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_operands_and_cotangents_that_do_not_fit_are_rounded_once(dtype):
    """A float32 parameter and a float32 cotangent lose 2^-8 (2^-11) of each term, no more."""
    spec = "btd,df->btf"
    x, w, g = operands(spec, 0)
    x = x.astype(dtype)
    u = ROUNDOFF[dtype]
    exact, magnitude = truth(spec, x, w, g)
    out, dx, dw = run(spec, x, w, g, jnp.float32)
    assert (np.abs(np.float64(out) - exact[0]) <= (u + SUMS) * magnitude[0] + TINY[dtype]).all()
    # w, g and result
    assert (
        np.abs(np.float64(dx) - exact[1]) <= (3.01 * u + SUMS) * magnitude[1] + TINY[dtype]
    ).all()
    assert (np.abs(np.float64(dw) - exact[2]) <= (u + SUMS) * magnitude[2] + TINY[dtype]).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_wide_operands_of_a_narrow_product_have_wide_gradients(dtype):
    """The product of operands rounded to `operand_dtype`; nothing is rounded to 16 bits after the
    sums."""
    spec = "btd,vd->btv"
    x, w, g = (a.astype(dtype).astype(jnp.float32) for a in operands(spec, 5))
    product = lambda x, w: einsum(spec, x, w, operand_dtype=dtype)
    out, pullback = jax.jit(lambda x, w: jax.vjp(product, x, w))(x, w)
    exact, magnitude = truth(spec, x, w, g)
    for ours, theirs, size in zip(
        (out, *jax.jit(lambda g: pullback(g))(g)), exact, magnitude, strict=True
    ):
        assert ours.dtype == jnp.float32
        assert (np.abs(np.float64(ours) - theirs) <= SUMS * size).all()


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sums_are_float32(dtype):
    """4096 terms (1 + 2^-7)^2 make 4160.25 exactly; a bfloat16 sum of ones would stop at 256, a
    rounded product at 4160."""
    n, one = 4096, 1 + 2.0**-7
    x, w = jnp.full((1, 1, n), one, dtype), jnp.full((n, 1), one, jnp.float32)
    assert run("btd,df->btf", x, w, jnp.ones((1, 1, 1)), jnp.float32)[0].item() == n * one**2
    assert (
        run("btd,df->btf", x, w, jnp.ones((1, 1, 1)))[0].item()
        == jnp.asarray(n * one**2, dtype).item()
    )
    # the same number of tokens in the gradient of a parameter, and of outputs in the gradient of an
    # input
    tokens, narrow = jnp.full((1, n, 1), one, dtype), jnp.ones((1, 1), jnp.float32)
    assert (
        run("btd,df->btf", tokens, narrow, jnp.full((1, n, 1), one, dtype))[2].item() == n * one**2
    )
    wide = jnp.full((1, n), one, jnp.float32)
    dx = run("btd,df->btf", jnp.ones((1, 1, 1), dtype), wide, jnp.full((1, 1, n), one, dtype))[1]
    assert dx.item() == jnp.asarray(n * one**2, dtype).item()


@pytest.mark.thorough_after(2)
@pytest.mark.parametrize("spec", USED[::2])
def test_float32_is_jnp_einsum(spec):
    x, w, g = operands(spec, 3)
    out, pullback = jax.jit(lambda x, w: jax.vjp(lambda x, w: jnp.einsum(spec, x, w), x, w))(x, w)
    # the same program but for the order of sums, which XLA chooses: a few roundings of terms of
    # order one
    for ours, theirs in zip(
        run(spec, x, w, g), (out, *jax.jit(lambda g: pullback(g))(g)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


def test_float32_keeps_narrow_parameters_narrow_and_float64_wide():
    x, w, g = operands("btd,df->btf", 0, w_dtype=jnp.bfloat16)
    assert [r.dtype for r in run("btd,df->btf", x, w, g)] == [
        jnp.float32,
        jnp.float32,
        jnp.bfloat16,
    ]
    with jax.enable_x64(True):
        x, w, g = operands("btd,df->btf", 0, jnp.float64, jnp.float64)
        exact, _ = truth("btd,df->btf", x, w, g)
        for ours, theirs in zip(run("btd,df->btf", x, w, g), exact, strict=True):
            # float64 sums of five terms
            np.testing.assert_allclose(ours, theirs, rtol=1e-13, atol=1e-14)


def test_second_derivatives_in_float32():
    x, w, _ = operands("btd,df->btf", 1)
    f = lambda w: jnp.sum(jnp.sin(einsum("btd,df->btf", x, w)))
    g = lambda w: jnp.sum(jnp.sin(jnp.einsum("btd,df->btf", x, w)))
    hessians = jax.jit(lambda w: (jax.hessian(f)(w), jax.hessian(g)(w)))(w)
    # the same sums, perhaps in another order
    np.testing.assert_allclose(*hessians, rtol=1e-6, atol=1e-6)


@pytest.mark.thorough
def test_bfloat16_under_vmap_scan_and_checkpoint():
    """Stacked layers: the gradient of each is what it is alone."""
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=(3, 4, 4)) / 2, jnp.float32)
    x = jnp.asarray(rng.normal(size=(2, 5, 4)), jnp.bfloat16)
    layer = lambda x, w: einsum("btd,df->btf", x, w)

    def unrolled(w, x):
        for i in range(3):
            x = layer(x, w[i])
        return x.astype(jnp.float32).sum()

    def scanned(w, x):
        step = jax.checkpoint(lambda x, w: (layer(x, w), None))
        return jax.lax.scan(step, x, w)[0].astype(jnp.float32).sum()

    by_row = lambda w, x: jax.vmap(lambda row: unrolled(w, row[None]))(x).sum()
    whole, *others = jax.jit(
        lambda w, x: [jax.grad(f, (0, 1))(w, x) for f in (unrolled, scanned, by_row)]
    )(w, x)
    for other in others:
        assert [a.dtype for a in other] == [jnp.float32, jnp.bfloat16]
        # intermediate activations are rounded at the same places; only float32 sums may be ordered
        # otherwise
        np.testing.assert_allclose(other[0], whole[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(np.float32(other[1]), np.float32(whole[1]), rtol=2.0**-7)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_the_gradient_of_a_bias_is_summed_in_float32(dtype):
    """16 x 1024 tokens of cotangent 10: bfloat16 sums stop growing and float16 ones overflow."""
    x = jnp.zeros((16, 1024, 4), dtype)
    bias = jnp.ones((4,), jnp.float32)
    gradient = jax.grad(lambda b: jnp.sum(add_bias(x, b).astype(jnp.float32) * 10.0))(bias)
    assert gradient.dtype == jnp.float32
    np.testing.assert_allclose(gradient, 163840.0, rtol=1e-6)  # exact but for float32 sums
    np.testing.assert_array_equal(add_bias(x, bias), 1)


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("size", [8, 24])
def test_axes_of_both_operands_may_alternate_in_the_result(size):
    """Talking heads: XLA:CPU has no kernel for it in bfloat16 unless each operand's axes are
    together."""
    x, w = jnp.ones((2, size, size, size), jnp.bfloat16), jnp.eye(size)
    np.testing.assert_array_equal(jax.jit(partial(einsum, "bmts,mn->bnts"))(x, w), x)


def attend(x, *weights):
    """Attention without its mask and scale: the products of a layer."""
    query, key, value = (einsum("btd,dnh->btnh", x, w) for w in weights)
    scores = einsum("btnh,bsnh->bnts", query, key, jnp.float32)
    return einsum("bnts,bsnh->btnh", jax.nn.softmax(scores).astype(x.dtype), value)


@pytest.mark.thorough
def test_rows_of_a_table_in_8_bits_are_those_of_the_table_and_nan_outside():
    table = jax.random.normal(jax.random.key(0), (7, 5))
    index = jnp.array([[*range(-20, 20), -(2**31), 2**31 - 1]], jnp.int32)
    found, expected = (
        int8_weight(table, (0, 1), 1).look_up(index, jnp.float32),
        learned(index, table),
    )
    outside = (index < 0) | (index >= 7)
    np.testing.assert_array_equal(
        jnp.isnan(found), jnp.broadcast_to(outside[..., None], found.shape)
    )
    # half a step of 1/127 of the row's largest
    np.testing.assert_allclose(
        found, expected, rtol=0, atol=0.51 / 127 * float(jnp.abs(table).max())
    )


@pytest.mark.thorough_after(4)
@pytest.mark.parametrize("shape", [(0, 3, 7), (2, 0, 7)])
@pytest.mark.parametrize(
    "store", [lambda w: w, lambda w: StoredWeight(w.T, (1, 0)), lambda w: int8_weight(w, (1, 0), 1)]
)
def test_no_rows_have_a_product_of_no_rows(store, shape):
    w = store(jnp.ones((7, 5)))
    assert jax.jit(lambda x: einsum("btd,df->btf", x, w))(jnp.ones(shape)).shape == (*shape[:2], 5)


@pytest.mark.thorough_after(2)
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what XLA:CPU makes of products")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("backward", [False, True])
def test_compiled_products_take_their_operands_as_they_are(dtype, backward):
    """In the precision of the model: XLA:CPU once widened them in forward passes, whose products
    were half as fast.

    And without an array whose heads and widths of a head have changed places, which the sum over
    both once took.
    """
    B, T, D, N, H = 4, 128, 256, 4, 64
    x, weights = jnp.ones((B, T, D), dtype), [jnp.ones((D, N, H), dtype)] * 3
    total = lambda *operands: jnp.sum(attend(*operands), dtype=jnp.float32)
    text = (
        jax.jit(jax.grad(total, (0, 1, 2, 3)) if backward else attend)
        .lower(x, *weights)
        .compile()
        .as_text()
    )
    types = dict(re.findall(r"%?([\w.\-]+)(?: =|:) (\w+)\[", text))
    operands = [
        name
        for match in re.findall(r" dot\((.*?)\)", text)
        for name in re.findall(r"%([\w.\-]+)", match)
    ]
    assert len(operands) == 2 * (14 if backward else 5)
    assert {types[name] for name in operands} == {"bf16" if dtype == "bfloat16" else "f32"}
    assert not re.findall(rf"\[(?:{B},{T},{H},{N}|{H},{N},{D}|{D},{H},{N})\]", text)


@pytest.mark.parametrize("spec", ["btd,vd->btv", "bth,bsh->bts"])
@pytest.mark.parametrize(("lines", "products"), [(1, 1), (2, 2), (4, 4), (5, 1)])
def test_few_lines_are_multiplied_one_after_another(spec, lines, products):
    """On CPU, where XLA gives several lines to threads and waits for them."""
    x = jnp.ones((1, lines, 8))
    w = jnp.ones((16, 8) if spec.startswith("btd") else (1, 16, 8))
    text = jax.jit(partial(einsum, spec)).lower(x, w).as_text()
    assert len(re.findall(r"stablehlo\.dot_general", text)) == products
