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

Outputs = tuple[Float[Array, "N D"], Int[Array, ""]]  # the experts' weighted sum of each token; how many choices had a row


class Routing(NamedTuple):
    """The experts of each token, best first, and their weights."""

    weights: Array  # [.., top_k]
    experts: Array  # [.., top_k]
    probabilities: Array  # [.., E], the softmax over all experts


class RoutingStatistics(NamedTuple):
    """What the router did with the real tokens."""

    fraction: Array  # [E], choices of each expert a token; the sum is top_k
    probability: Array  # [E], mean of the softmax
    dropped: Array  # share of the choices for which an expert had no room
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
    """Tokens and their choices, slot by slot: all first choices come before the second ones."""

    tokens: Any  # [N, D]
    experts: Any  # [top_k, N]; a number beyond the experts for a choice that counts in nothing
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
    device_capacity: float | None = None, real: Bool[Array, "B T"] | None = None, groups: int = 1,
) -> tuple[Float[Array, "B T D"], RoutingStatistics]:  # fmt: skip
    """sum_k w_k expert_{e_k}(x), where w and e are `route`d by x router; and statistics of the choices.

    An expert is activation(x up) down, or (activation(x gate) * (x up)) down. The router works in float32 or better
    (Switch, section 2.4). Tokens with real=False go to no expert: their output is zero, and they count in nothing. Without
    a capacity no choice is dropped. With one, an expert takes ceil(capacity top_k n / E) choices of each of the `groups` of
    n = B T / groups tokens (GShard's groups, section 3.2; consecutive rows): first choices come before second ones (section
    2.2), then the order of the batch decides, so a token may depend on later ones. ConfigError where B is no multiple of
    `groups`.

    On a mesh the choices, what is dropped and the statistics are those of one device. Weights are gathered over `fsdp`.
    Tokens reach experts that are split over `expert` by `gather_scatter`, or by `all_to_all` where each device has whole
    groups: there the memory and the exchange are those of its groups' room.
    Without a capacity a device of P along `expert` has memory for the case that its experts get all they can. With a
    `device_capacity` it has memory for ceil(device_capacity top_k n / P) choices of n tokens, and drops later ones.
    """
    real = jnp.ones(x.shape[:2], bool) if real is None else real
    (B, T, D), (E, _, F), mesh = x.shape, up.shape, jax.sharding.get_abstract_mesh()
    if B % groups:
        advice = f"expected a divisor of {B}" if B > 1 else "expected 1"
        raise ConfigError(f"model.feedforward.groups={groups}: does not divide a batch of {B} rows; {advice}")
    batch, length = mesh_axes("batch", B), mesh_axes("length", T)
    embed = tuple(name for name in PARAMETERS["embed"] if name in batch and D % mesh.shape[name] == 0)
    split = Split(batch, length, mesh_axes("expert", E), embed, mesh_axes("mlp", F))
    arrays = x, router, gate, up, down, real
    run = partial(_on_device, split, activation, top_k, normalise, capacity, device_capacity, groups)
    if any(split):
        inward, outward = P(split.experts, embed, split.mlp), P(split.experts, split.mlp, embed)
        tokens, names = P(batch, length), auto_axis_names()
        in_specs = tokens, P(), inward, inward, outward, tokens
        # a chip's own kernels need all axes to be manual; where few rows leave weights split, the compiler keeps those axes
        whole = all(name in embed for name in PARAMETERS["embed"] if name in names and mesh.shape[name] > 1)
        if whole and is_explicit():
            arrays = [a if a is None else with_sharding(a, how) for a, how in zip(arrays, in_specs, strict=True)]
        axes = frozenset(names if whole else sum(split, ()))
        run = jax.shard_map(run, in_specs=in_specs, out_specs=(tokens, P()), axis_names=axes)
    return run(*arrays)


