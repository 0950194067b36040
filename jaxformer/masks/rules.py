"""The rules of masks: `rule(mask, q, kv)` is True where a query at q may see a key at kv.

`masks.builders` has a function for each rule, which documents it. Positions broadcast against each
other: q `[B|1, 1, T, 1]` and kv `[B|1, 1, 1, S]`. They are NumPy arrays in `masks.blocks` (at trace
time) and JAX arrays in kernels. Slow operations such as remainders act on q or kv alone, before the
two broadcast.
"""

import operator
from functools import lru_cache, reduce

import jax.numpy as jnp
import numpy as np


def and_(mask, q, kv):
    return reduce(operator.and_, (part._evaluate(q, kv) for part in mask.parts))


def or_(mask, q, kv):
    return reduce(operator.or_, (part._evaluate(q, kv) for part in mask.parts))


def not_(mask, q, kv):
    return ~mask.parts[0]._evaluate(q, kv)


def by_head(mask, q, kv):
    xp = q.__array_namespace__()
    visible = [each._evaluate(q, kv) for each in mask.parts]
    shape = jnp.broadcast_shapes(q.shape, kv.shape, *(each.shape for each in visible))
    if shape[1] != 1:
        raise ValueError(f"by_head takes masks of one head each; one of {mask} has {shape[1]}")
    return xp.concatenate([xp.broadcast_to(each, shape) for each in visible], axis=1)


def full(mask, q, kv):
    return (q == q) & (kv == kv)


def causal(mask, q, kv):
    return kv <= q


def window(mask, q, kv):
    left, right, dilation = window_of(mask)
    near = (kv >= shifted(q, -left * dilation)) & (kv <= shifted(q, right * dilation))
    return near if dilation == 1 else near & (kv % dilation == q % dilation)


def window_of(mask):
    """(left, right, dilation) of a `window`."""
    return (*mask.args, 1)[:3]


def strided(mask, q, kv):
    return kv % mask.args[0] == q % mask.args[0]


def chunked(mask, q, kv):
    size, before, after = mask.args
    q_chunk = q // size
    kv_chunk = kv // size
    if before == after == 0:
        return kv_chunk == q_chunk
    return (kv_chunk >= shifted(q_chunk, -before)) & (kv_chunk <= shifted(q_chunk, after))


def columns(mask, q, kv):
    stride, count = mask.args
    return (kv % stride >= stride - count) & (q == q)


def prefix(mask, q, kv):
    length = mask.args[0] if mask.args else mask.arrays[0][:, None, None, None]
    return (kv < length) & (q == q)


def global_tokens(mask, q, kv):
    return _marked(mask, q) | _marked(mask, kv)


def _marked(mask, positions):
    if mask.args and isinstance(mask.args[0], int):
        return (positions >= 0) & (positions < mask.args[0])
    if mask.arrays and mask.arrays[0].dtype == bool:
        return lookup(mask.arrays[0], positions)
    xp = positions.__array_namespace__()
    tokens = mask.arrays[0] if mask.arrays else xp.asarray(mask.args, xp.int32)
    tokens = tokens[:, None, None, None, :]
    return ((positions[..., None] == tokens) & (tokens >= 0)).any(-1)


