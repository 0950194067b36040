"""Every form of the products of experts computes what a loop in NumPy computes, in float64.

The package tokamax is compared where it is installed (`make aot`). The fast tests put its
documented definition, that of `jax.lax.ragged_dot_general`, in its place.
"""

import importlib.util
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config.describe import execution_fields
from jaxformer.errors import ConfigError
from jaxformer.models.mixture import Mixture
from jaxformer.ops import grouped_product, tokamax
from jaxformer.ops.grouped_forms import COPIES, LOOP, Blocks, sum_blocks
from jaxformer.ops.grouped_product import FORMS, grouped
from jaxformer.ops.grouped_tpu import sum_blocks_on_tpu
from jaxformer.ops.mixture import mixture
from jaxformer.ops.tokamax import TOKAMAX_GROUPED
from jaxformer.parallel import Mesh, make_mesh


def documented(x, w, counts, numbers, *, preferred_element_type, implementation):
    """Rows of groups times the matrices of their groups; rows of no group are left as anything."""
    assert implementation == tokamax.GROUPED["cpu"]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y = jax.lax.ragged_dot_general(
        x, w, counts, ragged_dot_dimension_numbers=numbers, preferred_element_type=wide
    )
    if y.ndim == 2:
        rows = jnp.arange(len(y))[:, None]
        y = jnp.where(rows < jnp.sum(counts), y, jnp.nan)
    return y.astype(preferred_element_type)


@pytest.fixture
def stand_in(monkeypatch):
    package = SimpleNamespace(ragged_dot_general=documented)
    monkeypatch.setitem(sys.modules, "tokamax", package)
    monkeypatch.setattr(tokamax, "is_installed", lambda: True)


def drawn(seed, dtype=np.float32):
    """(x, w, blocks, g) of random sizes: some blocks unused, some experts without a block."""
    rng = np.random.default_rng(seed)
    n, b, D, F, E = (int(rng.integers(1, most)) for most in (9, 12, 20, 20, 6))
    experts = np.sort(rng.integers(0, E, n))
    used = rng.integers(0, n + 1)
    shapes = (n, b, D), (E, D, F), (n, b, F)
    x, w, g = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    return x, w, Blocks(jnp.asarray(experts, jnp.int32), jnp.int32(used)), g


def in_float64(x, w, blocks, g):
    """(the products, the gradients of x and w)."""
    x, w, g = (np.asarray(a, np.float64) for a in (x, w, g))
    y, dx, dw = np.zeros(g.shape), np.zeros(x.shape), np.zeros(w.shape)
    for i, expert in enumerate(np.asarray(blocks.experts)[: int(blocks.used)]):
        y[i] = x[i] @ w[expert]
        dx[i] = g[i] @ w[expert].T
        dw[expert] += x[i].T @ g[i]
    return y, dx, dw


def computed(implementation, x, w, blocks, g):
    y, pullback = jax.vjp(lambda x, w: grouped(x, w, blocks, implementation), x, w)
    return y, *pullback(g)


def check(implementation, seed, dtype=np.float32, atol=2e-5):
    arrays = drawn(seed, dtype)
    found = jax.jit(partial(computed, implementation))(*arrays)
    for one, other in zip(found, in_float64(*arrays), strict=True):
        assert one.dtype == dtype
        np.testing.assert_allclose(np.asarray(one, np.float64), other, rtol=0, atol=atol)


# float32 sums of up to 20 products, over up to 96 rows, of numbers of order one
@pytest.mark.parametrize("implementation", [None, "loop", "copies", "ragged", "tokamax"])
def test_it_is_a_loop_in_numpy(stand_in, implementation):
    check(implementation, seed=4)  # matrices of 17 x 10, unused blocks, idle experts


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("implementation", ["loop", "copies", "ragged", "tokamax"])
def test_it_is_a_loop_in_numpy_for_any_sizes(stand_in, implementation, seed):
    check(implementation, seed)


