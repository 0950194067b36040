"""Products of blocks of rows, each with the matrix of its own expert: one form for each kind of device.

`grouped` is x[i] w[block_experts[i]]. A CPU and a GPU take a loop or copies of the matrices, others `jax.lax.ragged_dot`. A TPU
sums the gradients of the matrices by a kernel.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from jaxformer.ops.einsum import einsum
from jaxformer.sharding import (
    alike,
    is_explicit,
)  # fmt: skip

LANES = 128  # of a TPU: rows of a block that its kernel takes
ADD, SET, ZERO = 1, 2, 3  # what that kernel does with a tile of a sum


def count_choices(experts, E):
    return jnp.sum(experts.reshape(-1, 1) == jnp.arange(E)[None], axis=0)


@jax.custom_vjp
def grouped(x: Float[Array, "n b D"], w: Float[Array, "E D F"], block_experts: Int[Array, " n"], used_blocks: Int[Array, ""]):
    """x[i] w[block_experts[i]] for the first `used_blocks` blocks i of x, zeros for the rest.

    Only reverse mode, first order. Raises NotImplementedError for second derivatives.
    """
    loop, copies = partial(_each_block, "bd,df->bf"), partial(_product_of_copies, "gtd,gdf->gtf")
    return lax.platform_dependent(
        *alike(x, w.astype(x.dtype)), block_experts, used_blocks, cpu=loop, cuda=copies, default=_ragged
    )


def _grouped_backward(residuals, g):
    return *_grouped_gradients(*residuals, g), None, None


@jax.custom_vjp
def _grouped_gradients(x, w, block_experts, used_blocks, g):
    """The gradients of x and w."""
    loop, copies = partial(_each_block, "bf,df->bd"), partial(_product_of_copies, "gtf,gdf->gtd")

    def ragged(g, w, *blocks):
        return _ragged(g, w.swapaxes(1, 2), *blocks)

    dx = lax.platform_dependent(*alike(g, w.astype(x.dtype)), block_experts, used_blocks, cpu=loop, cuda=copies, default=ragged)
    each = partial(_sum_blocks, len(w))

    # in a loop of unknown length, a GPU's host waits for each step
    def all_blocks(x, g, block_experts, used_blocks):
        return each(x, _zero_unused(g, used_blocks), block_experts, len(block_experts))

    kernel = partial(_sum_on_tpu, len(w)) if x.shape[1] % LANES == 0 else each
    dw = lax.platform_dependent(*alike(x, g), block_experts, used_blocks, tpu=kernel, cuda=all_blocks, default=each)
    return dx, dw.astype(w.dtype)


def _second_derivatives(*_):
    raise NotImplementedError("mixture: no second derivatives of experts without a limit; with a `capacity` they have them")


_grouped_gradients.defvjp(_second_derivatives, _second_derivatives)


def _sum_blocks(
    count: int, x: Float[Array, "n b D"], g: Float[Array, "n b F"], block_experts, used_blocks
) -> Float[Array, "E D F"]:
    """Of each of `count` experts, the sum of x[i]^T g[i] over its blocks, in float32 or better."""

    def add(i, dw):
        product = einsum("bd,bf->df", _at(x, i), _at(g, i), dtype=dw.dtype)
        return _put(dw, _at(dw, block_experts[i]) + product, block_experts[i])

    zeros = jnp.zeros((count, x.shape[-1], g.shape[-1]), jnp.promote_types(x.dtype, jnp.float32))
    return lax.fori_loop(0, used_blocks, add, alike(zeros, x)[0])


def _sum_on_tpu(count: int, x, g, block_experts, used_blocks, interpret=False):
    """The same by a kernel: a tile of an expert's sum stays in fast memory while that expert's blocks pass.

    In the loop each block reads and writes a whole sum. (`lax.ragged_dot_general` multiplies every row by every expert here,
    also on TPUs.)
    """
    from jax.experimental import pallas
    from jax.experimental.pallas import tpu

    (n, _, D), F, (tile, across) = x.shape, g.shape[-1], (min(x.shape[-1], 512), min(g.shape[-1], 1024))
    # an expert without a block is visited once, for zeros
    blocks = count_choices(jnp.where(jnp.arange(n) < used_blocks, block_experts, count), count)
    visits = jnp.maximum(blocks, 1)
    ends, starts = jnp.cumsum(visits), jnp.cumsum(visits) - visits
    visit = jnp.minimum(jnp.arange(n + count), ends[-1] - 1)
    expert = jnp.sum(ends[None] <= visit[:, None], axis=1)
    block_of_expert = visit - starts[expert]
    block = jnp.minimum((jnp.cumsum(blocks) - blocks)[expert] + block_of_expert, n - 1)
    action = jnp.where(
        jnp.arange(n + count) > visit, 0, jnp.where(block_of_expert > 0, ADD, jnp.where(blocks[expert] > 0, SET, ZERO))
    )

    spec = tpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3, grid=(pallas.cdiv(F, across), pallas.cdiv(D, tile), n + count),
        in_specs=[
            pallas.BlockSpec((1, x.shape[1], tile), lambda f, d, i, expert, block, action: (block[i], 0, d)),
            pallas.BlockSpec((1, x.shape[1], across), lambda f, d, i, expert, block, action: (block[i], 0, f)),
        ],
        out_specs=pallas.BlockSpec((1, tile, across), lambda f, d, i, expert, block, action: (expert[i], d, f)),
    )  # fmt: skip
    dtype, axes = jnp.promote_types(x.dtype, jnp.float32), jax.typeof(x).manual_axis_type
    moved = (x.size + g.size) * x.dtype.itemsize + count * D * F * dtype.itemsize
    run = pallas.pallas_call(
        _sum_tile, grid_spec=spec, interpret=interpret, name="sum_blocks",
        out_shape=jax.ShapeDtypeStruct((count, D, F), dtype, manual_axis_type=axes),
        cost_estimate=pallas.CostEstimate(flops=2 * x.size * F, bytes_accessed=moved, transcendentals=0),
        compiler_params=tpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )  # fmt: skip
    return run(*(a.astype(jnp.int32) for a in (expert, block, action)), x, g)


def _sum_tile(expert, block, action, x, g, out):
    """A step of that kernel, on a tile of one expert's sum and one block of rows."""
    from jax.experimental import pallas

    step = action[pallas.program_id(2)]

    def product():
        return lax.dot_general(x[0], g[0], (((0,), (0,)), ((), ())), preferred_element_type=out.dtype)

    @pallas.when(step == ADD)
    def _():
        out[0] += product()

    @pallas.when(step == SET)
    def _():
        out[0] = product()

    @pallas.when(step == ZERO)
    def _():
        out[0] = jnp.zeros_like(out[0])