def _on_device(split: Split, activation, top_k, normalise, capacity, device_capacity, groups, x, router, gate, up, down, real):
    """`mixture` on one device: its tokens `[B, T, D]`, and its experts, with D and F as they are split."""
    (B, T, D), E = x.shape, router.shape[1]
    capacity = capacity if x.size else 0.0  # without tokens, blocks have no size and collectives nothing to gather
    logits = einsum("btd,de->bte", in_float32(x), router)
    routing = route(logits, top_k, normalise)
    chosen = jnp.moveaxis(jnp.where(real[:, :, None], routing.experts, E), 2, 0)  # [top_k, B, T]
    served_choices, room, rows = chosen, None, None
    if capacity is not None:
        served_choices, room, rows = _with_room(split, chosen, E, capacity, groups)

    # pcast here, not where arrays first meet: its transpose is a sum over devices, and these arrays are the smallest
    def spread(a):
        return varying(a, {*split.batch, *split.length, *split.experts, *split.mlp})

    def gather(w, axis):
        return _gather(split.embed, axis, x.dtype, spread(w)) if split.embed else spread(w)

    experts = Experts(None if gate is None else gather(gate, 1), gather(up, 1), gather(down, 2), activation)
    tokens, weights = spread(x.reshape(B * T, D)), routing.weights.reshape(B * T, top_k).T
    choices = Choices(tokens, served_choices.reshape(top_k, B * T), weights)
    tokens_split = set(split.experts) <= set(split.batch)  # over the axis of experts, too
    if device_capacity is not None and split.experts:  # of tokens that a device of `gather_scatter` sees
        seen = B * T if tokens_split else B * T / lax.axis_size(split.experts)
        rows = math.ceil(device_capacity * top_k * seen - 1e-9)
    match split.experts, tokens_split, room:
        case (), _, _:
            out, served = local(choices, experts, E, room, rows)
        case axes, True, int(length):
            out, served = all_to_all(choices, experts, E, length, axes)
        case axes, _, _:
            out, served = gather_scatter(choices, experts, E, room, axes, tokens_split, rows)
    out = psum(out, split.mlp).reshape(B, T, D)
    # of the choices that a device gathered, each is served by one device at most
    served = lax.psum(served, tuple(dict.fromkeys(split.batch + split.length + split.experts)))
    return out, _statistics(split, logits, routing, chosen.reshape(top_k, B * T), real, served)


def _with_room(split: Split, chosen: Int[Array, "top_k B T"], E: int, capacity: float, groups: int):
    """(the choices, E for one without room; an expert's room on this device; rows of this device's experts, at most).

    The room is None where the tokens of a group are on several devices: then all choices that are left are served.
    """
    top_k, B, T = chosen.shape
    if not chosen.size:  # without tokens nothing is dropped, and blocks would have no size
        return chosen, 0, None
    devices = _count(split.batch)
    tokens = B * devices * T * _count(split.length) // groups  # of a group
    # a token takes no expert twice; the small number is for products like 1.1 x 10, which are not 11 in floating point
    room = min(math.ceil(capacity * top_k * tokens / E - 1e-9), tokens)
    if split.length or groups % devices:
        return _first_choices(split, chosen, E, room, groups), None, E // _count(split.experts) * room * groups
    here = groups // devices
    # of one group, the bucket of an expert is its room
    choices = chosen if here == 1 else _first_choices(split._replace(batch=()), chosen, E, room, here)
    return choices, here * room, None


def _count(axes: tuple[str, ...]) -> int:
    return lax.axis_size(axes) if axes else 1


