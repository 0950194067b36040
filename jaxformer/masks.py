"""Attention masks as values: small, hashable specs that every kernel understands.

    mask = causal() & window(256) | prefix(16)

A mask is a rule over absolute positions, `(q_positions, kv_positions) -> bool`, True where a query may attend. Nothing
of size T x S exists until somebody asks for `.dense(T, S)`. Masks without arrays are hashable and may be static
arguments of `jax.jit`; masks with arrays (`segments`, `lengths`, `prefix` by row) are pytrees and may be traced.
"""

import ast
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jaxtyping import Bool, Int

Positions = Int[Array, "..."] | Int[np.ndarray, "..."]


@struct.dataclass
class Mask:
    """A rule `rule(mask, q, kv) -> bool` with its static `args`, its `arrays` and the masks it is made of.

    `rule` sees positions that broadcast against each other: q `[B|1, 1, T, 1]` and kv `[B|1, 1, 1, S]`. A rule of your
    own is a function: `Mask(lambda mask, q, kv: (q + kv) % 2 == 0)`.
    """

    rule: Callable = struct.field(pytree_node=False)
    args: tuple = struct.field(pytree_node=False, default=())
    arrays: tuple = ()
    parts: tuple["Mask", ...] = ()
    offset: Any = None

    def __call__(self, q_positions: Positions, kv_positions: Positions) -> Bool[Array, "#B #N T S"]:
        """True where a query may see a key, at absolute positions `[T]`, `[S]` or by row `[B, T]`, `[B, S]`."""
        return self._evaluate(_rank4(q_positions, -1), _rank4(kv_positions, -2))

    def _evaluate(self, q, kv):
        return self.rule(self, q, kv)

    def at(self, offset: int | Int[Array, ""]) -> "Mask":
        """The same mask, its first query at absolute position `offset`; without, queries end where keys end."""
        return replace(self, offset=offset)

    def positions(self, q_length: int, kv_length: int) -> tuple[Array, Array]:
        """Absolute positions of the queries and keys: bottom-right aligned unless `at` said otherwise."""
        first = kv_length - q_length if self.offset is None else self.offset
        return first + jnp.arange(q_length), jnp.arange(kv_length)

    def dense(self, q_length: int, kv_length: int) -> Bool[Array, "#B #N T S"]:
        """The mask as an array `[B|1, N|1, T, S]`; for the reference, for small sizes, and to look at."""
        mask = self(*self.positions(q_length, kv_length))
        return jnp.broadcast_to(mask, (*mask.shape[:2], q_length, kv_length))

    def __and__(self, other: "Mask") -> "Mask":
        return _combine(_and, self, other)

    def __or__(self, other: "Mask") -> "Mask":
        return _combine(_or, self, other)

    def __invert__(self) -> "Mask":
        return Mask(_not, parts=(self,), offset=self.offset)

    def __repr__(self) -> str:
        name = self.rule.__name__.strip("_")
        if self.rule in _SYMBOLS:
            operands = [
                f"({part})" if part.rule in _SYMBOLS and part.rule is not self.rule else str(part)
                for part in self.parts
            ]
            return _SYMBOLS[self.rule].join(operands)
        if self.rule is _not:
            return f"~({self.parts[0]})" if self.parts[0].rule in _SYMBOLS else f"~{self.parts[0]}"
        arrays = [f"<{a.dtype}{list(a.shape)}>" for a in self.arrays if a is not None]
        return f"{name}({', '.join([*map(str, self.args), *arrays])})"

    __str__ = __repr__

    @staticmethod
    def __parse__(text: str) -> "Mask":
        return parse(text)


def _rank4(positions, axis: int):
    if positions.ndim == 1:
        positions = positions[None]
    # [B, length] -> [B, 1, length, 1] for queries (axis -1), [B, 1, 1, length] for keys (axis -2)
    return positions[:, None, :, None] if axis == -1 else positions[:, None, None, :]


def _combine(rule, left: Mask, right: Mask) -> Mask:
    if not isinstance(right, Mask):
        raise TypeError(
            f"a mask combines with a mask, not with {type(right).__name__}; wrap your rule in masks.Mask(rule)"
        )
    if left.offset is not None and right.offset is not None and left.offset is not right.offset:
        raise ValueError("two masks with different query offsets do not combine; call .at(offset) once, on the result")
    offset = left.offset if left.offset is not None else right.offset
    parts = [p for m in (left, right) for p in (m.parts if m.rule is rule else (m,))]
    return Mask(rule, parts=tuple(parts), offset=offset)


def _and(mask, q, kv):
    result = mask.parts[0]._evaluate(q, kv)
    for part in mask.parts[1:]:
        result = result & part._evaluate(q, kv)
    return result


