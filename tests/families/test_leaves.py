"""Parameters that are put together on the host or on their devices: the same arrays."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

from jaxformer import families
from jaxformer.families import leaves
from tests import golden


def mesh(*shape):
    return Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), ("a", "b")[: len(shape)])


SHARDINGS = {
    "one device": lambda: SingleDeviceSharding(jax.devices()[3]),
    "copies": lambda: NamedSharding(mesh(4), P()),
    "layers": lambda: NamedSharding(mesh(2, 2), P("a", None, "b")),
    "one axis by both": lambda: NamedSharding(mesh(2, 4), P(None, ("b", "a"))),
    "the second axis": lambda: NamedSharding(mesh(4, 2), P(None, "a")),
}


@pytest.mark.parametrize("name", SHARDINGS)
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_parts_in_any_order_on_any_devices(name, data):
    """A leaf is the array of its parts, whatever axes its devices split."""
    shape = (4, 8, 2)
    depth = data.draw(st.integers(0, 2), "axes of the index")
    dtype = data.draw(st.sampled_from([np.float32, jnp.bfloat16, np.int8]), "dtype")
    expected = np.random.default_rng(0).integers(-9, 9, shape).astype(np.float32)
    numbers = data.draw(st.permutations(list(np.ndindex(*shape[:depth]))), "order")
    sharding = SHARDINGS[name]()
    found = []
    for limit in (0, 1 << 20):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(leaves, "HOST_BYTES", limit)
            leaf = leaves.empty_leaf(shape, dtype, sharding)
            for index in numbers:
                leaf.fill(index, expected[index])
            found.append(leaf.array())
    for array in found:
        assert array.sharding.is_equivalent_to(sharding, len(shape)) and array.dtype == dtype
        np.testing.assert_array_equal(np.asarray(array, np.float32), expected)


def halves(leaf):
    """A leaf split over two devices along its last even axis."""
    even = [i for i, size in enumerate(leaf.shape) if size % 2 == 0]
    return NamedSharding(mesh(2), P(*[None] * even[-1], "a") if even else P())


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gpt2", "mixtral", "t5", "gpt_oss"])
def test_a_folder_is_read_to_the_same_parameters(name, monkeypatch, tmp_path):
    """Leaves of any size, experts included, on one device and split over a mesh."""
    checkpoint = families.load(golden.folder(name))
    split = jax.tree.map(halves, checkpoint.params)
    monkeypatch.setattr(leaves, "HOST_BYTES", 0)
    for sharding in (None, split):
        again = families.load(golden.folder(name), sharding=sharding).params
        pairs = itertools.zip_longest(jax.tree.leaves(again), jax.tree.leaves(checkpoint.params))
        for found, expected in pairs:
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