def _first_choices(split: Split, chosen: Int[Array, "top_k B T"], E: int, room: int, groups: int):
    """The choices, but E for one that is not among the first `room` of its expert in its group of rows.

    The order is that of one device with all tokens: slots, then rows, then places in a row. Devices exchange how many
    choices each row has for each expert.
    """
    top_k, B, T = chosen.shape
    known = jnp.minimum(chosen, E - 1)
    order = jnp.argsort(chosen, axis=-1)  # stable
    counts = jnp.sum(chosen[..., None] == jnp.arange(E)[None, None, None], axis=2)  # [top_k, B, E]
    starts = jnp.cumsum(counts, axis=-1) - counts
    rank = jnp.arange(T)[None, None] - jnp.take_along_axis(starts, jnp.take_along_axis(known, order, -1), -1)
    rank = jnp.take_along_axis(rank, jnp.argsort(order, axis=-1), -1)  # among the row's choices on this device
    before = jnp.zeros_like(counts)
    if split.length:  # parts of the row on other devices
        parts = lax.all_gather(counts, split.length)
        earlier = jnp.arange(len(parts)) < lax.axis_index(split.length)
        before = jnp.sum(jnp.where(earlier[:, None, None, None], parts, 0), axis=0)
        counts = jnp.sum(parts, axis=0)
    first = 0
    if split.batch:
        counts = lax.all_gather(counts, split.batch, axis=1, tiled=True)
        first = lax.axis_index(split.batch) * B
    in_group = jnp.moveaxis(counts.reshape(top_k, groups, -1, E), 1, 0).reshape(groups, -1, E)
    totals = jnp.cumsum(in_group, axis=1) - in_group  # of the slots and rows before
    totals = jnp.moveaxis(totals.reshape(groups, top_k, -1, E), 0, 1).reshape(top_k, -1, E)
    before += lax.dynamic_slice_in_dim(totals, first, B, axis=1)
    return jnp.where(rank + jnp.take_along_axis(before, known, -1) < room, chosen, E)


def _statistics(split: Split, logits, routing: Routing, chosen, real, served) -> RoutingStatistics:
    def total(a):
        return lax.psum(a, split.batch + split.length)

    sizes, top_k = count_choices(chosen, logits.shape[-1]), chosen.shape[0]
    asked = total(jnp.sum(sizes))
    fraction = total(sizes).astype(logits.dtype) * top_k / jnp.maximum(asked, 1)
    probability = _mean(routing.probabilities, real, total)
    z = _mean(jnp.square(jax.nn.logsumexp(logits, axis=-1)), real, total)
    return RoutingStatistics(fraction, probability, (asked - served).astype(logits.dtype) / jnp.maximum(asked, 1), z)


def local(choices: Choices, experts: Experts, E: int, room: int | None, rows: int | None = None) -> Outputs:
    """What these experts compute of the tokens, on this device. E is the number of all experts.

    Each takes at most `room` choices, or all together at most `rows`.
    """
    here = experts.up.shape[0]
    if room is None:
        table, owners, used = _blocks(choices.experts, here, E, rows)

        def product(x, w):
            return grouped(*alike(x, w), owners, used)
    else:
        table, product = _buckets(choices.experts, here, room), _bucket_product
    return _combine(table, experts(product, _take(choices.tokens, table.tokens)), choices)


def all_to_all(choices: Choices, experts: Experts, E: int, room: int, axes) -> Outputs:
    """Tokens travel to the devices of their experts, a bucket of `room` rows an expert, and the outputs back.

    Each way moves E C D numbers, C = ceil(capacity top_k n / E) for the n tokens of a device with one group (GShard,
    section 3.2).
    """
    table = _buckets(choices.experts, E, room)
    rows = lax.all_to_all(_take(choices.tokens, table.tokens), axes, 0, 1, tiled=True)
    outputs = lax.all_to_all(experts(_bucket_product, rows), axes, 1, 0, tiled=True)
    return _combine(table, outputs, choices)


def gather_scatter(choices: Choices, experts: Experts, E: int, room, axes, tokens_split: bool, rows) -> Outputs:
    """Each device computes its experts' part of the tokens of all, and the parts are summed.

    On P devices P n D numbers are gathered, and scattered. Memory is P n min(top_k, E/P) rows of D and F for any choice, or
    the `rows` that there are.
    """
    here = experts.up.shape[0]
    if tokens_split:
        tokens = wide_on_cpu(lambda x: lax.all_gather(x, axes, axis=0, tiled=True), choices.tokens)
        choices = Choices(tokens, *(lax.all_gather(a, axes, axis=1, tiled=True) for a in choices[1:]))
    chosen = choices.experts - lax.axis_index(axes) * here
    chosen = jnp.where((chosen >= 0) & (chosen < here), chosen, here)
    if rows is not None:
        earlier = jnp.cumsum(chosen.reshape(-1) < here).reshape(chosen.shape)  # this choice included
        chosen = jnp.where(earlier <= rows, chosen, here)
    out, served = local(choices._replace(experts=chosen), experts, E, room, rows)
    return psum_scatter(out, axes, tiled=True) if tokens_split else psum(out, axes), served


