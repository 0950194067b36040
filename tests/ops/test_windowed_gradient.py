"""Sums that travel while products run: those of a plain sum, at the devices that keep them."""

from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxformer import ops
from jaxformer.ops import scattered_gradient
from jaxformer.ops.windowed_gradient import Ring, folded, ring_of, windowed
from jaxformer.parallel import Mesh, make_mesh

RINGS = {
    "eight": Ring(tuple(range(8))),
    "two": Ring((0, 1), inner=4),
    "folded": folded(4, inner=2),
    "folded eight": folded(8, inner=1),
    "any order": Ring((3, 0, 2, 1), inner=2),
}


@pytest.mark.thorough
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", RINGS)
def test_each_device_keeps_its_share_of_the_sum(name, axis):
    x = jax.random.normal(jax.random.key(0), (8, 16, 16))
    g = jax.random.normal(jax.random.key(1), (8, 16, 3))

    def on_each(x, g):
        def product(piece):
            return (piece[0].T if axis else piece[0]) @ g[0]

        return windowed(RINGS[name], product, x, axis + 1, "fsdp")

    mesh = make_mesh(Mesh(data=1, fsdp=8))
    options = dict(mesh=mesh, in_specs=(P("fsdp"), P("fsdp")), check_vma=False)
    found = jax.jit(jax.shard_map(on_each, out_specs=P("fsdp"), **options))(x, g)
    expected = np.einsum("bij,bjk->ik" if axis == 0 else "bji,bjk->ik", x, g)
    np.testing.assert_allclose(found, expected, atol=1e-4)  # sums of 128 products in float32


@pytest.mark.parametrize("size", [2, 16, 32, 256])
def test_a_folded_ring_visits_every_row_and_comes_back(size):
    ring = folded(size, 1)
    pairs = dict(ring.pairs())
    visited, device = [], 0
    for _ in range(size):
        visited.append(device)
        device = pairs[device]
    assert device == 0
    assert sorted(visited) == list(range(size))
    assert all(abs(a - b) <= 2 for a, b in pairs.items())


def test_only_tpus_in_number_sum_in_rings(monkeypatch):
    assert ring_of(16) is None  # of this CPU
    monkeypatch.setattr("jaxformer.ops.windowed_gradient.platform", lambda: "tpu")
    assert ring_of(8) is None
    assert ring_of(16) == Ring(tuple(range(16)))
    assert ring_of(256) == folded(16, 16)
    assert ring_of(48) is None
    assert ring_of(40) is None


@pytest.mark.thorough
@pytest.mark.parametrize("spec", ["btd,df->btf", "btf,fd->btd", "btnh,nhd->btd"])
@pytest.mark.parametrize("name", ["eight", "folded"])
def test_the_gradient_of_a_weight_is_that_of_one_device(monkeypatch, spec, name):
    monkeypatch.setattr(scattered_gradient, "ring_of", lambda size: RINGS[name])
    sizes = dict(b=8, t=4, d=32, f=6, n=2, h=3)
    x_axes, w_axes, out = ops.cpu.axes_of(spec)
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, g = (
        jax.random.normal(key, [sizes[axis] for axis in axes])
        for key, axes in zip(keys, (x_axes, w_axes, out), strict=True)
    )

    def pull(x, w, g):
        return jax.vjp(partial(ops.einsum, spec), x, w)[1](g)

    expected = jax.jit(pull)(x, w, g)
    with jax.set_mesh(make_mesh(Mesh(data=1, fsdp=8))):
        text = jax.jit(pull).lower(x, w, g).as_text()
        found = jax.jit(pull)(x, w, g)
    assert "collective_permute" in text
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)  # sums of some dozen products in float32
