"""Whether the values in an experiment's file have the types that the fields of its configs declare, as options must."""

import dataclasses
import os
from typing import Any

from jaxformer.config import expressions
from jaxformer.config.describe import fields, is_config
from jaxformer.errors import ConfigError


def check_types(config: Any, prefix: str = "", besides: tuple[str, ...] = ()) -> None:
    """Raises ConfigError for a field with a value of another type, in a config of this library and in those inside it.

    Python's own annotations check nothing, so that `precision="int8"` would train in eight bits. Numbers of NumPy and JAX
    are numbers, a path is a text, True is 1. The user's own classes may declare what they like. `besides` are paths of
    fields that are not checked.
    """
    for name, value in fields(config).items():
        path = prefix + name
        hint = expressions.hints(type(config))[name]
        if _is_ours(type(config)) and path not in besides:
            _check(path, value, hint)
        for place, part in _configs(path, value):
            check_types(part, f"{place}.", besides)


def _is_ours(kind: type) -> bool:
    """Whether a class is one of this library."""
    return kind.__module__.partition(".")[0] == "jaxformer"


def _configs(path: str, value: Any) -> list[tuple[str, Any]]:
    """(path, config) of a value that is a config, or of those in a tuple of them."""
    items = enumerate(value) if isinstance(value, tuple | list) else ()
    found = [(f"{path}[{i}]", item) for i, item in items]
    return [(place, part) for place, part in [(path, value), *found] if is_config(part)]


def _check(path: str, value: Any, hint: Any) -> None:
    if isinstance(value, type) and dataclasses.is_dataclass(value) and _is_ours(value):
        raise ConfigError(f"{path}={value.__name__}: is a class; write {value.__name__}(...)")
    if hint is Any:  # such as a model, or data, which may be large
        return
    members = expressions.members_of(hint)
    try:
        expressions.convert(_plain(value, members), hint)
    except ConfigError:
        expected = expressions.expected(hint)
        if isinstance(value, float) and int in members:
            expected = f"a whole number, such as {value:.0f}" if value.is_integer() else "a whole number"
        raise ConfigError(f"{path}={expressions.shown(value)}: must be {expected}") from None


def _plain(value: Any, members: tuple[Any, ...]) -> Any:
    """The value as Python writes it: numbers of NumPy and JAX, paths, and True where a number is meant, or 1 for True."""
    if hasattr(value, "tolist") and not isinstance(value, type):
        value = value.tolist()
    if isinstance(value, os.PathLike) and str in members:
        return os.fspath(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bool) and bool not in members and {int, float} & set(members):
        return int(value)
    if isinstance(value, int) and value in (0, 1) and bool in members and int not in members:
        return bool(value)
    return value
