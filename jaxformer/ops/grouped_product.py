"""`grouped`: x[i] w[block_experts[i]], blocks of tokens times the matrix of their own expert.

There is one form for each kind of device. A CPU runs a loop over the blocks, a GPU copies the
matrices, and others call `jax.lax.ragged_dot`. On a TPU a kernel sums the gradients of the
matrices.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from jaxformer.ops.einsum import einsum
from jaxformer.sharding import alike, is_explicit

LANES = 128  # of a TPU: its kernel takes blocks of a multiple of this many rows
ADD, SET, ZERO = 1, 2, 3  # the actions of that kernel on a tile of a sum


def count_choices(experts, E):
    """The number of choices of each expert, `[E]`."""
    return jnp.sum(experts.reshape(-1, 1) == jnp.arange(E)[None], axis=0)


@jax.custom_vjp
def grouped(
    x: Float[Array, "n b D"],
    w: Float[Array, "E D F"],
    block_experts: Int[Array, " n"],
    used_blocks: Int[Array, ""],
):
    """x[i] w[block_experts[i]] for the first `used_blocks` blocks i of x; zeros for the rest.

    It has first derivatives in reverse mode. Raises NotImplementedError for second derivatives.
    """
    loop = partial(_each_block, "bd,df->bf")
    copies = partial(_product_of_copies, "gtd,gdf->gtf")
    return lax.platform_dependent(
        *alike(x, w.astype(x.dtype)),
        block_experts,
        used_blocks,
        cpu=loop,
        cuda=copies,
        default=_ragged,
    )


def _grouped_backward(residuals, g):
    return *_grouped_gradients(*residuals, g), None, None


@jax.custom_vjp
def _grouped_gradients(x, w, block_experts, used_blocks, g):
    """The gradients of x and w from the cotangent g."""
    loop = partial(_each_block, "bf,df->bd")
    copies = partial(_product_of_copies, "gtf,gdf->gtd")

    def ragged(g, w, *blocks):
        return _ragged(g, w.swapaxes(1, 2), *blocks)

    dx = lax.platform_dependent(
        *alike(g, w.astype(x.dtype)),
        block_experts,
        used_blocks,
        cpu=loop,
        cuda=copies,
        default=ragged,
    )
    sums = partial(_sum_blocks, len(w))
    sums_on_gpu = partial(_sum_all_blocks, len(w))
    sums_on_tpu = partial(_sum_on_tpu, len(w)) if x.shape[1] % LANES == 0 else sums
    dw = lax.platform_dependent(
        *alike(x, g), block_experts, used_blocks, tpu=sums_on_tpu, cuda=sums_on_gpu, default=sums
    )
    return dx, dw.astype(w.dtype)


def _second_derivatives(*_):
    raise NotImplementedError(
        "mixture: no second derivatives of experts without a limit; "
        "with a `capacity` they have them"
    )


_grouped_gradients.defvjp(_second_derivatives, _second_derivatives)


def _sum_blocks(
    count: int, x: Float[Array, "n b D"], g: Float[Array, "n b F"], block_experts, used_blocks
) -> Float[Array, "E D F"]:
    """For each of `count` experts, the sum of x[i]^T g[i] over its blocks, in float32 or better."""

    def add(i, dw):
        product = einsum("bd,bf->df", _at(x, i), _at(g, i), dtype=dw.dtype)
        return _put(dw, _at(dw, block_experts[i]) + product, block_experts[i])

    zeros = jnp.zeros((count, x.shape[-1], g.shape[-1]), jnp.promote_types(x.dtype, jnp.float32))
    return lax.fori_loop(0, used_blocks, add, alike(zeros, x)[0])


def _sum_all_blocks(count: int, x, g, block_experts, used_blocks):
    """`_sum_blocks` over all blocks, with zeros for unused ones.

    So the length of the loop is known. In a loop of unknown length the host of a GPU waits for each
    step.
    """
    return _sum_blocks(count, x, _zero_unused(g, used_blocks), block_experts, len(block_experts))


def _sum_on_tpu(count: int, x, g, block_experts, used_blocks, interpret=False):
    """`_sum_blocks` by a kernel.

    A tile of an expert's sum stays in fast memory while the blocks of that expert pass. In the loop
    of `_sum_blocks` each block reads and writes a whole sum. (`lax.ragged_dot_general` multiplies
    every row by every expert here, also on TPUs.)
    """
    from jax.experimental import pallas
    from jax.experimental.pallas import tpu

    n, length, D = x.shape
    F = g.shape[-1]
    d_tile = min(D, 512)
    f_tile = min(F, 1024)
    visits = _visits_of_blocks(count, block_experts, used_blocks)

    def x_block(f, d, i, expert, block, action):
        return block[i], 0, d

    def g_block(f, d, i, expert, block, action):
        return block[i], 0, f

    def out_block(f, d, i, expert, block, action):
        return expert[i], d, f

    spec = tpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3,
        grid=(pallas.cdiv(F, f_tile), pallas.cdiv(D, d_tile), n + count),
        in_specs=[
            pallas.BlockSpec((1, length, d_tile), x_block),
            pallas.BlockSpec((1, length, f_tile), g_block),
        ],
        out_specs=pallas.BlockSpec((1, d_tile, f_tile), out_block),
    )
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    axes = jax.typeof(x).manual_axis_type
    moved = (x.size + g.size) * x.dtype.itemsize + count * D * F * dtype.itemsize
    run = pallas.pallas_call(
        _sum_tile,
        grid_spec=spec,
        interpret=interpret,
        name="sum_blocks",
        out_shape=jax.ShapeDtypeStruct((count, D, F), dtype, manual_axis_type=axes),
        cost_estimate=pallas.CostEstimate(
            flops=2 * x.size * F, bytes_accessed=moved, transcendentals=0
        ),
        compiler_params=tpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
    )
    return run(*visits, x, g)


def _visits_of_blocks(count: int, block_experts, used_blocks) -> list[Array]:
    """The expert, the block and the action of each of n + `count` visits, for n blocks.

    The visits of an expert follow each other. An expert without a block is visited once, for zeros.
    The last visits repeat the one before them without an action.
    """
    n = len(block_experts)
    blocks = count_choices(jnp.where(jnp.arange(n) < used_blocks, block_experts, count), count)
    visits = jnp.maximum(blocks, 1)
    ends = jnp.cumsum(visits)
    starts = jnp.cumsum(visits) - visits
    visit = jnp.minimum(jnp.arange(n + count), ends[-1] - 1)
    expert = jnp.sum(ends[None] <= visit[:, None], axis=1)
    block_of_expert = visit - starts[expert]
    block = jnp.minimum((jnp.cumsum(blocks) - blocks)[expert] + block_of_expert, n - 1)
    first_action = jnp.where(blocks[expert] > 0, SET, ZERO)
    action = jnp.where(block_of_expert > 0, ADD, first_action)
    action = jnp.where(jnp.arange(n + count) > visit, 0, action)
    return [x.astype(jnp.int32) for x in (expert, block, action)]


def _sum_tile(expert, block, action, x, g, out):
    """A step of the kernel: one tile of an expert's sum, and one block of tokens."""
    from jax.experimental import pallas

    step = action[pallas.program_id(2)]

    def product():
        return lax.dot_general(
            x[0], g[0], (((0,), (0,)), ((), ())), preferred_element_type=out.dtype
        )

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
    """The product of all blocks by `lax.ragged_dot`, a kernel that sums in float32."""
    is_of_expert = block_experts[None] == jnp.arange(len(w))[:, None]
    is_used = jnp.arange(len(block_experts))[None] < used_blocks
    is_of_expert = is_of_expert & is_used
    # [E], the number of rows of each expert
    expert_lengths = jnp.sum(is_of_expert, axis=1, dtype=jnp.int32) * x.shape[1]
    # Under Explicit axes JAX infers no sharding. The arrays are those of one device.
    replicated = P() if is_explicit() else None
    lines = x.reshape(-1, x.shape[-1])
    y = lax.ragged_dot(lines, w, expert_lengths, out_sharding=replicated)
    return y.reshape(*x.shape[:2], -1)


