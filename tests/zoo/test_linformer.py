"""Linformer against its definition step by step in float64, and lucidrains' package."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import masks
from jaxformer.ops.einsum import einsum
from jaxformer.zoo.linformer import attention as linformer_attention
from tests.witnesses import load

# float64 sums of some tens of terms of order one: 1e-12 leaves three digits for the order of
# summation.
FLOAT64 = dict(rtol=1e-12, atol=1e-12)
# float32 unit roundoff is 6e-8: two sums of ten products of order one before an exp that keeps
# their absolute error.
FLOAT32 = dict(rtol=2e-5, atol=2e-5)


def witness(query, key, value, E, F, lengths):
    """softmax(q (E^T k)^T / sqrt(H)) F^T v, one query of one head at a time, over each row's first
    `lengths` keys."""
    query, key, value, E, F = (np.asarray(a, np.float64) for a in (query, key, value, E, F))
    (B, T, N, H), K = query.shape, key.shape[2]
    of_head = lambda projection, k: projection if projection.ndim == 2 else projection[k]
    out = np.zeros((B, T, N, value.shape[-1]))
    for b, n in np.ndindex(B, N):
        k, end = n // (N // K), lengths[b]
        keys = sum(np.outer(of_head(E, k)[s], key[b, s, k]) for s in range(end))  # [R, H]
        values = sum(np.outer(of_head(F, k)[s], value[b, s, k]) for s in range(end))
        for t in range(T):
            weights = np.exp(keys @ query[b, t, n] / H**0.5)
            out[b, t, n] = weights / weights.sum() @ values
    return out


def case(seed, dtype=np.float32, per_head=False, T=5, S=7, L=9, R=3):
    rng = np.random.default_rng(seed)
    heads = (2,) if per_head else ()
    shapes = (2, T, 4, 3), (2, S, 2, 3), (2, S, 2, 6), (*heads, L, R), (*heads, L, R)
    return [jnp.asarray(rng.normal(size=shape) / np.sqrt(3), dtype) for shape in shapes]


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_equals_its_definition(per_head, padded):
    """Cross-attention of 5 queries to 7 keys by projections made for 9; grouped heads; with and
    without padding."""
    with jax.enable_x64(True):
        arrays = case(0, np.float64, per_head)
        lengths = [7, 4] if padded else [7, 7]
        mask = masks.lengths(kv=jnp.array(lengths)) if padded else None
        out = jax.jit(partial(linformer_attention, mask=mask))(*arrays)
        np.testing.assert_allclose(out, witness(*arrays, lengths), **FLOAT64)


@pytest.mark.thorough
def test_gradients_equal_finite_differences():
    with jax.enable_x64(True):
        point = [np.asarray(x) for x in case(1, np.float64)]
        rng = np.random.default_rng(0)
        g, mask = rng.normal(size=(2, 5, 4, 6)), masks.lengths(kv=jnp.array([7, 4]))
        f = jax.jit(lambda *a: (linformer_attention(*a, mask=mask) * g).sum())
        gradients = jax.jit(jax.grad(f, range(5)))(*point)
        for _ in range(3):
            step = [rng.normal(size=x.shape) for x in point]
            # h = 1e-5: the truncation error h^2 and the rounding error 1e-16 / h both stay below
            # 1e-9
            ends = [
                f(*(x + sign * 1e-5 * d for x, d in zip(point, step, strict=True)))
                for sign in (1, -1)
            ]
            slope = sum(np.vdot(d, x) for d, x in zip(step, gradients, strict=True))
            np.testing.assert_allclose((ends[0] - ends[1]) / 2e-5, slope, rtol=1e-7, atol=1e-8)


@pytest.mark.thorough
def test_the_ways_of_sharing_are_ways_of_passing_arrays():
    query, key, value, E, F = case(2)
    call = jax.jit(linformer_attention)
    headwise = call(query, key, value, E, F)
    # a copy for each of the two key heads
    each = call(query, key, value, jnp.stack([E, E]), jnp.stack([F, F]))
    np.testing.assert_allclose(each, headwise, **FLOAT32)
    # key-value
    np.testing.assert_allclose(call(query, key, value, E), call(query, key, value, E, E), **FLOAT32)
    assert np.abs(call(query, key, value, E) - headwise).max() > 1e-2


@pytest.mark.thorough
@pytest.mark.parametrize("by", ["lengths", "segments"])
def test_padding_does_not_matter(by):
    """A padded row = the row cut short; NaN in the padding reaches neither values nor gradients; an
    empty row is zeros."""
    query, key, value, E, F = case(3, T=7)
    ends = np.array([7, 4])
    padding = (np.arange(7)[None] >= ends[:, None])[..., None, None]
    dirty = [np.where(padding, np.float32("nan"), x) for x in (query, key, value)]
    if by == "lengths":
        mask = lambda ends: masks.lengths(ends, ends)
    else:
        mask = lambda ends: masks.segments((jnp.arange(7)[None] < ends[:, None]).astype(jnp.int32))

    @jax.jit
    def run(ends, *arrays):
        out, pullback = jax.vjp(lambda *a: linformer_attention(*a, mask=mask(ends)), *arrays)
        return out, pullback(jnp.ones_like(out))

    out, gradients = jax.tree.map(np.asarray, run(ends, *dirty, E, F))
    np.testing.assert_allclose(out[0], witness(query, key, value, E, F, ends)[0], **FLOAT32)
    np.testing.assert_allclose(out[1, :4], witness(query, key, value, E, F, ends)[1, :4], **FLOAT32)
    assert (out[1, 4:] == 0).all() and all(np.isfinite(x).all() for x in gradients)
    assert all((x[1, 4:] == 0).all() for x in gradients[:3])
    out, gradients = jax.tree.map(np.asarray, run(np.array([7, 0]), query, key, value, E, F))
    assert (out[1] == 0).all() and all((x[1] == 0).all() for x in gradients[:3])


@pytest.mark.thorough
def test_a_packed_row_is_nan_and_the_others_are_not():
    query, key, value, E, F = case(4, T=7)
    ids = jnp.array([[1, 1, 2, 2, 0, 0, 0], [3, 3, 3, 3, 3, 3, 0]])
    out = jax.jit(
        lambda ids: linformer_attention(query, key, value, E, F, mask=masks.segments(ids))
    )(ids)
    assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()


@pytest.mark.parametrize(
    "mask", [masks.causal(), masks.window(3, 3), masks.full() & masks.causal(), ~masks.causal()]
)
def test_masks_that_need_single_keys_are_refused_by_name(mask):
    with pytest.raises(NotImplementedError, match="linformer_attention") as error:
        linformer_attention(*case(5), mask=mask)
    assert str(mask) in str(error.value) and "attention(implementation='blockwise')" in str(
        error.value
    )


@pytest.mark.thorough
@pytest.mark.parametrize("per_head", [False, True])
def test_bfloat16(per_head):
    arrays = [x.astype(jnp.bfloat16) for x in case(7, per_head=per_head)]

    @jax.jit
    def run(*arrays):
        out, pullback = jax.vjp(linformer_attention, *arrays)
        return out, pullback(jnp.ones_like(out))

    out, gradients = run(*arrays)
    wide, wide_gradients = run(*(x.astype(jnp.float32) for x in arrays))
    assert out.dtype == jnp.bfloat16 and all(x.dtype == jnp.bfloat16 for x in gradients)
    np.testing.assert_allclose(wide, witness(*arrays, [7, 7]), **FLOAT32)
    for ours, theirs in zip((out, *gradients), (wide, *wide_gradients), strict=True):
        # E^T k, E^T v, weights, output and their cotangents are each rounded once, by 2^-9: some
        # eight of them in norm
        assert np.linalg.norm(np.float32(ours) - theirs) <= 8 * 2.0**-9 * np.linalg.norm(theirs)


@pytest.mark.parametrize("sharing", ["headwise", "one_kv_head", "key_value"])
def test_lucidrains(sharing):
    """Its module whole: projections of 17 positions on 11 tokens, shared by all heads. float64."""
    with jax.enable_x64(True):
        arrays = {name: jnp.asarray(x) for name, x in load("linformer").items()}
        w = {
            name.removeprefix(f"{sharing}/"): x
            for name, x in arrays.items()
            if name.startswith(f"{sharing}/")
        }

        @jax.jit
        def run(x, w):
            heads = lambda y: y.reshape(2, 11, -1, 4)
            project = lambda name: heads(einsum("btd,fd->btf", x, w[f"to_{name}.weight"]))
            key = project("k")
            value, F = (key, None) if sharing == "key_value" else (project("v"), w["proj_v"])
            out = linformer_attention(project("q"), key, value, w["proj_k"], F).reshape(2, 11, 12)
            return einsum("btf,df->btd", out, w["to_out.weight"]) + w["to_out.bias"][None, None]

        np.testing.assert_allclose(run(arrays["x"], w), w["out"], **FLOAT64)
