"""tokamax, a package of kernels for GPUs: whether a program can call it, and products of experts.

It needs the extra `kernels`. tokamax (0.0.17) calls its interface unstable, so only this file and
`attention/tokamax.py` import it.
"""

import importlib.util
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.backend import get_default_device

from jaxformer.errors import install_command
from jaxformer.ops.grouped_forms import Blocks, GroupedProduct, row_counts, zero_unused
from jaxformer.sharding import auto_axis_names, platform, varying

# Their products of experts, in the order of preference. "mosaic" is written for Hopper and
# Blackwell. "triton" also needs the package jax-triton. On a CPU their definition of the result is
# all that runs: tests use it.
GROUPED = {"gpu": ("mosaic", "triton"), "cpu": ("xla",)}
TILE = 64  # rows and widths are multiples; others end with an error of the compiler


def is_installed() -> bool:
    """Whether tokamax is there. Nothing is imported: its import takes some seconds."""
    return importlib.util.find_spec("tokamax") is not None


def lacks_package() -> str | None:
    """What keeps this program from calling tokamax, in a few words; None: nothing."""
    if platform() not in ("gpu", "cpu"):
        return f"kernel for {platform()}"
    if get_default_device().platform != platform():  # it asks this device what to compile
        return f"{platform()} as jax.default_device"
    if not is_installed():
        return f"package tokamax (Python 3.12 or later): {install_command('kernels')}"
    return None


def declines(function: Any, *arrays: Any) -> str | None:
    """What the package itself refuses, such as a width, while `function(*arrays)` is traced.

    The arrays may be `jax.ShapeDtypeStruct`s.
    """
    if platform() == "cpu":  # its definition takes all calls
        return None
    try:
        jax.eval_shape(function, *arrays)
    except (NotImplementedError, ExceptionGroup) as error:
        first = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
        return f"such call: {' '.join(str(first).split())[:200]}"
    return None


def _numbers(x_summed: int, w_summed: int) -> lax.RaggedDotDimensionNumbers:
    """Rows of groups times the matrix of their group, summed over these axes of both."""
    return lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((x_summed,), (w_summed,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )


# rows of groups are summed: one matrix for each group
_SUMS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


def _product(numbers: lax.RaggedDotDimensionNumbers, x: Array, w: Array, blocks: Blocks) -> Array:
    y = _ragged_dot(numbers, _rows(x), w, row_counts(x, blocks, len(w)), x.dtype)
    # it leaves the rows of no group as they were in memory
    n, length = x.shape[:2]
    return zero_unused(y[: n * length].reshape(n, length, -1), blocks)


def _weight_gradient(x: Array, g: Array, blocks: Blocks, count: int) -> Array:
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return _ragged_dot(_SUMS, _rows(x), _rows(g), row_counts(x, blocks, count), wide)


def _rows(x: Array) -> Array:
    """The rows of all blocks; behind them, rows of no group fill the last tile."""
    rows = x.reshape(-1, x.shape[-1])
    return jnp.pad(rows, ((0, -len(rows) % TILE), (0, 0)))


def _ragged_dot(numbers, x: Array, w: Array, counts: Array, dtype: Any) -> Array:
    from tokamax import ragged_dot_general  # pyrefly: ignore[missing-import]

    names = GROUPED[platform()]
    if importlib.util.find_spec("jax_triton") is None:
        names = tuple(name for name in names if name != "triton")
    y = ragged_dot_general(
        x, w, counts, numbers, preferred_element_type=dtype, implementation=names
    )
    # its kernels do not say along which mesh axes their results differ
    return varying(y, jax.typeof(x).manual_axis_type.varying)


def _refuses(x: Array, w: Array) -> str | None:
    """The feature that tokamax lacks for such a product, in a few words; None: none."""
    if x.dtype.itemsize > 4:
        return str(x.dtype)
    if any(jax.sharding.get_abstract_mesh().shape[axis] > 1 for axis in auto_axis_names()):
        return "mesh axes that the compiler splits"
    if (reason := lacks_package()) is not None:
        return reason
    if any(width % TILE for width in w.shape[1:]) and platform() == "gpu":
        return f"matrices of {w.shape[1]} x {w.shape[2]}: it takes multiples of {TILE}"
    shapes = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(w.shape, x.dtype)
    return _declined(*shapes, get_default_device())


@cache
def _declined(x: jax.ShapeDtypeStruct, w: jax.ShapeDtypeStruct, device: Any) -> str | None:
    """`declines` for all products: a trace takes a second, and every layer asks."""
    return declines(_all_products, x, w)


def _all_products(x: Array, w: Array) -> tuple[Array, Array, Array]:
    blocks = Blocks(jnp.zeros(len(x), jnp.int32), jnp.int32(0))
    y = TOKAMAX_GROUPED.product(x, w, blocks)
    dx = TOKAMAX_GROUPED.input_gradient(y, w, blocks)
    return y, dx, TOKAMAX_GROUPED.weight_gradient(x, y, blocks, len(w))


TOKAMAX_GROUPED = GroupedProduct(
    "tokamax",
    partial(_product, _numbers(1, 1)),
    partial(_product, _numbers(1, 2)),
    _weight_gradient,
    _refuses,
)
