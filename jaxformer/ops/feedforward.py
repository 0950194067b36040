"""Position-wise feed-forward layers and their activations. `mlp` and `glu` are the layers."""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxformer.ops.einsum import Weight, add_bias, einsum, in_float32


def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x Phi(x), by erf and in float32. Hendrycks & Gimpel 2016, arXiv:1606.08415."""
    y = in_float32(x)
    return (0.5 * y * (1 + jax.lax.erf(y * math.sqrt(0.5)))).astype(x.dtype)


def gelu_tanh(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x (1 + tanh(y)) / 2 = x sigmoid(2 y) for y = sqrt(2 / pi) (x + 0.044715 x^3), in float32.

    The approximation of `gelu` in the same paper.
    """
    y = in_float32(x)
    return (y * jax.nn.sigmoid(math.sqrt(8 / math.pi) * (y + 0.044715 * y**3))).astype(x.dtype)


def laplace(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """(1 + erf((x - mu) / (sigma sqrt 2))) / 2 for mu = sqrt(1/2), sigma = sqrt(1 / (4 pi)).

    It is close to relu(x)^2 and bounded. Ma et al. 2022, arXiv:2209.10655, eq. 16.
    """
    y = (in_float32(x) - 0.707107) / (0.282095 * math.sqrt(2))
    return (0.5 * (1 + jax.lax.erf(y))).astype(x.dtype)


# jax.nn.gelu is an approximation by default. Here "gelu" is exact and the approximation is
# "gelu_tanh".
ACTIVATIONS: dict[str, Callable] = {
    "relu": jax.nn.relu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "silu": jax.nn.silu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "identity": lambda x: x,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "gelu_10": lambda x: jnp.clip(gelu(x), -10, 10),
    "relu6": jax.nn.relu6,
    "leaky_relu": jax.nn.leaky_relu,
    "hardswish": jax.nn.hard_swish,
    "mish": jax.nn.mish,
    "laplace": laplace,
}

# Shazeer 2020, arXiv:2002.05202: the published name of each gated layer, and its activation
GATES: dict[str, str] = {
    "glu": "sigmoid",
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "reglu": "relu",
    "bilinear": "identity",
}
# gated layers without a published name
GATES |= {f"{name}_glu": name for name in ACTIVATIONS if name not in GATES.values()}


def activated(
    activation: Callable, x: Float[Array, "..."], up: Float[Array, "..."] | None = None
) -> Float[Array, "..."]:
    """activation(x), or activation(x) * up for a gated layer.

    The backward pass computes the activation again: a slope needs one read of x, which is kept
    anyway. Keeping the float32 slopes took 5 % of a step on CPU.
    """

    def gated(x, up):
        return activation(x) if up is None else activation(x) * up

    return jax.checkpoint(gated)(x, up)


def mlp(
    x: Float[Array, "B T D"],
    up: Weight,
    down: Weight,
    activation: Callable,
    up_bias: Float[Array, " F"] | None = None,
    down_bias: Float[Array, " D"] | None = None,
    edit: Callable = lambda hidden: hidden,
) -> Float[Array, "B T D"]:
    """activation(x up + b_up) down + b_down. Vaswani et al. 2017, arXiv:1706.03762, eq. 2.

    `edit` is applied to the hidden activations before `down` reads them.
    """
    hidden = activated(activation, add_bias(einsum("btd,df->btf", x, up), up_bias))
    return add_bias(einsum("btf,fd->btd", edit(hidden), down), down_bias)


def glu(
    x: Float[Array, "B T D"],
    gate: Weight,
    up: Weight,
    down: Weight,
    activation: Callable,
    gate_bias: Float[Array, " F"] | None = None,
    up_bias: Float[Array, " F"] | None = None,
    down_bias: Float[Array, " D"] | None = None,
    edit: Callable = lambda hidden: hidden,
) -> Float[Array, "B T D"]:
    """(activation(x gate + b_gate) * (x up + b_up)) down + b_down.

    `edit` is applied to the hidden activations before `down` reads them. Shazeer 2020,
    arXiv:2002.05202, eq. 6.
    """
    wide = in_float32(x)
    product = partial(einsum, "btd,df->btf", dtype=x.dtype, operand_dtype=x.dtype)
    gates = add_bias(product(wide, gate), gate_bias)
    hidden = activated(activation, gates, add_bias(product(wide, up), up_bias))
    return add_bias(einsum("btf,fd->btd", edit(hidden), down), down_bias)


# the gated layers of Shazeer 2020 by name: `swiglu(x, gate, up, down)`
swiglu = partial(glu, activation=jax.nn.silu)
geglu = partial(glu, activation=gelu)
reglu = partial(glu, activation=jax.nn.relu)
bilinear = partial(glu, activation=ACTIVATIONS["identity"])
