"""Each kernel that a GPU has, against the reference in float32: values and gradients, as
`check_kernel` compares them.

`make check-gpu` runs this folder. Without a GPU the same tests run on the CPU, with shorter rows
and without cuDNN.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.ops.attention import CUDNN, QUERY_BLOCKED, REFERENCE, TOKAMAX, attention
from jaxformer.ops.attention.kernel import Kernel
from jaxformer.ops.attention.ring import BLOCKWISE
from jaxformer.ops.grouped_forms import Blocks
from jaxformer.ops.grouped_product import grouped
from jaxformer.ops.tokamax import is_installed
from jaxformer.tools.kernel_check import CASES, Case, check_kernel

pytestmark = pytest.mark.gpu

ON_GPU = jax.default_backend() == "gpu"
LONG = 4160 if ON_GPU else 260
GROUPS = 4  # of cases, so that workers share them
CALLS = [  # kernel, dtype, head width
    ("reference", "bfloat16", 64),
    ("query_blocked", "bfloat16", 64),
    ("query_blocked", "float32", 64),
    ("blockwise", "bfloat16", 64),
    ("blockwise", "float32", 128),
    ("cudnn", "bfloat16", 64),
    ("cudnn", "bfloat16", 128),
    ("tokamax", "bfloat16", 64),
    ("tokamax", "bfloat16", 128),
    ("fastest", "bfloat16", 128),
    ("fastest", "float32", 64),
]


def fastest(query, key, value, call):
    """What `attention` takes where nobody names a kernel."""
    options = {name: getattr(call, name) for name in ("mask", "bias", "scale", "softcap", "sinks")}
    return attention(query, key, value, **options)


FASTEST = Kernel("fastest", fastest, lambda query, key, value, call: dropped(call))
KERNELS = {
    "reference": REFERENCE,
    "query_blocked": QUERY_BLOCKED,
    "blockwise": BLOCKWISE,
    "cudnn": CUDNN,
    "tokamax": TOKAMAX,
    "fastest": FASTEST,
}
LONG_CASES = (
    Case("causal", T=LONG, S=LONG),
    Case("causal segments", T=LONG, S=LONG),
    Case("causal window", T=LONG, S=LONG),
    Case("full", T=LONG, S=LONG - 1),
    Case("causal", T=1, S=LONG),
    Case("lengths", T=LONG, S=LONG, heads=(4, 4)),
)


def dropped(call):
    return None if call.dropout_seed is None else "dropout by a seed"


def kernel_of(name, dtype):
    if name == "cudnn" and not ON_GPU:
        pytest.skip("cuDNN needs a GPU")
    if name == "cudnn" and dtype == "float32":
        pytest.skip("cuDNN computes in 16 bits")
    if name == "tokamax" and not (ON_GPU and is_installed()):
        pytest.skip("tokamax needs a GPU and the extra `kernels`")
    return KERNELS[name]


@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.parametrize(("name", "dtype", "width"), CALLS)
def test_it_is_the_reference(name, dtype, width, group):
    kernel = kernel_of(name, dtype)
    check_kernel(
        kernel,
        cases=CASES[group::GROUPS],
        draws=0 if ON_GPU else 2,  # each draw is a program, and a GPU compiles slowly
        seed=group,
        dtype=jnp.dtype(dtype),
        head_width=width,
    )


@pytest.mark.parametrize("group", range(2))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["blockwise", "cudnn", "fastest"])
def test_it_is_the_reference_over_long_rows(name, dtype, group):
    kernel = kernel_of(name, dtype)
    check_kernel(kernel, cases=LONG_CASES[group::2], draws=0, dtype=jnp.dtype(dtype), head_width=64)


@pytest.mark.parametrize("length", [8, 100, 128])
@pytest.mark.parametrize("name", ["copies", "ragged", "tokamax", None])
def test_products_of_experts_are_those_of_the_loop(name, length):
    """Values and gradients in bfloat16, with unused blocks and an expert without one."""
    if name == "tokamax" and not (ON_GPU and is_installed()):
        pytest.skip("tokamax needs a GPU and the extra `kernels`")
    n, E, D, F = 7, 5, 128, 192
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (n, length, D), jnp.bfloat16)
    w = jax.random.normal(keys[1], (E, D, F))
    g = jax.random.normal(keys[2], (n, length, F), jnp.bfloat16)
    blocks = Blocks(jnp.array([0, 0, 1, 3, 4, 4, 4], jnp.int32), jnp.int32(5))

    @partial(jax.jit, static_argnums=0)
    def run(form, x, w, g):
        y, pullback = jax.vjp(lambda x, w: grouped(x, w, blocks, form), x, w)
        return y, *pullback(g)

    for found, expected in zip(run(name, x, w, g), run("loop", x, w, g), strict=True):
        found, expected = found.astype(jnp.float32), expected.astype(jnp.float32)
        # float32 sums in another order, rounded to 8 bits: a unit in the last place of the largest
        atol = float(jnp.max(jnp.abs(expected))) * 2.0**-7
        np.testing.assert_allclose(found, expected, rtol=0, atol=atol)
