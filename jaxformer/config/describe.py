"""The description of a config as JSON, its fingerprint, and the difference of two descriptions.

A function is described by its name, its code and its closure. So experiments with different
lambdas, partials or classes of the user have different descriptions. Nothing is ever built from a
description.
"""

import dataclasses
import enum
import functools
import hashlib
import inspect
import json
import pickle
import re
import sys
import types
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

from jaxformer.config import code
from jaxformer.errors import ConfigError


def execution(default: Any, unless: Callable[[Any], bool] | None = None) -> Any:
    """A field with this default that decides how a run executes, and not its numbers.

    The field is not part of the fingerprint, except for a value with `unless(value)` True. Such a
    value decides numbers all the same: a kernel of the user, for example.
    """
    return dataclasses.field(default=default, metadata={"execution": True, "unless": unless})


def _decides_no_number(field: dataclasses.Field, value: Any) -> bool:
    """Whether a field was made by `execution` and its value does not decide numbers."""
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
    """The place of a value in a description."""

    # ids of the values that contain this one: a value inside itself is not described again
    above: tuple[int, ...] = ()
    execution: bool = True  # whether fields made by `execution` are described
    # inside code of the user: the functions so far, by id; each is described once
    seen: dict[int, tuple[int, Any]] | None = None


def describe(value: Any) -> Any:
    """The value as JSON.

    A config becomes `{"type": class, field: ...}`, a function its name and code, an array a digest.
    """
    return _describe_whole(value, _Place())


def _describe_whole(value: Any, place: _Place) -> Any:
    try:
        return _describe(value, place)
    except RecursionError:
        raise ConfigError(
            f"{type(value).__name__}: a value or a function's code in it "
            "nests too deep to be described"
        ) from None


def _describe(value: Any, place: _Place) -> Any:
    if isinstance(value, enum.Enum):
        return {
            "type": f"{code.name_of(type(value))}.{value.name}",
            "value": _describe(value.value, place),
        }
    if _is_number_of_numpy(value):  # np.int64(3) is described as 3
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
        return {
            key if isinstance(key, str) else json.dumps(inner(key)): inner(item)
            for key, item in value.items()
        }
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
    """The entries that describe a config, by name."""
    own = {field.name: field for field in dataclasses.fields(config)}
    described: dict[str, Any] = {}
    for name, item in fields(config).items():
        if not place.execution and _decides_no_number(own[name], item):
            continue
        described |= _entries(own[name], item)
    return described


def _entries(field: dataclasses.Field, value: Any) -> dict[str, Any]:
    """What describes a field. One that replaced an older field says it in the older words."""
    in_older_words = field.metadata.get("describe")
    return {field.name: value} if in_older_words is None else in_older_words(value)


def _is_number_of_numpy(value: Any) -> bool:
    """Whether a value is a scalar of NumPy. It does not import NumPy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def _object(value: Any, place: _Place) -> Any:
    """The description of any other object: its attributes, else its repr if that has no address."""
    if isinstance(value, types.ModuleType):
        return code.plain_name(value.__name__)
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "__wrapped__"):  # jax.jit, jax.custom_vjp, functools.cache
        others = {
            name: item for name, item in getattr(value, "__dict__", {}).items() if name[0] != "_"
        }
        inner = value.__wrapped__
        return _describe({"wrapped": inner, **others} if others else inner, place)
    if callable(value) and hasattr(value, "__qualname__"):  # a function written in C
        return code.name_of(value)
    if isinstance(value, re.Pattern):  # its repr is cut short
        return _instance(value, {"pattern": value.pattern, "flags": value.flags}, place)
    attributes = {
        name: item
        for name, item in getattr(value, "__dict__", {}).items()
        if not _is_computed(type(value), name)
    }
    for kind in type(value).__mro__:
        slots = getattr(kind, "__slots__", ())
        attributes |= {name: getattr(value, name) for name in slots if hasattr(value, name)}
    if attributes:
        return _instance(value, attributes, place)
    text = repr(value)
    if "..." in text and (state := _pickled(value)) is not None:  # the repr is cut short
        return _instance(value, {"pickle": hashlib.sha256(state).hexdigest()}, place)
    return _instance(value, {} if " at 0x" in text else {"text": text}, place)


def _pickled(value: Any) -> bytes | None:
    """The object as bytes, such as a tokenizer of another package; None if it gives none."""
    try:
        return pickle.dumps(value, protocol=4)
    except Exception:
        return None


def _is_computed(kind: type, name: str) -> bool:
    """Whether an attribute is kept from an earlier use of the object: a cached property."""
    return isinstance(inspect.getattr_static(kind, name, None), functools.cached_property)


def _instance(value: Any, parts: Mapping[str, Any], place: _Place) -> dict[str, Any]:
    described = _code(type(value), place)
    described = dict(described) if isinstance(described, dict) else {"function": described}
    name = described.pop("function")
    return {
        "type": type(value).__name__ if is_config(value) else name,
        **described,
        **_describe(parts, place),
    }


def _code(unit: Any, place: _Place) -> Any:
    """The name of a function or class; for the user's own also code, closure and defaults."""
    name = code.name_of(unit)
    if code.in_library(unit):
        # inside code without the module, because libraries move the names that they export
        return name if place.seen is None else name.rpartition(":")[2]
    described: dict[str, Any] = {"function": name}
    if place.seen is not None:
        if id(unit) in place.seen:
            return f"{name} (function {place.seen[id(unit)][0]} of this code)"
        place.seen[id(unit)] = (len(place.seen), unit)
    if code.is_users(unit):
        # each digest starts anew, so it does not depend on the function's place in the config
        inside = _Place((id(unit),), False, {id(unit): (0, unit)}) if place.seen is None else place
        source = code.source(unit, functools.partial(_describe, place=inside))
        described["code"] = _digest(source) if place.seen is None else source
    defaults = {}
    if not isinstance(unit, type):
        parameters = inspect.signature(unit, follow_wrapped=False).parameters.values()
        defaults = {
            each.name: each.default for each in parameters if each.default is not each.empty
        }
    for kind, values in (("closure", code.closure(unit)), ("defaults", defaults)):
        if values:
            described[kind] = _describe(values, place)
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
    """Eight hex digits of a description. As in Python, 2 and 2.0 are equal."""

    def number(text):
        return int(float(text)) if float(text).is_integer() else float(text)

    description = json.loads(json.dumps(description), parse_float=number)
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:8]