@pytest.mark.thorough
@pytest.mark.parametrize("implementation", ["loop", "copies", "ragged", "tokamax"])
def test_sums_of_16_bits_are_made_in_32(stand_in, implementation):
    """A result is rounded once, by 2^-9 of itself. Sums of 704 rows in 16 bits are off by more."""
    rng = np.random.default_rng(0)
    shapes = (12, 64, 48), (2, 48, 32), (12, 64, 32)
    x, w, g = (jnp.asarray(rng.uniform(0, 1, shape), jnp.bfloat16) for shape in shapes)
    blocks = Blocks(jnp.zeros(12, jnp.int32), jnp.int32(11))
    expected = in_float64(x, w, blocks, g)
    found = jax.jit(partial(computed, implementation))(x, w, blocks, g)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float64), other, rtol=2.0**-8)
    narrow = jnp.zeros((48, 32), jnp.bfloat16)
    for i in range(11):
        narrow = narrow + (x[i].T @ g[i]).astype(jnp.bfloat16)
    assert np.abs(np.asarray(narrow, np.float64) / expected[2][0] - 1).max() > 2.0**-8


@pytest.mark.aot
@pytest.mark.skipif(importlib.util.find_spec("tokamax") is None, reason="needs the extra kernels")
@pytest.mark.parametrize("seed", range(3))
def test_the_package_computes_what_a_loop_does(seed):
    check("tokamax", seed)


def problem(E=4, D=8, F=12, B=8):
    rng = np.random.default_rng(0)
    shapes = (B, 9, D), (D, E), (E, D, F), (E, D, F), (E, F, D)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def loss(*arrays, implementation=None):
    top_k = min(arrays[1].shape[1], 2)
    out, _ = mixture(*arrays, jax.nn.silu, top_k=top_k, implementation=implementation)
    return 64 * jnp.sum(jnp.sin(out / 64))  # outputs are some tens


def both(implementation):
    return jax.jit(jax.value_and_grad(partial(loss, implementation=implementation), range(5)))


@pytest.mark.thorough
@pytest.mark.parametrize("implementation", ["copies", "ragged", "tokamax"])
@pytest.mark.parametrize(
    "mesh", [Mesh(data=2, fsdp=4), Mesh(data=2, expert=4), Mesh(data=1, fsdp=2, tensor=4)], ids=repr
)
def test_a_mesh_computes_the_same(stand_in, implementation, mesh):
    arrays = problem()
    expected = both("loop")(*arrays)
    with jax.set_mesh(make_mesh(mesh)):
        found = both(implementation)(*arrays)
    # float32 sums of 8 to 72 products, in another order; gradients of some hundreds
    compare = partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-4)
    jax.tree.map(compare, found, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("E", [5, 1])
def test_a_gpu_computes_the_same_in_its_own_way(choose_gpu, E):
    """Without tokamax: a copy of a weight for each block, and a loop over all blocks."""
    arrays = problem(E)
    expected = both(None)(*arrays)
    choose_gpu()
    found = both(None)
    # float32 sums of 8 to 72 products, in another order; gradients of some hundreds
    compare = partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-4)
    jax.tree.map(compare, found(*arrays), expected)
    assert "ragged_dot" not in str(jax.make_jaxpr(found)(*arrays))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "D, F, experts, used",
    [(640, 130, [0, 0, 2, 4, 4, 4], 5), (8, 1100, [1, 1, 1, 3], 4), (16, 8, [1], 0)],
)
def test_a_tpus_sums_are_those_of_the_loop(D, F, experts, used):
    """Of one tile and of several that do not fill the matrix; unused blocks, and experts without
    one."""
    rng = np.random.default_rng(0)
    x, g = (
        jnp.asarray(rng.normal(size=(len(experts), 128, width)), jnp.bfloat16) for width in (D, F)
    )
    blocks = Blocks(jnp.array(experts), jnp.array(used))
    sums = sum_blocks(x, g, blocks, 5)
    found = sum_blocks_on_tpu(x, g, blocks, 5, interpret=True)
    # the same products; a block's sum may be made in another order: float32, 128 terms of order one
    np.testing.assert_allclose(found, sums, rtol=1e-5, atol=1e-4)
    idle = [e for e in range(5) if e not in experts[:used]]
    assert np.all(np.asarray(sums)[idle] == 0)


