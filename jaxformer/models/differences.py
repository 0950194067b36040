"""Which fields of a model change what trained weights compute, and how two models differ in them."""

import reprlib
from collections.abc import Mapping
from typing import Any

# fields that do not change what trained weights compute
WITHOUT_EFFECT = ("remat", "unroll", "attention_implementation", "dropout_rate", "attention_dropout_rate", "context_length")

_shown = reprlib.Repr()
_shown.maxother = _shown.maxstring = 200


def has_effect(name: str, old: Any, new: Any) -> bool:
    """Whether a field of a model, by its dotted path, changes what trained weights compute."""
    parts = name.split(".")
    if "init_std" in parts:  # of muP, which divides logits, it is no number
        return not all(isinstance(value, int | float | None) for value in (old, new))
    return not any(part in WITHOUT_EFFECT for part in parts)


def list_differences(differing: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """A line for each field, {dotted path: (there, here)}, that changes what trained weights compute."""
    return [
        f"{name}: {_shown.repr(old)} -> {_shown.repr(new)}"
        for name, (old, new) in differing.items()
        if has_effect(name, old, new)
    ]
