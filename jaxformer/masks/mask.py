"""`Mask`, and the functions that build one."""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int, Shaped

from jaxformer.errors import ConfigError
from jaxformer.masks import blocks as block_counts, rules

MOST, DEEPEST = 2048, 64  # masks in a mask, and how deep: what evaluates, prints or describes one calls itself
FAR = 1 << 30  # positions lie between -FAR and FAR, so that the difference of two fits 32 bits

_SYMBOLS = {rules.and_: " & ", rules.or_: " | "}

Positions = Int[Array, "..."] | Int[np.ndarray, "..."]


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Mask:
    """A rule `rule(mask, q, kv) -> bool` with its static `args`, its `arrays` and the masks that it combines.

    `rule` gets positions that broadcast against each other: q `[B|1, 1, T, 1]` and kv `[B|1, 1, 1, S]`. Your own rule is a
    function: `Mask(lambda mask, q, kv: (q + kv) % 2 == 0)`.
    """

    rule: Callable
    args: tuple = ()
    arrays: tuple = ()
    parts: tuple["Mask", ...] = ()
    offset: Any = None  # an integer is static, an array is a leaf
    _size: tuple[int, int] = field(default=(1, 1), init=False, repr=False, compare=False)  # masks in it, and how deep

    def __post_init__(self):
        parts = [part for part in self.parts if isinstance(part, Mask)] if isinstance(self.parts, tuple) else []
        count, depth = 1 + sum(part._size[0] for part in parts), 1 + max((part._size[1] for part in parts), default=0)
        if count > MOST or depth > DEEPEST:
            limits = f"at most {MOST} masks, {DEEPEST} deep, combine"
            raise ConfigError(f"{limits}; here are {count}, {depth} deep: write them as one rule, masks.Mask(rule)")
        object.__setattr__(self, "_size", (count, depth))

    def tree_flatten(self):
        fixed = self.offset if isinstance(self.offset, int) else None
        return (self.arrays, self.parts, self.offset if fixed is None else None), (self.rule, self.args, fixed)

    @classmethod
    def tree_unflatten(cls, static, children):
        (rule, args, fixed), (arrays, parts, offset) = static, children
        return cls(rule, args, arrays, parts, offset if fixed is None else fixed)

    def __call__(self, q_positions: Positions, kv_positions: Positions) -> Bool[Array, "#B #N T S"]:
        """True where a query may see a key, at absolute positions `[T]`, `[S]` or by row `[B, T]`, `[B, S]`."""
        return self._evaluate(_by_row(q_positions)[:, None, :, None], _by_row(kv_positions)[:, None, None, :])

    def _evaluate(self, q, kv):
        return self.rule(self, q, kv)

    def at(self, offset: int | Int[Array, ""]) -> "Mask":
        """The same mask with its first query at absolute position `offset`. By default the last query is at the last key."""
        if isinstance(offset, int | np.integer):
            if not -FAR <= offset <= FAR:
                raise ValueError(f"{self}.at({offset}): positions lie between -2^30 and 2^30")
            return replace(self, offset=int(offset))
        if np.shape(offset) or not jnp.issubdtype(jnp.result_type(offset), jnp.integer):
            raise ValueError(f"{self}.at({offset}): an offset is one integer, for all rows")
        return replace(self, offset=offset)

    def sized(self, kv_length: int) -> "Mask":
        """The same mask, in which a `random_blocks` without a length draws from `kv_length` keys."""
        if self.rule is rules.random_blocks and len(self.args) == 3:
            return replace(self, args=(*self.args, kv_length))
        return replace(self, parts=tuple(part.sized(kv_length) for part in self.parts)) if self.parts else self

    # to print; a user's rule may have the name of one of ours: to recognise a rule, compare `rule`
    name = property(lambda self: getattr(self.rule, "__name__", type(self.rule).__name__).strip("_"))
    # whether the mask holds no arrays: then it can be hashed, and is known at trace time
    static = property(lambda self: not jax.tree.leaves(self))

    def head_counts(self) -> set[int]:
        """How many masks each `by_head` in it has. The parts of a user's own rule do not count."""
        if self.rule is rules.by_head:
            return {len(self.parts)}
        combines = self.rule in (rules.and_, rules.or_, rules.not_)
        return set().union(*(part.head_counts() for part in self.parts)) if combines else set()

    def conjuncts(self) -> tuple["Mask", ...]:
        """The operands of an `&`, each with the offset of the whole mask; of any other mask, the mask alone."""
        return tuple(replace(part, offset=self.offset) for part in self.parts) if self.rule is rules.and_ else (self,)

    def first(self, q_length: int, kv_length: int) -> Any:
        """Absolute position of the first query: a number, or an array where `at` was given one."""
        return kv_length - q_length if self.offset is None else self.offset

    def positions(self, q_length: int, kv_length: int) -> tuple[Array, Array]:
        """Absolute positions of the queries and keys: aligned at their ends unless the mask has an offset."""
        return self.first(q_length, kv_length) + jnp.arange(q_length), jnp.arange(kv_length)

    def dense(self, q_length: int, kv_length: int) -> Bool[Array, "#B #N T S"]:
        """The mask as an array `[B|1, N|1, T, S]`; for the reference, for small sizes, and to look at."""
        mask = self.sized(kv_length)(*self.positions(q_length, kv_length))
        return jnp.broadcast_to(mask, (*mask.shape[:2], q_length, kv_length))

    def blocks(self, q_length: int, kv_length: int, block: int | tuple[int, int]) -> Int[np.ndarray, "q_blocks kv_blocks"]:
        """EMPTY, PARTIAL or FULL for each block of `block` (or `(queries, keys)`) pairs, int8 `[ceil(T/b), ceil(S/b)]`.

        EMPTY and FULL are proven, for every row and head. PARTIAL is exact for one rule, and for combinations within
        `masks.blocks.BUDGET`. What arrays or a traced offset decide is PARTIAL.
        """
        q_block, kv_block = (block, block) if isinstance(block, int | np.integer) else block
        if min(q_block, kv_block) < 1:
            raise ValueError(f"blocks({q_length}, {kv_length}, {block}): a block has at least one query and one key")
        return block_counts.blocks(self.sized(kv_length), q_length, kv_length, q_block, kv_block)

    def density(self, q_length: int, kv_length: int) -> float:
        """Share of visible pairs, exact. Most masks count whole blocks; where bounds differ, all pairs are evaluated."""
        return block_counts.density(self.sized(kv_length), q_length, kv_length)

    def plot(self, q_length: int, kv_length: int) -> Any:
        """The mask of the first batch row as a matplotlib figure: one panel for each head, at most four."""
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure

        dense = np.asarray(self.dense(q_length, kv_length))
        count, height = min(4, dense.shape[1]), 0.9 + 3 * float(np.clip(q_length / kv_length, 0.3, 2))
        figure = Figure(figsize=(0.6 + 3.4 * count, height), dpi=150, layout="constrained")
        for head, axes in enumerate(figure.subplots(1, count, squeeze=False)[0]):
            colors = ListedColormap(["#ffffff", "#1f5d8c"])
            axes.imshow(dense[0, head], cmap=colors, vmin=0, vmax=1, interpolation_stage="rgba")
            axes.set(xlabel="key", ylabel="query" if head == 0 else None)
            axes.set_title(f"head {head}" if count > 1 else "", fontsize=8)
        title = f"{self}: {dense.mean():.1%} visible"
        title = "\n".join(textwrap.wrap(title, 55 * count)).replace("$", r"\$")  # two of them would begin a formula
        figure.suptitle(title, fontsize=8)
        return figure

    def __and__(self, other: "Mask") -> "Mask":
        return _combine(rules.and_, self, other)

    def __or__(self, other: "Mask") -> "Mask":
        return _combine(rules.or_, self, other)

    def __bool__(self) -> bool:
        """Refused: `a and b`, `a or b` and `not a` would ask for it, and `a and b` would be b alone."""
        raise TypeError(f"{self}: a mask has no truth value; combine masks with & | ~, not with and, or, not")

    def __invert__(self) -> "Mask":
        return Mask(rules.not_, parts=(replace(self, offset=None),), offset=self.offset)

    def __repr__(self) -> str:
        """The calls that build the mask; arrays are shown by type and shape, a user's rule as `Mask(name)`."""
        if self.offset is not None:
            text = repr(replace(self, offset=None))
            text = f"({text})" if self.rule in (*_SYMBOLS, rules.not_) else text
            return f"{text}.at({self.offset if isinstance(self.offset, int) else _short(self.offset)})"
        if self.rule in _SYMBOLS:

            def nested(part):
                return part.rule in _SYMBOLS and part.rule is not self.rule

            return _SYMBOLS[self.rule].join(f"({part})" if nested(part) else str(part) for part in self.parts)
        if self.rule is rules.not_:
            return f"~({self.parts[0]})" if self.parts[0].rule in _SYMBOLS else f"~{self.parts[0]}"
        args = self.args
        if self.rule is rules.block_sparse and self.static:
            args = (_short(rules.layout_of(*args[1:])), args[0])
        shown = [*self.parts, *args, *(_short(array) for array in self.arrays if array is not None)]
        if self.rule is not getattr(rules, self.name, None):  # a user's rule may be called causal
            return f"Mask({', '.join(map(str, [self.name, *shown]))})"
        return f"{self.name}({', '.join(map(str, shown))})"

    def __describe__(self) -> Any:
        """For `jaxformer.config`: the mask's text, and what the text leaves out, namely users' rules and arrays."""
        masks = _with_parts(self)
        users = [(mask.rule, mask.args) for mask in masks if mask.rule.__module__ != rules.__name__]
        hidden = [mask.args for mask in masks if mask.rule is rules.block_sparse]
        hidden += [mask.arrays for mask in masks if mask.arrays]
        return {"mask": str(self), "rules": users, "hidden": hidden} if users or hidden else str(self)


