"""`Mask`: a rule over positions, as a value. `masks.builders` has the functions that build one.

A mask combines with others by `& | ~`. `dense` is the mask as an array, `blocks` its class for each
block of pairs, which kernels read.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int

from jaxformer.errors import ConfigError
from jaxformer.masks import blocks as block_counts, rules, show

# Evaluating, printing and describing a mask recurse into its parts. So a mask has at most this many
# masks in it, and this depth.
MOST = 2048
DEEPEST = 64
FAR = 1 << 30  # positions lie between -FAR and FAR, so that the difference of two fits 32 bits

Positions = Int[Array, "..."] | Int[np.ndarray, "..."]


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Mask:
    """A rule `rule(mask, q, kv) -> bool`, its static `args` and `arrays`, and masks as `parts`.

    `rule` gets positions that broadcast against each other: q `[B|1, 1, T, 1]` and kv
    `[B|1, 1, 1, S]`. Your own rule is a function: `Mask(lambda mask, q, kv: (q + kv) % 2 == 0)`.
    """

    rule: Callable
    args: tuple = ()
    arrays: tuple = ()
    parts: tuple["Mask", ...] = ()
    offset: Any = None  # an integer is static, an array is a leaf
    # (the number of masks in it, its depth)
    _size: tuple[int, int] = field(default=(1, 1), init=False, repr=False, compare=False)

    def __post_init__(self):
        # JAX also builds masks whose leaves are placeholders
        parts = self.parts if isinstance(self.parts, tuple) else ()
        sizes = [part._size for part in parts if isinstance(part, Mask)]
        count = 1 + sum(count for count, _ in sizes)
        depth = 1 + max((depth for _, depth in sizes), default=0)
        if count > MOST or depth > DEEPEST:
            limits = f"at most {MOST} masks, {DEEPEST} deep, combine"
            raise ConfigError(
                f"{limits}; here are {count}, {depth} deep: "
                "write them as one rule, masks.Mask(rule)"
            )
        object.__setattr__(self, "_size", (count, depth))

    def tree_flatten(self):
        if isinstance(self.offset, int):
            return (self.arrays, self.parts, None), (self.rule, self.args, self.offset)
        return (self.arrays, self.parts, self.offset), (self.rule, self.args, None)

    @classmethod
    def tree_unflatten(cls, static, children):
        rule, args, static_offset = static
        arrays, parts, offset = children
        return cls(rule, args, arrays, parts, offset if static_offset is None else static_offset)

    def __call__(self, q_positions: Positions, kv_positions: Positions) -> Bool[Array, "#B #N T S"]:
        """True where a query may see a key.

        Positions are absolute: `[T]` and `[S]`, or by batch row `[B, T]` and `[B, S]`.
        """
        q = _by_row(q_positions)[:, None, :, None]
        kv = _by_row(kv_positions)[:, None, None, :]
        return self._evaluate(q, kv)

    def _evaluate(self, q, kv):
        return self.rule(self, q, kv)

    def at(self, offset: int | Int[Array, ""]) -> "Mask":
        """The same mask with its first query at absolute position `offset`.

        By default the last query is at the position of the last key. Raises ValueError unless the
        offset is one integer; a traced one is allowed.
        """
        if isinstance(offset, int | np.integer):
            if not -FAR <= offset <= FAR:
                raise ValueError(f"{self}.at({offset}): positions lie between -2^30 and 2^30")
            return replace(self, offset=int(offset))
        if np.shape(offset) or not jnp.issubdtype(jnp.result_type(offset), jnp.integer):
            raise ValueError(f"{self}.at({offset}): an offset is one integer, for all rows")
        return replace(self, offset=offset)

    def sized(self, kv_length: int) -> "Mask":
        """The same mask; each `random_blocks` without a length draws from `kv_length` keys."""
        if self.rule is rules.random_blocks and len(self.args) == 3:
            return replace(self, args=(*self.args, kv_length))
        if not self.parts:
            return self
        return replace(self, parts=tuple(part.sized(kv_length) for part in self.parts))

    # For printing. A user's rule may have the same name as a rule of ours: compare `rule` to
    # recognise a rule.
    name = property(
        lambda self: getattr(self.rule, "__name__", type(self.rule).__name__).strip("_")
    )
    # Whether the mask holds no arrays. Then it can be hashed and is known at trace time.
    static = property(lambda self: not jax.tree.leaves(self))

    def head_counts(self) -> set[int]:
        """The number of masks of each `by_head` inside. The parts of a user's rule do not count."""
        if self.rule is rules.by_head:
            return {len(self.parts)}
        if self.rule not in (rules.and_, rules.or_, rules.not_):
            return set()
        return set().union(*(part.head_counts() for part in self.parts))

    def conjuncts(self) -> tuple["Mask", ...]:
        """The operands of an `&`, each with the offset of this mask; any other mask, alone."""
        if self.rule is not rules.and_:
            return (self,)
        return tuple(replace(part, offset=self.offset) for part in self.parts)

    def first(self, q_length: int, kv_length: int) -> Any:
        """Absolute position of the first query: a number, or an array if `at` got one."""
        return kv_length - q_length if self.offset is None else self.offset

    def positions(self, q_length: int, kv_length: int) -> tuple[Array, Array]:
        """Absolute positions of the queries `[T]` and keys `[S]`.

        Their ends are aligned unless the mask has an offset.
        """
        return self.first(q_length, kv_length) + jnp.arange(q_length), jnp.arange(kv_length)

    def dense(self, q_length: int, kv_length: int) -> Bool[Array, "#B #N T S"]:
        """The mask as an array `[B|1, N|1, T, S]`: for the reference kernel and for inspection."""
        mask = self.sized(kv_length)(*self.positions(q_length, kv_length))
        return jnp.broadcast_to(mask, (*mask.shape[:2], q_length, kv_length))

    def blocks(
        self, q_length: int, kv_length: int, block: int | tuple[int, int]
    ) -> Int[np.ndarray, "q_blocks kv_blocks"]:
        """EMPTY, PARTIAL or FULL for each block of pairs: int8 `[ceil(T / b), ceil(S / b)]`.

        `block` is b, or a pair (queries, keys). EMPTY and FULL are certain for every batch row and
        head. PARTIAL is exact for a single rule, and for a combination within
        `masks.blocks.BUDGET`. A block is also PARTIAL where arrays or a traced offset decide.
        Raises ValueError for a block below 1.
        """
        q_block, kv_block = (block, block) if isinstance(block, int | np.integer) else block
        if min(q_block, kv_block) < 1:
            raise ValueError(
                f"blocks({q_length}, {kv_length}, {block}): "
                "a block has at least one query and one key"
            )
        return block_counts.blocks(self.sized(kv_length), q_length, kv_length, q_block, kv_block)

    def density(self, q_length: int, kv_length: int) -> float:
        """The exact share of visible pairs, from 0 to 1.

        Blocks are counted from the structure of the mask. If this does not decide a block, all of
        its pairs are evaluated. With arrays, all pairs are evaluated. Raises ValueError if the
        offset is an array, and if traced values decide.
        """
        return block_counts.density(self.sized(kv_length), q_length, kv_length)

    def plot(self, q_length: int, kv_length: int) -> Any:
        """A matplotlib figure of the first batch row's mask: one panel a head, at most four."""
        return show.figure(self, q_length, kv_length)

    def __and__(self, other: "Mask") -> "Mask":
        return combine(rules.and_, self, other)

    def __or__(self, other: "Mask") -> "Mask":
        return combine(rules.or_, self, other)

    def __bool__(self) -> bool:
        """Raises TypeError. Python calls this for `a and b`, which would silently be b alone."""
        raise TypeError(
            f"{self}: a mask has no truth value; combine masks with & | ~, not with and, or, not"
        )

    def __invert__(self) -> "Mask":
        return Mask(rules.not_, parts=(replace(self, offset=None),), offset=self.offset)

    def __repr__(self) -> str:
        """The calls that build the mask (`show.mask_text`)."""
        return show.mask_text(self)

    def __describe__(self) -> Any:
        """The mask as `jaxformer.config` describes it (`show.description`)."""
        return show.description(self)


