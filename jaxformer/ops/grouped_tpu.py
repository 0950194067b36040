"""The gradient of the matrices of experts on a TPU, by a kernel of our own.

`grouped_forms.RAGGED` calls it.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from jaxformer.ops.expert_capacity import count_choices

LANES = 128  # of a TPU: the kernel takes blocks of a multiple of this many rows
ADD, SET, ZERO = 1, 2, 3  # the actions of the kernel on a tile of a sum


def sum_blocks_on_tpu(
    x: Float[Array, "n b D"],
    g: Float[Array, "n b F"],
    blocks: tuple[Array, Array],
    count: int,
    interpret: bool = False,
) -> Float[Array, "E D F"]:
    """`grouped_forms.sum_blocks` by a kernel, for b a multiple of `LANES`.

    A tile of an expert's sum stays in fast memory while the blocks of that expert pass. In the loop
    of `sum_blocks` each block reads and writes a whole sum. (`lax.ragged_dot_general` multiplies
    every row by every expert here, also on TPUs.)
    """
    from jax.experimental import pallas
    from jax.experimental.pallas import tpu

    n, length, D = x.shape
    F = g.shape[-1]
    d_tile = min(D, 512)
    f_tile = min(F, 1024)
    visits = _visits_of_blocks(count, *blocks)

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
