"""Exact attention of a sequence that is split over the devices of the mesh axis `context`.

Each device computes as `blockwise` does. Keys, values and their gradients travel around the ring of
devices; each keeps its queries and their running softmax (Liu et al. 2023, arXiv:2310.01889). A
causal mask gives the last devices more work than the first: then each takes one chunk from the
front and one from the back (zigzag: the Llama 3 report, arXiv:2407.21783, section 3.3.2).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxformer.masks import EMPTY, Mask
from jaxformer.ops.attention import blocks, blockwise
from jaxformer.ops.attention.blocks import Grid, Visits, head_blocks, join_heads
from jaxformer.ops.attention.blockwise import Gradients, QueryBlock, Tiles
from jaxformer.ops.attention.call import CONTEXT, Call, context_devices, refuse
from jaxformer.ops.attention.kernel import Kernel, never_refuses

SPLIT = P(None, CONTEXT)  # an array [B, T, ...] split over the devices


def attention(query: Array, key: Array, value: Array, call: Call) -> Array:
    """The output of `reference` on the mesh of `jax.set_mesh`, with T and S split over `context`.

    The compiler splits the other axes. With P devices a forward pass permutes keys and values P - 1
    times, less where the mask leaves rounds empty; zigzag adds 6 permutes. Arrays of masks and
    biases are on every device. Raises NotImplementedError for what `refuses` names.
    """
    (B, T, N, _), S = query.shape, key.shape[1]
    count = context_devices()
    if count == 1:
        return blockwise.attention(query, key, value, call)
    refuse("ring", refuses(query, key, value, call))
    # zigzag needs two chunks for each device
    chunks = 2 * count if T % (2 * count) == 0 == S % (2 * count) else count
    largest = blocks.choose_grid(call.mask, T, S, B * N)
    bk = _divisor(S // chunks, largest.bk)
    grid = Grid(T, S, _divisor(T // chunks, largest.bq), bk, bk)
    plan = make_plan(call.mask, grid, count, chunks)
    kv = jnp.concatenate([key, value], axis=-1)
    if not plan.zigzag:
        return _attend(plan, query, kv, call)[0]
    out, _ = _attend(plan, _exchange(count, query), _exchange(count, kv), call)
    return _exchange(count, out, back=True)


def _divisor(n: int, largest: int) -> int:
    """The largest divisor of n up to a number."""
    return max(d for d in range(1, min(n, largest) + 1) if n % d == 0)


def refuses(query: Array, key: Array, value: Array, call: Call) -> str | None:
    """The part of a call that the ring cannot compute on the mesh of `jax.set_mesh`; None: it can.

    With one device along `context` it can compute all.
    """
    T, S = query.shape[1], key.shape[1]
    count = context_devices()
    if count == 1:
        return None
    if T % count or S % count or not T * S:
        return f"{T} queries and {S} keys on {count} devices (mesh.context must divide them)"
    if key.dtype != value.dtype:
        return f"keys and values of two types, {key.dtype} and {value.dtype}"
    if callable(call.bias) or getattr(call.bias, "query_arrays", ()):
        other = "a `ops.bias.Bias` may have your own rule"
        return f"bias that is a function or has rows, as `shaw` ({other})"
    return None


def blockwise_or_ring(query: Array, key: Array, value: Array, call: Call) -> Array:
    """The ring where the sequence is split and the ring takes the call, `blockwise` otherwise."""
    kernel = attention if refuses(query, key, value, call) is None else blockwise.attention
    return kernel(query, key, value, call)


RING = Kernel("ring", attention, refuses)
BLOCKWISE = Kernel("blockwise", blockwise_or_ring, never_refuses)


# The plan, made at trace time
@dataclass(frozen=True, eq=False)
class Plan:
    """Which device visits which keys in which round.

    A shard is the keys that one device has at the start.
    """

    grid: Grid  # of all devices together
    zigzag: bool
    query_blocks: np.ndarray  # [devices, blocks]: the numbers of the query blocks of each device
    index_in_shard: np.ndarray  # [key blocks]: the index of each in its shard
    visits: Visits
    busy: np.ndarray  # [devices, rounds]: whether a device visits any block
    first_round: int  # device d meets shard d - t in round t
    round_count: int


@blocks.cached_by_mask
def make_plan(mask: Mask, grid: Grid, devices: int, chunks: int) -> Plan:
    """The plan of least work for the busiest devices, zigzag or not."""
    visited = mask.blocks(grid.T, grid.S, (grid.bq, grid.bk)) != EMPTY
    work = visited.reshape(chunks, grid.nq // chunks, chunks, grid.nk // chunks).sum((1, 3))
    split = np.arange(chunks).reshape(devices, -1)

    # the exchange must save more than it costs; in each round all devices wait for the busiest
    def slowest(split):
        return _visits_by_round(work, split).max(0).sum()

    zigzag = split.shape[1] == 2 and bool(slowest(_zigzag(devices)) < 0.9 * slowest(split))
    split = _zigzag(devices) if zigzag else split
    busy = _visits_by_round(work, split) > 0

    def blocks_of(count):
        numbers = np.arange(count, dtype=np.int32).reshape(chunks, -1)
        return numbers[split].reshape(devices, -1)

    key_blocks = blocks_of(grid.nk)
    order = np.argsort(key_blocks, axis=None).astype(np.int32)
    shard_of, index_in_shard = np.divmod(order, key_blocks.shape[1])
    visits = blocks.find_visits(mask, grid, tuple(shard_of.tolist()))
    return Plan(grid, zigzag, blocks_of(grid.nq), index_in_shard, visits, busy, *_busy_rounds(busy))


def _visits_by_round(work, split) -> np.ndarray:
    """[devices, rounds]: in round t device d visits the keys that device d - t began with."""
    devices = np.arange(len(split))
    device_work = work[split].sum(1)  # [devices, chunks of keys]
    rounds = [device_work[devices[:, None], split[devices - t]].sum(1) for t in devices]
    return np.stack(rounds, 1)


def _zigzag(devices: int) -> np.ndarray:
    """[devices, 2]: device d has chunks d and 2 devices - 1 - d, the even one first."""
    d = np.arange(devices)
    chunks = np.stack([d, 2 * devices - 1 - d], 1)
    return np.where((d % 2 == 0)[:, None], chunks, chunks[:, ::-1])


def _busy_rounds(busy: np.ndarray) -> tuple[int, int]:
    """(first, count) of the shortest run of rounds around the ring that holds all busy ones."""
    needed = np.flatnonzero(busy.any(axis=0))
    counts = {}
    for first in needed:
        counts[int(first)] = int(((needed - first) % busy.shape[1]).max()) + 1
    return min(counts.items(), key=lambda item: item[1], default=(0, 1))


def _on_devices(f: Callable, in_specs, out_specs) -> Callable:
    return jax.jit(jax.shard_map(f, in_specs=in_specs, out_specs=out_specs, axis_names={CONTEXT}))


def _exchange(devices: int, x, back: bool = False):
    """x `[B, length, ...]`: a device's two neighbouring chunks are exchanged for those of zigzag.

    `back` undoes it.
    """

    def exchange(x):
        halves = []
        for half, chunks in zip(jnp.split(x, 2, axis=1), _zigzag(devices).T.tolist(), strict=True):
            pairs = [(chunk // 2, device) for device, chunk in enumerate(chunks)]
            if back:
                pairs = [(b, a) for a, b in pairs]
            halves.append(lax.ppermute(half, CONTEXT, pairs))
        return jnp.concatenate(halves, axis=1)

    return _on_devices(exchange, (SPLIT,), SPLIT)(x)


# The ring, seen from one device
class Ring(NamedTuple):
    """The arrays of a device in one round. `kv` and `d_kv` travel; `stays` does not."""

    kv: Any  # [B, K, S, H + Hv]
    d_kv: Any  # [B, K, H + Hv, S]; None in the forward pass
    stays: Any  # of the device's query blocks: the running softmax, or (dq, gradient of the bias)


def _shift(plan: Plan, x, by: int):
    """x of the device that is `by` places back in the ring."""
    count = len(plan.busy)
    pairs = [(d, (d + by) % count) for d in range(count)]
    return jax.tree.map(lambda x: lax.ppermute(x, CONTEXT, pairs), x) if by % count else x


def go_around(plan: Plan, attend_to: Callable, ring: Ring) -> Ring:
    """`ring = attend_to(ring, shard)` for every shard of the keys, as it passes by this device."""
    last = plan.first_round + plan.round_count - 1
    ring = ring._replace(kv=_shift(plan, ring.kv, plan.first_round))

    def one_round(t, ring):
        ring = _if_busy(plan, attend_to, ring, t)
        return Ring(_shift(plan, ring.kv, 1), _shift(plan, ring.d_kv, 1), ring.stays)

    if plan.round_count > 1:
        ring = lax.fori_loop(plan.first_round, last, one_round, ring)
    ring = _if_busy(plan, attend_to, ring, last)
    return ring._replace(d_kv=_shift(plan, ring.d_kv, -last))


def _if_busy(plan: Plan, attend_to: Callable, ring: Ring, t) -> Ring:
    """attend_to(ring, shard), skipped if the mask hides all of the shard from this device."""
    device = lax.axis_index(CONTEXT)
    count = plan.busy.shape[1]
    shard = (device - t) % count
    if plan.busy.all():
        return attend_to(ring, shard)

    def visit(d_kv, stays):
        return attend_to(Ring(ring.kv, d_kv, stays), shard)[1:]

    def skip(d_kv, stays):
        return d_kv, stays

    is_busy = jnp.asarray(plan.busy)[device, t % count]
    return Ring(ring.kv, *lax.cond(is_busy, visit, skip, ring.d_kv, ring.stays))


def _tiles(plan: Plan, call: Call) -> Tiles:
    """The tiles of this device's queries; keys and values are filled in round by round."""
    # as different on each device: then its gradient is summed over devices once, at the end
    bias = jax.tree.map(lambda x: lax.pcast(x, CONTEXT, to="varying"), call.bias)
    first = call.mask.first(plan.grid.T, plan.grid.S)
    bias = blocks.bias_blocks(plan.grid, bias, first, plan.grid.S)
    return Tiles(plan.grid, call, bias, plan.visits, None, None, jnp.asarray(plan.index_in_shard))