def _by_row(positions: Positions) -> Array:
    """Positions `[length]` or `[B, length]` as `[B|1, length]`, in at least 32 bits.

    Sums of 8-bit positions would wrap around.
    """
    positions = jnp.asarray(positions)
    return jnp.atleast_2d(positions.astype(jnp.promote_types(positions.dtype, jnp.int32)))


def combine(rule: Callable, *masks: Mask) -> Mask:
    """The mask `rule` of `masks`, with their offset.

    Parts of the same rule become parts of the result: (a & b) & c has three. Raises TypeError for
    an operand that is no mask, and ValueError for masks with different offsets.
    """
    for mask in masks:
        if not isinstance(mask, Mask):
            kind = type(mask).__name__
            raise TypeError(
                f"a mask combines with masks, not with {kind}; wrap a rule as masks.Mask(rule)"
            )
    offsets = [mask.offset for mask in masks if mask.offset is not None]
    if len({offset if isinstance(offset, int) else id(offset) for offset in offsets}) > 1:
        raise ValueError(
            "masks with different query offsets do not combine; "
            "call .at(offset) once, on the result"
        )
    parts = []
    for mask in masks:
        same_rule = mask.rule is rule and rule is not rules.by_head
        parts += mask.parts if same_rule else (mask,)
    parts = tuple(part if part.offset is None else replace(part, offset=None) for part in parts)
    return Mask(rule, parts=parts, offset=offsets[0] if offsets else None)
