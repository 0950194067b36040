"""Parameters: values that depend on path and key alone, and trees that agree with one another."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.nn.initializers import normal, ones, uniform, zeros

from jaxformer import params
from jaxformer.params import Spec

KEY = jax.random.key(0)


def matrix(*shape):
    return Spec(shape, tuple(f"axis{i}" for i in range(len(shape))), normal(0.02), ("axis0",))


TREE = {
    "embedding": {"tokens": matrix(6, 4), "positions": matrix(5, 4)},
    "layers": {
        "norm": {"scale": Spec((4,), ("embed",), ones), "bias": Spec((4,), ("embed",), zeros)},
        "query": {"kernel": matrix(4, 2, 2), "bias": Spec((2, 2), ("heads", "head"), zeros)},
    },
}


def init(tree, key=KEY, dtype=jnp.float32):
    """One program for all leaves: leaf by leaf, every shape would compile its own."""
    return jax.tree.map(np.asarray, jax.jit(lambda key: params.init(tree, key, dtype))(key))


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def nearly_equal(a, b):
    """Equal up to one float32 rounding: another program may fuse a multiply and an add."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2.0**-23), a, b)


names = st.text("abc", min_size=1, max_size=2)
shapes = st.dictionaries(
    names,
    st.recursive(
        st.lists(st.integers(1, 3), max_size=3).map(tuple),
        lambda inner: st.dictionaries(names, inner, max_size=3),
        max_leaves=5,
    ),
    max_size=3,
)


@settings(deadline=None, max_examples=20)
@given(shapes)
def test_all_trees_have_one_structure(shapes):
    """Values, abstract tree and masks fit each other under jax.tree.map, empty branches (a mixer
    without weights) included."""
    tree = jax.tree.map(
        lambda shape: matrix(*shape), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )
    values = jax.eval_shape(lambda key: params.init(tree, key, jnp.bfloat16), KEY)
    abstract = params.abstract(tree, jnp.bfloat16)
    jax.tree.map(lambda leaf, value: None, abstract, values)
    assert (
        jax.tree.structure(values)
        == jax.tree.structure(abstract)
        == jax.tree.structure(params.mask(tree, "a"))
    )
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(values)] == [
        (x.shape, x.dtype) for x in jax.tree.leaves(abstract)
    ]
    size = sum(x.size for x in jax.tree.leaves(values))
    assert params.count(tree) == params.count(abstract) == params.count(values) == size


def its_key(key, shape, dtype):
    """An initializer whose value is the key that it was given."""
    return jax.random.key_data(key)


@pytest.mark.thorough
def test_values_depend_on_key_and_path_alone():
    """Initializers are functions of their key, so it is enough to see that every leaf keeps its
    key."""
    tree = jax.tree.map(lambda spec: replace(spec, init=its_key), TREE)
    keys = init(tree)
    assert len({x.tobytes() for x in jax.tree.leaves(keys)}) == len(jax.tree.leaves(keys))
    reordered = {k: dict(reversed(v.items())) for k, v in reversed(tree.items())}
    equal(init(reordered), keys)
    fewer = {"layers": {"query": tree["layers"]["query"]}}
    equal(init(fewer), {"layers": {"query": keys["layers"]["query"]}})
    more = tree | {
        "kernel": tree["embedding"]["tokens"],
        "a": {"scale": tree["embedding"]["tokens"]},
    }
    equal({k: v for k, v in init(more).items() if k in tree}, keys)
    equal(params.init(tree, KEY), keys)  # without jit
    other = init(tree, jax.random.key(1))
    jax.tree.map(lambda a, b: np.testing.assert_array_compare(np.not_equal, a, b), keys, other)


@pytest.mark.thorough
def test_leaves_of_one_shape_differ_and_jit_changes_nothing():
    tree = {name: {"kernel": matrix(4, 4)} for name in ("query", "key")} | {"kernel": matrix(4, 4)}
    values = init(tree)
    assert len({x.tobytes() for x in jax.tree.leaves(values)}) == 3
    nearly_equal(params.init(tree, KEY), values)


@pytest.mark.thorough
def test_initializers_see_shape_and_dtype():
    values = init(TREE, dtype=jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(values)} == {jnp.dtype(jnp.bfloat16)}
    assert (values["layers"]["norm"]["scale"] == 1).all() and (
        values["layers"]["norm"]["bias"] == 0
    ).all()
    wide = init({"w": matrix(300, 300)})["w"]
    # standard error of a standard deviation over n draws: sigma / sqrt(2 n); five of them
    assert abs(np.std(wide) - 0.02) < 5 * 0.02 / math.sqrt(2 * wide.size)