def _short(array) -> str:
    """An array by its type and shape."""
    return f"<{array.dtype}{list(array.shape)}>"


def _with_parts(mask: Mask) -> list[Mask]:
    return [mask, *(below for part in mask.parts for below in _with_parts(part))]


def _by_row(positions: Positions) -> Array:
    """Positions `[length]` or `[B, length]` as `[B|1, length]` of 32 bits: sums of 8 bits would wrap around."""
    positions = jnp.asarray(positions)
    return jnp.atleast_2d(positions.astype(jnp.promote_types(positions.dtype, jnp.int32)))


def _combine(rule, *masks: Mask) -> Mask:
    for mask in masks:
        if not isinstance(mask, Mask):
            kind = type(mask).__name__
            raise TypeError(f"a mask combines with masks, not with {kind}; wrap a rule as masks.Mask(rule)")
    offsets = [mask.offset for mask in masks if mask.offset is not None]
    if len({offset if isinstance(offset, int) else id(offset) for offset in offsets}) > 1:
        raise ValueError("masks with different query offsets do not combine; call .at(offset) once, on the result")
    parts = [part for mask in masks for part in (mask.parts if mask.rule is rule is not rules.by_head else (mask,))]
    parts = tuple(part if part.offset is None else replace(part, offset=None) for part in parts)
    return Mask(rule, parts=parts, offset=offsets[0] if offsets else None)


