"""What a config says, one way: a description for people and tools, its fingerprint, and how two descriptions differ.

A description is JSON. A function is described by its name, its code and what it closes over, so that a lambda, a
partial or a user's own class tells one experiment from another. Nothing is ever built from a description.
"""

import dataclasses
import enum
import functools
import hashlib
import inspect
import json
import re
import sys
import types
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

from jaxformer.config import code
from jaxformer.errors import ConfigError


def execution(default: Any, unless: Callable[[Any], bool] | None = None) -> Any:
    """A field with this default that decides how a run executes and not its numbers.

    It is no part of the run's fingerprint. `unless(value)`: whether this value decides numbers all the same,
    as a kernel of the user's does; then it is a part.
    """
    return dataclasses.field(default=default, metadata={"execution": True, "unless": unless})


def _decides_no_number(field: dataclasses.Field, value: Any) -> bool:
    """Whether a field was made by `execution`, and its value is none that decides numbers."""
    if "execution" not in field.metadata:
        return False
    unless = field.metadata.get("unless")
    return unless is None or not unless(value)


def is_config(value: Any) -> bool:
    """Whether a value is an instance of a dataclass, whose fields can be listed and set."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def fields(config: Any) -> dict[str, Any]:
    """The values of a config's fields by name."""
    members = dataclasses.fields(config) if is_config(config) else ()
    return {field.name: getattr(config, field.name, None) for field in members if field.init}


class _Place(NamedTuple):
    """Where in a description a value stands."""

    above: tuple[int, ...] = ()  # ids of the values around it: a value inside itself is not described again
    execution: bool = True  # whether fields made by `execution` are described
    seen: dict[int, tuple[int, Any]] | None = None  # inside a user's code: its functions so far, each described once


def describe(value: Any) -> Any:
    """The value as JSON: a config as `{"type": class, field: ...}`, a function by name and code, an array by its digest."""
    return _describe_whole(value, _Place())


def _describe_whole(value: Any, place: _Place) -> Any:
    try:
        return _describe(value, place)
    except RecursionError:
        raise ConfigError(
            f"{type(value).__name__}: a value or a function's code in it nests too deep to be described"
        ) from None


def _describe(value: Any, place: _Place) -> Any:
    if isinstance(value, enum.Enum):
        return {"type": f"{code.name_of(type(value))}.{value.name}", "value": _describe(value.value, place)}
    if _is_number_of_numpy(value):  # np.int64(3) is the number 3, as it is for what computes with it
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if value - value == 0 else repr(float(value))  # JSON has no infinity
    if id(value) in place.above:
        return "(itself)"
    place = place._replace(above=(*place.above, id(value)))
    inner = functools.partial(_describe, place=place)
    if isinstance(value, type | types.FunctionType):
        return _code(value, place)
    if hasattr(value, "__describe__"):
        return inner(value.__describe__())
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else json.dumps(inner(key)): inner(item) for key, item in value.items()}
    if isinstance(value, Set):
        return sorted((inner(item) for item in value), key=json.dumps)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _instance(value, dict(zip(value._fields, value, strict=True)), place)
    if isinstance(value, list | tuple):
        return [inner(item) for item in value]
    if is_config(value):
        return _instance(value, _described_fields(value, place), place)
    if isinstance(value, functools.partial):
        arguments = {"arguments": value.args} if value.args else {}
        return {"type": "partial", **inner({"of": value.func, **arguments, **value.keywords})}
    if isinstance(value, types.MethodType):
        return {"type": "method", "name": value.__name__, "of": inner(value.__self__)}
    if hasattr(value, "__array__") and hasattr(value, "dtype"):
        return _array(value, inner)
    return _object(value, place)


def _described_fields(config: Any, place: _Place) -> dict[str, Any]:
    """The fields that describe a config. One that took another's place says itself what a description has of it."""
    own = {field.name: field for field in dataclasses.fields(config)}
    found: dict[str, Any] = {}
    for name, item in fields(config).items():
        if not place.execution and _decides_no_number(own[name], item):
            continue
        metadata = own[name].metadata
        found |= metadata["describe"](item) if "describe" in metadata else {name: item}
    return found