def _numbers_and_visits(plan: Plan, shard):
    """The numbers of this device's query blocks, and the indices of their visits to the shard."""
    numbers = jnp.asarray(plan.query_blocks)[lax.axis_index(CONTEXT)]
    return numbers, numbers * plan.busy.shape[1] + shard


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, query, kv, call: Call):
    """The output, and for the backward pass the log-sum-exp of each query."""
    run = _on_devices(partial(_forward_here, plan), (SPLIT, SPLIT, P()), (SPLIT, P(CONTEXT)))
    return run(query, kv, call)


def _forward(plan: Plan, query, kv, call: Call):
    # a policy that keeps them saves the rounds
    out, lse = checkpoint_name(_attend(plan, query, kv, call), "attention")
    return (out, lse), (query, kv, call, out, lse)


def _forward_here(plan: Plan, query, kv, call: Call):
    H = query.shape[3]
    K, width = kv.shape[2:]
    q = head_blocks(plan.grid.bq, K, query)
    softmax = jax.vmap(lambda q: blockwise.begin(q, call.sinks, width - H))(q)
    extend = partial(_extend, plan, _tiles(plan, call), q)
    ring = go_around(plan, extend, Ring(kv.swapaxes(1, 2), None, softmax))
    out, lse = jax.vmap(lambda softmax: blockwise.finish(softmax, kv.dtype))(ring.stays)
    return join_heads(out, query.shape[1]), lse


