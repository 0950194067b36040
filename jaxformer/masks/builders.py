"""The functions that build a `Mask`, one for each rule, and questions about a mask.

Below, i is the position of a query and j that of a key.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int, Shaped

from jaxformer.masks import blocks, rules
from jaxformer.masks.mask import FAR, Mask, combine
from jaxformer.masks.show import array_text


def full() -> Mask:
    """Every key is visible."""
    return Mask(rules.full)


def causal() -> Mask:
    """Keys up to and including the query's own position: j <= i."""
    return Mask(rules.causal)


def window(left: int, right: int = 0, dilation: int = 1) -> Mask:
    """Keys from `left` positions before the query to `right` after it: i - left <= j <= i + right.

    With a dilation d, query i sees only every d-th key: i - d m for 0 <= m <= left, and i + d m for
    1 <= m <= right (Beltagy et al. 2020).
    """
    left, right, dilation = _integers(
        "window", left=(left, 0), right=(right, 0), dilation=(dilation, 1)
    )
    return Mask(rules.window, (left, right) if dilation == 1 else (left, right, dilation))


def strided(stride: int) -> Mask:
    """Keys a multiple of `stride` away, before and after: (i - j) mod stride = 0."""
    return Mask(rules.strided, _integers("strided", stride=(stride, 1)))


def chunked(size: int, before: int = 0, after: int = 0) -> Mask:
    """Keys in the query's own chunk, `before` chunks before it and `after` chunks after it.

    A chunk has `size` positions: -before <= floor(j / size) - floor(i / size) <= after.
    """
    sizes = _integers("chunked", size=(size, 1), before=(before, 0), after=(after, 0))
    return Mask(rules.chunked, sizes)


def columns(stride: int, count: int) -> Mask:
    """All queries see the last `count` keys of each `stride`: j mod stride >= stride - count."""
    numbers = _integers("columns", stride=(stride, max(1, count)), count=(count, 0))
    return Mask(rules.columns, numbers)


def prefix(length: int | Int[Array, " B"]) -> Mask:
    """All queries see the first `length` keys: j < length. An array has one length a batch row.

    A prefix language model is `causal() | prefix(n)`.
    """
    if isinstance(length, int | np.integer):
        return Mask(rules.prefix, _integers("prefix", length=(length, -FAR)))
    return Mask(rules.prefix, arrays=(_integer_array("prefix", length, "B"),))


def global_tokens(
    tokens: int | Sequence | Shaped[np.ndarray, "..."] | Shaped[Array, "..."],
) -> Mask:
    """Global tokens g see all keys, and all queries see them: i in g or j in g.

    `tokens` is a number (the first tokens), a sequence of positions, or an array by batch row,
    which may be traced: positions `[B, G]` (a negative one is none) or booleans `[B, length]`.
    Beltagy et al. 2020, section 3.1.
    """
    if isinstance(tokens, Array) or np.ndim(tokens) > 1:
        if np.ndim(tokens) != 2:
            raise ValueError(
                f"global_tokens: arrays are by row, [B, G] or [B, length]; got {np.shape(tokens)}"
            )
        if not isinstance(tokens, jax.core.Tracer) and _are_flags(np.asarray(tokens)):
            raise ValueError(
                "global_tokens: an integer array holds positions, here 0 and 1 alone; "
                "for flags give booleans"
            )
        return Mask(rules.global_tokens, arrays=(jnp.asarray(tokens),))
    static = np.unique(np.asarray(tokens, None if np.size(tokens) else int))
    if static.dtype.kind not in "iu" or (static < 0).any() or (static >= 2**31).any():
        raise ValueError(
            f"global_tokens({tokens}): expected a number or positions, "
            f"integers from 0 to {2**31 - 1}"
        )
    number_or_positions = tuple(static.tolist()) if np.ndim(tokens) else int(static[0])
    return Mask(rules.global_tokens, (number_or_positions,))