def _is_number_of_numpy(value: Any) -> bool:
    """Whether a value is a scalar of NumPy, which is not imported for that: a config is read without it."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def _object(value: Any, place: _Place) -> Any:
    """A value of no kind that is known: its attributes, or else its text where no address in memory is in it."""
    if isinstance(value, types.ModuleType):
        return code.plain_name(value.__name__)
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "__wrapped__"):  # jax.jit, jax.custom_vjp, functools.cache
        others = {name: item for name, item in getattr(value, "__dict__", {}).items() if name[0] != "_"}
        return _describe({"wrapped": value.__wrapped__, **others} if others else value.__wrapped__, place)
    if callable(value) and hasattr(value, "__qualname__"):  # of C
        return code.name_of(value)
    if isinstance(value, re.Pattern):  # whose text is cut short
        return _instance(value, {"pattern": value.pattern, "flags": value.flags}, place)
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(value, name)]
    if attributes := {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots}}:
        return _instance(value, attributes, place)
    text = repr(value)
    return _instance(value, {} if " at 0x" in text else {"text": text}, place)


def _instance(value: Any, parts: Mapping[str, Any], place: _Place) -> dict[str, Any]:
    described = _code(type(value), place)
    described = dict(described) if isinstance(described, dict) else {"function": described}
    name = described.pop("function")
    return {"type": type(value).__name__ if is_config(value) else name, **described, **_describe(parts, place)}


def _code(unit: Any, place: _Place) -> Any:
    """A function or class: its name; of the user's own also its code, closure and default arguments."""
    name = code.name_of(unit)
    if code.in_library(unit):
        return name if place.seen is None else name.rpartition(":")[2]  # libraries move what they export
    described: dict[str, Any] = {"function": name}
    if place.seen is not None:
        if id(unit) in place.seen:
            return f"{name} (function {place.seen[id(unit)][0]} of this code)"
        place.seen[id(unit)] = (len(place.seen), unit)
    if code.is_users(unit):
        # a digest starts anew, so it does not depend on where in the config the function stands
        inside = _Place((id(unit),), False, {id(unit): (0, unit)}) if place.seen is None else place
        found = code.source(unit, functools.partial(_describe, place=inside))
        described["code"] = _digest(found) if place.seen is None else found
    parameters = {} if isinstance(unit, type) else inspect.signature(unit, follow_wrapped=False).parameters
    defaults = {name: each.default for name, each in parameters.items() if each.default is not each.empty}
    for part, values in (("closure", code.closure(unit)), ("defaults", defaults)):
        if values:
            described[part] = _describe(values, place)
    return described if len(described) > 1 else name


def _array(value: Any, inner) -> dict[str, Any]:
    import numpy as np

    try:
        array = np.asarray(value)
    except TypeError:  # a key of jax.random
        import jax

        array = np.asarray(jax.random.key_data(value))
    kind = {"type": f"{value.dtype}{list(value.shape)}"}
    if array.dtype == object:
        return kind | {"items": inner(array.tolist())}
    return kind | {"sha256": hashlib.sha256(array.tobytes()).hexdigest()}


def _digest(description: Any) -> str:
    """Eight hex digits of a description. 2 and 2.0 are equal, as they are in Python."""

    def number(text):
        return int(float(text)) if float(text).is_integer() else float(text)

    description = json.loads(json.dumps(description), parse_float=number)
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:8]


def fingerprint(config: Any) -> str:
    """Eight hex digits over what decides numbers and differs from the defaults: a new field with a default changes none."""
    return _digest(changes(config))


def changes(config: Any, default: Any = None) -> dict[str, Any]:
    """The description of what a config does not share with `default` or its class's defaults, without `execution` fields."""
    numbers_only = _Place(execution=False)
    described = _describe_whole(config, numbers_only)
    if type(default) is type(config):
        usual, found = fields(default), {}
    else:

        def default_of(field):
            return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()

        usual = {field.name: default_of(field) for field in dataclasses.fields(config)}  # MISSING where there is none
        found = {name: part for name, part in described.items() if name not in usual}
    for name, value in fields(config).items():
        if name not in described:  # execution
            continue
        if is_config(value) and not hasattr(value, "__describe__"):
            if part := changes(value, usual[name]):
                found[name] = part
        elif usual[name] is dataclasses.MISSING or described[name] != _describe(usual[name], numbers_only):
            found[name] = described[name]
    return found


def flat(description: Any, prefix: str = "") -> dict[str, Any]:
    """A description by dotted path: `{"optimizer": "AdamW", "optimizer.learning_rate": 0.001}`."""
    if not isinstance(description, Mapping) or not description:
        return {prefix: description}
    found: dict[str, Any] = {}
    for name, value in description.items():
        if prefix and name in ("type", "function") and isinstance(value, str):
            found[prefix] = value
        elif prefix or name != "type":
            found |= flat(value, f"{prefix}.{name}" if prefix else name)
    return found


def diff(old: Mapping, new: Mapping) -> dict[str, tuple[Any, Any]]:
    """What two descriptions differ in, by dotted path: `{"optimizer.learning_rate": (old, new)}`; None where there is none."""
    before, after = flat(old), flat(new)
    pairs = {name: (before.get(name), after.get(name)) for name in before | after}
    return {name: (a, b) for name, (a, b) in pairs.items() if a != b or isinstance(a, bool) != isinstance(b, bool)}


def execution_fields(config: Any, prefix: str = "") -> set[str]:
    """The dotted paths of the fields that decide no number, with all below them."""
    found = set()
    for field in dataclasses.fields(config) if is_config(config) else ():
        path, value = prefix + field.name, getattr(config, field.name, None)
        if _decides_no_number(field, value):
            found |= {path} | {f"{path}.{name}" for name in flat(describe(value)) if name}
        else:
            found |= execution_fields(value, f"{path}.")
    return found