def _mean(x, real, total):
    """The mean over the real tokens; x has the axes of `real`, and perhaps others behind them. `total` sums over devices."""
    flags = real.reshape(*real.shape, *(1,) * (x.ndim - real.ndim))
    sums = jnp.sum(jnp.where(flags, x, 0), axis=tuple(range(real.ndim)))
    return total(sums) / jnp.maximum(total(jnp.sum(real)), 1)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gather(mesh_axes, axis, dtype, w):
    """w gathered along mesh axes, rounded to `dtype` on the way; the gradient is summed in its own precision."""
    return lax.all_gather(w.astype(dtype), mesh_axes, axis=axis, tiled=True).astype(w.dtype)


_gather.defvjp(
    lambda mesh_axes, axis, dtype, w: (_gather(mesh_axes, axis, dtype, w), None),
    lambda mesh_axes, axis, dtype, _, g: (psum_scatter(g, mesh_axes, scatter_dimension=axis, tiled=True),),
)


class _Table(NamedTuple):
    """The rows that experts compute, `[count, length, D]`: which token is in each row, and the row of each choice."""

    tokens: Array  # [count, length]; N for an empty row
    rows: Array  # [top_k, N]; count * length for a choice without a row


def _take(x: Float[Array, "N D"], rows: Int[Array, "..."]) -> Float[Array, "... D"]:
    return x.at[rows].get(mode="fill", fill_value=0)


def _combine(table: _Table, y: Float[Array, "count length D"], choices: Choices) -> Outputs:
    wide = in_float32(_take(y.reshape(-1, y.shape[-1]), table.rows))  # [top_k, N, D]
    sums = jnp.sum(wide * choices.weights[:, :, None].astype(wide.dtype), axis=0)
    return sums.astype(choices.tokens.dtype), jnp.sum(table.rows < table.tokens.size)


def _buckets(experts: Int[Array, "top_k N"], E: int, room: int) -> _Table:
    """A table with `room` rows for each expert; later choices are dropped."""
    return _table(experts, count_choices(experts, E), jnp.arange(E) * room, room, E, room)


def _bucket_product(x, w):
    return einsum("ebd,edf->ebf", *alike(x, w))


def _blocks(experts: Int[Array, "top_k N"], here: int, E: int, rows: int | None):
    """(a table in blocks, each of one expert; the expert of each block; how many blocks are used).

    There are at most `rows` choices of these experts, if that is known.
    """
    top_k, N = experts.shape
    # a quarter of an expert's even share, in eights: last blocks are half empty, so an eighth of the work is lost
    length = min(8 * -(-experts.size // (32 * E)), 512)
    length += -length % LANES if length > LANES else 0
    sizes = count_choices(experts, here)
    blocks = -(-sizes // length)  # of each expert
    ends = jnp.cumsum(blocks)
    most = min(N * min(top_k, here), experts.size if rows is None else rows)
    count = min((most + here * (length - 1)) // length, most)  # of blocks, at most
    owners = jnp.minimum(jnp.sum(ends[None] <= jnp.arange(count)[:, None], axis=1), here - 1)
    return _table(experts, sizes, (ends - blocks) * length, experts.size, count, length), owners, ends[-1]


def _table(experts: Int[Array, "top_k N"], sizes, first, room: int, count: int, length: int) -> _Table:
    """Each expert's choices in a run of rows from `first[expert]` on, in their order, as many as there is room for."""
    E, N, end = sizes.shape[0], experts.shape[1], count * length
    order = jnp.argsort(experts.reshape(-1))  # stable
    expert = experts.reshape(-1)[order]
    clipped = jnp.minimum(expert, E - 1)
    rank = jnp.arange(order.size) - (jnp.cumsum(sizes) - sizes)[clipped]
    row = jnp.where((expert < E) & (rank < room), first[clipped] + rank, end)
    tokens = jnp.full(end, N, order.dtype).at[row].set(order % N, mode="drop")
    rows = jnp.zeros_like(row).at[order].set(row, unique_indices=True).reshape(experts.shape)
    return _Table(tokens.reshape(count, length), rows)
