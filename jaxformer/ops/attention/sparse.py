"""Sparse attentions that a mask alone does not describe: Longformer has two sets of projections, BigBird gathers blocks."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jaxtyping import Bool, Float, Int

from jaxformer.masks import Mask, global_tokens as global_mask, prefix, segments, window as band
from jaxformer.ops.attention import attention
from jaxformer.ops.attention.blocks import padded
from jaxformer.ops.attention.call import check_shapes, mask_refusal
from jaxformer.ops.attention.linear import visibility

Layout = Int[Array, "N rows r"] | Int[np.ndarray, "N rows r"]
Tokens = int | Sequence[int] | Int[np.ndarray, "..."] | Bool[Array, "B T"] | Bool[np.ndarray, "B T"]


@jax.named_scope("longformer_attention")
def longformer_attention(
    query: Float[Array, "B T N H"], key: Float[Array, "B T K H"], value: Float[Array, "B T K Hv"],
    global_query: Float[Array, "B T N H"] | None, global_key: Float[Array, "B T K H"] | None,
    global_value: Float[Array, "B T K Hv"] | None, *, window: int, global_tokens: Tokens = 0, max_globals: int | None = None,
    mask: Mask | None = None, scale: float | None = None, dropout_rate: float = 0.0, dropout_key: Array | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N Hv"]:  # fmt: skip
    """Sliding window and global tokens, the latter with projections of their own. Beltagy et al. 2020, arXiv:2004.05150.

    A local token attends to the keys at most window / 2 away and to the global tokens' keys, each once, in one softmax. A
    global token attends from `global_query` to every `global_key`. `global_tokens` is their number (the first ones), their
    positions, or flags `[B, T]`; without any, the global arrays may be None. Traced flags need `max_globals`, the most of a
    row: a row with more yields NaN. `mask` hides padding (`segments`, `lengths`), which yields zeros; NotImplementedError for
    others. Cost grows with T * (window + globals).
    """
    q_ids, kv_ids = _segment_ids("longformer_attention", mask, query, key, value)
    if window < 0 or window % 2:
        raise ValueError(f"longformer_attention: window is the total width, an even number >= 0; got {window}")
    (B, T), each = query.shape[:2], jnp.arange(len(query))[:, None]
    chosen, overfull = _chosen(global_tokens, max_globals, B, T)
    G = chosen.shape[1]
    keys = (None, None) if dropout_key is None else random.split(dropout_key)
    options: dict[str, Any] = dict(scale=scale, dropout_rate=dropout_rate, implementation=implementation)
    # The global keys are copied in front of all keys and hidden in their own places: then the mask is a rule of positions,
    # and the kernel knows at trace time that it is sparse.
    in_front = lambda x: jnp.concatenate([_take(x, chosen), x], axis=1)
    kv_local = jnp.concatenate([_take(kv_ids, chosen), kv_ids.at[each, chosen].set(0, mode="drop")], axis=1)
    visible = segments(jnp.pad(q_ids, [(0, 0), (G, 0)]), kv_local) & (band(window // 2, window // 2) | prefix(G))
    out: Any = attention(query, in_front(key), in_front(value), mask=visible.at(G), dropout_key=keys[0], **options)
    if G:
        if global_query is None or global_key is None or global_value is None:
            raise ValueError("longformer_attention: global tokens need global_query, global_key and global_value")
        options |= dict(mask=segments(_take(q_ids, chosen), kv_ids), dropout_key=keys[1])
        rows: Any = attention(_take(global_query, chosen), global_key, global_value, **options)
        out = out.at[each, chosen].set(rows, mode="drop")
    return out if overfull is None else jnp.where(overfull[:, None, None, None], jnp.nan, out)


def _chosen(tokens, max_globals, B, T):
    """Positions of the global tokens `[B, G]`, T where a row has fewer; of flags, also the rows `[B]` with too many."""
    if np.ndim(tokens) < 2:
        (static,) = global_mask(np.asarray(tokens)).args  # refuses what is no number and no positions
        positions = np.arange(static) if isinstance(static, int) else np.array(static, np.int32)
        if (positions >= T).any():
            raise ValueError(f"longformer_attention: global tokens are among 0 to {T - 1}; got {tokens}")
        return jnp.broadcast_to(jnp.asarray(positions)[None], (B, len(positions))), None
    if tokens.shape != (B, T) or tokens.dtype != bool:
        raise ValueError(f"longformer_attention: global tokens by row are flags [{B}, {T}]; got {tokens.dtype} {tokens.shape}")
    if max_globals is None:
        if isinstance(tokens, jax.core.Tracer):
            raise ValueError("longformer_attention: traced flags of global tokens need max_globals, the most of a row")
        max_globals = int(np.asarray(tokens).sum(1).max(initial=0))
    chosen = jax.vmap(lambda row: jnp.nonzero(row, size=max_globals, fill_value=T)[0])(jnp.asarray(tokens))
    return chosen, jnp.sum(tokens, axis=1) > max_globals


def _take(x, indices):
    """x [B, T, ...] at indices [B, G] -> [B, G, ...]; zeros at indices beyond T."""
    index = indices.reshape(*indices.shape, *[1] * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1, mode="fill", fill_value=0)


@jax.named_scope("bigbird_attention")
def bigbird_attention(
    query: Float[Array, "B T N H"], key: Float[Array, "B T K H"], value: Float[Array, "B T K Hv"], layout: Layout, *,
    block: int, mask: Mask | None = None, scale: float | None = None, dropout_rate: float = 0.0,
    dropout_key: Array | None = None, implementation: str | None = None,
) -> Float[Array, "B T N Hv"]:  # fmt: skip
    """Internal transformer construction (ITC): global, neighbouring and random blocks. Zaheer et al. 2020, arXiv:2007.14062.

    Of the nb = ceil(T / block) blocks of queries the first and the last attend to all keys, block i between them to
    the key blocks {0, i - 1, i, i + 1, nb - 1} and `layout[n, i - 1]` (`[N, nb - 2, r]`, of a `bigbird_layout` function). A
    block that it names twice, or that is among the five, counts twice in the softmax, as in the authors' code. `mask` hides
    padding (`segments`, `lengths`), which yields zeros; NotImplementedError for others. Cost grows with T * block * (5 + r).
    """
    ids = _segment_ids("bigbird_attention", mask, query, key, value)
    B, T, N = query.shape[:3]
    blocks = -(-T // block)
    if layout.shape[:2] != (N, max(blocks - 2, 0)):
        raise ValueError(f"bigbird_attention: layout is [{N}, {max(blocks - 2, 0)}, r]; got {layout.shape}")
    if B * T == 0:
        return jnp.zeros((B, T, N, value.shape[-1]), value.dtype)
    query, key, value, q_ids, kv_ids = (padded(x, 1, block) for x in (query, key, value, *ids))
    keys = (None, None) if dropout_key is None else random.split(dropout_key)

    ends = np.unique(np.r_[:block, -block:0] % (blocks * block))
    options: dict[str, Any] = dict(scale=scale, dropout_rate=dropout_rate)
    outer = dict(mask=segments(q_ids[:, ends], kv_ids), dropout_key=keys[0], implementation=implementation)
    dense: Any = attention(query[:, ends], key, value, **outer, **options)
    parts = [dense[:, :block], dense[:, block:]]
    if blocks > 2:
        parts.insert(1, _inner_blocks(query, key, value, q_ids, kv_ids, layout, block, keys[1], options))
    return jnp.concatenate(parts, axis=1)[:, :T]


def _inner_blocks(query, key, value, q_ids, kv_ids, layout, block, dropout_key, options):
    """All but the first and last block of queries, `[B, T - 2 block, N, Hv]`: each row is an attention to gathered keys."""
    (B, T, N, _), K, r = query.shape, key.shape[2], layout.shape[-1]
    rows = T // block - 2
    near, counted = _neighbours(rows + 2)
    index = jnp.concatenate([jnp.broadcast_to(near[None], (N, rows, 5)), jnp.asarray(layout)], axis=-1)
    head = (jnp.arange(N) // (N // K))[:, None, None]

    split = lambda x: x.reshape(B, rows + 2, block, *x.shape[2:])

    def take_blocks(x):  # [B, T, K, H] -> [B, rows, (5 + r) block, N, H]
        x = split(x).transpose(0, 3, 1, 2, 4)[:, head, index]
        return x.reshape(B, N, rows, (5 + r) * block, -1).transpose(0, 2, 3, 1, 4)

    counted = np.concatenate([counted, np.ones((rows, r), bool)], axis=1)[None, None, :, :, None]
    kv_ids = jnp.where(counted, split(kv_ids)[:, index], 0).reshape(B, N, rows, 1, -1)
    ids = split(q_ids)[:, 1:-1, None, :, None].swapaxes(0, 1), jnp.moveaxis(kv_ids, 2, 0)
    by_row = dict(mask=Mask(_same_id, arrays=ids), dropout_key=None if dropout_key is None else random.split(dropout_key, rows))
    # rows joined to the batch would be computed whole on each device of a mesh
    attend = jax.vmap(partial(attention, implementation="reference", **options), 1, 1)  # of keywords it maps the first axis
    out = attend(split(query)[:, 1:-1], take_blocks(key), take_blocks(value), **by_row)
    return out.reshape(B, rows * block, N, -1)


def _same_id(mask, q, kv):
    """`segments` of one row: ids `[B, 1, T, 1]` of its queries, `[B, N, 1, S]` of the keys that each head gathered."""
    q_ids, kv_ids = mask.arrays
    return (q_ids == kv_ids) & (kv_ids != 0)


def _neighbours(blocks):
    """Key blocks 0, i - 1, i, i + 1, last of the query blocks 1 .. last - 1 `[rows, 5]`, and which of them are new."""
    i = np.arange(1, blocks - 1)
    near = np.stack([0 * i, i - 1, i, i + 1, 0 * i + blocks - 1], axis=1)
    first = np.stack([(near[:, :j] != near[:, j : j + 1]).all(axis=1) for j in range(5)], axis=1)
    return near, first


def bigbird_layout(key: Array, T: int, block: int, r: int, heads: int) -> Int[Array, "N rows r"]:
    """r distinct random blocks for every inner block of queries and every head, none of them among its five."""
    blocks = -(-T // block)
    if blocks > 2 and blocks - 5 < r:
        raise ValueError(f"bigbird_layout: {r} random blocks beside the five need {5 + r} of them; got {blocks}")
    rows = max(blocks - 2, 0)
    taken = np.zeros((rows, blocks), bool)
    if rows:
        np.put_along_axis(taken, _neighbours(blocks)[0], True, axis=1)
    draws = jnp.where(taken[None], -1.0, random.uniform(key, (heads, rows, blocks)))
    return jax.lax.top_k(draws, r)[1]


def bigbird_layout_zero(T: int, block: int, r: int, heads: int) -> Int[np.ndarray, "N rows r"]:
    """Block 0, r times, as in Hugging Face's model outside training: the first block counts 1 + r times."""
    return np.zeros((heads, max(-(-T // block) - 2, 0), r), np.int32)


def bigbird_layout_seeded(T: int, block: int, r: int, heads: int, layer: int, *, max_length: int = 4096) -> Layout:
    """The layout of the published checkpoints: NumPy's legacy generator, seeded by the layer's number.

    Random blocks come from the first 2 r + 5. For the published lengths 1,024, 3,072 and 4,096 an older plan draws from the
    first 1,024 positions, for `max_length` positions (the config's); there some neighbours count twice. ValueError for a T that
    is no multiple of `block`, or has at most 2 r + 5 blocks (there Hugging Face's model is dense).
    """
    blocks, old = T // block, T in (1024, 3072, 4096)
    if T % block or blocks <= 2 * r + 5:
        raise ValueError(f"bigbird_layout_seeded: T is a multiple of block {block}, > {2 * r + 5} blocks; got {T}")
    state = np.random.RandomState(layer)
    planned = max_length // block if old else blocks  # rows beyond T are drawn too: they advance the generator
    layout = np.zeros((heads, planned, r), np.int32)
    rows = [(head, row) for head in range(heads) for row in range(1, planned - 1)]
    for head, row in rows if old else sorted(rows, key=lambda pair: pair[1]):  # the newer plan draws row by row
        candidates = _old_candidates(row, block, planned) if old else np.arange(2 * r + 5)
        drop = set() if old else _dropped(row, 2 * r + 5)
        drawn = [j for j in state.permutation(candidates) if j not in drop][:r]
        if len(drawn) < r:
            raise ValueError(f"bigbird_layout_seeded: block {row} finds {len(drawn)} of {r} blocks of {block}")
        layout[head, row] = drawn
    return layout[:, 1 : blocks - 1]


def _dropped(row, end):
    """Blocks of 0 .. end - 1 that a row may not draw: its five, as if there were no more blocks."""
    return {0, row - 1, row, row + 1, end - 1} | ({end - 2} if row == 1 else set()) | ({1} if row == end - 2 else set())


def _old_candidates(row, block, blocks):
    """Inner blocks of the first 1,024 positions, without the row's neighbours if the row is among them."""
    last = 1024 // block - 1 if 2 * block < 1024 else blocks - 1
    last = min(last, blocks - 2)
    if row >= blocks - 3 or row - 2 > last:
        return np.arange(1, last + 1)
    return np.concatenate([np.arange(1, row - 1), np.arange(row + 2, last + 1)])


def _segment_ids(name, mask, query, key, value):
    """The mask of a self-attention as ids [B, T] of queries and of keys, 0 for padding."""
    check_shapes(name, query, key, value)
    B, T = query.shape[:2]
    if key.shape[1] != T:
        raise ValueError(f"{name}: T of query and key must agree; got query {query.shape}, key {key.shape}")
    view = visibility(mask, T, T, name, takes_causal=False)
    if not isinstance(view.first, int) or view.first:
        raise mask_refusal(name, mask, "offset", "the positions of a self-attention")
    return tuple(jnp.broadcast_to(ids, (B, T)) for ids in (view.q_ids, view.kv_ids))
