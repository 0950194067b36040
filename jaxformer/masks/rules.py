"""The rules of the masks that `masks.mask` builds: `rule(mask, q, kv)` is True where a query at q may see a key at kv.

Positions broadcast against each other, q `[B|1, 1, T, 1]` and kv `[B|1, 1, 1, S]`: NumPy arrays in `masks.blocks` (at trace
time), JAX arrays in kernels. Slow operations such as remainders act on q or kv alone, before they broadcast.
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
    left, right, dilation = (*mask.args, 1)[:3]
    near = (kv >= shifted(q, -left * dilation)) & (kv <= shifted(q, right * dilation))
    return near if dilation == 1 else near & (kv % dilation == q % dilation)


def strided(mask, q, kv):
    return kv % mask.args[0] == q % mask.args[0]


def chunked(mask, q, kv):
    size, before, after = mask.args
    q, kv = q // size, kv // size
    return kv == q if before == after == 0 else (kv >= shifted(q, -before)) & (kv <= shifted(q, after))


def columns(mask, q, kv):
    stride, count = mask.args
    return (kv % stride >= stride - count) & (q == q)


def prefix(mask, q, kv):
    return (kv < (mask.args[0] if mask.args else mask.arrays[0][:, None, None, None])) & (q == q)


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
    xp, block = q.__array_namespace__(), mask.args[0]
    layout = mask.arrays[0] if mask.arrays else xp.asarray(layout_of(*mask.args[1:]))
    heads, q_blocks, kv_blocks = layout.shape
    layout = xp.pad(layout, ((0, 0), (1, 1), (1, 1)))  # positions outside the layout read this border of False
    head = xp.arange(heads).reshape(1, heads, 1, 1)
    return layout[head, xp.clip(q // block, -1, q_blocks) + 1, xp.clip(kv // block, -1, kv_blocks) + 1]


@lru_cache(maxsize=64)
def layout_of(shape, packed):
    """The layout that the static arguments of `block_sparse` hold."""
    bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=int(np.prod(shape)))
    return bits.astype(bool).reshape(shape)


def random_blocks(mask, q, kv):
    key_blocks, block = choice_of(mask), mask.args[1]
    key_blocks = q.__array_namespace__().asarray(key_blocks)[q // block % len(key_blocks)]  # [B|1, 1, T, 1, count]
    return reduce(operator.or_, (kv // block == key_blocks[..., c] for c in range(key_blocks.shape[-1])))


def choice_of(mask):
    """The key blocks `[key blocks, count]` that the query blocks of `random_blocks` see."""
    if len(mask.args) == 3:
        raise ValueError(f"{mask} does not know the number of keys; call mask.sized(S) first, or give it a length")
    count, block, seed, length = mask.args
    return _draw(count, seed, max(1, -(-length // block)))


@lru_cache(maxsize=64)
def _draw(count, seed, n):
    """`count` distinct numbers below n in each of n rows: Floyd's sampling of raw bits, which NumPy keeps stable."""
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
    """ids [B|1, length] at positions [B|1, ...] -> [B|1, ...]; 0 (padding) at positions outside the array."""
    flat = positions.reshape(positions.shape[0], -1)
    flat = jnp.where(flat < 0, ids.shape[1], flat)  # a negative index would count from the end
    (B,) = jnp.broadcast_shapes(ids.shape[:1], flat.shape[:1])  # export has symbols for sizes
    ids, flat = (jnp.broadcast_to(x, (B, x.shape[1])) for x in (ids, flat))
    return jnp.take_along_axis(ids, flat, axis=1, mode="fill", fill_value=0).reshape(B, *positions.shape[1:])


def lengths(mask, q, kv):
    q_length, kv_length = mask.arrays
    limits = ((q, q_length), (kv, kv_length))
    inside = (x < length[:, None, None, None] for x, length in limits if length is not None)
    return reduce(operator.and_, inside, full(mask, q, kv))


def segment_ids(parts, q, kv):
    """Ids [B|1, T], [B|1, S] at positions [T], [S] for masks of `lengths` and one `segments`; id 0 neither sees nor is seen."""
    sides = []
    for side, positions in enumerate((q, kv)):
        ids = jnp.ones((1, len(positions)), jnp.int32)
        for part in parts:
            array = part.arrays[-side]  # the first or the last: `segments` of one sequence has one array
            if part.rule is segments:
                ids = jnp.where(ids == 0, 0, lookup(array, positions[None]))
            elif array is not None:
                ids = jnp.where(positions[None] < array[:, None], ids, 0)
        sides.append(ids)
    return tuple(sides)


def shifted(positions, by):
    """positions + by, clipped to the ends of their integer type, because the sum could wrap around."""
    xp, ends = positions.__array_namespace__(), np.iinfo(positions.dtype)
    by = max(-ends.max, min(by, ends.max))
    return by + (xp.minimum(positions, ends.max - by) if by > 0 else xp.maximum(positions, ends.min - by))