def _product_of_copies(spec, x, w, block_experts, used_blocks):
    """The product of all blocks, each with a copy of the weight of its expert.

    XLA:GPU, too, multiplies every row by every expert in `lax.ragged_dot`.
    """
    if len(w) == 1:
        y = einsum(spec.replace(",g", ","), x, w[0])
    else:
        y = einsum(spec, x, w[block_experts])
    return _zero_unused(y, used_blocks)


def _zero_unused(x: Float[Array, "n b D"], used_blocks: Int[Array, ""]) -> Float[Array, "n b D"]:
    """The first `used_blocks` blocks of x, and zeros for the rest."""
    return jnp.where((jnp.arange(len(x)) < used_blocks)[:, None, None], x, 0)


def _each_block(spec, x, w, block_experts, used_blocks):
    """The product of all used blocks by a loop.

    XLA:CPU (jax 0.10) multiplies every row by every expert in `lax.ragged_dot`. A loop skips unused
    blocks and does not read the weights of experts without tokens.
    """

    def product(i):
        return einsum(spec, _at(x, i), _at(w, block_experts[i]))

    out, _ = alike(jnp.zeros((x.shape[0], *jax.eval_shape(product, 0).shape), x.dtype), x)
    return lax.fori_loop(0, used_blocks, lambda i, out: _put(out, product(i), i), out)


def _at(x, i):
    return lax.dynamic_index_in_dim(x, i, keepdims=False)


def _put(x, entry, i):  # x.at[i].set is a scatter, which XLA:CPU does in float32
    return lax.dynamic_update_index_in_dim(x, entry, i, 0)
