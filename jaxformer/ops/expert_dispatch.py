"""Tokens go to their experts, and the weighted outputs come back to the tokens.

`local` computes the experts of one device. `all_to_all` and `gather_scatter` are for experts that a
mesh splits. With a capacity an expert gets its tokens in one bucket of a fixed size, otherwise in
as many blocks as it needs (`_RowTable`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from jaxformer.ops.einsum import einsum, in_float32
from jaxformer.ops.expert_capacity import count_choices
from jaxformer.ops.feedforward import activated
from jaxformer.ops.grouped_forms import Blocks
from jaxformer.ops.grouped_product import GroupedImplementation, grouped
from jaxformer.ops.grouped_tpu import LANES
from jaxformer.sharding import alike, psum, reduce_scatter, wide_on_cpu

# (each token's weighted sum over its experts, the number of choices that experts served)
Outputs = tuple[Float[Array, "N D"], Int[Array, ""]]


class Experts(NamedTuple):
    """The weights of E experts: gate and up `[E, D, F]`, down `[E, F, D]`; and their activation."""

    gate: Any  # or None
    up: Any
    down: Any
    activation: Callable
    implementation: GroupedImplementation = None  # of the products without a capacity

    def __call__(self, product: Callable, x: Array) -> Array:
        up = product(x, self.up)
        hidden = (up,) if self.gate is None else (product(x, self.gate), up)
        return product(activated(self.activation, *hidden), self.down)


class Choices(NamedTuple):
    """Tokens and their choices of experts. All first choices come before all second ones."""

    tokens: Any  # [N, D]
    experts: Any  # [top_k, N]; the number of experts or more for a choice that no expert serves
    weights: Any  # [top_k, N]


def local(
    choices: Choices,
    experts: Experts,
    E: int,
    expert_capacity: int | None,
    choice_limit: int | None = None,
) -> Outputs:
    """The outputs of the experts of this device. E is the number of all experts.

    Each expert takes at most `expert_capacity` choices. None: all of them together take at most
    `choice_limit` choices.
    """
    expert_count = experts.up.shape[0]
    if expert_capacity is None:
        table, blocks = _blocks(choices.experts, expert_count, E, choice_limit)
        product = partial(_block_product, blocks, experts.implementation)
    else:
        table = _buckets(choices.experts, expert_count, expert_capacity)
        product = _bucket_product
    return _combine(table, experts(product, _take(choices.tokens, table.tokens)), choices)


def all_to_all(
    choices: Choices, experts: Experts, E: int, expert_capacity: int, axes: tuple[str, ...]
) -> Outputs:
    """Tokens travel to the devices of their experts, and the outputs travel back.

    A device sends a bucket of `expert_capacity` = C tokens to each expert. Each way moves E C D
    numbers, where C = ceil(capacity top_k n / E) for the n tokens of a device with one group
    (GShard, section 3.2).
    """
    table = _buckets(choices.experts, E, expert_capacity)
    expert_inputs = lax.all_to_all(_take(choices.tokens, table.tokens), axes, 0, 1, tiled=True)
    outputs = lax.all_to_all(experts(_bucket_product, expert_inputs), axes, 1, 0, tiled=True)
    return _combine(table, outputs, choices)


def gather_scatter(
    choices: Choices,
    experts: Experts,
    E: int,
    expert_capacity: int | None,
    axes: tuple[str, ...],
    tokens_split: bool,
    choice_limit: int | None,
) -> Outputs:
    """Each device computes the outputs of its experts for all tokens; the outputs are summed.

    P devices with n tokens each gather P n D numbers and scatter as many. A device keeps D and F
    numbers for each of P n min(top_k, E / P) choices, or of `choice_limit` choices.
    """
    expert_count = experts.up.shape[0]
    if tokens_split:
        tokens = wide_on_cpu(lambda x: lax.all_gather(x, axes, axis=0, tiled=True), choices.tokens)
        expert_ids = lax.all_gather(choices.experts, axes, axis=1, tiled=True)
        weights = lax.all_gather(choices.weights, axes, axis=1, tiled=True)
        choices = Choices(tokens, expert_ids, weights)
    local_ids = choices.experts - lax.axis_index(axes) * expert_count
    local_ids = jnp.where((local_ids >= 0) & (local_ids < expert_count), local_ids, expert_count)
    if choice_limit is not None:
        # this choice included
        earlier = jnp.cumsum(local_ids.reshape(-1) < expert_count).reshape(local_ids.shape)
        local_ids = jnp.where(earlier <= choice_limit, local_ids, expert_count)
    local_choices = choices._replace(experts=local_ids)
    out, served_count = local(local_choices, experts, E, expert_capacity, choice_limit)
    if tokens_split:
        return reduce_scatter(out, axes), served_count
    return psum(out, axes), served_count


class _RowTable(NamedTuple):
    """Where the tokens are in the input of experts, an array `[count, length, D]` of rows."""

    tokens: Array  # [count, length], the token in each row; N for an empty row
    row_of_choice: Array  # [top_k, N], the row of each choice; count * length without a row


def _take(x: Float[Array, "N D"], indices: Int[Array, "..."]) -> Float[Array, "... D"]:
    """x[indices]; zeros for the index N."""
    return x.at[indices].get(mode="fill", fill_value=0)


def _combine(table: _RowTable, y: Float[Array, "count length D"], choices: Choices) -> Outputs:
    """Each token's weighted sum over the outputs y of its experts; the number of served choices."""
    wide = in_float32(_take(y.reshape(-1, y.shape[-1]), table.row_of_choice))  # [top_k, N, D]
    sums = jnp.sum(wide * choices.weights[:, :, None].astype(wide.dtype), axis=0)
    return sums.astype(choices.tokens.dtype), jnp.sum(table.row_of_choice < table.tokens.size)