def test_a_form_of_a_researchers_own_has_the_same_rights():
    calls = []

    def product(x, w, blocks):
        calls.append("product")
        return LOOP.product(x, w, blocks)

    mine = replace(LOOP, name="mine", product=product)
    arrays = problem(B=2)
    assert loss(*arrays, implementation=mine) == loss(*arrays, implementation="loop")
    assert calls


@pytest.mark.parametrize("part", ["product", "input_gradient", "weight_gradient"])
def test_another_shape_is_refused_where_it_arises(part):
    """Otherwise a reshape of the model would speak of it."""
    short = replace(LOOP, name="mine", **{part: lambda *a: getattr(LOOP, part)(*a)[:, :, 1:]})
    arrays = problem(B=2)
    with pytest.raises(ConfigError, match=rf"GroupedProduct 'mine': {part} gave \(.*; expected"):
        jax.grad(loss, range(5))(*arrays, implementation=short)


def test_what_decides_numbers_names_a_run():
    mine = replace(LOOP, name="mine")
    for implementation in (None, "loop", "tokamax", COPIES):
        fields = execution_fields(Mixture(grouped_implementation=implementation))
        assert "grouped_implementation" in fields
    assert "grouped_implementation" not in execution_fields(Mixture(grouped_implementation=mine))


def test_an_unknown_form_is_refused_by_name(as_users_call):
    said = "grouped_implementation='fast': expected None, one of loop, copies, ragged, tokamax"
    with pytest.raises(ConfigError, match=said):
        Mixture(grouped_implementation="fast")
    with pytest.raises(ConfigError, match=r"grouped\(implementation='fast'\): expected"):
        loss(*problem(B=2), implementation="fast")
    with pytest.raises(ConfigError, match=r"GroupedProduct\('mine'\).refuses: expected a function"):
        replace(LOOP, name="mine", refuses=None)  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(ConfigError, match=r"GroupedProduct.name='': expected a name"):
        replace(LOOP, name="")


class Device(NamedTuple):
    platform: str


def refusal(dtype=jnp.float32, E=2, D=64, F=128):
    return TOKAMAX_GROUPED.refuses(jnp.zeros((3, 8, D), dtype), jnp.zeros((E, D, F)))


def test_what_tokamax_lacks_is_refused_by_name(stand_in, monkeypatch):
    assert refusal() is None
    with jax.enable_x64(True):
        assert refusal(jnp.float64) == "float64"
    with jax.set_mesh(make_mesh(Mesh(data=8))):
        assert refusal() == "mesh axes that the compiler splits"
    monkeypatch.setattr(tokamax, "platform", lambda: "tpu")
    assert refusal() == "kernel for tpu"
    monkeypatch.setattr(tokamax, "platform", lambda: "gpu")
    assert refusal() == "gpu as jax.default_device"
    monkeypatch.setattr(tokamax, "get_default_device", lambda: Device("gpu"))
    assert refusal(F=100) == "matrices of 64 x 100: it takes multiples of 64"

    def declines(*arrays, **options):
        raise ExceptionGroup("all", [NotImplementedError("float32\nis not supported")])

    monkeypatch.setattr(sys.modules["tokamax"], "ragged_dot_general", declines)
    assert refusal(E=3) == "such call: float32 is not supported"
    monkeypatch.setattr(tokamax, "is_installed", lambda: False)
    assert "pip install 'jaxformer[kernels]'" in refusal()
    said = "tokamax: no package tokamax .*; implementation='loop' has it"
    with pytest.raises(NotImplementedError, match=said):
        grouped(*drawn(0)[:3], "tokamax")


def test_a_gpu_says_why_it_copies(monkeypatch, caplog):
    """Once for each reason."""
    monkeypatch.setattr("jaxformer.ops.grouped_product.platform", lambda: "gpu")
    monkeypatch.setattr(tokamax, "platform", lambda: "gpu")
    grouped_product._log_once.cache_clear()  # of earlier tests
    arrays = drawn(0)[:3]
    with caplog.at_level("INFO", "jaxformer"):
        grouped(*arrays)
        grouped(*arrays)
    said = "experts on gpu: copies; tokamax has no gpu as jax.default_device"
    assert [record.message for record in caplog.records] == [said]


def test_every_form_has_a_name_of_its_own():
    assert [form.name for form in FORMS] == ["loop", "copies", "ragged", "tokamax"]
