"""The type checker of the tests: beartype, which makes a check once for each signature.

jaxtyping decorates a function inside of another one anew whenever the outer one runs, and asks its
type checker for two checks of the signature. Beartype writes and compiles a program for each, which
was a fifth of the suite's time.
"""

from collections.abc import Callable
from typing import Any

from beartype import beartype

_made: dict[Any, Callable] = {}


def checked(function: Callable) -> Callable:
    """`beartype(function)`, for the functions without a body that jaxtyping makes of signatures."""
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    kinds = code.co_posonlyargcount, code.co_argcount, code.co_kwonlyargcount, code.co_flags
    annotations = tuple(function.__annotations__.items())
    key = function.__module__, function.__qualname__, names, kinds, annotations
    try:
        if key not in _made:
            _made[key] = beartype(function)
    except TypeError:  # an annotation without a hash
        return beartype(function)
    return _made[key]
