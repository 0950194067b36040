"""Exact attention of few queries to keys in a cache, for decoding.

`attention` makes one pass over keys and values in the order that they have in memory.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from jaxformer.ops.attention.blocks import join_blocks, query_blocks
from jaxformer.ops.attention.call import Call
from jaxformer.ops.attention.reference import softmax, visible_scores
from jaxformer.ops.bias import Bias, bias_between
from jaxformer.ops.einsum import einsum
from jaxformer.ops.stored_weight import to_int8
from jaxformer.params import Tree
from jaxformer.sharding import is_split, mesh_axes, platform

QUERY_BLOCK = 128  # queries at a time: their scores are an array
# If the slots of a layer have at most this many bytes, a GPU reads all of them, in about 10 us.
# Choosing one of several branches takes longer: the host waits for the number of the branch, and
# the kernels before and after it are launched one by one.
WHOLE_READ_BYTES = 2**25
# For at most this many queries of a key head, a GPU computes scores without the kernel of a
# product.
FEW_QUERIES = 16


class Int8Slots(NamedTuple):
    """Keys or values in 8 bits, values * scale: a token of a head has one scale, max |x| / 127."""

    values: Array  # int8 [B, K, S, H]
    scale: Array  # float32 [B, K, S, 1]


def empty_slots(shape: tuple[int, ...], dtype) -> Array | Int8Slots:
    """Slots of zeros `[B, K, S, H]`, in 8 bits with scales for int8."""
    if dtype == jnp.int8:
        return Int8Slots(*to_int8(jnp.zeros(shape, jnp.float32), (-1,)))
    return jnp.zeros(shape, dtype)


def as_array(slots: "Array | Int8Slots", dtype) -> Array:
    """Keys or values as an array."""
    return (slots.values * slots.scale if isinstance(slots, Int8Slots) else slots).astype(dtype)


def write(write_fn: Callable, state: Tree, new: Tree, *arguments) -> Tree:
    """The state of a layer after `write_fn(old slots, new slots, *arguments)` of keys and values.

    The state keeps its precision.
    """

    def like_state(name, x):
        return Int8Slots(*to_int8(x, (-1,))) if isinstance(state[name], Int8Slots) else x

    new = {name: like_state(name, x) for name, x in new.items()}
    return jax.tree.map(lambda old, x: write_fn(old, x, *arguments), state, new)


class Slots(NamedTuple):
    """The keys and values of a cache, arrays or `Int8Slots`, and their positions."""

    keys: Any  # [B, K, S, H]
    values: Any  # [B, K, S, Hv]
    positions: Array  # [B, S]; -1 for an empty slot

    def first(self, width: int) -> "Slots":
        keys, values = jax.tree.map(lambda x: x[:, :, :width], (self.keys, self.values))
        return Slots(keys, values, self.positions[:, :width])


def attention(
    query: Array,
    positions: Array,
    old: Slots,
    new: Slots,
    call: Call,
    widths: list[int],
    width: Array,
) -> Array:
    """Queries `[B, T, N, H]` at `positions` [B, T] attend to old slots of a cache and to new keys.

    Only the first widths[width] of the old slots are read.
    """
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((old.keys, old.values)))
    if platform() == "gpu" and size <= WHOLE_READ_BYTES:
        widths, width = widths[-1:], jnp.zeros_like(width)

    def read_first(count, query, positions):
        return _attend(old.first(count), new, call, query, positions)

    def run(query, positions):
        return lax.switch(width, [partial(read_first, count) for count in widths], query, positions)

    if query.shape[1] <= QUERY_BLOCK:
        return run(query, positions)
    split = tuple(query_blocks(QUERY_BLOCK, x) for x in (query, positions))
    return join_blocks(lax.map(lambda block: run(*block), split), query.shape[1])


def _attend(old: Slots, new: Slots, call: Call, query: Array, positions: Array) -> Array:
    (B, T, N, H), (K, S) = query.shape, jax.tree.leaves(old.keys)[0].shape[1:3]
    wide = jnp.promote_types(query.dtype, jnp.float32)
    kv_positions = jnp.concatenate([old.positions, new.positions], axis=1)
    if callable(call.bias) or isinstance(call.bias, Bias):
        call = replace(call, bias=bias_between(call.bias, positions, kv_positions))
    grouped = query.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4).reshape(B, K, -1, H)
    scores = [_product("bkth,bksh->bkts", grouped, slots.keys, wide) for slots in (old, new)]
    scores = jnp.concatenate(scores, axis=-1).reshape(B, N, T, -1) * call.scale
    scores = visible_scores(scores, call, (positions, kv_positions))
    weights = softmax(scores, call.sinks).astype(query.dtype)
    weights = weights.reshape(B, K, -1, kv_positions.shape[1])
    of_old = _product("bkts,bksh->bkth", weights[..., :S], old.values, wide)
    out = of_old + _product("bkts,bksh->bkth", weights[..., S:], new.values, wide)
    return out.astype(query.dtype).reshape(B, N, T, -1).transpose(0, 2, 1, 3)


def _product(spec: str, x: Array, slots: "Array | Int8Slots", dtype) -> Array:
    """x `[B, K, T, n]` times keys or values, in the wider of their precisions."""
    if isinstance(slots, Int8Slots):
        scale = slots.scale.swapaxes(2, 3)
        if spec.endswith("s"):  # of keys
            return _product(spec, x, slots.values.astype(x.dtype), dtype) * scale
        return _product(spec, (x * scale).astype(x.dtype), slots.values.astype(x.dtype), dtype)
    small = x.shape[2] <= (FEW_QUERIES if spec.endswith("s") else 1)
    on_gpu = partial(_sums if small else _dot, spec, dtype)
    return lax.platform_dependent(x, slots, cuda=on_gpu, default=partial(_dot, spec, dtype))


def _dot(spec: str, dtype, x: Array, slots: Array) -> Array:
    x = x.astype(jnp.promote_types(x.dtype, slots.dtype))
    if x.shape[2] == 1 and x.dtype.itemsize < 4:  # XLA:CPU has no kernel for one line of 16 bits
        twice = jnp.concatenate([x, x], axis=2)
        return einsum(spec, twice, slots.astype(x.dtype), dtype=dtype)[:, :, :1]
    return einsum(spec, x, slots.astype(x.dtype), dtype=dtype)


def _sums(spec: str, dtype, x: Array, slots: Array) -> Array:
    """The same without a product's kernel, for which XLA:GPU would first copy the filled slots."""
    x, slots = x.astype(dtype), slots.astype(dtype)
    if spec.endswith("s"):
        return jnp.sum(x[:, :, :, None] * slots[:, :, None], axis=-1)
    return jnp.sum(x[:, :, 0, :, None] * slots, axis=2)[:, :, None]