def _buckets(experts: Int[Array, "top_k N"], E: int, expert_capacity: int) -> _RowTable:
    """A bucket of `expert_capacity` rows for each expert. Later choices are dropped."""
    sizes = count_choices(experts, E)
    first = jnp.arange(E) * expert_capacity
    return _table(experts, sizes, first, expert_capacity, E, expert_capacity)


def _bucket_product(x, w):
    """The product of each bucket with the matrix of its expert."""
    return einsum("ebd,edf->ebf", *alike(x, w))


def _blocks(
    experts: Int[Array, "top_k N"], expert_count: int, E: int, choice_limit: int | None
) -> tuple[_RowTable, Blocks]:
    """The rows in blocks of one expert each, and the experts of the blocks.

    `choice_limit`: the largest number of choices of these experts, if it is known.
    """
    top_k, N = experts.shape
    # A quarter of the choices that an expert gets on average, as a multiple of 8. The last block of
    # an expert is half empty on average, so an eighth of the work is lost.
    length = min(8 * -(-experts.size // (32 * E)), 512)
    length += -length % LANES if length > LANES else 0
    sizes = count_choices(experts, expert_count)
    blocks = -(-sizes // length)  # [expert_count], the blocks of each expert
    ends = jnp.cumsum(blocks)
    if choice_limit is None:
        choice_limit = experts.size
    max_choices = min(N * min(top_k, expert_count), choice_limit)
    # of blocks, at most
    count = min((max_choices + expert_count * (length - 1)) // length, max_choices)
    block_experts = jnp.sum(ends[None] <= jnp.arange(count)[:, None], axis=1)
    block_experts = jnp.minimum(block_experts, expert_count - 1)
    table = _table(experts, sizes, (ends - blocks) * length, experts.size, count, length)
    return table, Blocks(block_experts, ends[-1])


def _block_product(blocks: Blocks, implementation: GroupedImplementation, x, w):
    """The product of each used block with the matrix of its expert."""
    return grouped(x, w, blocks, implementation)


def _table(
    experts: Int[Array, "top_k N"], sizes, first, expert_capacity: int, count: int, length: int
) -> _RowTable:
    """The first `expert_capacity` choices of each expert, in rows from `first[expert]` on."""
    E = sizes.shape[0]
    N = experts.shape[1]
    row_count = count * length
    order = jnp.argsort(experts.reshape(-1))  # stable
    expert = experts.reshape(-1)[order]
    clipped = jnp.minimum(expert, E - 1)
    rank = jnp.arange(order.size) - (jnp.cumsum(sizes) - sizes)[clipped]
    row = jnp.where((expert < E) & (rank < expert_capacity), first[clipped] + rank, row_count)
    tokens = jnp.full(row_count, N, order.dtype).at[row].set(order % N, mode="drop")
    row_of_choice = jnp.zeros_like(row).at[order].set(row, unique_indices=True)
    row_of_choice = row_of_choice.reshape(experts.shape)
    return _RowTable(tokens.reshape(count, length), row_of_choice)
