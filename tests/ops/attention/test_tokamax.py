"""tokamax's attention: what `plan` asks for is what our masks mean; the rest is refused by name.

The package itself is compared with the reference where it is installed (`make aot`). The fast tests
put its documented definition in its place.
"""

import importlib.util
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import masks, ops
from jaxformer.ops import tokamax as package_checks
from jaxformer.ops.attention import tokamax
from jaxformer.ops.attention.call import Call
from jaxformer.parallel import Mesh, make_mesh
from jaxformer.tools.kernel_check import check_kernel

IDS = jnp.array([[1, 1, 1, 2, 2, 0, 0], [1, 2, 2, 2, 2, 3, 3]])
MASKS = [
    (masks.full(), 6, 9),
    (masks.causal(), 7, 7),
    (masks.causal(), 3, 8),
    (masks.causal().at(2), 7, 7),
    (masks.window(2), 7, 7),
    (masks.window(3, 1), 7, 7),
    (masks.causal() & masks.window(2, 3), 7, 7),
    (masks.causal() | masks.prefix(3), 7, 7),
    (masks.segments(IDS), 7, 7),
    (masks.causal() & masks.segments(IDS), 7, 7),
    (masks.window(1) & masks.segments(IDS) & masks.lengths(kv=jnp.array([4, 6])), 7, 7),
    (~masks.causal(), 7, 7),
]


@pytest.mark.parametrize("mask, T, S", MASKS, ids=str)
def test_a_plan_shows_what_the_mask_shows(mask, T, S):
    options, rest = tokamax.plan(mask, T, S)
    visible = tokamax._named(options, T, S)
    if rest is not None:
        visible = visible & rest.dense(T, S)
    shape = mask.dense(T, S).shape
    np.testing.assert_array_equal(jnp.broadcast_to(visible, shape), mask.dense(T, S))


def test_causality_and_windows_need_no_array():
    assert tokamax.plan(masks.causal(), 7, 7) == ({"is_causal": True}, None)
    assert tokamax.plan(masks.window(2), 7, 7) == ({"local_window_size": (2, 0)}, None)
    packed = masks.causal() & masks.segments(IDS)
    options, rest = tokamax.plan(packed, 7, 7)
    assert options == {"is_causal": True}
    assert rest.rule is masks.rules.segments


def documented(query, key, value, bias, mask, *, scale, logits_soft_cap, implementation, **options):
    """softmax(cap tanh((scale q k + bias) / cap)) v over the pairs that the mask shows."""
    assert implementation == tokamax.IMPLEMENTATIONS["cpu"]
    T, S, group = query.shape[1], key.shape[1], query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x.astype(jnp.float32), group, axis=2) for x in (key, value))
    scores = scale * jnp.einsum("btnh,bsnh->bnts", query.astype(jnp.float32), key)
    scores = scores if bias is None else scores + bias
    if logits_soft_cap is not None:
        scores = logits_soft_cap * jnp.tanh(scores / logits_soft_cap)
    visible = tokamax._named(options, T, S)
    visible = visible if mask is None else visible & mask
    # a row without keys would be NaN here, as softmax is
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, value).astype(query.dtype)


@pytest.fixture
def stand_in(monkeypatch):
    package = SimpleNamespace(dot_product_attention=documented)
    monkeypatch.setitem(sys.modules, "tokamax", package)
    monkeypatch.setattr(package_checks, "is_installed", lambda: True)


@pytest.mark.thorough
def test_its_definition_is_that_of_the_reference(stand_in):
    report = check_kernel(tokamax.TOKAMAX, draws=4)
    refused = [result for result in report.results if result.refuses]
    assert len(refused) < len(report.results) / 2


def arrays(T, S, dtype=jnp.float32, B=2):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (B, T, 4, 8), (B, S, 2, 8), (B, S, 2, 8)
    return [jax.random.normal(k, shape, dtype) for k, shape in zip(keys, shapes, strict=True)]


@pytest.mark.thorough
def test_a_query_without_keys_yields_zeros_and_no_gradient(stand_in):
    q, k, v = arrays(7, 7)
    mask = masks.causal() & masks.segments(jnp.array([[0, 0, 1, 1, 2, 2, 2]] * 2), IDS)

    def total(q, k, v, implementation):
        out = ops.attention(q, k, v, mask=mask, implementation=implementation)
        return jnp.sum(jnp.sin(out)), out

    found, expected = (
        jax.grad(total, argnums=(0, 1, 2), has_aux=True)(q, k, v, name)
        for name in ("tokamax", "reference")
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)
    assert (found[1] == 0).all(axis=(2, 3)).any()


@pytest.mark.thorough
def test_devices_compute_their_shares(stand_in):
    q, k, v = arrays(8, 8, B=4)
    ids = jnp.repeat(jnp.array([[1, 2]]), 4, axis=1)
    mask = masks.causal() & masks.segments(jnp.tile(ids, (4, 1)))
    expected = ops.attention(q, k, v, mask=mask, implementation="reference")
    with jax.set_mesh(make_mesh(Mesh(data=4, tensor=2))):
        found = jax.jit(lambda *x: ops.attention(*x, mask=mask, implementation="tokamax"))(q, k, v)
    np.testing.assert_allclose(found, expected, atol=2e-6)


def refusal(mask=None, T=7, S=7, dtype=jnp.float32, **options):
    q, k, v = arrays(T, S, dtype)
    return tokamax.refuses(q, k, v, Call(masks.causal() if mask is None else mask, **options))


def test_what_it_lacks_is_refused_by_name(stand_in, monkeypatch):
    assert refusal() is None
    assert refusal(dropout_seed=jnp.zeros(2, jnp.uint32)) == "dropout of ours"
    assert refusal(sinks=jnp.zeros(4)) == "sinks"
    assert refusal(bias=lambda q, kv: q) == "bias that is a function"
    assert refusal(T=0) == "empty queries or keys"
    monkeypatch.setattr(tokamax, "MOST_BYTES", 2 * 7 * 7 - 1)
    assert "which would be an array" in refusal(masks.segments(IDS))
    monkeypatch.setattr(package_checks, "is_installed", lambda: False)
    assert "pip install 'jaxformer[kernels]'" in refusal()
    monkeypatch.setattr(package_checks, "platform", lambda: "tpu")
    assert refusal() == "kernel for tpu"


@pytest.mark.parametrize(
    "error",
    [NotImplementedError("head width 8"), ExceptionGroup("all", [NotImplementedError("width 8")])],
    ids=["one", "all"],
)
def test_what_the_package_declines_is_refused_by_its_words(stand_in, monkeypatch, error):
    """On a GPU it has several kernels, and each may decline."""

    def declines(*arrays, **options):
        raise error

    assert refusal() is None  # on this CPU
    monkeypatch.setattr(tokamax, "platform", lambda: "gpu")
    monkeypatch.setattr(package_checks, "platform", lambda: "gpu")
    there = SimpleNamespace(platform="gpu")
    monkeypatch.setattr(package_checks, "get_default_device", lambda: there)
    monkeypatch.setattr(sys.modules["tokamax"], "dot_product_attention", declines)
    assert "width 8" in refusal(scale=0.5)


@pytest.mark.aot
@pytest.mark.skipif(importlib.util.find_spec("tokamax") is None, reason="needs the extra kernels")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_package_computes_what_the_reference_does(dtype):
    check_kernel(tokamax.TOKAMAX, draws=6, dtype=dtype)
