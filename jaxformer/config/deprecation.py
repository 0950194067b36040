"""The door for public names that moved and for arguments that went away.

Both work for one minor version, with a warning. A module hands its own `__getattr__` to
`moved_names`:

    __getattr__ = deprecation.moved_names(
        __name__, {"old_name": Moved("jaxformer.ops.new_name", until="1.2")}
    )

A function, or a dataclass with a field that went away, is decorated:

    @deprecation.without(chunk=Gone("the sum has no chunks", until="1.2"))

The door closes by itself. From version `until` on, the old name raises an error that still names
the new one. Experiment files of older runs have a door of their own (`moved.py`).
"""

import functools
import pkgutil
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import jaxformer

Decorated = TypeVar("Decorated", bound=Callable)


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


class Gone(NamedTuple):
    """Why an argument went away, and the first version that refuses it."""

    reason: str  # a sentence without a full stop, such as "the sum has no chunks"
    until: str  # the minor version after the one that ended it, such as 1.2


def without(**arguments: Gone) -> Callable[[Decorated], Decorated]:
    """A decorator of a function, or of a class, that no longer has these arguments.

    A call by keyword that has one warns (DeprecationWarning) and ignores it; from version `until`
    on it raises TypeError. The signature shows the arguments that are left.
    """
    return functools.partial(_without, arguments)


def _without(arguments: Mapping[str, Gone], decorated: Decorated) -> Decorated:
    is_class = isinstance(decorated, type)
    function = decorated.__init__ if is_class else decorated

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        for name in arguments.keys() & named.keys():
            reason, until = arguments[name]
            what = f"{decorated.__qualname__}: the argument {name}"
            if _release(jaxformer.__version__) >= _release(until):
                raise TypeError(f"{what} ended with version {until}: {reason}")
            warnings.warn(
                f"{what} is ignored, and ends with version {until}: {reason}",
                DeprecationWarning,
                stacklevel=2,  # the line of the call
            )
            del named[name]
        return function(*given, **named)

    if not is_class:
        return cast(Decorated, call)
    decorated.__init__ = call
    return decorated


def _release(version: str) -> tuple[int, int]:
    """Major and minor version."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
