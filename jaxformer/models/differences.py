"""How two models differ in the fields that change the result of trained weights."""

import reprlib
from collections.abc import Mapping
from typing import Any

# fields that do not change the result of trained weights
WITHOUT_EFFECT = (
    "remat",
    "unroll",
    "attention_implementation",
    "grouped_implementation",
    "dropout_rate",
    "attention_dropout_rate",
    "context_length",
)

_shown = reprlib.Repr()
_shown.maxother = _shown.maxstring = 200


def has_effect(name: str, old: Any, new: Any) -> bool:
    """Whether a change of the field at this dotted path changes the result of trained weights."""
    parts = name.split(".")
    if "init_std" in parts:  # a number has no effect; MuP has: it divides logits
        return not all(isinstance(value, int | float | None) for value in (old, new))
    return not any(part in WITHOUT_EFFECT for part in parts)


def list_differences(differing: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """A line for each field that changes the result of trained weights.

    `differing` is {dotted path: (there, here)}.
    """
    return [
        f"{name}: {_shown.repr(old)} -> {_shown.repr(new)}"
        for name, (old, new) in differing.items()
        if has_effect(name, old, new)
    ]
