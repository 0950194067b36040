"""Forms for TPUs give the numbers of the plain forms, on any platform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxformer.ops import positions, tpu
from jaxformer.ops.positions import NTK, Rope, rope
from jaxformer.parallel import AXES


def angles(rng, shape, dtype=jnp.float32):
    turns = rng.uniform(-np.pi, np.pi, shape)
    return jnp.asarray(np.cos(turns), dtype), jnp.asarray(np.sin(turns), dtype)


def numbers(rng, shape, dtype):
    return jnp.asarray(rng.normal(size=shape), dtype)


@settings(deadline=None, max_examples=20)  # most of them compile
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["half", "interleaved"]),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 3]),
)
def test_a_rotation_of_whole_heads_is_that_of_pairs(seed, layout, dtype, pairs, texts):
    rng = np.random.default_rng(seed)
    x = numbers(rng, (3, 5, 2, 8), dtype)
    gradient = numbers(rng, x.shape, dtype)
    cos, sin = angles(rng, (texts, 5, 1, pairs))
    plain, pull_plain = jax.vjp(lambda x: positions.rotated_pairs(x, cos, sin, layout), x)
    whole, pull_whole = jax.vjp(lambda x: tpu.rotated(x, cos, sin, layout), x)
    # a product and a sum in float32: the compiler may round the product or not
    tolerance = 2 * float(jnp.finfo(dtype).eps) * float(jnp.abs(x).max())
    np.testing.assert_allclose(np.float32(whole), np.float32(plain), rtol=0, atol=tolerance)
    np.testing.assert_array_equal(whole[..., 2 * pairs :], x[..., 2 * pairs :])
    assert whole.dtype == plain.dtype == x.dtype
    (plain,), (whole,) = pull_plain(gradient), pull_whole(gradient)
    tolerance = 2 * float(jnp.finfo(dtype).eps) * float(jnp.abs(gradient).max())
    np.testing.assert_allclose(np.float32(whole), np.float32(plain), rtol=0, atol=tolerance)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_a_feature_takes_the_bits_of_the_other_one(layout):
    """A quarter turn moves every number of float32 to another place, also the smallest digit."""
    x = numbers(np.random.default_rng(0), (1, 1, 3, 128), "float32")
    cos, sin = jnp.zeros((1, 1, 1, 64)), jnp.ones((1, 1, 1, 64))
    with jax.default_matmul_precision("bfloat16"):
        found = tpu.rotated(x, cos, sin, layout)
    np.testing.assert_array_equal(found, positions.rotated_pairs(x, cos, sin, layout))


@pytest.mark.parametrize(
    ("dtype", "passes"), [("bfloat16", False), ("float16", True), ("float32", True)]
)
def test_only_bfloat16_is_multiplied_in_one_pass(dtype, passes):
    """A product of TPUs rounds its operands to bfloat16; float16 has three bits more."""
    x, angle = jnp.zeros((1, 1, 1, 8), dtype), jnp.zeros((1, 1, 1, 4))
    text = str(jax.make_jaxpr(lambda x: tpu.rotated(x, angle, angle, "half"))(x))
    assert ("HIGHEST" in text) == passes


def test_forward_mode_is_refused_in_words():
    x, angle = jnp.zeros((1, 1, 1, 8)), jnp.zeros((1, 1, 1, 4))
    with pytest.raises(NotImplementedError, match=r"rope on TPU: no forward mode .* jax\.grad"):
        jax.jvp(lambda x: tpu.rotated(x, angle, angle, "half"), (x,), (x,))


def test_it_passes_through_transformations():
    rng = np.random.default_rng(0)
    x = numbers(rng, (4, 2, 3, 2, 8), "float32")
    cos, sin = angles(rng, (1, 3, 1, 4))

    def loss(x, rotate):
        return (rotate(x, cos, sin, "half") ** 3).sum()

    for transform in (
        lambda f: jax.vmap(f),
        lambda f: jax.vmap(jax.grad(f)),
        lambda f: jax.vmap(jax.checkpoint(jax.grad(f))),
        lambda f: jax.vmap(jax.grad(lambda x: (jax.grad(f)(x) ** 2).sum())),
    ):
        found, expected = (
            transform(lambda x, rotate=rotate: loss(x, rotate))(x)
            for rotate in (tpu.rotated, positions.rotated_pairs)
        )
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "products"),
    [(Rope(), 1), (Rope(scaling=NTK(2.0, 8)), 0)],
    ids=["frequencies of the config", "frequencies of the text"],
)
def test_a_program_for_tpus_has_it(config, products):
    """Where frequencies depend on the text, cos and sin may have a gradient: pairs stay."""
    device = jax.sharding.AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    auto = (jax.sharding.AxisType.Auto,) * len(AXES)
    mesh = jax.sharding.AbstractMesh((1,) * len(AXES), AXES, auto, abstract_device=device)

    def program():  # another function each time: traces are kept
        def f(x, positions):
            return rope(x, positions, config)

        x = jax.ShapeDtypeStruct((1, 4, 2, 8), jnp.bfloat16)
        return str(jax.make_jaxpr(f)(x, jax.ShapeDtypeStruct((1, 4), jnp.int32)))

    assert "dot_general" not in program()
    with jax.sharding.use_abstract_mesh(mesh):
        assert program().count("dot_general") == products
