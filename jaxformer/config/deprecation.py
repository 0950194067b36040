"""The door for public names that moved: the old name works for one minor version, with a warning.

A module hands its own `__getattr__` to `moved_names`:

    __getattr__ = deprecation.moved_names(
        __name__, {"old_name": Moved("jaxformer.ops.new_name", until="1.2")}
    )

The door closes by itself. From version `until` on, the old name raises an error that still names
the new one. Experiment files of older runs have a door of their own (`moved.py`).
"""

import pkgutil
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jaxformer


class Moved(NamedTuple):
    """Where a public name is now, and the first version without its old name."""

    name: str  # in full, such as jaxformer.ops.rope
    until: str  # the minor version after the one that moved it, such as 1.2


def moved_names(module: str, moved: Mapping[str, Moved]) -> Callable[[str], Any]:
    """The `__getattr__` of a module from which names moved.

    It warns (DeprecationWarning) and returns the object of the new name. Raises AttributeError for
    names that did not move, and for those whose old name has ended.
    """

    def look_up(old_name: str) -> Any:
        if old_name not in moved:
            raise AttributeError(f"module {module!r} has no attribute {old_name!r}")
        new_name, until = moved[old_name]
        if _release(jaxformer.__version__) >= _release(until):
            raise AttributeError(f"{module}.{old_name} ended with version {until}; use {new_name}")
        warnings.warn(
            f"{module}.{old_name} is now {new_name}; the old name ends with version {until}",
            DeprecationWarning,
            stacklevel=2,  # the line that uses the old name
        )
        return pkgutil.resolve_name(new_name)

    return look_up


def _release(version: str) -> tuple[int, int]:
    """Major and minor version."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
