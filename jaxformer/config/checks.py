"""Checks that the values of an experiment file have the types that its config fields declare."""

import dataclasses
import os
from typing import Any

from jaxformer.config import expressions
from jaxformer.config.describe import fields, is_config
from jaxformer.errors import ConfigError


def check_types(config: Any, prefix: str = "", besides: tuple[str, ...] = ()) -> None:
    """Raises ConfigError for a field with a value of another type, in `config` and nested configs.

    Python does not enforce annotations, so `precision="int8"` would train in eight bits. Numbers of
    NumPy and JAX count as numbers, a path as a text, True as 1. Fields of the user's own classes
    and the paths in `besides` are not checked.
    """
    for name, value in fields(config).items():
        path = prefix + name
        hint = expressions.hints(type(config))[name]
        if _is_ours(type(config)) and path not in besides:
            _check(path, value, hint)
        for place, inner in _configs(path, value):
            check_types(inner, f"{place}.", besides)


def _is_ours(kind: type) -> bool:
    """Whether a class is one of this library."""
    return kind.__module__.partition(".")[0] == "jaxformer"


def _configs(path: str, value: Any) -> list[tuple[str, Any]]:
    """(path, config) of a value that is a config, or of each config in a tuple or list."""
    values = [(path, value)]
    if isinstance(value, tuple | list):
        values += [(f"{path}[{i}]", item) for i, item in enumerate(value)]
    return [(place, inner) for place, inner in values if is_config(inner)]


def _check(path: str, value: Any, hint: Any) -> None:
    if isinstance(value, type) and dataclasses.is_dataclass(value) and _is_ours(value):
        raise ConfigError(f"{path}={value.__name__}: is a class; write {value.__name__}(...)")
    if hint is Any:  # such as a model or data, which may be large
        return
    members = expressions.members_of(hint)
    try:
        expressions.convert(_plain(value, members), hint)
    except ConfigError:
        expected = expressions.expected(hint)
        if isinstance(value, float) and int in members:
            expected = (
                f"a whole number, such as {value:.0f}" if value.is_integer() else "a whole number"
            )
        raise ConfigError(f"{path}={expressions.shown(value)}: must be {expected}") from None


def _plain(value: Any, members: tuple[Any, ...]) -> Any:
    """The value as a plain Python value of the kind that `members` name.

    Numbers of NumPy and JAX become Python numbers, paths become texts. True becomes 1 where only
    numbers are allowed, and 1 becomes True where only bools are allowed.
    """
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