def as_mask(mask: Any, function: str) -> Mask:
    """`mask`, or `full()` for None. Raises ValueError, which names the function, for anything else, such as an array."""
    if mask is not None and not isinstance(mask, Mask):
        found = _short(mask) if hasattr(mask, "dtype") else repr(mask)
        wraps = "masks.segments(ids) or masks.lengths(kv=lengths) wrap padding, masks.block_sparse(pattern, 1) a pattern [T, S]"
        raise ValueError(f"{function}: a mask is a value of jaxformer.masks, not {found}; {wraps}")
    return full() if mask is None else mask


def _integers(builder: str, **numbers) -> tuple:
    """The numbers, each `(value, least)`, as `int`s. Raises ValueError unless they are integers from `least` to 2^31 - 1."""
    for name, (value, least) in numbers.items():
        if not isinstance(value, int | np.integer) or not least <= value < 2**31:
            raise ValueError(f"{builder}: {name} is an integer from {least} to {2**31 - 1}; got {value!r}")
    return tuple(int(value) for value, _ in numbers.values())


def _integer_array(builder: str, array: Any, axes: str, flags: bool = False) -> Any:
    """An array by batch row, of integers (or `flags`). Raises ValueError for another shape or kind: it means another mask."""
    array = array if hasattr(array, "dtype") else np.asarray(array)
    kinds = (jnp.integer, jnp.bool_) if flags else (jnp.integer,)
    if array.ndim != len(axes.split()) or not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
        padding = "" if flags else "; masks.segments takes a padding mask [B, length], True where a token is"
        raise ValueError(f"{builder}: expected integers of shape [{axes}]; got {_short(array)}{padding}")
    return array


