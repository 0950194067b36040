"""Masks as text: the calls that build a mask, which `masks.parse` reads again."""

from dataclasses import replace
from typing import Any

from jaxformer.masks import rules

_SYMBOLS = {rules.and_: " & ", rules.or_: " | "}


def write(mask: Any) -> str:
    """The calls that build the mask; arrays are shown by type and shape, a user's rule as `Mask(name)`."""
    if mask.offset is not None:
        text = write(replace(mask, offset=None))
        text = f"({text})" if mask.rule in (*_SYMBOLS, rules.not_) else text
        return f"{text}.at({mask.offset if isinstance(mask.offset, int) else short(mask.offset)})"
    if mask.rule in _SYMBOLS:
        nested = lambda part: part.rule in _SYMBOLS and part.rule is not mask.rule
        return _SYMBOLS[mask.rule].join(f"({part})" if nested(part) else str(part) for part in mask.parts)
    if mask.rule is rules.not_:
        return f"~({mask.parts[0]})" if mask.parts[0].rule in _SYMBOLS else f"~{mask.parts[0]}"
    args = mask.args
    if mask.rule is rules.block_sparse and mask.static:
        args = (short(rules.layout_of(*args[1:])), args[0])
    shown = [*mask.parts, *args, *(short(array) for array in mask.arrays if array is not None)]
    if mask.rule is not getattr(rules, getattr(mask.rule, "__name__", ""), None):  # a user's rule may be called causal
        return f"Mask({', '.join(map(str, [mask.name, *shown]))})"
    return f"{mask.name}({', '.join(map(str, shown))})"


def short(array) -> str:
    """An array by its type and shape."""
    return f"<{array.dtype}{list(array.shape)}>"
