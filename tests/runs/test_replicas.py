"""A device that computes wrong in silence: one bit of one copy of a parameter, flipped in a
device's memory."""

import ctypes

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jaxformer.parallel import pmap
from jaxformer.runs.replicas import Diverged, check, check_pmapped, local_fingerprints


def mesh_of(axis_type=AxisType.Auto):
    return jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(axis_type,) * 2)


def state_on(mesh):
    """Leaves that are copied, split, and split in one of two directions; a typed key."""
    put = lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec))
    whole, split = jax.random.normal(jax.random.key(0), (8, 16)), jnp.arange(32.0).reshape(8, 4)
    return {
        "copied": put(whole, P()),
        "split": put(whole + 1, P("data", "fsdp")),
        "partly": put(split, P(None, "fsdp")),
        "half": put(whole.astype(jnp.bfloat16), P("data")),
        "step": put(jnp.int32(7), P()),
        "key": put(jax.random.key(1), P()),
    }


def flip(leaf, device, byte=5, bit=3):
    """Flips a bit where the device keeps its part of the array."""
    (shard,) = [shard for shard in leaf.addressable_shards if shard.device.id == device]
    address = shard.data.unsafe_buffer_pointer()
    ctypes.c_uint8.from_address(address + byte).value ^= 1 << bit


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_equal_copies_pass(axis_type):
    mesh = mesh_of(axis_type)
    with jax.set_mesh(mesh):
        check(mesh, state_on(mesh), 3)


@pytest.mark.parametrize(
    ("name", "device", "doubt"), [("copied", 5, False), ("partly", 2, True), ("half", 7, False)]
)
def test_a_flipped_bit_names_the_leaf_and_the_device(name, device, doubt):
    mesh = mesh_of()
    state = jax.block_until_ready(state_on(mesh))
    flip(state[name], device)
    with pytest.raises(Diverged) as caught:
        check(mesh, state, 40)
    text = str(caught.value)
    assert f"before step 40, {name} on device" in text and "suspect the hardware" in text
    assert ("cannot be known" in text) == doubt
    assert doubt or f"{name} on device {device} differs" in text


def test_the_program_is_compiled_once():
    mesh = mesh_of()
    before = local_fingerprints._cache_size()
    for step in range(3):
        check(mesh, state_on(mesh), step)
    assert local_fingerprints._cache_size() <= before + 1


def test_a_part_without_copies_cannot_be_checked():
    mesh = mesh_of()
    state = jax.block_until_ready(state_on(mesh))
    flip(state["split"], 6)
    check(mesh, state, 1)


def test_copies_of_pmap_are_compared_too():
    state = jax.block_until_ready(
        pmap.replicate({"a": jnp.arange(6.0), "step": jnp.int32(3)}, jax.devices())
    )
    check_pmapped(state, 5)
    flip(state["a"], 4)
    with pytest.raises(
        Diverged,
        match="before step 5, a on device 4 differs from its copies on devices 0, 1, 2, 3, 5, 6, 7",
    ):
        check_pmapped(state, 5)