def _are_flags(tokens: np.ndarray) -> bool:
    """Whether integers `[B, G]` must be flags, not positions: more than two a row, all 0 or 1."""
    if tokens.dtype.kind not in "iu" or tokens.shape[1] <= 2:
        return False
    return bool(((tokens == 0) | (tokens == 1)).all())


def block_sparse(
    layout: Sequence | Shaped[np.ndarray, "..."] | Bool[Array, "..."], block: int
) -> Mask:
    """Query block i sees key block j where `layout[i, j]`. A block has `block` positions.

    `layout` is `[nq, nk]`, or `[N, nq, nk]` with one layout a head. With a NumPy array or a list
    the mask is static and hashable. A JAX array may be traced. A position outside the layout
    neither sees a key nor is seen.
    """
    (block,) = _integers("block_sparse", block=(block, 1))
    if np.ndim(layout) not in (2, 3):
        raise ValueError(
            f"block_sparse: a layout is [nq, nk] or [N, nq, nk]; got {np.shape(layout)}"
        )
    layout = layout.astype(bool) if isinstance(layout, Array) else np.asarray(layout, bool)
    layout = layout if layout.ndim == 3 else layout[None]
    if isinstance(layout, Array):
        return Mask(rules.block_sparse, (block,), arrays=(layout,))
    return Mask(rules.block_sparse, (block, layout.shape, np.packbits(layout).tobytes()))


def random_blocks(count: int, block: int, seed: int = 0, length: int | None = None) -> Mask:
    """Each query block sees `count` distinct random key blocks, or all if there are no more.

    A block has `block` positions; there are ceil(length / block) key blocks. Without a `length`, a
    model takes its config's `context_length`, and `ops.attention` takes the number of keys
    (`Mask.sized`). The draw of a query block depends on the seed, on the number of key blocks, and
    on its index modulo this number. Zaheer et al. 2020, arXiv:2007.14062.
    """
    sizes = dict(count=(count, 1), block=(block, 1), seed=(seed, 0), length=(length or 0, 0))
    args = _integers("random_blocks", **sizes)
    return Mask(rules.random_blocks, args[:3] if length is None else args)


def by_head(*masks: Mask) -> Mask:
    """Head n sees what mask n shows: `[B|1, N, T, S]`."""
    if not masks:
        raise ValueError("by_head: give one mask a head")
    return combine(rules.by_head, *masks)


def segments(q: Int[Array, "B T"], kv: Int[Array, "B S"] | None = None) -> Mask:
    """A query attends only within its own segment. Segment 0 is padding, which no query sees.

    Ids are looked up by position. With two arrays (cross-attention) the positions of both sides
    start at 0, also if their lengths differ.
    """
    # Both sides share one array. Two arguments of `jit` would lose the fact that they are equal.
    sides = (q,) if kv is None or kv is q else (q, kv)
    arrays = tuple(_integer_array("segments", ids, "B length", flags=True) for ids in sides)
    return Mask(rules.segments, arrays=arrays, offset=None if kv is None else 0)


def lengths(q: Int[Array, " B"] | None = None, kv: Int[Array, " B"] | None = None) -> Mask:
    """Right-padded batch rows: i < q[b] and j < kv[b]. None does not limit its side.

    With `q` the positions of both sides start at 0, also if their lengths differ.
    """
    arrays = tuple(
        None if limit is None else _integer_array("lengths", limit, "B") for limit in (q, kv)
    )
    return Mask(rules.lengths, arrays=arrays, offset=None if q is None else 0)


# Patterns of papers. Their parameters have the papers' names, which hide two functions above.
_window = window
_columns = columns


