"""Exact attention of a sequence that is split over the devices of the mesh axis `context`, by the blockwise kernel.

Keys and values travel around the ring of devices, each of which keeps its queries and their running maximum and sum
(Liu et al. 2023, Ring Attention, arXiv:2310.01889); memory is linear in a device's share. On the way back the gradients
of keys and values travel with them. What the mask hides is never visited, and where no device needs a turn of the ring,
it is not made. Where the mask gives some devices more work than others, as a causal one does, each device takes a chunk
from the front and one from the back instead (zigzag: Brandon et al. 2023, Striped Attention, arXiv:2311.09431, and the
Llama 3 report, arXiv:2407.21783, section 3.3.2).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

from jaxformer.masks import EMPTY, Mask
from jaxformer.ops.attention import blocks, blockwise
from jaxformer.ops.attention.blocks import Call, Seen, Visits, as_rows, from_rows
from jaxformer.ops.dropout import seed
from jaxformer.ops.positions import Bias
from jaxformer.sharding import with_logical_constraint

AXIS = "context"
SPLIT, WHOLE = P(None, AXIS), P()  # activations [B, T, ...] and what every device has whole


def parts() -> int:
    """Devices along `context` in the mesh of `jax.set_mesh`; 1 without one, and where the caller has split it by hand."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return 1 if kinds.get(AXIS, AxisType.Manual) == AxisType.Manual else mesh.shape[AXIS]


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    *,
    mask: Mask,
    bias: Any = None,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    gather: bool = False,
) -> Float[Array, "B T N Hv"]:
    """`ops.attention` on the mesh of `jax.set_mesh`, T and S split over `context`, the other axes the compiler's.

    With P devices a forward pass permutes keys and values P - 1 times, less where the mask leaves turns empty; zigzag adds
    2 for queries, 2 for keys and values, and 2 for the output. `gather` collects all keys and values on each device
    instead: one all-gather, one reduce-scatter back; for sequences that are short enough. Arrays of masks and biases are
    whole on every device. Raises NotImplementedError for what `refuses` names.
    """
    (B, T, N, _), S, count = query.shape, key.shape[1], parts()
    if count == 1:
        options = dict(bias=bias, softcap=softcap, sinks=sinks, dropout_rate=dropout_rate, dropout_key=dropout_key)
        return blockwise.attention(query, key, value, mask=mask, scale=scale, **options)[0]
    if reason := refuses(query, key, value, bias):
        raise NotImplementedError(f"ring: no {reason}; implementation='reference' has it")
    mask = mask.sized(S)
    arrays, rest = mask.split()
    dropping = dropout_rate > 0 and dropout_key is not None
    chunks = 2 * count if T % (2 * count) == 0 == S % (2 * count) else count
    chosen = blocks.choose_block(mask, T, S, B * N)
    bq, bk = (_divisor(n // chunks, most) for n, most in zip((T, S), chosen, strict=True))
    call = Call(T, S, bq, bk, scale, softcap, dropout_rate if dropping else 0.0, rest)
    ring = _Ring(call, count, chunks // count, gather)
    drop_seed = seed(dropout_key) if dropping else None
    return _attend(ring, query, key, value, arrays, blocks.as_bias(call, bias), sinks, drop_seed)


def refuses(query, key, value, bias) -> str | None:
    """What of a call this cannot do on the mesh of `jax.set_mesh`, in a few words, or None if it can all of it."""
    (T, S), count = (query.shape[1], key.shape[1]), parts()
    if T % count or S % count or not T * S:
        return f"{T} queries and {S} keys on {count} devices (mesh.context must divide them)"
    if key.dtype != value.dtype:
        return f"keys and values of two types, {key.dtype} and {value.dtype}"
    if callable(bias) and not isinstance(bias, Bias):
        return "bias that is a function (a `positions.Bias` may have a rule of your own)"
    return None


def _divisor(n: int, most: int) -> int:
    """The largest divisor of n up to `most`."""
    return max(d for d in range(1, min(n, most) + 1) if n % d == 0)


@dataclass(frozen=True)
class _Ring:
    """What is static: the call on all devices together, the devices, the chunks that each of them may have, how keys come."""

    call: Call
    devices: int
    chunks: int
    gather: bool

    @property
    def keys(self) -> P:
        """How keys and values lie when a device meets them."""
        return WHOLE if self.gather else SPLIT

    @property
    def here(self) -> Call:
        """The call's lengths on one device."""
        return replace(self.call, T=self.call.T // self.devices, S=self.call.S // self.devices)


@dataclass(frozen=True)
class _Plan:
    """Who does what when. A part is the keys that one device begins with, or where they are gathered, all of them."""

    zigzag: bool
    rows: np.ndarray  # [devices, blocks]: the query blocks of each device
    places: np.ndarray | None  # [key blocks]: where each lies in its part; None: in order
    visits: dict[int, Visits]
    busy: np.ndarray  # [devices, parts]: whether a device looks at a part at all
    first: int  # device d meets part d - t in turns t = first, first + 1, ...
    turns: int


@blocks.remembered
def _plan(mask: Mask, ring: _Ring) -> _Plan:
    call, D = ring.call, ring.devices
    seen = mask.blocks(call.T, call.S, (call.bq, call.bk)) != EMPTY
    chunks = D * ring.chunks
    work = seen.reshape(chunks, call.nq // chunks, chunks, call.nk // chunks).sum((1, 3))
    turn = (np.arange(D)[:, None] - np.arange(1 if ring.gather else D)) % D  # [device, turn] -> part

    def pairs(split):
        """[devices, parts]: visits"""
        mine = work[split].sum(1)
        return mine.sum(1, keepdims=True) if ring.gather else mine[:, split].sum(2)

    def slowest(split):
        """Visits one after another: in each turn of the ring all wait for the busiest."""
        return np.take_along_axis(pairs(split), turn * (not ring.gather), 1).max(0).sum()

    straight = np.arange(chunks).reshape(D, -1)
    zigzag = ring.chunks == 2 and slowest(_zigzag(D)) < 0.9 * slowest(
        straight
    )  # or the exchange costs more than it saves
    split = _zigzag(D) if zigzag else straight
    busy = pairs(split) > 0
    first, turns = (0, 1) if ring.gather else _turns(np.any(np.take_along_axis(busy, turn, 1), 0))
    owners = places = None
    if not ring.gather:
        columns, owner = _blocks_of(split, call.nk // chunks), np.zeros(call.nk, int)
        owner[columns] = np.arange(D)[:, None]
        places, owners = np.empty(call.nk, np.int32), tuple(owner.tolist())
        places[columns] = np.arange(columns.shape[1])
    visits = blocks.find_visits(mask, call, owners)
    return _Plan(bool(zigzag), _blocks_of(split, call.nq // chunks), places, visits, busy, first, turns)


def _zigzag(devices: int) -> np.ndarray:
    """[devices, 2]: device d has chunks d and 2 devices - 1 - d, the even one first."""
    d = np.arange(devices)
    return np.where((d % 2 == 0)[:, None], np.stack([d, 2 * devices - 1 - d], 1), np.stack([2 * devices - 1 - d, d], 1))


def _blocks_of(split: np.ndarray, count: int) -> np.ndarray:
    """[devices, blocks]: the blocks of each device's chunks of `count`."""
    return (split[:, :, None] * count + np.arange(count)).reshape(len(split), -1).astype(np.int32)


def _turns(busy: Any) -> tuple[int, int]:
    """The shortest run of turns, around the ring, that has all in which anybody is busy: (first, how many)."""
    needed = np.flatnonzero(busy)
    if not len(needed):
        return 0, 1
    gaps = np.diff(np.append(needed, needed[0] + len(busy)))
    last = len(gaps) - 1 - int(np.argmax(gaps[::-1]))  # before the longest pause; of equals the one that starts at home
    first = int(needed[(last + 1) % len(needed)])
    return first, (int(needed[last]) - first) % len(busy) + 1


# Exchanges


def _shift(x, by: int, devices: int):
    """x of the device `by` places before."""
    return lax.ppermute(x, AXIS, [(d, (d + by) % devices) for d in range(devices)]) if by % devices else x


def _exchange(x, devices: int, back: bool = False):
    """[B, length, ...]: two neighbouring chunks become the two of zigzag; `back` undoes it."""
    halves = []
    for half, chunks in zip(jnp.split(x, 2, axis=1), _zigzag(devices).T.tolist(), strict=True):
        pairs = [(chunk // 2, device) for device, chunk in enumerate(chunks)]
        halves.append(lax.ppermute(half, AXIS, [(b, a) for a, b in pairs] if back else pairs))
    return jnp.concatenate(halves, axis=1)


def _over_context(f: Callable, in_specs, out_specs) -> Callable:
    return jax.jit(jax.shard_map(f, in_specs=in_specs, out_specs=out_specs, axis_names={AXIS}))


def _varying(tree):
    """As different on each device: a gradient is summed over the devices at the end, not at every use."""
    return jax.tree.map(lambda x: lax.pcast(x, AXIS, to="varying"), tree)


# Forward and backward: on all devices, and on each


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring, query, key, value, arrays, bias, sinks, drop_seed):
    return _forward(ring, query, key, value, arrays, bias, sinks, drop_seed)[0]


def _bias_parts(bias) -> tuple[Any, tuple]:
    """(what is whole on every device, what is split as the queries are)"""
    return (bias.arrays, bias.rows) if isinstance(bias, Bias) else (bias, ())


def _forward(ring, query, key, value, arrays, bias, sinks, drop_seed):
    plan = _plan(ring.call.mask.join(arrays), ring)
    whole, rows = _bias_parts(bias)
    H, kv = key.shape[-1], jnp.concatenate([key, value], axis=-1)
    in_specs, out_specs = (SPLIT, ring.keys, SPLIT, *[WHOLE] * 4), (SPLIT, SPLIT, ring.keys, P(AXIS))
    run = _over_context(partial(_forward_here, ring, plan, bias, H), in_specs, out_specs)
    out, query, moved, lse = run(query, kv, rows, arrays, whole, sinks, drop_seed)
    out, lse = checkpoint_name((out, lse), "attention")  # a policy that keeps them does not go around the ring again
    return out, (query, kv if moved is None else moved, lse, out, arrays, bias, sinks, drop_seed)


def _forward_here(ring, plan, bias, H, query, kv, rows, arrays, whole, sinks, drop_seed):
    call, here, K = ring.call, ring.here, kv.shape[2]
    if plan.zigzag:
        query, rows = jax.tree.map(lambda x: _exchange(x, ring.devices), (query, rows))
        kv = kv if ring.gather else _exchange(kv, ring.devices)
    look = _sight(ring, plan, bias, H, arrays, whole, drop_seed)
    me, (q, rows) = lax.axis_index(AXIS), jax.tree.map(partial(as_rows, here), (query, rows))
    each = jnp.asarray(plan.rows)[me], q, rows

    def meet(kv, part, state):
        def row(_, inputs):
            (i, q, rows), state = inputs
            return None, blockwise.extend_row(call, look(kv), q, rows, i, i * plan.busy.shape[1] + part, state)

        return lax.scan(row, None, (each, state))[1]

    state = jax.vmap(lambda q: blockwise.begin_row(q, sinks, K, kv.shape[3] - H))(q)
    state = _around(ring, plan, me, meet, kv, state)
    out, lse = jax.vmap(lambda state: blockwise.finish_row(state, kv.dtype))(state)
    out = from_rows(out, here.T)
    out = _exchange(out, ring.devices, back=True) if plan.zigzag else out
    return out, query, None if ring.gather else kv, lse


def _sight(ring, plan, bias, H: int, arrays, whole, drop_seed) -> Callable:
    """kv -> what rows of blocks see of these keys and values."""
    mask, places = ring.call.mask.join(arrays), None if plan.places is None else jnp.asarray(plan.places)
    whole = _varying(whole)
    return lambda kv: Seen(mask, bias, whole, drop_seed, plan.visits, kv[..., :H], kv[..., H:], places)


def _around(ring, plan, me, meet: Callable, kv, state, travel: Callable = lambda state, by: state):
    """state after meet(kv, part, state) for every part; `travel(state, by)` moves what of it goes with the keys."""
    D, count = ring.devices, plan.busy.shape[1]
    move = lambda x, by: _shift(x, by, D)

    def if_busy(kv, part, state):
        if plan.busy.all():
            return meet(kv, part, state)
        return lax.cond(jnp.asarray(plan.busy)[me, part], partial(meet, kv, part), lambda state: state, state)

    def turn(carry, t):
        kv, state = carry
        return (move(kv, 1), travel(if_busy(kv, (me - t) % count, state), 1)), None

    if ring.gather:
        return if_busy(kv, 0 * me, state)
    last = plan.first + plan.turns - 1
    carry = move(kv, plan.first), state
    if plan.turns > 1:
        carry, _ = lax.scan(turn, carry, jnp.arange(plan.first, last))
    kv, state = carry
    return travel(if_busy(kv, (me - last) % count, state), -last)


def _backward(ring, residuals, d_out):
    query, kv, lse, out, arrays, bias, sinks, drop_seed = residuals
    plan, H = _plan(ring.call.mask.join(arrays), ring), kv.shape[-1] - out.shape[-1]
    whole, rows = _bias_parts(bias)
    in_specs = SPLIT, ring.keys, P(AXIS), SPLIT, SPLIT, SPLIT, *[WHOLE] * 4
    out_specs = SPLIT, P(AXIS) if ring.gather else SPLIT, SPLIT, WHOLE, WHOLE
    run = _over_context(partial(_backward_here, ring, plan, bias, H), in_specs, out_specs)
    d_query, d_kv, d_rows, d_whole, d_sinks = run(query, kv, lse, out, d_out, rows, arrays, whole, sinks, drop_seed)
    if ring.gather:  # summed out here, where the compiler makes a reduce-scatter that keeps the other axes split
        d_kv = with_logical_constraint(d_kv.sum(0), "batch", "length", "kv_heads", None).astype(kv.dtype)
    d_bias = blocks.bias_gradient(bias, d_whole, d_rows)
    d_sinks = None if sinks is None else d_sinks.reshape(-1).astype(sinks.dtype)
    return d_query, d_kv[..., :H], d_kv[..., H:], None, d_bias, d_sinks, None


def _backward_here(ring, plan, bias, H, query, kv, lse, out, d_out, rows, arrays, whole, sinks, drop_seed):
    call, here, K = ring.call, ring.here, kv.shape[2]
    wide = jnp.promote_types(query.dtype, jnp.float32)
    g, delta = d_out, jnp.sum(d_out.astype(wide) * out.astype(wide), axis=-1)
    if plan.zigzag:
        g, delta, rows = jax.tree.map(lambda x: _exchange(x, ring.devices), (g, delta, rows))
    look = _sight(ring, plan, bias, H, arrays, whole, drop_seed)
    me, (q, g, deltas), rows = lax.axis_index(AXIS), *jax.tree.map(partial(as_rows, here), ((query, g, delta), rows))
    each = jnp.asarray(plan.rows)[me], q, g, deltas, lse, rows

    def meet(kv, part, state):
        d_kv, own, d_whole = state

        def row(sums, inputs):
            (i, q, g, delta, lse, rows), own = inputs
            at = i * plan.busy.shape[1] + part
            own, sums = blockwise.back_row(call, look(kv), q, g, delta, lse, rows, i, at, (own, sums))
            return sums, own

        (dk, dv, d_whole), own = lax.scan(row, (d_kv[..., :H], d_kv[..., H:], d_whole), (each, own))
        return jnp.concatenate([dk, dv], axis=-1), own, d_whole

    own = jax.vmap(lambda q, rows: blockwise.no_gradient(q, rows, K))(q, rows)
    sums = blocks.zeros((kv, whole), wide)
    d_kv, d_whole = (_varying(sums[0]) if ring.gather else sums[0]), _varying(sums[1])
    travel = lambda state, by: (_shift(state[0], by, ring.devices), *state[1:])
    d_kv, (dq, d_rows), d_whole = _around(ring, plan, me, meet, kv, (d_kv, own, d_whole), travel)
    d_kv = d_kv[None] if ring.gather else d_kv.astype(kv.dtype)
    dq, d_rows = jax.tree.map(lambda x: from_rows(x, here.T), (jax.vmap(blockwise.end_row)(dq, q), d_rows))
    if plan.zigzag:
        dq, d_rows = jax.tree.map(lambda x: _exchange(x, ring.devices, back=True), (dq, d_rows))
        d_kv = d_kv if ring.gather else _exchange(d_kv, ring.devices, back=True)
    d_sinks = None
    if sinks is not None:
        d_sinks = jax.vmap(partial(blockwise.sink_gradient, sinks))(lse, deltas).sum(0)
    return dq, d_kv, d_rows, *jax.tree.map(lambda x: lax.psum(x, AXIS), (d_whole, d_sinks))


_attend.defvjp(_forward, _backward)
