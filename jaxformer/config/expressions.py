"""Values as text: literals and calls of names from a closed list. Nothing else is evaluated.

    Lion(learning_rate=1e-4)      causal() & window(255)      (0.9, 0.98)      swiglu

The text is parsed to a syntax tree. `_value` refuses every kind of node that it does not name, and
a call may only use the names that are offered.
"""

import ast
import dataclasses
import enum
import functools
import inspect
import math
import operator
import types
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from jaxformer.config.describe import is_config
from jaxformer.errors import ConfigError, did_you_mean

Names = Mapping[str, Any]

LONGEST = 10_000  # characters of an expression; this also bounds numbers and nesting
_UNARY: dict[type, Callable] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}
_BINARY: dict[type, Callable] = {ast.BitAnd: operator.and_, ast.BitOr: operator.or_}


def evaluate(text: str, names: Names) -> Any:
    """The value of an expression over `names`: literals, calls and `& | ~`.

    Raises ConfigError for anything else.
    """
    if len(text) > LONGEST:
        raise ConfigError(f"the expression has {len(text)} characters; at most {LONGEST} are read")
    try:
        with warnings.catch_warnings(action="ignore"):  # the parser warns of "\d"
            tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{getattr(error, 'msg', 'too deep')}, in an expression") from None
    try:
        return _value(tree, names)
    except RecursionError:
        raise ConfigError("too deep, in an expression") from None
    except Exception as error:  # a call may raise anything
        raise ConfigError(str(error) or type(error).__name__) from error


def _value(node: ast.expr, names: Names) -> Any:
    match node:
        case ast.Constant(None | bool() | int() | float() | str() as value):
            # Python reads 1e400 as inf; a float may not hold an integer of more than 1000 bits
            is_large = value.bit_length() > 1000 if isinstance(value, int) else value == math.inf
            if is_large:
                raise ConfigError("the number is too large")
            return value
        case ast.Name(name):
            value = _look_up(name, names)
            return _call(name, value, [], {}) if isinstance(value, type) else value
        case ast.Call(ast.Name(name), arguments, keywords) if _have_own_names(keywords):
            function = _look_up(name, names)
            if not callable(function) or is_config(function):
                raise ConfigError(f"{name} cannot be called; use it without ()")
            values = [_value(argument, names) for argument in arguments]
            named = {str(each.arg): _value(each.value, names) for each in keywords}
            return _call(name, function, values, named)
        case ast.Tuple(items) | ast.List(items):
            return tuple(_value(item, names) for item in items)
        case ast.Dict(keys, values) if None not in keys:
            return {
                _value(key, names): _value(item, names)
                for key, item in zip(keys, values, strict=True)
                if key
            }
        case ast.UnaryOp(sign, operand) if type(sign) in _UNARY:
            value = _value(operand, names)
            if _is_number(value) != isinstance(sign, ast.Invert):
                return _UNARY[type(sign)](value)
        case ast.BinOp(left, sign, right) if type(sign) in _BINARY:
            return _BINARY[type(sign)](_value(left, names), _value(right, names))
    raise ConfigError(
        f"{_short(ast.unparse(node))!r}: expected a literal or a call such as Name(field=value)"
    )


def _have_own_names(keywords: list[ast.keyword]) -> bool:
    """Whether no two keyword arguments have one name, and none is `**`, which has no name."""
    return len({each.arg for each in keywords} - {None}) == len(keywords)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def _look_up(name: str, names: Names) -> Any:
    if name in names:
        return names[name]
    if name in ("inf", "nan"):
        return float(name)
    raise ConfigError(f"there is no {name!r} to choose from{did_you_mean(name, names)}")


def _call(name: str, function: Callable, arguments: Sequence[Any], named: dict[str, Any]) -> Any:
    """The result of a call. Arguments of a config are converted to the types of its fields."""
    signature = inspect.signature(function)
    try:
        bound = signature.bind(*arguments, **named)
    except TypeError as error:
        raise ConfigError(f"{name}({', '.join(signature.parameters)}): {error}") from None
    if dataclasses.is_dataclass(function):
        types_of_fields = hints(typing.cast(type, function))
        for field, value in bound.arguments.items():
            try:
                bound.arguments[field] = convert(value, types_of_fields.get(field, Any))
            except ConfigError as error:
                raise ConfigError(f"{name}({field}=...): {error}") from None
    return function(*bound.args, **bound.kwargs)