def longformer(
    window: int, globals: int | Sequence | Shaped[np.ndarray, "..."] | Shaped[Array, "..."]
) -> Mask:
    """A sliding window of `window` keys, half on each side, and global tokens. arXiv:2004.05150."""
    return _window(window // 2, window // 2) | global_tokens(globals)


def bigbird(block: int, window: int = 3, globals: int = 2, random: int = 3, seed: int = 0) -> Mask:
    """`window` neighbouring blocks, the first `globals` blocks, and `random` random blocks.

    A block that is several of these counts once. Zaheer et al. 2020, arXiv:2007.14062.
    """
    near = chunked(block, window // 2, window // 2)
    return near | global_tokens(globals * block) | random_blocks(random, block, seed)


def sparse_transformer_strided(stride: int) -> Mask:
    """The last `stride` keys, the query's own included, and every `stride`-th key before them.

    Child et al. 2019, arXiv:1904.10509, section 4.3.
    """
    return window(stride - 1) | (causal() & strided(stride))


def sparse_transformer_fixed(stride: int, columns: int) -> Mask:
    """Causal: the query's block of `stride` keys, and the last `columns` keys of earlier blocks.

    Child et al. 2019, arXiv:1904.10509, section 4.3.
    """
    return causal() & (chunked(stride) | _columns(stride, columns))


# Questions about a mask, and checks of arguments
def shift_invariant(mask: Mask) -> bool:
    """Whether a mask certainly depends on i - j alone. Then padding in front changes nothing."""
    return blocks.made_of(mask, blocks.OF_DISTANCE)


def is_causal(mask: Mask) -> bool:
    """Whether a mask certainly hides all later keys.

    These are `causal()`, a `window` without a right side, and each of them `&` any mask.
    """

    def hides_later_keys(conjunct: Mask) -> bool:
        if conjunct.rule is rules.window:
            return conjunct.args[1] == 0
        return conjunct.rule is rules.causal

    return any(map(hides_later_keys, mask.conjuncts()))


def reach(mask: Mask) -> int | None:
    """The largest i - j that the `window`s of a mask let a query i see; None: no limit."""
    windows = [rules.window_of(each) for each in mask.conjuncts() if each.rule is rules.window]
    return min((left * dilation for left, _, dilation in windows), default=None)


def as_mask(mask: Any, function: str) -> Mask:
    """`mask`, or `full()` for None.

    Raises ValueError, which names the function, for any other value, such as an array.
    """
    if mask is None:
        return full()
    if isinstance(mask, Mask):
        return mask
    value = array_text(mask) if hasattr(mask, "dtype") else repr(mask)
    advice = (
        "masks.segments(ids) or masks.lengths(kv=lengths) wrap padding, "
        "masks.block_sparse(pattern, 1) a pattern [T, S]"
    )
    raise ValueError(f"{function}: a mask is a value of jaxformer.masks, not {value}; {advice}")


def _integers(builder: str, **numbers) -> tuple:
    """The values of numbers `name=(value, least)`, as `int`s.

    Raises ValueError for a value that is no integer from `least` to 2^31 - 1.
    """
    for name, (value, least) in numbers.items():
        if not isinstance(value, int | np.integer) or not least <= value < 2**31:
            raise ValueError(
                f"{builder}: {name} is an integer from {least} to {2**31 - 1}; got {value!r}"
            )
    return tuple(int(value) for value, _ in numbers.values())


def _integer_array(builder: str, array: Any, axes: str, flags: bool = False) -> Any:
    """An array by batch row, of integers, and with `flags` also of booleans.

    Raises ValueError for another shape or type: the caller meant another mask.
    """
    array = array if hasattr(array, "dtype") else np.asarray(array)
    kinds = (jnp.integer, jnp.bool_) if flags else (jnp.integer,)
    has_kind = any(jnp.issubdtype(array.dtype, kind) for kind in kinds)
    if has_kind and array.ndim == len(axes.split()):
        return array
    advice = "; masks.segments takes a padding mask [B, length], True where a token is"
    raise ValueError(
        f"{builder}: expected integers of shape [{axes}]; "
        f"got {array_text(array)}{'' if flags else advice}"
    )