grouped.defvjp(lambda *args: (grouped(*args), args), _grouped_backward)


def _ragged(x, w, block_experts, used_blocks):
    """The product of all blocks by the chip's own kernel, which sums in float32."""
    is_of_expert = (block_experts[None] == jnp.arange(len(w))[:, None]) & (jnp.arange(len(block_experts))[None] < used_blocks)
    expert_lengths = jnp.sum(is_of_expert, axis=1, dtype=jnp.int32) * x.shape[1]  # of each expert
    replicated = P() if is_explicit() else None  # a device's own arrays; JAX infers no sharding under Explicit axes
    return lax.ragged_dot(x.reshape(-1, x.shape[-1]), w, expert_lengths, out_sharding=replicated).reshape(*x.shape[:2], -1)


def _product_of_copies(spec, x, w, block_experts, used_blocks):
    """The product of all blocks, each with a copy of its expert's weight: XLA:GPU multiplies every row by every expert, too."""
    y = einsum(spec.replace(",g", ","), x, w[0]) if len(w) == 1 else einsum(spec, x, w[block_experts])
    return _zero_unused(y, used_blocks)


def _zero_unused(x: Float[Array, "n b D"], used_blocks: Int[Array, ""]) -> Float[Array, "n b D"]:
    """The first `used_blocks` blocks of x, and zeros for the rest."""
    return jnp.where((jnp.arange(len(x)) < used_blocks)[:, None, None], x, 0)


# XLA:CPU (jax 0.10) multiplies every row by every expert in `lax.ragged_dot`. A loop does not visit unused blocks, nor read the
# weights of experts without tokens.
def _each_block(spec, x, w, block_experts, used_blocks):
    def product(i):
        return einsum(spec, _at(x, i), _at(w, block_experts[i]))

    out, _ = alike(jnp.zeros((x.shape[0], *jax.eval_shape(product, 0).shape), x.dtype), x)
    return lax.fori_loop(0, used_blocks, lambda i, out: _put(out, product(i), i), out)


def _at(x, i):
    return lax.dynamic_index_in_dim(x, i, keepdims=False)


def _put(x, entry, i):  # x.at[i].set is a scatter, which XLA:CPU does in float32
    return lax.dynamic_update_index_in_dim(x, entry, i, 0)