def _extend(plan: Plan, tiles: Tiles, q, ring: Ring, shard) -> Ring:
    """The running softmax of each query block, with this shard of the keys."""
    H = q.shape[-1]
    tiles = tiles._replace(keys=ring.kv[..., :H], values=ring.kv[..., H:])

    def step(_, block):
        return (None, blockwise.extend(tiles, *block))

    _, softmax = lax.scan(step, None, (ring.stays, q, *_numbers_and_visits(plan, shard)))
    return ring._replace(stays=softmax)


def _backward(plan: Plan, residuals, gradients):
    # the log-sum-exp is read by `_gradients` alone, which gives it no gradient
    d_out, _ = gradients
    return _gradients(plan, residuals, d_out)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradients(plan: Plan, residuals, d_out):
    """The gradients of query, kv and call."""
    query, kv, call, out, lse = residuals
    wide = jnp.promote_types(query.dtype, jnp.float32)
    delta = blockwise.row_products(d_out, out, wide)
    in_specs = SPLIT, SPLIT, P(), P(CONTEXT), SPLIT, SPLIT
    run = _on_devices(partial(_backward_here, plan), in_specs, (SPLIT, SPLIT, P()))
    d_query, d_kv, d_bias = run(query, kv, call, lse, d_out, delta)
    d_sinks = blockwise.sink_gradient(call.sinks, lse, delta)
    return d_query, d_kv, call.gradient(d_bias, d_sinks)