def full() -> Mask:
    """Every key is visible."""
    return Mask(rules.full)


def causal() -> Mask:
    """Keys up to and including the query's own position: j <= i."""
    return Mask(rules.causal)


def window(left: int, right: int = 0, dilation: int = 1) -> Mask:
    """Keys from `left` positions before the query to `right` after it, itself included: i - left <= j <= i + right.

    With a dilation d only every d-th: i - d m for 0 <= m <= left and i + d m for 1 <= m <= right (Beltagy et al. 2020).
    """
    left, right, dilation = _integers("window", left=(left, 0), right=(right, 0), dilation=(dilation, 1))
    return Mask(rules.window, (left, right) if dilation == 1 else (left, right, dilation))


def strided(stride: int) -> Mask:
    """Keys a multiple of `stride` away, before and after: (i - j) mod stride = 0."""
    return Mask(rules.strided, _integers("strided", stride=(stride, 1)))


def chunked(size: int, before: int = 0, after: int = 0) -> Mask:
    """Keys in the query's chunk of `size` positions, in the `before` chunks before it and in the `after` chunks after it."""
    return Mask(rules.chunked, _integers("chunked", size=(size, 1), before=(before, 0), after=(after, 0)))


def columns(stride: int, count: int) -> Mask:
    """The last `count` keys of every `stride`, to all queries: j mod stride >= stride - count."""
    return Mask(rules.columns, _integers("columns", stride=(stride, max(1, count)), count=(count, 0)))


def prefix(length: int | Int[Array, " B"]) -> Mask:
    """The first `length` keys are visible to all (prefix LM: `causal() | prefix(n)`); an array: one length a row."""
    if isinstance(length, int | np.integer):
        return Mask(rules.prefix, _integers("prefix", length=(length, -FAR)))
    return Mask(rules.prefix, arrays=(_integer_array("prefix", length, "B"),))


def global_tokens(tokens: int | Sequence | Shaped[np.ndarray, "..."] | Shaped[Array, "..."]) -> Mask:
    """Some tokens see all keys and all queries see them: j in g or i in g (Beltagy et al. 2020, section 3.1).

    `tokens`: their number (the first ones), a sequence of positions, or by row an array `[B, G]` of positions (negative: none)
    or `[B, length]` of booleans, which may be traced.
    """
    if isinstance(tokens, Array) or np.ndim(tokens) > 1:
        if np.ndim(tokens) != 2:
            raise ValueError(f"global_tokens: arrays are by row, [B, G] or [B, length]; got {np.shape(tokens)}")
        if not isinstance(tokens, jax.core.Tracer) and _are_flags(np.asarray(tokens)):
            raise ValueError("global_tokens: an integer array holds positions, here 0 and 1 alone; for flags give booleans")
        return Mask(rules.global_tokens, arrays=(jnp.asarray(tokens),))
    static = np.unique(np.asarray(tokens, None if np.size(tokens) else int))
    if static.dtype.kind not in "iu" or (static < 0).any() or (static >= 2**31).any():
        raise ValueError(f"global_tokens({tokens}): expected a number or positions, integers from 0 to {2**31 - 1}")
    return Mask(rules.global_tokens, (tuple(static.tolist()) if np.ndim(tokens) else int(static[0]),))


def _are_flags(tokens: np.ndarray) -> bool:
    """Whether an array of integers must be flags: no row names more than two positions, 0 and 1, many times."""
    return tokens.dtype.kind in "iu" and tokens.shape[1] > 2 and bool(((tokens == 0) | (tokens == 1)).all())


def block_sparse(layout: Sequence | Shaped[np.ndarray, "..."] | Bool[Array, "..."], block: int) -> Mask:
    """A mask that is constant on blocks of `block` positions: query block i sees key block j where `layout[i, j]`.

    `layout` is `[nq, nk]`, or `[N, nq, nk]` with one a head; a NumPy array or a list is part of the (static, hashable)
    mask, a JAX array may be traced. Positions outside the layout neither see nor are seen.
    """
    (block,) = _integers("block_sparse", block=(block, 1))
    if np.ndim(layout) not in (2, 3):
        raise ValueError(f"block_sparse: a layout is [nq, nk] or [N, nq, nk]; got {np.shape(layout)}")
    layout = layout.astype(bool) if isinstance(layout, Array) else np.asarray(layout, bool)
    layout = layout if layout.ndim == 3 else layout[None]
    if isinstance(layout, Array):
        return Mask(rules.block_sparse, (block,), arrays=(layout,))
    return Mask(rules.block_sparse, (block, layout.shape, np.packbits(layout).tobytes()))