def fingerprint(config: Any) -> str:
    """Eight hex digits of the values that decide numbers and differ from their defaults.

    So a new field with a default changes no fingerprint.
    """
    return _digest(changes(config))


def changes(config: Any, default: Any = None) -> dict[str, Any]:
    """The description of the fields that differ from `default`, without `execution` fields.

    If `default` is of another class, the config is compared with the defaults of its own class.
    """
    numbers_only = _Place(execution=False)
    described = _describe_whole(config, numbers_only)
    own = {field.name: field for field in dataclasses.fields(config)}
    if type(default) is type(config):
        defaults = fields(default)
    else:
        defaults = {name: _default_of(field) for name, field in own.items()}
    changed = {}
    unchanged = set()
    for name, value in fields(config).items():
        usual = defaults[name]
        if is_config(value) and not hasattr(value, "__describe__"):
            unchanged.add(name)  # as a whole
            inner = changes(value, usual) if name in described else {}
            if inner:
                changed[name] = inner
            continue
        of_default = {} if usual is dataclasses.MISSING else _entries(own[name], usual)
        for entry, item in of_default.items():
            if entry in described and described[entry] == _describe(item, numbers_only):
                unchanged.add(entry)
    if type(default) is type(config):
        unchanged.add("type")
    return changed | {name: item for name, item in described.items() if name not in unchanged}


def _default_of(field: dataclasses.Field) -> Any:
    """The default of a field; MISSING if it has none."""
    if field.default_factory is dataclasses.MISSING:
        return field.default
    return field.default_factory()


def flat(description: Any, prefix: str = "") -> dict[str, Any]:
    """A description by dotted path: `{"optimizer": "AdamW", "optimizer.learning_rate": 0.001}`."""
    if not isinstance(description, Mapping) or not description:
        return {prefix: description}
    values: dict[str, Any] = {}
    for name, value in description.items():
        if prefix and name in ("type", "function") and isinstance(value, str):
            values[prefix] = value
        elif prefix or name != "type":
            values |= flat(value, f"{prefix}.{name}" if prefix else name)
    return values


def diff(old: Mapping, new: Mapping) -> dict[str, tuple[Any, Any]]:
    """The differences of two descriptions by path: `{"optimizer.learning_rate": (old, new)}`.

    A value that is absent on one side is None.
    """
    old, new = flat(old), flat(new)
    pairs = {name: (old.get(name), new.get(name)) for name in old | new}
    return {
        name: (a, b)
        for name, (a, b) in pairs.items()
        if a != b or isinstance(a, bool) != isinstance(b, bool)
    }


def execution_fields(config: Any, prefix: str = "") -> set[str]:
    """The dotted paths of the fields that decide no number, and of all fields below them."""
    paths = set()
    for field in dataclasses.fields(config) if is_config(config) else ():
        path = prefix + field.name
        value = getattr(config, field.name, None)
        if _decides_no_number(field, value):
            paths |= {path} | {f"{path}.{name}" for name in flat(describe(value)) if name}
        else:
            paths |= execution_fields(value, f"{path}.")
    return paths
