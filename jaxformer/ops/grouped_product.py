"""`grouped`: x[i] w[experts[i]], blocks of tokens times the matrix of their own expert.

There is one form for each kind of device, a `GroupedProduct`: `grouped_forms` has those of XLA,
`tokamax` one for GPUs, of the extra `kernels`. A form of a researcher's own goes where a name of
ours goes.
"""

import logging
from functools import cache, partial
from typing import Any, TypeAlias

import jax
from jax import Array
from jaxtyping import Float

from jaxformer.errors import ConfigError
from jaxformer.ops.grouped_forms import COPIES, LOOP, RAGGED, XLA, Blocks, GroupedProduct
from jaxformer.ops.tokamax import TOKAMAX_GROUPED
from jaxformer.sharding import alike, platform

FORMS = LOOP, COPIES, RAGGED, TOKAMAX_GROUPED
# The name of a form of ours, or a form. None: on a GPU tokamax where it computes the product,
# because copies of matrices fill the memory; else what is fastest in XLA.
GroupedImplementation: TypeAlias = str | GroupedProduct | None


def grouped(
    x: Float[Array, "n b D"],
    w: Float[Array, "E D F"],
    blocks: Blocks,
    implementation: GroupedImplementation = None,
) -> Float[Array, "n b F"]:
    """x[i] w[experts[i]] for the used blocks i of x; zeros for the rest.

    It has first derivatives in reverse mode. Raises NotImplementedError for second derivatives, and
    for a form that refuses the product.
    """
    x, w = alike(x, w)
    return _grouped(_choose(implementation, x, w), x, w, blocks)


def _choose(implementation: GroupedImplementation, x: Array, w: Array) -> GroupedProduct:
    """The form that computes the product."""
    if implementation is None:
        return _fastest(x, w)
    if (expected := unknown_grouped(implementation)) is not None:
        raise ConfigError(f"grouped(implementation={implementation!r}): {expected}")
    form = _find(implementation)
    if (lacks := form.refuses(x, w)) is not None:
        raise NotImplementedError(f"{form.name}: no {lacks}; implementation='loop' has it")
    return form


def _find(implementation: str | GroupedProduct) -> GroupedProduct:
    """Our form of that name; a `GroupedProduct` is returned unchanged."""
    if isinstance(implementation, GroupedProduct):
        return implementation
    return next(form for form in FORMS if form.name == implementation)


def _fastest(x: Array, w: Array) -> GroupedProduct:
    """The fastest of our forms on the platform of the program."""
    if platform() != "gpu":
        return XLA
    lacks = TOKAMAX_GROUPED.refuses(x, w)
    if lacks is None:
        _log_once(TOKAMAX_GROUPED.name, "")
        return TOKAMAX_GROUPED
    _log_once(COPIES.name, f"; tokamax has no {lacks}")
    return XLA


@cache
def _log_once(name: str, why: str) -> None:
    logging.getLogger("jaxformer").info("experts on gpu: %s%s", name, why)


def unknown_grouped(implementation: GroupedImplementation) -> str | None:
    """The error text for a value that is no form; None if it is one."""
    names = [form.name for form in FORMS]
    known = isinstance(implementation, GroupedProduct | None) or implementation in names
    return None if known else f"expected None, one of {', '.join(names)}, or a GroupedProduct"


def has_own_form(implementation: GroupedImplementation) -> bool:
    """Whether a form is not ours, so that it may change numbers."""
    return isinstance(implementation, GroupedProduct) and implementation not in FORMS


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(form: GroupedProduct, x, w, blocks: Blocks):
    y = form.product(x, w.astype(x.dtype), blocks)
    return _checked(form, "product", y, (*x.shape[:2], w.shape[2])).astype(x.dtype)


def _forward(form: GroupedProduct, x, w, blocks: Blocks):
    return _grouped(form, x, w, blocks), (x, w, blocks)


def _backward(form: GroupedProduct, residuals, g):
    return *_gradients(form, *residuals, g), None


_grouped.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradients(form: GroupedProduct, x, w, blocks: Blocks, g):
    """The gradients of x and w from the cotangent g."""
    g, x, narrow = alike(g, x, w.astype(x.dtype))
    dx = _checked(form, "input_gradient", form.input_gradient(g, narrow, blocks), x.shape)
    dw = form.weight_gradient(x, g, blocks, len(w))
    dw = _checked(form, "weight_gradient", dw, w.shape)
    return dx.astype(x.dtype), dw.astype(w.dtype)


def _checked(form: GroupedProduct, part: str, array: Any, shape: tuple[int, ...]) -> Array:
    """The array, if it has this shape."""
    found = getattr(array, "shape", type(array).__name__)
    if found != shape:
        raise ConfigError(f"GroupedProduct {form.name!r}: {part} gave {found}; expected {shape}")
    return array


def _no_second_derivatives(*_):
    raise NotImplementedError(
        "mixture: no second derivatives of experts without a limit; "
        "with a `capacity` they have them"
    )


_gradients.defvjp(_no_second_derivatives, _no_second_derivatives)