def random_blocks(count: int, block: int, seed: int = 0, length: int | None = None) -> Mask:
    """Each block of `block` queries sees `count` distinct random blocks of the ceil(length / block) ones of keys, or all.

    Zaheer et al. 2020, arXiv:2007.14062. Without a `length`, a model takes its config's `context_length`, and `ops.attention`
    the number of keys (`Mask.sized`). A query block draws by the seed, the number of key blocks and its index modulo that.
    """
    sizes = dict(count=(count, 1), block=(block, 1), seed=(seed, 0), length=(length or 0, 0))
    count, block, seed, number = _integers("random_blocks", **sizes)
    return Mask(rules.random_blocks, (count, block, seed) if length is None else (count, block, seed, number))


def by_head(*masks: Mask) -> Mask:
    """Head n sees what mask n shows: `[B|1, N, T, S]`."""
    if not masks:
        raise ValueError("by_head: give one mask a head")
    return _combine(rules.by_head, *masks)


def segments(q: Int[Array, "B T"], kv: Int[Array, "B S"] | None = None) -> Mask:
    """Queries see keys of their own segment; nobody sees segment 0, which is padding. Ids are looked up by position.

    With two arrays (cross-attention) both sides count from 0, whatever their lengths.
    """
    # one array for both sides: as two arguments of jit, nobody could tell that they are equal
    sides = (q,) if kv is None or kv is q else (q, kv)
    arrays = tuple(_integer_array("segments", ids, "B length", flags=True) for ids in sides)
    return Mask(rules.segments, arrays=arrays, offset=None if kv is None else 0)


def lengths(q: Int[Array, " B"] | None = None, kv: Int[Array, " B"] | None = None) -> Mask:
    """Right-padded rows: queries before `q[b]` see keys before `kv[b]`; None does not limit that side.

    With `q` both sides count from 0, whatever their lengths.
    """
    arrays = tuple(None if lengths is None else _integer_array("lengths", lengths, "B") for lengths in (q, kv))
    return Mask(rules.lengths, arrays=arrays, offset=None if q is None else 0)


_window, _columns = window, columns  # for functions whose parameters have these names


def longformer(window: int, globals: int | Sequence | Shaped[np.ndarray, "..."] | Shaped[Array, "..."]) -> Mask:
    """A sliding window of `window` keys in total, half of them on each side, and global tokens: arXiv:2004.05150."""
    return _window(window // 2, window // 2) | global_tokens(globals)


def bigbird(block: int, window: int = 3, globals: int = 2, random: int = 3, seed: int = 0) -> Mask:
    """`window` neighbouring blocks, the first `globals` blocks, `random` random ones, each counted once: Zaheer et al. 2020."""
    near = chunked(block, window // 2, window // 2)
    return near | global_tokens(globals * block) | random_blocks(random, block, seed)


def sparse_transformer_strided(stride: int) -> Mask:
    """The last `stride` keys, itself included, and every `stride`-th before: Child et al. 2019, arXiv:1904.10509, 4.3."""
    return window(stride - 1) | (causal() & strided(stride))


def sparse_transformer_fixed(stride: int, columns: int) -> Mask:
    """The query's block of `stride` keys and the last `columns` of every block before it: Child et al. 2019, section 4.3."""
    return causal() & (chunked(stride) | _columns(stride, columns))


def shift_invariant(mask: Mask) -> bool:
    """Whether a mask certainly depends on the distance of positions alone, so that padding in front changes nothing."""
    return block_counts.made_of(mask, block_counts.OF_DISTANCE)


def is_causal(mask: Mask) -> bool:
    """Whether a mask certainly hides all later keys: `causal()`, a `window` without a right side, or `&` of those with any."""
    return any(part.rule is rules.causal or (part.rule is rules.window and part.args[1] == 0) for part in mask.conjuncts())


def reach(mask: Mask) -> int | None:
    """How many positions before it a query sees at most, by the `window`s of a mask; None: all."""
    lefts = [part.args[0] * (*part.args, 1)[2] for part in mask.conjuncts() if part.rule is rules.window]
    return min(lefts, default=None)
