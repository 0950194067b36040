"""Products of experts: what users of other projects saw go wrong with grouped kernels."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import ops
from jaxformer.ops import tokamax
from jaxformer.ops.grouped_forms import Blocks
from jaxformer.ops.grouped_product import grouped
from jaxformer.ops.grouped_tpu import sum_blocks_on_tpu
from jaxformer.ops.tokamax import TOKAMAX_GROUPED
from tests.ops.test_grouped_product import computed, in_float64, stand_in  # noqa: F401

FORMS = "loop", "copies", "ragged", "tokamax"


# the documented definition in place of tokamax; rows of no group are NaN there
pytestmark = pytest.mark.usefixtures("stand_in")


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def arrays(experts, used, E, b=4, D=6, F=5):
    n = len(experts)
    blocks = Blocks(jnp.array(experts, jnp.int32), jnp.int32(used))
    return normal(0, n, b, D), normal(1, E, D, F), blocks, normal(2, n, b, F)


def check(form, *arguments):
    found = jax.jit(partial(computed, form))(*arguments)
    for one, other in zip(found, in_float64(*arguments), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
    return found


@pytest.mark.thorough
@pytest.mark.report(
    "openxla/tokamax#887",
    "openxla/tokamax#889",
    right="an expert without tokens has a gradient of zero",
)
@pytest.mark.parametrize("form", FORMS)
def test_an_expert_without_tokens_learns_nothing(form):
    _, _, dw = check(form, *arrays([1, 1, 4], 3, E=6))
    assert np.all(np.asarray(dw)[[0, 2, 3, 5]] == 0)


@pytest.mark.thorough
@pytest.mark.report(
    "pytorch/torchtitan#1237",
    "ROCm/aiter#575",
    right="rows of no expert are zeros, whatever a kernel leaves there, and reach no gradient",
)
@pytest.mark.parametrize("form", FORMS)
def test_rows_of_no_expert_are_zeros(form):
    x, w, blocks, g = arrays([0, 0, 1, 1], 2, E=2)
    y, dx, dw = check(form, x, w, blocks, g)
    assert np.all(np.asarray(y)[2:] == 0)
    assert np.all(np.asarray(dx)[2:] == 0)
    assert np.all(np.asarray(dw)[1] == 0)


@pytest.mark.thorough
@pytest.mark.report(
    "NVIDIA/TransformerEngine#3019",
    "pytorch/torchtitan#1166",
    right="a device whose experts get no token at all computes zeros, and zero gradients",
)
@pytest.mark.parametrize("form", FORMS)
def test_no_token_at_all(form):
    for array in check(form, *arrays([0, 1, 1], 0, E=3)):
        assert np.all(np.asarray(array) == 0)
    weights = [normal(seed, *shape) for seed, shape in enumerate([(6, 4), (4, 6, 8), (4, 8, 6)])]
    router, up, down = weights

    def loss(x, router, up, down):
        hidden = jnp.zeros((2, 3), bool)
        options = dict(top_k=2, implementation=form, padding_mask=hidden)
        out, _ = ops.mixture(x, router, None, up, down, jax.nn.gelu, **options)
        return jnp.sum(out)

    value, gradients = jax.value_and_grad(loss, range(4))(normal(9, 2, 3, 6), router, up, down)
    assert value == 0
    for gradient in gradients:
        assert np.all(np.asarray(gradient) == 0)


@pytest.mark.thorough
@pytest.mark.report(
    "tenstorrent/tt-metal#50669",
    right="a mixture is the sum over its experts for every number of tokens",
)
@pytest.mark.parametrize("form", FORMS)
def test_every_number_of_tokens(form):
    D, E = 6, 3
    router, up, down = normal(0, D, E), normal(1, E, D, 8), normal(2, E, 8, D)
    run = partial(ops.mixture, activation=jax.nn.relu, top_k=2, implementation=form)
    for tokens in (1, 2, 3, 7, 8, 9, 31, 32, 33, 63, 65):
        x = normal(tokens, 1, tokens, D)
        out, _ = run(x, router, None, up, down)
        routing = ops.route(x[0] @ router, 2)
        every = jnp.einsum("tef,efd->ted", jax.nn.relu(jnp.einsum("td,edf->tef", x[0], up)), down)
        chosen = jnp.take_along_axis(every, routing.experts[..., None], axis=1)
        expected = jnp.sum(chosen * routing.weights[..., None], axis=1)
        np.testing.assert_allclose(out[0], expected, atol=1e-4)


@pytest.mark.thorough
@pytest.mark.report(
    "AI-Hypercomputer/maxtext#1183",
    "huggingface/kernels-community#1153",
    "marin-community/marin#7484",
    right="widths that fill no tile are computed right, or refused by name",
    hit="tokamax 0.0.17 ends in an error of the compiler: `must have size smaller or a "
    "multiple of its tiling 64`",
)
@pytest.mark.parametrize(("D", "F"), [(96, 96), (130, 1100), (5, 160), (1, 3)])
def test_widths_that_fill_no_tile(D, F, monkeypatch):
    x, w, blocks, g = arrays([0, 2, 2], 3, E=3, b=128, D=D, F=F)
    sums = sum_blocks_on_tpu(x, g, blocks, 3, interpret=True)
    np.testing.assert_allclose(sums, in_float64(x, w, blocks, g)[2], atol=2e-4)
    for form in FORMS:
        found = grouped(x, w, blocks, form)
        np.testing.assert_allclose(found, in_float64(x, w, blocks, g)[0], atol=1e-4)
    monkeypatch.setattr(tokamax, "platform", lambda: "gpu")
    monkeypatch.setattr(tokamax, "get_default_device", lambda: SimpleNamespace(platform="gpu"))
    assert TOKAMAX_GROUPED.refuses(x, w) == f"matrices of {D} x {F}: it takes multiples of 64"
