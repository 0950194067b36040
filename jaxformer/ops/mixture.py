"""Routed experts: each token goes through the few feed-forward layers that a router picks for it.

Shazeer et al. 2017, arXiv:1701.06538; GShard, Lepikhin et al. 2020, arXiv:2006.16668; Switch, Fedus et al. 2021,
arXiv:2101.03961; ST-MoE, Zoph et al. 2022, arXiv:2202.08906; Mixtral, Jiang et al. 2024, arXiv:2401.04088.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Int

from jaxformer.errors import ConfigError
from jaxformer.ops.einsum import einsum, in_float32
from jaxformer.ops.feedforward import activated
from jaxformer.ops.grouped_product import LANES, count_choices, grouped
from jaxformer.sharding import (
    PARAMETERS,
    alike,
    auto_axis_names,
    is_explicit,
    mesh_axes,
    psum,
    psum_scatter,
    varying,
    wide_on_cpu,
    with_sharding,
)  # fmt: skip

Outputs = tuple[
    Float[Array, "N D"], Int[Array, ""]
]  # each token's weighted sum over its experts; the number of choices that experts served


class Routing(NamedTuple):
    """The experts of each token, best first, and their weights."""

    weights: Array  # [.., top_k]
    experts: Array  # [.., top_k]
    probabilities: Array  # [.., E], the softmax over all experts


class RoutingStatistics(NamedTuple):
    """What the router did with the tokens that are no padding."""

    fraction: Array  # [E], choices of each expert a token; the sum is top_k
    probability: Array  # [E], mean of the softmax
    dropped: Array  # share of the choices beyond the capacity of their expert
    z: Array  # the router's z-loss, which keeps logits small: the mean of logsumexp(logits)^2. ST-MoE, eq. 5


def route(logits: Float[Array, "*batch E"], top_k: int, normalise: bool = True) -> Routing:
    """The top_k largest of softmax(logits), in float32 or better; `normalise` makes their weights sum to one.

    With it this is Mixtral (section 2.1), without it Switch (eq. 2). Of equal ones the first expert wins.
    """
    probabilities = jax.nn.softmax(in_float32(logits), axis=-1)
    weights, experts = lax.top_k(probabilities, top_k)
    if normalise:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return Routing(weights, experts, probabilities)


def balance_loss(fraction: Float[Array, " E"], probability: Float[Array, " E"]) -> Float[Array, ""]:
    """E sum_e fraction_e probability_e: from top_k, where experts get the same, up to E. Switch, eq. 4-6."""
    return fraction.shape[0] * jnp.sum(fraction * probability)


class Experts(NamedTuple):
    """The weights of E experts, up and gate `[E, D, F]`, down `[E, F, D]`, and their activation."""

    gate: Any  # or None
    up: Any
    down: Any
    activation: Callable

    def __call__(self, product: Callable, x: Array) -> Array:
        up = product(x, self.up)
        hidden = (up,) if self.gate is None else (product(x, self.gate), up)
        return product(activated(self.activation, *hidden), self.down)


class Choices(NamedTuple):
    """Tokens and their choices: all first choices come before all second ones."""

    tokens: Any  # [N, D]
    experts: Any  # [top_k, N]; a number beyond the experts for a choice that no expert serves
    weights: Any  # [top_k, N]


class Split(NamedTuple):
    """The mesh axes, longer than one, over which B, T, E, D (of weights) and F are split."""

    batch: tuple[str, ...]
    length: tuple[str, ...]
    experts: tuple[str, ...]
    embed: tuple[str, ...]
    mlp: tuple[str, ...]


def mixture(
    x: Float[Array, "B T D"], router: Float[Array, "D E"], gate: Float[Array, "E D F"] | None, up: Float[Array, "E D F"],
    down: Float[Array, "E F D"], activation: Callable, *, top_k: int, normalise: bool = True, capacity: float | None = None,
    device_capacity: float | None = None, padding_mask: Bool[Array, "B T"] | None = None, groups: int = 1,
) -> tuple[Float[Array, "B T D"], RoutingStatistics]:  # fmt: skip
    """sum_k w_k expert_{e_k}(x), where w and e are `route`d by x router; and statistics of the choices.

    An expert is activation(x up) down, or (activation(x gate) * (x up)) down. The router works in float32 or better
    (Switch, section 2.4). Where `padding_mask` is False a token goes to no expert: its output is zero, and no statistic
    counts it. Without a capacity no choice is dropped. With one, an expert takes ceil(capacity top_k n / E) choices of each
    of the `groups` of n = B T / groups tokens (GShard's groups, section 3.2; consecutive batch rows): first choices come
    before second ones (section 2.2), then the order of the batch decides, so a token may depend on later ones. ConfigError
    where B is no multiple of `groups`.

    On a mesh the choices, what is dropped and the statistics are those of one device. Weights are gathered over `fsdp`.
    Tokens reach experts that are split over `expert` by `gather_scatter`, or by `all_to_all` where each device has whole
    groups: there the memory and the exchange are those of its groups' capacity.
    Without a capacity each of P devices along `expert` reserves memory for all the choices that its experts may get. With a
    `device_capacity` it reserves memory for ceil(device_capacity top_k n / P) choices of n tokens, and drops later ones.
    """
    padding_mask = jnp.ones(x.shape[:2], bool) if padding_mask is None else padding_mask
    (B, T, D), (E, _, F), mesh = x.shape, up.shape, jax.sharding.get_abstract_mesh()
    if B % groups:
        advice = f"expected a divisor of {B}" if B > 1 else "expected 1"
        raise ConfigError(f"model.feedforward.groups={groups}: does not divide a batch of {B} rows; {advice}")
    batch, length = mesh_axes("batch", B), mesh_axes("length", T)
    embed = tuple(name for name in PARAMETERS["embed"] if name in batch and D % mesh.shape[name] == 0)
    split = Split(batch, length, mesh_axes("expert", E), embed, mesh_axes("mlp", F))
    arrays = x, router, gate, up, down, padding_mask
    run = partial(_on_device, split, activation, top_k, normalise, capacity, device_capacity, groups)
    if any(split):
        inward, outward = P(split.experts, embed, split.mlp), P(split.experts, split.mlp, embed)
        tokens, names = P(batch, length), auto_axis_names()
        in_specs = tokens, P(), inward, inward, outward, tokens
        # a chip's own kernels need all axes to be manual; where few rows leave weights split, the compiler keeps those axes
        all_manual = all(name in embed for name in PARAMETERS["embed"] if name in names and mesh.shape[name] > 1)
        if all_manual and is_explicit():
            arrays = [a if a is None else with_sharding(a, spec) for a, spec in zip(arrays, in_specs, strict=True)]
        axes = frozenset(names if all_manual else sum(split, ()))
        run = jax.shard_map(run, in_specs=in_specs, out_specs=(tokens, P()), axis_names=axes)
    return run(*arrays)


def _on_device(
    split: Split, activation, top_k, normalise, capacity, device_capacity, groups, x, router, gate, up, down, padding_mask
):
    """`mixture` on one device: its tokens `[B, T, D]`, and its experts with its part of D and F."""
    (B, T, D), E = x.shape, router.shape[1]
    capacity = capacity if x.size else 0.0  # without tokens, blocks have no size and collectives nothing to gather
    logits = einsum("btd,de->bte", in_float32(x), router)
    routing = route(logits, top_k, normalise)
    expert_ids = jnp.moveaxis(jnp.where(padding_mask[:, :, None], routing.experts, E), 2, 0)  # [top_k, B, T]
    ids_within_capacity, expert_capacity, choice_limit = expert_ids, None, None
    if capacity is not None:
        ids_within_capacity, expert_capacity, choice_limit = _within_capacity(split, expert_ids, E, capacity, groups)

    # pcast here, not where arrays first meet: its transpose is a sum over devices, and these arrays are the smallest
    def spread(a):
        return varying(a, {*split.batch, *split.length, *split.experts, *split.mlp})

    def gather(w, axis):
        return _gather(split.embed, axis, x.dtype, spread(w)) if split.embed else spread(w)

    experts = Experts(None if gate is None else gather(gate, 1), gather(up, 1), gather(down, 2), activation)
    tokens, weights = spread(x.reshape(B * T, D)), routing.weights.reshape(B * T, top_k).T
    choices = Choices(tokens, ids_within_capacity.reshape(top_k, B * T), weights)
    tokens_split = set(split.experts) <= set(split.batch)  # over the axis of experts, too
    if device_capacity is not None and split.experts:  # of tokens that a device of `gather_scatter` sees
        tokens_of_device = B * T if tokens_split else B * T / lax.axis_size(split.experts)
        choice_limit = math.ceil(device_capacity * top_k * tokens_of_device - 1e-9)
    match split.experts, tokens_split, expert_capacity:
        case (), _, _:
            out, served_count = local(choices, experts, E, expert_capacity, choice_limit)
        case axes, True, int(length):
            out, served_count = all_to_all(choices, experts, E, length, axes)
        case axes, _, _:
            out, served_count = gather_scatter(choices, experts, E, expert_capacity, axes, tokens_split, choice_limit)
    out = psum(out, split.mlp).reshape(B, T, D)
    # of the choices that a device gathered, each is served by one device at most
    served_count = lax.psum(served_count, tuple(dict.fromkeys(split.batch + split.length + split.experts)))
    return out, _statistics(split, logits, routing, expert_ids.reshape(top_k, B * T), padding_mask, served_count)


def _within_capacity(split: Split, expert_ids: Int[Array, "top_k B T"], E: int, capacity: float, groups: int):
    """(experts of the choices, E for a dropped one; an expert's capacity on this device; choices of this device, at most).

    The capacity is None where the tokens of a group are on several devices: then the dropped choices are marked already.
    """
    top_k, B, T = expert_ids.shape
    if not expert_ids.size:  # without tokens nothing is dropped, and blocks would have no size
        return expert_ids, 0, None
    devices = _count(split.batch)
    tokens = B * devices * T * _count(split.length) // groups  # of a group
    # a token takes no expert twice; the small number is for products like 1.1 x 10, which are not 11 in floating point
    expert_capacity = min(math.ceil(capacity * top_k * tokens / E - 1e-9), tokens)
    if split.length or groups % devices:
        choices = _first_choices(split, expert_ids, E, expert_capacity, groups)
        return choices, None, E // _count(split.experts) * expert_capacity * groups
    groups_of_device = groups // devices
    choices = expert_ids  # of one group, the bucket of an expert has this capacity, and drops the rest
    if groups_of_device > 1:
        choices = _first_choices(split._replace(batch=()), expert_ids, E, expert_capacity, groups_of_device)
    return choices, groups_of_device * expert_capacity, None


def _count(axes: tuple[str, ...]) -> int:
    return lax.axis_size(axes) if axes else 1


def _first_choices(split: Split, expert_ids: Int[Array, "top_k B T"], E: int, expert_capacity: int, groups: int):
    """The choices, but E for one that is not among the first `expert_capacity` of its expert in its group of batch rows.

    The order is that of one device with all tokens: first choices, then second ones; of these by batch row, then by position.
    Devices exchange the number of choices that each batch row has for each expert.
    """
    top_k, B, T = expert_ids.shape
    clipped_ids = jnp.minimum(expert_ids, E - 1)
    order = jnp.argsort(expert_ids, axis=-1)  # stable
    counts = jnp.sum(expert_ids[..., None] == jnp.arange(E)[None, None, None], axis=2)  # [top_k, B, E]
    starts = jnp.cumsum(counts, axis=-1) - counts
    rank = jnp.arange(T)[None, None] - jnp.take_along_axis(starts, jnp.take_along_axis(clipped_ids, order, -1), -1)
    rank = jnp.take_along_axis(rank, jnp.argsort(order, axis=-1), -1)  # among the row's choices on this device
    earlier_counts = jnp.zeros_like(counts)
    if split.length:  # other devices have earlier tokens of the batch row
        device_counts = lax.all_gather(counts, split.length)
        is_earlier = jnp.arange(len(device_counts)) < lax.axis_index(split.length)
        earlier_counts = jnp.sum(jnp.where(is_earlier[:, None, None, None], device_counts, 0), axis=0)
        counts = jnp.sum(device_counts, axis=0)
    first = 0
    if split.batch:
        counts = lax.all_gather(counts, split.batch, axis=1, tiled=True)
        first = lax.axis_index(split.batch) * B
    in_group = jnp.moveaxis(counts.reshape(top_k, groups, -1, E), 1, 0).reshape(groups, -1, E)
    totals = jnp.cumsum(in_group, axis=1) - in_group  # of first choices before second ones, and of earlier batch rows
    totals = jnp.moveaxis(totals.reshape(groups, top_k, -1, E), 0, 1).reshape(top_k, -1, E)
    earlier_counts += lax.dynamic_slice_in_dim(totals, first, B, axis=1)
    return jnp.where(rank + jnp.take_along_axis(earlier_counts, clipped_ids, -1) < expert_capacity, expert_ids, E)


def _statistics(split: Split, logits, routing: Routing, expert_ids, padding_mask, served_count) -> RoutingStatistics:
    def total(a):
        return lax.psum(a, split.batch + split.length)

    sizes, top_k = count_choices(expert_ids, logits.shape[-1]), expert_ids.shape[0]
    choice_count = total(jnp.sum(sizes))
    fraction = total(sizes).astype(logits.dtype) * top_k / jnp.maximum(choice_count, 1)
    probability = _mean(routing.probabilities, padding_mask, total)
    z = _mean(jnp.square(jax.nn.logsumexp(logits, axis=-1)), padding_mask, total)
    return RoutingStatistics(
        fraction, probability, (choice_count - served_count).astype(logits.dtype) / jnp.maximum(choice_count, 1), z
    )


def local(choices: Choices, experts: Experts, E: int, expert_capacity: int | None, choice_limit: int | None = None) -> Outputs:
    """The outputs of this device's experts. E is the number of all experts.

    Each expert takes at most `expert_capacity` choices, or all together at most `choice_limit`.
    """
    expert_count = experts.up.shape[0]
    if expert_capacity is None:
        table, block_experts, used_blocks = _blocks(choices.experts, expert_count, E, choice_limit)

        def product(x, w):
            return grouped(*alike(x, w), block_experts, used_blocks)
    else:
        table, product = _buckets(choices.experts, expert_count, expert_capacity), _bucket_product
    return _combine(table, experts(product, _take(choices.tokens, table.tokens)), choices)


def all_to_all(choices: Choices, experts: Experts, E: int, expert_capacity: int, axes) -> Outputs:
    """Tokens travel to the devices of their experts, a bucket of `expert_capacity` rows an expert, and the outputs back.

    Each way moves E C D numbers, C = ceil(capacity top_k n / E) for the n tokens of a device with one group (GShard,
    section 3.2).
    """
    table = _buckets(choices.experts, E, expert_capacity)
    expert_inputs = lax.all_to_all(_take(choices.tokens, table.tokens), axes, 0, 1, tiled=True)
    outputs = lax.all_to_all(experts(_bucket_product, expert_inputs), axes, 1, 0, tiled=True)
    return _combine(table, outputs, choices)


def gather_scatter(
    choices: Choices, experts: Experts, E: int, expert_capacity, axes, tokens_split: bool, choice_limit
) -> Outputs:
    """Each device computes its experts' part of the tokens of all, and the parts are summed.

    On P devices P n D numbers are gathered, and scattered. Memory is D and F numbers for each of P n min(top_k, E/P) choices,
    or of `choice_limit` choices.
    """
    expert_count = experts.up.shape[0]
    if tokens_split:
        tokens = wide_on_cpu(lambda x: lax.all_gather(x, axes, axis=0, tiled=True), choices.tokens)
        choices = Choices(tokens, *(lax.all_gather(a, axes, axis=1, tiled=True) for a in choices[1:]))
    local_ids = choices.experts - lax.axis_index(axes) * expert_count
    local_ids = jnp.where((local_ids >= 0) & (local_ids < expert_count), local_ids, expert_count)
    if choice_limit is not None:
        earlier = jnp.cumsum(local_ids.reshape(-1) < expert_count).reshape(local_ids.shape)  # this choice included
        local_ids = jnp.where(earlier <= choice_limit, local_ids, expert_count)
    out, served_count = local(choices._replace(experts=local_ids), experts, E, expert_capacity, choice_limit)
    return psum_scatter(out, axes, tiled=True) if tokens_split else psum(out, axes), served_count


def _mean(x, padding_mask, total):
    """The mean over tokens that are no padding; x has the mask's axes, and perhaps others behind. `total` sums over devices."""
    flags = padding_mask.reshape(*padding_mask.shape, *(1,) * (x.ndim - padding_mask.ndim))
    sums = jnp.sum(jnp.where(flags, x, 0), axis=tuple(range(padding_mask.ndim)))
    return total(sums) / jnp.maximum(total(jnp.sum(padding_mask)), 1)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gather(mesh_axes, axis, dtype, w):
    """w gathered along mesh axes, rounded to `dtype` on the way; the gradient is summed in its own precision."""
    return lax.all_gather(w.astype(dtype), mesh_axes, axis=axis, tiled=True).astype(w.dtype)


_gather.defvjp(
    lambda mesh_axes, axis, dtype, w: (_gather(mesh_axes, axis, dtype, w), None),
    lambda mesh_axes, axis, dtype, _, g: (psum_scatter(g, mesh_axes, scatter_dimension=axis, tiled=True),),
)


class _RowTable(NamedTuple):
    """The rows that experts compute, `[count, length, D]`: which token is in each row, and the row of each choice."""

    tokens: Array  # [count, length]; N for an empty row
    row_of_choice: Array  # [top_k, N]; count * length for a choice without a row


def _take(x: Float[Array, "N D"], indices: Int[Array, "..."]) -> Float[Array, "... D"]:
    return x.at[indices].get(mode="fill", fill_value=0)


def _combine(table: _RowTable, y: Float[Array, "count length D"], choices: Choices) -> Outputs:
    wide = in_float32(_take(y.reshape(-1, y.shape[-1]), table.row_of_choice))  # [top_k, N, D]
    sums = jnp.sum(wide * choices.weights[:, :, None].astype(wide.dtype), axis=0)
    return sums.astype(choices.tokens.dtype), jnp.sum(table.row_of_choice < table.tokens.size)


def _buckets(experts: Int[Array, "top_k N"], E: int, expert_capacity: int) -> _RowTable:
    """`expert_capacity` rows for each expert; later choices are dropped."""
    return _table(experts, count_choices(experts, E), jnp.arange(E) * expert_capacity, expert_capacity, E, expert_capacity)


def _bucket_product(x, w):
    return einsum("ebd,edf->ebf", *alike(x, w))


def _blocks(experts: Int[Array, "top_k N"], expert_count: int, E: int, choice_limit: int | None):
    """(the rows in blocks of one expert each; the expert of each block; the number of blocks that are used).

    `choice_limit`: the largest number of choices of these experts, if it is known.
    """
    top_k, N = experts.shape
    # a quarter of an expert's even share, in eights: last blocks are half empty, so an eighth of the work is lost
    length = min(8 * -(-experts.size // (32 * E)), 512)
    length += -length % LANES if length > LANES else 0
    sizes = count_choices(experts, expert_count)
    blocks = -(-sizes // length)  # of each expert
    ends = jnp.cumsum(blocks)
    max_choices = min(N * min(top_k, expert_count), experts.size if choice_limit is None else choice_limit)
    count = min((max_choices + expert_count * (length - 1)) // length, max_choices)  # of blocks, at most
    block_experts = jnp.minimum(jnp.sum(ends[None] <= jnp.arange(count)[:, None], axis=1), expert_count - 1)
    return _table(experts, sizes, (ends - blocks) * length, experts.size, count, length), block_experts, ends[-1]


def _table(experts: Int[Array, "top_k N"], sizes, first, expert_capacity: int, count: int, length: int) -> _RowTable:
    """Each expert's first `expert_capacity` choices, in consecutive rows from `first[expert]` on."""
    E, N, row_count = sizes.shape[0], experts.shape[1], count * length
    order = jnp.argsort(experts.reshape(-1))  # stable
    expert = experts.reshape(-1)[order]
    clipped = jnp.minimum(expert, E - 1)
    rank = jnp.arange(order.size) - (jnp.cumsum(sizes) - sizes)[clipped]
    row = jnp.where((expert < E) & (rank < expert_capacity), first[clipped] + rank, row_count)
    tokens = jnp.full(row_count, N, order.dtype).at[row].set(order % N, mode="drop")
    row_of_choice = jnp.zeros_like(row).at[order].set(row, unique_indices=True).reshape(experts.shape)
    return _RowTable(tokens.reshape(count, length), row_of_choice)
