"""Exact attention of a sequence that is split over the devices of the mesh axis `context`, by the blockwise kernel.

Keys, values and their gradients travel around the ring of devices; each keeps its queries and their running softmax (Liu
et al. 2023, arXiv:2310.01889). A causal mask gives the last devices more work than the first: then each takes one chunk from
the front and one from the back (zigzag: the Llama 3 report, arXiv:2407.21783, section 3.3.2).
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
from jaxformer.ops.attention.blockwise import Gradients, Row, Tiles
from jaxformer.ops.attention.call import Call, refuse
from jaxformer.sharding import auto_axis_names

AXIS = "context"
SPLIT = P(None, AXIS)  # an array [B, T, ...] split over the devices


def devices() -> int:
    """Devices along `context` in the mesh of `jax.set_mesh`; 1 without a mesh, and where the axis is manual already."""
    return jax.sharding.get_abstract_mesh().shape[AXIS] if AXIS in auto_axis_names() else 1


def attention(query: Array, key: Array, value: Array, call: Call) -> Array:
    """`ops.attention` on the mesh of `jax.set_mesh`, T and S split over `context`; the compiler splits the other axes.

    With P devices a forward pass permutes keys and values P - 1 times, less where the mask leaves turns empty; zigzag adds
    6 permutes. Arrays of masks and biases are on every device. NotImplementedError for what `refuses` names.
    """
    (B, T, N, _), S, count = query.shape, key.shape[1], devices()
    if count == 1:
        return blockwise.attention(query, key, value, call)
    refuse("ring", refuses(query, key, value, call), "reference")
    chunks = 2 * count if T % (2 * count) == 0 == S % (2 * count) else count  # zigzag needs two for each device
    most = blocks.choose_grid(call.mask, T, S, B * N)

    def divisor(n, most):
        return max(d for d in range(1, min(n, most) + 1) if n % d == 0)

    bk = divisor(S // chunks, most.bk)
    grid = Grid(T, S, divisor(T // chunks, most.bq), bk, bk)
    plan, kv = make_plan(call.mask, grid, count, chunks), jnp.concatenate([key, value], axis=-1)
    if not plan.zigzag:
        return _attend(plan, query, kv, call)[0]
    out, _ = _attend(plan, _exchange(count, query), _exchange(count, kv), call)
    return _exchange(count, out, back=True)


def refuses(query, key, value, call: Call) -> str | None:
    """What of a call the ring cannot compute on the mesh of `jax.set_mesh`, in a few words; None: it can compute it."""
    (T, S), count = (query.shape[1], key.shape[1]), devices()
    if T % count or S % count or not T * S:
        return f"{T} queries and {S} keys on {count} devices (mesh.context must divide them)"
    if key.dtype != value.dtype:
        return f"keys and values of two types, {key.dtype} and {value.dtype}"
    if callable(call.bias) or getattr(call.bias, "rows", ()):
        return "bias that is a function or has rows, as `shaw` (a `ops.bias.Bias` may have your own rule)"
    return None


# The plan, made at trace time
@dataclass(frozen=True, eq=False)
class Plan:
    """Which device attends to what, and when. A part is the keys that one device begins with."""

    grid: Grid  # of all devices together
    zigzag: bool
    rows: np.ndarray  # [devices, blocks]: the query blocks of each device
    places: np.ndarray  # [key blocks]: where each is in its part
    visits: Visits
    busy: np.ndarray  # [devices, turns]: whether a device visits any block
    first: int  # device d meets part d - t in turns t = first, first + 1, ...
    turns: int


@blocks.cached_by_mask
def make_plan(mask: Mask, grid: Grid, devices: int, chunks: int) -> Plan:
    visited = mask.blocks(grid.T, grid.S, (grid.bq, grid.bk)) != EMPTY
    work = visited.reshape(chunks, grid.nq // chunks, chunks, grid.nk // chunks).sum((1, 3))
    split = np.arange(chunks).reshape(devices, -1)

    # the exchange must save more than it costs; in each turn all devices wait for the busiest
    def slowest(split):
        return _visits_by_turn(work, split).max(0).sum()

    zigzag = split.shape[1] == 2 and bool(slowest(_zigzag(devices)) < 0.9 * slowest(split))
    split = _zigzag(devices) if zigzag else split
    busy = _visits_by_turn(work, split) > 0

    def blocks_of(count):
        return np.arange(count, dtype=np.int32).reshape(chunks, -1)[split].reshape(devices, -1)

    rows, columns = blocks_of(grid.nq), blocks_of(grid.nk)
    owners, places = np.divmod(np.argsort(columns, axis=None).astype(np.int32), columns.shape[1])
    visits = blocks.find_visits(mask, grid, tuple(owners.tolist()))
    return Plan(grid, zigzag, rows, places, visits, busy, *_turns(busy))


def _visits_by_turn(work, split) -> np.ndarray:
    """[devices, turns]: in turn t device d visits the keys that device d - t began with."""
    mine, d = work[split].sum(1), np.arange(len(split))
    return np.stack([mine[d[:, None], split[d - t]].sum(1) for t in d], 1)


def _zigzag(devices: int) -> np.ndarray:
    """[devices, 2]: device d has chunks d and 2 devices - 1 - d, the even one first."""
    d = np.arange(devices)
    chunks = np.stack([d, 2 * devices - 1 - d], 1)
    return np.where((d % 2 == 0)[:, None], chunks, chunks[:, ::-1])


def _turns(busy: np.ndarray) -> tuple[int, int]:
    """The shortest run of turns around the ring that holds all busy ones: (first, how many)."""
    needed = np.flatnonzero(busy.any(axis=0))
    counts = {int(first): int(((needed - first) % busy.shape[1]).max()) + 1 for first in needed}
    return min(counts.items(), key=lambda item: item[1], default=(0, 1))


def _on_devices(f: Callable, in_specs, out_specs) -> Callable:
    return jax.jit(jax.shard_map(f, in_specs=in_specs, out_specs=out_specs, axis_names={AXIS}))


def _exchange(devices: int, x, back: bool = False):
    """[B, length, ...]: the two neighbouring chunks of a device become its two of zigzag; `back` undoes it."""

    def exchange(x):
        halves = []
        for half, chunks in zip(jnp.split(x, 2, axis=1), _zigzag(devices).T.tolist(), strict=True):
            pairs = [(chunk // 2, device) for device, chunk in enumerate(chunks)]
            halves.append(lax.ppermute(half, AXIS, [(b, a) for a, b in pairs] if back else pairs))
        return jnp.concatenate(halves, axis=1)

    return _on_devices(exchange, (SPLIT,), SPLIT)(x)


# The ring, seen from one device
class Ring(NamedTuple):
    """What is on a device during one turn: keys and values with their gradient, which travel, and what stays."""

    kv: Any  # [B, K, S, H + Hv]
    d_kv: Any  # [B, K, H + Hv, S]; None in the forward pass
    rows: Any  # of the device's query blocks: the running softmax, or (dq, gradient of the bias)


def _shift(plan: Plan, x, by: int):
    """x of the device that is `by` places before this one."""
    count = len(plan.rows)
    pairs = [(d, (d + by) % count) for d in range(count)]
    return jax.tree.map(lambda x: lax.ppermute(x, AXIS, pairs), x) if by % count else x


def go_around(plan: Plan, attend_to: Callable, ring: Ring) -> Ring:
    """`ring = attend_to(ring, part)` for every part of the keys, as it passes by this device."""
    last = plan.first + plan.turns - 1
    ring = ring._replace(kv=_shift(plan, ring.kv, plan.first))

    def turn(t, ring):
        ring = _if_busy(plan, attend_to, ring, t)
        return Ring(_shift(plan, ring.kv, 1), _shift(plan, ring.d_kv, 1), ring.rows)

    if plan.turns > 1:
        ring = lax.fori_loop(plan.first, last, turn, ring)
    ring = _if_busy(plan, attend_to, ring, last)
    return ring._replace(d_kv=_shift(plan, ring.d_kv, -last))


def _if_busy(plan: Plan, attend_to: Callable, ring: Ring, turn) -> Ring:
    """attend_to(ring, part), skipped if the mask hides all of the part from this device."""
    me, count = lax.axis_index(AXIS), plan.busy.shape[1]
    (kv, *changing), part = ring, (me - turn) % count
    if plan.busy.all():
        return attend_to(ring, part)

    def visit(d_kv, rows):
        return attend_to(Ring(kv, d_kv, rows), part)[1:]

    return Ring(kv, *lax.cond(jnp.asarray(plan.busy)[me, turn % count], visit, lambda *x: x, *changing))


def _tiles(plan: Plan, call: Call) -> Tiles:
    """The pairs of this device's queries with keys and values that come later."""
    # as different on each device: then its gradient is summed over devices once, at the end
    bias = jax.tree.map(lambda x: lax.pcast(x, AXIS, to="varying"), call.bias)
    bias = blocks.bias_blocks(plan.grid, bias, call.mask.first(plan.grid.T, plan.grid.S), plan.grid.S)
    return Tiles(plan.grid, call, bias, plan.visits, None, None, jnp.asarray(plan.places))


