"""The joint `GroupedProduct`: a way to multiply blocks of tokens by the matrices of their experts.

`LOOP` is the plain form, and the oracle of the others. `ops.grouped_product.grouped` chooses.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

from jaxformer.errors import ConfigError
from jaxformer.ops.einsum import einsum
from jaxformer.ops.grouped_tpu import LANES, sum_blocks_on_tpu
from jaxformer.sharding import alike, is_explicit


class Blocks(NamedTuple):
    """Which expert each of n blocks of tokens has. The blocks of an expert follow each other."""

    experts: Any  # [n], in ascending order
    used: Any  # [], the number of blocks with tokens; they are the first ones


def never_refuses(x: Array, w: Array) -> None:
    """`GroupedProduct.refuses` of a form that computes all products."""
    return None


@dataclass(frozen=True)
class GroupedProduct:
    """One way to compute the products of experts. Ours and a user's own have the same rights.

    For x `[n, b, D]`, w `[E, D, F]` in the type of x, and `Blocks`:

    - `product(x, w, blocks) -> [n, b, F]`: x[i] w[experts[i]] for used blocks, zeros for the rest
    - `input_gradient(g [n, b, F], w, blocks) -> [n, b, D]`: g[i] w[experts[i]]^T, and zeros
    - `weight_gradient(x, g, blocks, E) -> [E, D, F]`: for each expert the sum of x[i]^T g[i] over
      its used blocks, in float32 or better
    - `refuses(x, w)`: the feature that the form lacks for such arrays, in a few words; None: none
    """

    name: str  # in messages and in the log
    product: Callable
    input_gradient: Callable
    weight_gradient: Callable
    refuses: Callable = never_refuses

    def __post_init__(self):
        if not (isinstance(self.name, str) and self.name):
            raise ConfigError(f"GroupedProduct.name={self.name!r}: expected a name, a text")
        for field in ("product", "input_gradient", "weight_gradient", "refuses"):
            if not callable(getattr(self, field)):
                raise ConfigError(f"GroupedProduct({self.name!r}).{field}: expected a function")


# A CPU: XLA:CPU (jax 0.10) multiplies every row by every expert in `lax.ragged_dot`. A loop skips
# unused blocks and does not read the weights of experts without tokens.
def _each_block(spec: str, x, w, blocks: Blocks):
    """The product of all used blocks by a loop."""

    def product(i):
        return einsum(spec, _at(x, i), _at(w, blocks.experts[i]))

    out, _ = alike(jnp.zeros((x.shape[0], *jax.eval_shape(product, 0).shape), x.dtype), x)
    return lax.fori_loop(0, blocks.used, lambda i, out: _put(out, product(i), i), out)


def sum_blocks(
    x: Float[Array, "n b D"], g: Float[Array, "n b F"], blocks: Blocks, count: int
) -> Float[Array, "E D F"]:
    """For each of `count` experts, the sum of x[i]^T g[i] over its blocks, in float32 or better."""

    def add(i, dw):
        product = einsum("bd,bf->df", _at(x, i), _at(g, i), dtype=dw.dtype)
        return _put(dw, _at(dw, blocks.experts[i]) + product, blocks.experts[i])

    zeros = jnp.zeros((count, x.shape[-1], g.shape[-1]), jnp.promote_types(x.dtype, jnp.float32))
    return lax.fori_loop(0, blocks.used, add, alike(zeros, x)[0])


def _at(x, i):
    return lax.dynamic_index_in_dim(x, i, keepdims=False)


def _put(x, entry, i):  # x.at[i].set is a scatter, which XLA:CPU does in float32
    return lax.dynamic_update_index_in_dim(x, entry, i, 0)


LOOP = GroupedProduct(
    "loop", partial(_each_block, "bd,df->bf"), partial(_each_block, "bf,df->bd"), sum_blocks
)


# A GPU: XLA:GPU, too, multiplies every row by every expert in `lax.ragged_dot`. In a loop of
# unknown length the host of a GPU waits for each step.
def _product_of_copies(spec: str, x, w, blocks: Blocks):
    """The product of all blocks, each with a copy of the matrix of its expert."""
    if len(w) == 1:
        y = einsum(spec.replace(",g", ","), x, w[0])
    else:
        y = einsum(spec, x, w[blocks.experts])
    return zero_unused(y, blocks)


def _sum_all_blocks(x, g, blocks: Blocks, count: int):
    """`sum_blocks` over all blocks, with zeros for unused ones: a loop of known length."""
    every = Blocks(blocks.experts, len(blocks.experts))
    return sum_blocks(x, zero_unused(g, blocks), every, count)


def zero_unused(x: Float[Array, "n b D"], blocks: Blocks) -> Float[Array, "n b D"]:
    """The used blocks of x, and zeros for the rest."""
    return jnp.where((jnp.arange(len(x)) < blocks.used)[:, None, None], x, 0)


COPIES = GroupedProduct(
    "copies",
    partial(_product_of_copies, "gtd,gdf->gtf"),
    partial(_product_of_copies, "gtf,gdf->gtd"),
    _sum_all_blocks,
)


# A TPU: XLA:TPU has a kernel for `lax.ragged_dot`, which sums in float32.
def _ragged_product(x, w, blocks: Blocks):
    """The product of all blocks by `lax.ragged_dot`."""
    # Under Explicit axes JAX infers no sharding. The arrays are those of one device.
    replicated = P() if is_explicit() else None
    lines = x.reshape(-1, x.shape[-1])
    y = lax.ragged_dot(lines, w, row_counts(x, blocks, len(w)), out_sharding=replicated)
    return y.reshape(*x.shape[:2], -1)


def row_counts(x: Float[Array, "n b D"], blocks: Blocks, count: int) -> Array:
    """The rows of each of `count` experts in their used blocks of x, `[count]`."""
    is_of_expert = blocks.experts[None] == jnp.arange(count)[:, None]
    is_used = jnp.arange(len(blocks.experts))[None] < blocks.used
    return jnp.sum(is_of_expert & is_used, axis=1, dtype=jnp.int32) * x.shape[1]


def _ragged_input_gradient(g, w, blocks: Blocks):
    return _ragged_product(g, w.swapaxes(1, 2), blocks)


def _sum_by_kernel(x, g, blocks: Blocks, count: int):
    """`sum_blocks` by a kernel on a TPU."""
    sums = partial(sum_blocks, count=count)
    if x.shape[1] % LANES:
        return sums(x, g, blocks)
    on_tpu = partial(sum_blocks_on_tpu, count=count)
    return lax.platform_dependent(x, g, blocks, tpu=on_tpu, default=sums)


RAGGED = GroupedProduct("ragged", _ragged_product, _ragged_input_gradient, _sum_by_kernel)


def _by_platform(part: str, x, y, blocks: Blocks, *options):
    """A function of `LOOP` on a CPU, of `COPIES` on a GPU, of `RAGGED` on others."""

    def of(form):
        return lambda x, y, blocks: getattr(form, part)(x, y, blocks, *options)

    return lax.platform_dependent(x, y, blocks, cpu=of(LOOP), cuda=of(COPIES), default=of(RAGGED))


XLA = GroupedProduct(
    "xla",
    partial(_by_platform, "product"),
    partial(_by_platform, "input_gradient"),
    partial(_by_platform, "weight_gradient"),
)