def block_sparse(mask, q, kv):
    xp = q.__array_namespace__()
    block = mask.args[0]
    layout = mask.arrays[0] if mask.arrays else xp.asarray(layout_of(*mask.args[1:]))
    heads, q_blocks, kv_blocks = layout.shape
    # positions outside the layout read this border of False
    layout = xp.pad(layout, ((0, 0), (1, 1), (1, 1)))
    head = xp.arange(heads).reshape(1, heads, 1, 1)
    q_block = xp.clip(q // block, -1, q_blocks) + 1
    kv_block = xp.clip(kv // block, -1, kv_blocks) + 1
    return layout[head, q_block, kv_block]


@lru_cache(maxsize=64)
def layout_of(shape, packed):
    """The layout that the static arguments of `block_sparse` hold."""
    bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=int(np.prod(shape)))
    return bits.astype(bool).reshape(shape)


def random_blocks(mask, q, kv):
    choice = choice_of(mask)
    block = mask.args[1]
    # [B|1, 1, T, 1, count]
    key_blocks = q.__array_namespace__().asarray(choice)[q // block % len(choice)]
    sees = (kv // block == key_blocks[..., c] for c in range(choice.shape[1]))
    return reduce(operator.or_, sees)


def choice_of(mask):
    """The key blocks `[key blocks, count]` that the query blocks of `random_blocks` see."""
    if len(mask.args) == 3:
        raise ValueError(
            f"{mask} does not know the number of keys; "
            "call mask.sized(S) first, or give it a length"
        )
    count, block, seed, length = mask.args
    return _draw(count, seed, max(1, -(-length // block)))


@lru_cache(maxsize=64)
def _draw(count, seed, n):
    """An array `[n, count]`: `count` distinct numbers below n in each line, by Floyd's sampling.

    It reads raw bits, because NumPy keeps their sequence stable.
    """
    count = min(count, n)
    bits = np.random.PCG64(np.random.SeedSequence([seed, n])).random_raw((n, count))
    numbers = np.full((n, count), -1, np.int32)
    for step in range(count):
        top = n - count + step
        draw = (bits[:, step] % np.uint64(top + 1)).astype(np.int32)
        is_repeated = (numbers[:, :step] == draw[:, None]).any(1)
        numbers[:, step] = np.where(is_repeated, top, draw)
    return numbers


def segments(mask, q, kv):
    q_ids, kv_ids = lookup(mask.arrays[0], q), lookup(mask.arrays[-1], kv)
    return (q_ids == kv_ids) & (kv_ids != 0)


def lookup(ids, positions):
    """ids `[B|1, length]` at positions `[B|1, ...]`: `[B|1, ...]`; 0 (padding) outside of them."""
    flat = positions.reshape(positions.shape[0], -1)
    flat = jnp.where(flat < 0, ids.shape[1], flat)  # a negative index would count from the end
    # not `max`: with `jax.export` sizes may be symbols
    (B,) = jnp.broadcast_shapes(ids.shape[:1], flat.shape[:1])
    ids, flat = (jnp.broadcast_to(x, (B, x.shape[1])) for x in (ids, flat))
    ids = jnp.take_along_axis(ids, flat, axis=1, mode="fill", fill_value=0)
    return ids.reshape(B, *positions.shape[1:])


def lengths(mask, q, kv):
    visible = full(mask, q, kv)
    for positions, length in zip((q, kv), mask.arrays, strict=True):
        if length is not None:
            visible = visible & (positions < length[:, None, None, None])
    return visible


def segment_ids(parts, q, kv):
    """Ids `[B|1, T]` and `[B|1, S]`: a query sees a key where both have the same id.

    They are the ids at positions `[T]` and `[S]` of `parts`: masks of `lengths` and at most one of
    `segments`. A position with id 0 neither sees a key nor is seen.
    """
    # the first or the last array: `segments` of one sequence has one array
    q_arrays = [(part.rule, part.arrays[0]) for part in parts]
    kv_arrays = [(part.rule, part.arrays[-1]) for part in parts]
    return _ids_of_side(q_arrays, q), _ids_of_side(kv_arrays, kv)


def _ids_of_side(rules_and_arrays, positions):
    """Ids `[B|1, length]` at positions `[length]`; 0 where a rule hides the position."""
    ids = jnp.ones((1, len(positions)), jnp.int32)
    for rule, array in rules_and_arrays:
        if rule is segments:
            ids = jnp.where(ids == 0, 0, lookup(array, positions[None]))
        elif array is not None:
            ids = jnp.where(positions[None] < array[:, None], ids, 0)
    return ids


def shifted(positions, by):
    """positions + by, clipped to the ends of their integer type. The sum could wrap around."""
    xp = positions.__array_namespace__()
    ends = np.iinfo(positions.dtype)
    by = max(-ends.max, min(by, ends.max))
    if by > 0:
        return by + xp.minimum(positions, ends.max - by)
    return by + xp.maximum(positions, ends.min - by)