def widths(S: int) -> list[int]:
    """The numbers of slots that decoding may read, out of S: at most 8 multiples of 128, and S.

    A step reads the smallest number that holds all tokens.
    """
    step = max(128, -(-S // 1024) * 128)
    return [*range(step, S, step), S]


def slot_positions(S: int, length: Array) -> Array:
    """The position of the token in each of S slots, `[B, S]`; negative for an empty slot.

    Position p is in slot p mod S.
    """
    newest = length[:, None] - 1
    return newest - (newest - jnp.arange(S)[None]) % S


def first_slots(state: Array, new: Array, count: Array) -> Array:
    """A state `[B, K, S, H]` with the first `count` [B] of new tokens `[B, K, T, H]`.

    If `count` is more than S, the state has the last S of them.
    """
    S, T = state.shape[2], new.shape[2]
    if T > S:
        index = jnp.maximum(slot_positions(S, count), 0)
        new = jnp.take_along_axis(new, index[:, None, :, None], axis=2)
    return lax.dynamic_update_slice_in_dim(state, new.astype(state.dtype), 0, axis=2)


def write_token(state: Array, new: Array, positions: Array) -> Array:
    """A state `[B, K, S, H]` with one new token in each batch row, `[B, K, 1, H]`.

    Their positions are `[B, 1]`; -1 writes nothing.
    """
    # The slot is empty or has a token that the new one does not see, so it may be written before
    # the state is read: XLA then keeps one copy of the state, and the TPU's compiler does not fetch
    # the slots that attention leaves out.
    if not is_split():
        return _write_token(state, new, positions)
    batch = mesh_axes("batch", len(state)) or None
    heads = mesh_axes("kv_heads", state.shape[1]) or None
    in_specs = P(batch, heads), P(batch, heads), P(batch)
    write = jax.shard_map(_write_token, in_specs=in_specs, out_specs=in_specs[0], check_vma=False)
    return write(state, new, positions)


def _write_token(state: Array, new: Array, positions: Array) -> Array:
    # without the barrier XLA:GPU would compute it again for each batch row
    new = lax.optimization_barrier(new.astype(state.dtype))
    if len(state) == 1:
        return _write_row(new, positions, 0, state)
    return lax.platform_dependent(
        state, new, positions, cpu=_write_rows_in_loop, default=_write_rows
    )


def _write_rows(state: Array, new: Array, positions: Array) -> Array:
    for b in range(len(state)):
        state = _write_row(new, positions, b, state)
    return state


def _write_rows_in_loop(state: Array, new: Array, positions: Array) -> Array:
    """`_write_rows` on a CPU.

    Without the loop, XLA:CPU fuses the write of a row with the read of the next one, and copies the
    whole state four times a token. It makes a loop of a scatter, in bfloat16 with copies, too.
    """
    write = partial(_write_row, new, positions)
    return lax.fori_loop(0, len(state), write, state)


def _write_row(new: Array, positions: Array, b: Any, state: Array) -> Array:
    """The state with the token of batch row b."""
    K, S, H = state.shape[1:]
    # to write a single slot, the TPU's compiler would give the whole state another layout
    pair = min(2, S)
    position = lax.dynamic_index_in_dim(positions, b, keepdims=False)[0]
    slot = position % S
    start = (b, 0, jnp.minimum(slot, S - pair), 0)
    hit = (jnp.arange(pair) == slot - start[2]) & (position >= 0)
    old = lax.dynamic_slice(state, start, (1, K, pair, H))
    token = lax.dynamic_slice_in_dim(new, b, 1)
    updated = jnp.where(hit[None, None, :, None], token, old)
    return lax.dynamic_update_slice(state, updated, start)


def write_slots(state: Array, new: Array, positions: Array, out: Array) -> Array:
    """A state `[B, K, S, H]` with new tokens `[B, K, T, H]`.

    Their positions are `[B, T]`, -1 for padding. `out` was computed from the old state.
    """
    B, S = len(state), state.shape[2]
    # that the write depends on `out` tells XLA that it need not copy the state
    zero = jnp.minimum(jnp.abs(out[:, :1, :1, :1]), 0).astype(new.dtype)
    new = (new + zero).astype(state.dtype)
    is_stored = (positions >= 0) & (positions > positions.max(axis=1, keepdims=True) - S)
    slots = jnp.where(is_stored, positions % S, S)  # S is outside, where nothing is written
    return state.at[jnp.arange(B)[:, None], :, slots].set(new.transpose(0, 2, 1, 3), mode="drop")