def _backward_here(plan: Plan, query, kv, call: Call, lse, d_out, delta):
    wide = delta.dtype
    tiles = _tiles(plan, call)
    kv = kv.swapaxes(1, 2)
    d_out = d_out.astype(kv.dtype)
    query_blocks = blockwise.query_blocks(plan.grid, kv.shape[1], query, d_out, delta, lse)
    d_bias = None if tiles.bias is None else tiles.bias.zeros(wide)
    d_kv = jnp.zeros_like(kv, wide).swapaxes(2, 3)
    ring = Ring(kv, d_kv, (jnp.zeros_like(query_blocks.q, wide), d_bias))
    ring = go_around(plan, partial(_add_gradients, plan, tiles, query_blocks), ring)
    dq, d_bias = ring.stays
    d_bias = blocks.bias_gradient(call.bias, lax.psum(d_bias, CONTEXT))
    d_kv = ring.d_kv.transpose(0, 3, 1, 2).astype(kv.dtype)
    return join_heads(dq, query.shape[1]).astype(query.dtype), d_kv, d_bias


def _add_gradients(plan: Plan, tiles: Tiles, query_blocks: QueryBlock, ring: Ring, shard) -> Ring:
    H = query_blocks.q.shape[-1]
    dq, d_bias = ring.stays
    tiles = tiles._replace(keys=ring.kv[..., :H], values=ring.kv[..., H:])

    def step(sums, inputs):
        dq, *block = inputs
        sums, more = blockwise.add_gradients(tiles, sums, *block)
        return sums, dq + more

    sums = Gradients(ring.d_kv[:, :, :H], ring.d_kv[:, :, H:], d_bias)
    of_blocks = dq, query_blocks, *_numbers_and_visits(plan, shard)
    (dk, dv, d_bias), dq = lax.scan(step, sums, of_blocks)
    return Ring(ring.kv, jnp.concatenate([dk, dv], axis=2), (dq, d_bias))


def _second_derivatives(*_):
    raise NotImplementedError("ring: no second derivatives; implementation='reference' has them")


_gradients.defvjp(_second_derivatives, _second_derivatives)
_attend.defvjp(_forward, _backward)