def _row_numbers(plan: Plan, part):
    """This device's query blocks: their numbers, and where their visits to the part stand."""
    numbers = jnp.asarray(plan.rows)[lax.axis_index(AXIS)]
    return numbers, numbers * plan.busy.shape[1] + part


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, query, kv, call: Call):
    """The output, and for the backward pass the log-sum-exp of each query."""
    run = _on_devices(partial(_forward_here, plan), (SPLIT, SPLIT, P()), (SPLIT, P(AXIS)))
    return run(query, kv, call)


def _forward(plan: Plan, query, kv, call: Call):
    out, lse = checkpoint_name(_attend(plan, query, kv, call), "attention")  # a policy that keeps them saves the turns
    return (out, lse), (query, kv, call, out, lse)


def _forward_here(plan: Plan, query, kv, call: Call):
    H, (K, width) = query.shape[3], kv.shape[2:]
    q = head_blocks(plan.grid.bq, K, query)
    rows = jax.vmap(lambda q: blockwise.begin(q, call.sinks, width - H))(q)
    ring = go_around(plan, partial(_extend, plan, _tiles(plan, call), q), Ring(kv.swapaxes(1, 2), None, rows))
    out, lse = jax.vmap(lambda row: blockwise.finish(row, kv.dtype))(ring.rows)
    return join_heads(out, query.shape[1]), lse