def read(text: str | None, hint: Any, names: Names) -> Any:
    """The value of type `hint` that a text means. Raises ConfigError, whose message names no place.

    If the text as an expression has the type, its value is taken; else, for a str or a Path, the
    text itself. A tuple is `(a, b)`, or its only item. None, no text, means True.
    """
    members = members_of(hint)
    if text is None:
        if bool not in members:
            raise ConfigError(f"expected {expected(hint)}")
        return True
    if bool in members and text in ("true", "false"):
        return text == "true"
    for member in members:
        for choice in get_args(member) if get_origin(member) is Literal else ():
            if text == str(choice):
                return choice
        for choice in member if _is_enum(member) else ():
            if text in (choice.name, str(choice.value)):
                return choice
    try:
        value = evaluate(text, names)
        if isinstance(value, str) and str in members:
            return text  # with its quotes
        if (
            isinstance(value, float)
            and "e" in text.lower()
            and int in members
            and value.is_integer()
        ):
            value = int(value)  # 1e4 is meant as an integer, 1.0 is not
        return convert(value, hint)
    except ConfigError as error:
        for member in members:
            if member in (str, Path):
                return member(text)
        if items := _item_types(hint, 1):
            if {str, Path} & set(members_of(items[0])) and _says_several(text):
                raise ConfigError(
                    f'expected {expected(hint)}, each in quotes: ("a", "b"), or ("a,b",) for one'
                ) from None
            return convert((read(text, items[0], names),), hint)
        told = hint is Any or str(error).startswith("expected")
        raise ConfigError(str(error) if told else f"{error}; expected {expected(hint)}") from None


def _says_several(text: str) -> bool:
    """Whether a text means several items: it is a list, or has a comma outside of brackets."""
    inner = text.strip()
    if inner[:1] == "[" and inner[-1:] == "]":
        return True
    if inner[:1] == "(" and inner[-1:] == ")":
        inner = inner[1:-1]
    depth = 0
    for letter in inner:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            return True
    return False


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, enum.Enum)


def members_of(hint: Any) -> tuple[Any, ...]:
    """The members of a union; the type alone otherwise."""
    return get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _item_types(hint: Any, count: int) -> list[Any] | None:
    """The types of `count` items of the tuple or list among the members of `hint`, or None."""
    for member in members_of(hint):
        origin = get_origin(member) or member
        arguments = get_args(member)
        if origin is list or (origin is tuple and (not arguments or arguments[-1] is ...)):
            return [arguments[0] if arguments else Any] * count
        if origin is tuple and len(arguments) == count:
            return list(arguments)
    return None


def convert(value: Any, hint: Any) -> Any:
    """The value converted to type `hint`: an int becomes a float where one is expected.

    Raises ConfigError for a value of another type.
    """
    for member in members_of(hint):
        for made in _as(value, member):
            return made
    raise ConfigError(f"expected {expected(hint)}, got {shown(value)}")


def _as(value: Any, hint: Any) -> list[Any]:
    """[the value converted to `hint`, which is no union], or [] if it does not have that type."""
    origin = get_origin(hint) or hint
    if origin is Literal:
        return [
            choice for choice in get_args(hint) if value == choice and type(value) is type(choice)
        ]
    if _is_enum(origin) and not isinstance(value, origin):
        return [
            choice
            for choice in origin
            if value == choice.name or (value == choice.value and type(value) is type(choice.value))
        ]
    if origin in (tuple, list):
        kinds = _item_types(hint, len(value)) if isinstance(value, tuple | list) else None
        if kinds is None:
            return []
        try:
            return [origin(convert(item, kind) for item, kind in zip(value, kinds, strict=True))]
        except ConfigError:
            return []
    if origin is float and _is_number(value):
        return [float(value)]
    if origin is Path and isinstance(value, str):
        return [Path(value)]
    try:
        fits = isinstance(value, origin) and not (origin is int and isinstance(value, bool))
    except TypeError:  # Any, and other types that isinstance cannot check
        return [value]
    return [value] if fits else []


@functools.cache
def hints(cls: type) -> dict[str, Any]:
    """The type of each field of a config class; `Any` if an annotation cannot be resolved."""
    try:
        resolved = typing.get_type_hints(cls)
    except Exception:  # a user's annotation may be any text
        resolved = {}
    return {
        field.name: resolved.get(field.name, Any) for field in dataclasses.fields(cls) if field.init
    }


def expected(hint: Any) -> str:
    """A type in words, for an error message."""
    members = get_args(hint)
    if members_of(hint) != (hint,):
        *others, last = dict.fromkeys(map(expected, members))
        return f"{', '.join(others)} or {last}" if others else last
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, members))}"
    if _is_enum(hint):
        return f"one of {', '.join(choice.name for choice in hint)}"
    if get_origin(hint) in (tuple, list):
        if get_origin(hint) is list or members[-1] is ...:
            return f"any number of {expected(members[0])}"
        return " ".join(map(expected, members))
    if hint is types.NoneType:
        return "None"
    if Callable in (hint, get_origin(hint)):
        return "a function such as Name(field=value)"
    return "any value" if hint is Any else getattr(hint, "__name__", str(hint))


def shown(value: Any) -> str:
    """A value on one short line, without addresses in memory."""
    if isinstance(value, tuple | list):
        comma = "," if len(value) == 1 else ""
        return f"({', '.join(map(shown, value))}{comma})"
    if isinstance(value, enum.Enum):
        return value.name
    if (
        value is None
        or isinstance(value, str | bool | int | float | Path)
        or hasattr(value, "__describe__")
    ):
        return _short(" ".join(repr(value).split()))
    return getattr(value, "__name__", None) or f"{type(value).__name__}(...)"