def _or(mask, q, kv):
    result = mask.parts[0]._evaluate(q, kv)
    for part in mask.parts[1:]:
        result = result | part._evaluate(q, kv)
    return result


def _not(mask, q, kv):
    return ~mask.parts[0]._evaluate(q, kv)


_SYMBOLS = {_and: " & ", _or: " | "}


def full() -> Mask:
    """Every key is visible."""
    return Mask(_full)


def _full(mask, q, kv):
    return (q == q) & (kv == kv)


def causal() -> Mask:
    """Keys up to and including the query's own position: j <= i."""
    return Mask(_causal)


def _causal(mask, q, kv):
    return kv <= q


def window(left: int, right: int = 0) -> Mask:
    """Keys from `left` positions before the query to `right` after it, itself included: i - left <= j <= i + right."""
    if left < 0 or right < 0:
        raise ValueError(f"window({left}, {right}): both sides count positions and must be >= 0")
    return Mask(_window, (left, right))


def _window(mask, q, kv):
    left, right = mask.args
    return (kv >= q - left) & (kv <= q + right)


def prefix(length: int | Int[Array, " B"]) -> Mask:
    """The first `length` keys are visible to all (prefix LM: `causal() | prefix(n)`); an array: one length a row."""
    if isinstance(length, int | np.integer):
        return Mask(_prefix, (int(length),))
    return Mask(_prefix, arrays=(length,))


def _prefix(mask, q, kv):
    length = mask.args[0] if mask.args else mask.arrays[0][:, None, None, None]
    return (kv < length) & (q == q)


def segments(q: Int[Array, "B T"], kv: Int[Array, "B S"] | None = None) -> Mask:
    """Queries see keys of their own segment; segment 0 is padding, seen by nobody. Ids are looked up by position.

    With two arrays (cross-attention) both sides count from 0, whatever their lengths.
    """
    return Mask(_segments, arrays=(q, q if kv is None else kv), offset=None if kv is None else 0)


def _segments(mask, q, kv):
    q_ids, kv_ids = _lookup(mask.arrays[0], q), _lookup(mask.arrays[1], kv)
    return (q_ids == kv_ids) & (kv_ids != 0)


def _lookup(ids, positions):
    """ids [B, length] at positions [B|1, 1, a, b] -> [B, 1, a, b]; positions beyond the array count as padding."""
    flat = positions.reshape(positions.shape[0], -1)
    flat = jnp.broadcast_to(flat, (ids.shape[0], flat.shape[1]))
    flat = jnp.where(flat < 0, ids.shape[1], flat)  # a negative index would count from the end
    found = jnp.take_along_axis(ids, flat, axis=1, mode="fill", fill_value=0)
    return found.reshape(ids.shape[0], *positions.shape[1:])


def lengths(q: Int[Array, " B"] | None = None, kv: Int[Array, " B"] | None = None) -> Mask:
    """Right-padded rows: queries before `q[b]` see keys before `kv[b]`; None leaves that side alone."""
    if q is None and kv is None:
        raise ValueError("lengths(q, kv): give the lengths of at least one side")
    return Mask(_lengths, arrays=(q, kv), offset=None if q is None else 0)


def _lengths(mask, q, kv):
    q_length, kv_length = mask.arrays
    visible = _full(mask, q, kv)
    if q_length is not None:
        visible = visible & (q < q_length[:, None, None, None])
    if kv_length is not None:
        visible = visible & (kv < kv_length[:, None, None, None])
    return visible


def shift_invariant(mask: Mask) -> bool:
    """Whether a mask is known to depend on the distance of positions alone, so that padding in front changes nothing."""
    if mask.rule in (_and, _or, _not):
        return all(map(shift_invariant, mask.parts))
    return mask.rule in (_full, _causal, _window)


_BUILDERS = {f.__name__: f for f in (full, causal, window, prefix)}


def parse(text: str) -> Mask:
    """The mask that `repr` wrote, e.g. `causal() & window(255, 0)`. Raises ValueError for all but builders and `& | ~`."""

    def build(node) -> Mask:
        match node:
            case ast.BinOp(left, ast.BitAnd(), right):
                return build(left) & build(right)
            case ast.BinOp(left, ast.BitOr(), right):
                return build(left) | build(right)
            case ast.UnaryOp(ast.Invert(), operand):
                return ~build(operand)
            case ast.Call(ast.Name(name), arguments, keywords) if name in _BUILDERS:
                named = {str(k.arg): ast.literal_eval(k.value) for k in keywords}
                return _BUILDERS[name](*map(ast.literal_eval, arguments), **named)
        raise ValueError(f"mask {text!r}: expected {', '.join(f'{b}()' for b in _BUILDERS)} combined with & | ~")

    try:
        return build(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError) as error:
        raise ValueError(f"mask {text!r}: {error}") from None
