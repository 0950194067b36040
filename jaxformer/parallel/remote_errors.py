"""An error of one process, raised again in the others: it travels as JSON, nothing is unpickled."""

import contextlib
import sys
from typing import Any


def describe_error(error: Exception) -> dict[str, Any]:
    """An error as JSON: the names of its class and base classes, and its arguments."""
    classes = [f"{one.__module__}:{one.__qualname__}" for one in type(error).__mro__]
    arguments = error.args
    if isinstance(error, OSError) and error.errno is not None:
        # `args` does not hold the name of the file
        arguments = error.errno, error.strerror, error.filename
    values = [
        value if isinstance(value, str | int | float | None) else str(value) for value in arguments
    ]
    return {"classes": classes, "arguments": values}


def rebuild_error(described: dict[str, Any]) -> Exception:
    """The error of another process, made of its description.

    Its class is the first that is known here: a built-in one, or one of this library's loaded
    modules.
    """
    for text in described["classes"]:
        module, _, name = text.partition(":")
        if module != "builtins" and module.partition(".")[0] != "jaxformer":
            continue
        error_class = getattr(sys.modules.get(module), name, None)
        if isinstance(error_class, type) and issubclass(error_class, Exception):
            with contextlib.suppress(Exception):
                return error_class.__new__(error_class, *described["arguments"])
    return RuntimeError(*described["arguments"])
