"""Masks as text: `write(mask)` prints the calls that build a mask, `parse` reads them again."""

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jaxformer.masks import rules

_SYMBOLS = {rules.and_: " & ", rules.or_: " | "}


def write(mask: Any) -> str:
    """The calls that build the mask; arrays are shown by type and shape, a user's rule as `Mask(name)`."""
    if mask.offset is not None:
        text = write(replace(mask, offset=None))
        offset = mask.offset if isinstance(mask.offset, int | np.integer) else short(mask.offset)
        return f"({text}).at({offset})" if mask.rule in _SYMBOLS or mask.rule is rules.not_ else f"{text}.at({offset})"
    if mask.rule in _SYMBOLS:
        operands = [
            f"({part})" if part.rule in _SYMBOLS and part.rule is not mask.rule else str(part) for part in mask.parts
        ]
        return _SYMBOLS[mask.rule].join(operands)
    if mask.rule is rules.not_:
        return f"~({mask.parts[0]})" if mask.parts[0].rule in _SYMBOLS else f"~{mask.parts[0]}"
    args = mask.args
    if mask.rule is rules.block_sparse and mask.static:
        args = [short(rules.layout_of(*mask.args[1:])), mask.args[0]]
    shown = [*mask.parts, *args, *(short(array) for array in mask.arrays if array is not None)]
    ours = getattr(rules, getattr(mask.rule, "__name__", ""), None)
    if mask.rule is not ours:  # a rule called causal need not be ours
        return f"Mask({', '.join(map(str, [mask.name, *shown]))})"
    return f"{mask.name}({', '.join(map(str, shown))})"


def short(array) -> str:
    """An array by its type and shape."""
    return f"<{array.dtype}{list(array.shape)}>"


def parse(text: str, builders: Mapping[str, Callable]) -> Any:
    """The mask that `write` wrote, by these builders. Raises ValueError for all but calls of them and `& | ~`."""

    def build(node):
        match node:
            case ast.BinOp(left, ast.BitAnd(), right):
                return build(left) & build(right)
            case ast.BinOp(left, ast.BitOr(), right):
                return build(left) | build(right)
            case ast.UnaryOp(ast.Invert(), operand):
                return ~build(operand)
            case ast.Call(ast.Attribute(mask, "at"), [offset], []):
                return build(mask).at(operator.index(ast.literal_eval(offset)))
            case ast.Call(ast.Name("by_head"), heads, []):
                return builders["by_head"](*map(build, heads))
            case ast.Call(ast.Name(name), arguments, keywords) if name in builders and name != "by_head":
                named = {str(k.arg): ast.literal_eval(k.value) for k in keywords}
                return builders[name](*map(ast.literal_eval, arguments), **named)
        known = ", ".join(f"{name}()" for name in builders)
        raise ValueError(f"mask {text!r}: expected {known} combined with & | ~")

    try:
        return build(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError) as error:
        raise ValueError(f"mask {text!r}: {error}") from None
