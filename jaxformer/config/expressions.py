"""Values as text: a literal, or an expression of calls over a closed list of names. Nothing else is ever evaluated.

    Lion(learning_rate=1e-4)      causal() & window(255)      (0.9, 0.98)      swiglu

The text is read as a syntax tree. A node that is not in `evaluate` is refused, and a name calls only what is offered.
"""

import ast
import dataclasses
import functools
import operator
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from jaxformer.config.describe import is_config
from jaxformer.errors import ConfigError, did_you_mean

Names = Mapping[str, Any]

_UNARY = {ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert}
_BINARY = {
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.Add: operator.add, ast.Sub: operator.sub,
    ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
_NUMBERS = int | float


def evaluate(text: str, names: Names) -> Any:
    """The value of an expression over `names`. Raises ConfigError for everything but literals, calls and `& | ~ + - * /`."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        if sum(1 for _ in ast.walk(tree)) > 10_000:
            raise ConfigError("the expression is too long")
        return _value(tree, names)
    except ConfigError:
        raise
    except Exception as error:  # a call may raise anything
        raise ConfigError(error.msg if isinstance(error, SyntaxError) else error) from error


def _value(node: ast.expr, names: Names) -> Any:
    match node:
        case ast.Constant(None | bool() | int() | float() | str() as value):
            return value
        case ast.Name(name):
            value = _look_up(name, names)
            return value() if dataclasses.is_dataclass(value) and isinstance(value, type) else value
        case ast.Call(ast.Name(name), arguments, keywords) if all(keyword.arg for keyword in keywords):
            function = _look_up(name, names)
            if not callable(function) or (is_config(function) and not isinstance(function, type)):
                raise ConfigError(f"{name} cannot be called; use it without ()")
            named = {str(keyword.arg): _value(keyword.value, names) for keyword in keywords}
            made = function(*[_value(argument, names) for argument in arguments], **named)
            return check_fields(made, name)
        case ast.Tuple(items) | ast.List(items):
            return tuple(_value(item, names) for item in items)
        case ast.Dict(keys, values) if None not in keys:
            pairs = zip(keys, values, strict=True)
            return {_value(key, names): _value(value, names) for key, value in pairs if key is not None}
        case ast.UnaryOp(sign, operand) if type(sign) in _UNARY:
            return _UNARY[type(sign)](_value(operand, names))
        case ast.BinOp(left, sign, right) if type(sign) in _BINARY:
            a, b = _value(left, names), _value(right, names)
            if isinstance(sign, ast.BitAnd | ast.BitOr) or (isinstance(a, _NUMBERS) and isinstance(b, _NUMBERS)):
                return _BINARY[type(sign)](a, b)
    raise ConfigError(f"{ast.unparse(node)!r}: expected a literal or a call such as Name(field=value)")


def _look_up(name: str, names: Names) -> Any:
    if name not in names:
        raise ConfigError(f"there is no {name!r} to choose from{did_you_mean(name, names)}")
    return names[name]


def read(texts: Sequence[str], hint: Any, names: Names) -> Any:
    """The value of type `hint` that is written in one or several words. Raises ConfigError, without saying where.

    A str and a Literal take the word as it is. A tuple takes several words, one word, or `(a, b)`.
    """
    if hint is bool and not texts:
        return True
    alone = _tuple_hint(hint)
    if alone is not None and len(texts) != 1:
        members = get_args(alone)
        inner = [members[0]] * len(texts) if members[-1] is ... else members
        if len(inner) != len(texts):
            raise ConfigError(f"expected {expected(hint)}")
        return tuple(_word(text, member, names) for text, member in zip(texts, inner, strict=True))
    if len(texts) != 1:
        raise ConfigError(f"expected {expected(hint)}")
    return _word(texts[0], hint, names)


def _tuple_hint(hint: Any) -> Any:
    """The tuple among the members of a type, or None."""
    return next((member for member in members_of(hint) if get_origin(member) is tuple), None)


def _word(text: str, hint: Any, names: Names) -> Any:
    members = members_of(hint)
    choices = [choice for member in members if get_origin(member) is Literal for choice in get_args(member)]
    if text in choices:
        return text
    if text == "None" and types.NoneType in members:
        return None
    if bool in members and text.capitalize() in ("True", "False"):
        return text.capitalize() == "True"
    alone = _tuple_hint(hint)
    only_words = all(m in (str, bool, int, float, types.NoneType) or get_origin(m) is Literal for m in members)
    if str in members and (only_words or not _is_expression(text, names)):
        return text
    try:
        value = evaluate(text, names)
    except ConfigError as error:
        if alone is not None and "(" not in text:
            return (_word(text, get_args(alone)[0], names),)
        if all(member in (bool, int, float, types.NoneType) or get_origin(member) is Literal for member in members):
            raise ConfigError(f"expected {expected(hint)}") from None
        raise ConfigError(f"{error}; expected {expected(hint)}") from None
    if isinstance(value, float) and "e" in text.lower() and int in members and value % 1 == 0:
        value = int(value)  # 1e4 is meant as an integer, 1.0 is not
    return convert(value, hint)


def _is_expression(text: str, names: Names) -> bool:
    """Whether a word is better read as a call or a name than as a string."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return isinstance(tree, ast.Call | ast.BinOp | ast.UnaryOp) or (isinstance(tree, ast.Name) and tree.id in names)


# Types


def members_of(hint: Any) -> tuple[Any, ...]:
    """The members of a union; the type alone otherwise."""
    return get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def convert(value: Any, hint: Any) -> Any:
    """The value as its type has it: an int where a float is due becomes one. Raises ConfigError for another type."""
    for member in members_of(hint):
        made = _as(value, member)
        if made is not _NO:
            return made
    raise ConfigError(f"expected {expected(hint)}, got {value!r}")


_NO = object()


def _as(value: Any, hint: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any or hint is object:
        return value
    if hint is types.NoneType or hint is None:
        return None if value is None else _NO
    if origin is Literal:
        return value if value in arguments else _NO
    if origin is tuple:
        items = value if isinstance(value, tuple | list) else (value,) if arguments[-1] is ... else ()
        inner = [arguments[0]] * len(items) if arguments[-1] is ... else arguments
        if len(items) != len(inner):
            return _NO
        try:
            return tuple(convert(item, member) for item, member in zip(items, inner, strict=True))
        except ConfigError:
            return _NO
    if Callable in (hint, origin):
        return value if callable(value) else _NO
    if hint is float:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else _NO
    if hint is int:
        return value if isinstance(value, int) and not isinstance(value, bool) else _NO
    if isinstance(origin or hint, type):
        return value if isinstance(value, origin or hint) else _NO
    return value  # a type that cannot be checked


def check_fields(value: Any, name: str) -> Any:
    """The config with its fields converted to their types. Raises ConfigError for a field of another type."""
    if not is_config(value) or not type(value).__module__.startswith("jaxformer"):
        return value
    changed = {}
    for field, hint in hints(type(value)).items():
        given = getattr(value, field)
        try:
            made = convert(given, hint)
        except ConfigError as error:
            raise ConfigError(f"{name}({field}=...): {error}") from None
        if made is not given:
            changed[field] = made
    return dataclasses.replace(value, **changed) if changed else value


@functools.cache
def hints(cls: type) -> dict[str, Any]:
    """The type of each field of a config class; `Any` for what cannot be resolved."""
    try:
        found = typing.get_type_hints(cls)
    except Exception:  # a user's annotation may be any text
        found = {}
    return {field.name: found.get(field.name, Any) for field in dataclasses.fields(cls) if field.init}


def expected(hint: Any) -> str:
    """A type in the words of an error message."""
    members = get_args(hint)
    if members_of(hint) != (hint,):
        return " or ".join(map(expected, members))
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, members))}"
    if get_origin(hint) is tuple:
        return f"any number of {expected(members[0])}" if members[-1] is ... else " ".join(map(expected, members))
    if hint is types.NoneType:
        return "None"
    if Callable in (hint, get_origin(hint)):
        return "a function or config such as Name(field=value)"
    return "any value" if hint is Any else getattr(hint, "__name__", str(hint))