@pytest.mark.thorough
def test_stacked_layers_draw_their_own_values():
    """Layer i is what the unstacked spec draws from the leaf's key folded with i; and the depth
    changes no layer."""
    stacked = params.stack(TREE["layers"], 3)
    values = init({"layers": stacked})["layers"]
    kernel = values["query"]["kernel"]
    assert kernel.shape == (3, 4, 2, 2) and len({layer.tobytes() for layer in kernel}) == 3
    path = {"layers": {"query": {"kernel": Spec((), (), its_key)}}}
    key = jax.random.wrap_key_data(jnp.asarray(jax.tree.leaves(init(path))[0]))
    alone = jax.jit(lambda i: normal(0.02)(jax.random.fold_in(key, i), (4, 2, 2), jnp.float32))
    for i in range(3):
        nearly_equal(kernel[i], alone(i))
    deeper = init({"layers": params.stack(TREE["layers"], 5)})["layers"]
    nearly_equal(jax.tree.map(lambda x: x[:3], deeper), values)


def counted(init, seen):
    """`init`, which notes the shapes that it is asked for."""

    def noted(key, shape, dtype):
        seen.append(shape)
        return init(key, shape, dtype)

    return noted


SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@pytest.mark.thorough
@settings(max_examples=10, deadline=None)
@given(
    shape=SHAPES,
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
    make=st.sampled_from([normal, uniform, jax.nn.initializers.truncated_normal]),
    impl=st.sampled_from(["threefry2x32", "rbg"]),
    partitionable=st.booleans(),
)
def test_numbers_in_a_row_are_those_of_the_shape(shape, dtype, make, impl, partitionable):
    init = make(0.02)
    key = jax.random.key(3, impl=impl)
    keys = jax.random.split(key, 3)

    def directly(key):
        return init(key, shape, dtype)

    def in_a_row(key):
        return params._values_in_a_row(init, key, shape, dtype)

    with jax.threefry_partitionable(partitionable):
        equal(in_a_row(key), directly(key))
        equal(jax.jit(in_a_row)(key), jax.jit(directly)(key))
        equal(jax.vmap(in_a_row)(keys), jax.vmap(directly)(keys))


def test_an_initializer_that_reads_its_shape_sees_all_of_it():
    seen = []

    def of_ones_own(key, shape, dtype):
        seen.append(shape)
        return jnp.zeros(shape, dtype)

    for init in (of_ones_own, partial(of_ones_own), counted(normal(0.02), seen)):
        assert params._values_in_a_row(init, KEY, (2, 3, 4), jnp.float32).shape == (2, 3, 4)
    assert seen == [(2, 3, 4)] * 3
    orthogonal = jax.nn.initializers.orthogonal()
    equal(
        params._values_in_a_row(orthogonal, KEY, (4, 4), jnp.float32),
        orthogonal(KEY, (4, 4), jnp.float32),
    )


def test_a_stack_names_its_axis_and_keeps_the_rest():
    kernel = params.stack(TREE, 3)["layers"]["query"]["kernel"]
    assert kernel.shape == (3, 4, 2, 2) and kernel.axes == ("layers", "axis0", "axis1", "axis2")
    assert kernel.contracts == ("axis0",)
    assert params.count(params.stack(TREE, 3)) == 3 * params.count(TREE)
    twice = params.stack(params.stack({"w": Spec((4, 2), ("embed", None), uniform())}, 3), 2)
    values = init(twice)["w"]
    assert (
        values.shape == (2, 3, 4, 2)
        and len({layer.tobytes() for layer in values.reshape(6, -1)}) == 6
    )


def test_count_needs_no_memory():
    huge = params.stack({"w": matrix(10**5, 10**5), "one": Spec((), (), ones)}, 10**4)
    assert params.count(huge) == params.count(params.abstract(huge)) == 10**14 + 10**4


def test_paths_and_masks():
    assert set(params.paths(TREE)) == {
        "embedding/tokens",
        "embedding/positions",
        "layers/norm/scale",
        "layers/norm/bias",
        "layers/query/kernel",
        "layers/query/bias",
    }
    chosen = lambda pattern: {
        path for path, yes in params.paths(params.mask(TREE, pattern)).items() if yes
    }
    assert chosen("kernel$") == {"layers/query/kernel"}
    assert chosen("^embedding/") == {"embedding/tokens", "embedding/positions"}
    assert chosen("norm|bias") == {"layers/norm/scale", "layers/norm/bias", "layers/query/bias"}
    assert chosen("nothing") == set() and chosen("") == set(params.paths(TREE))
    values = params.abstract(TREE)
    equal(params.mask(values, "bias"), params.mask(TREE, "bias"))
    # optax wants Python's
    assert all(type(x) is bool for x in jax.tree.leaves(params.mask(TREE, "bias")))


def test_a_spec_names_every_axis():
    with pytest.raises(ValueError, match=r"2 axes, names .* 1"):
        Spec((2, 3), ("embed",), zeros)