def _extend(plan: Plan, tiles: Tiles, q, ring: Ring, part) -> Ring:
    """The running softmax of each query block, with this part of the keys."""
    H = q.shape[-1]
    tiles = tiles._replace(keys=ring.kv[..., :H], values=ring.kv[..., H:])

    def step(_, row):
        return (None, blockwise.extend(tiles, *row))

    return ring._replace(rows=lax.scan(step, None, (ring.rows, q, *_row_numbers(plan, part)))[1])


def _backward(plan: Plan, residuals, gradients):
    d_out, _ = gradients  # the log-sum-exp is read by `_gradients` alone, which gives it no gradient
    return _gradients(plan, residuals, d_out)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradients(plan: Plan, residuals, d_out):
    """The gradients of query, kv and call."""
    query, kv, call, out, lse = residuals
    wide = jnp.promote_types(query.dtype, jnp.float32)
    delta = blockwise.row_products(d_out, out, wide)
    in_specs = SPLIT, SPLIT, P(), P(AXIS), SPLIT, SPLIT
    run = _on_devices(partial(_backward_here, plan), in_specs, (SPLIT, SPLIT, P()))
    d_query, d_kv, d_bias = run(query, kv, call, lse, d_out, delta)
    return d_query, d_kv, call.gradient(d_bias, blockwise.sink_gradient(call.sinks, lse, delta))


def _backward_here(plan: Plan, query, kv, call: Call, lse, d_out, delta):
    wide, tiles, kv = delta.dtype, _tiles(plan, call), kv.swapaxes(1, 2)
    rows = blockwise.query_rows(plan.grid, kv.shape[1], query, d_out.astype(kv.dtype), delta, lse)
    d_bias = None if tiles.bias is None else tiles.bias.zeros(wide)
    ring = Ring(kv, jnp.zeros_like(kv, wide).swapaxes(2, 3), (jnp.zeros_like(rows.q, wide), d_bias))
    _, d_kv, (dq, d_bias) = go_around(plan, partial(_add_gradients, plan, tiles, rows), ring)
    d_bias = blocks.bias_gradient(call.bias, lax.psum(d_bias, AXIS))
    d_kv = d_kv.transpose(0, 3, 1, 2).astype(kv.dtype)
    return join_heads(dq, query.shape[1]).astype(query.dtype), d_kv, d_bias


def _add_gradients(plan: Plan, tiles: Tiles, rows: Row, ring: Ring, part) -> Ring:
    H, (dq, d_bias) = rows.q.shape[-1], ring.rows
    tiles = tiles._replace(keys=ring.kv[..., :H], values=ring.kv[..., H:])

    def step(sums, inputs):
        dq, *row = inputs
        sums, more = blockwise.add_gradients(tiles, sums, *row)
        return sums, dq + more

    sums = Gradients(ring.d_kv[:, :, :H], ring.d_kv[:, :, H:], d_bias)
    (dk, dv, d_bias), dq = lax.scan(step, sums, (dq, rows, *_row_numbers(plan, part)))
    return Ring(ring.kv, jnp.concatenate([dk, dv], axis=2), (dq, d_bias))


def _second_derivatives(*_):
    raise NotImplementedError("ring: no second derivatives; implementation='reference' has them")


_gradients.defvjp(_second_derivatives, _second_derivatives)
_attend.defvjp(_forward, _backward)
