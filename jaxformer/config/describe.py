"""What a config says, one way: a description for people and tools, its fingerprint, and how two descriptions differ.

A description is JSON. A function is described by its name, its code and what it closes over, so that a lambda, a
partial or a user's own class tells one experiment from another. Nothing is ever built from a description.
"""

import ast
import dataclasses
import functools
import hashlib
import inspect
import json
import types
from collections.abc import Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any

EXECUTION = {"execution": True}


def execution(default: Any) -> Any:
    """A field with this default that decides how a run executes and not its numbers: no part of its fingerprint."""
    return dataclasses.field(default=default, metadata=EXECUTION)


def is_config(value: Any) -> bool:
    """Whether a value is an instance of a dataclass, whose fields can be listed and set."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def describe(value: Any) -> Any:
    """The value as JSON: a config as `{"type": class, field: ...}`, a function by name and code, an array by its digest."""
    return _describe(value, ())


def _describe(value: Any, above: tuple[int, ...]) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else repr(value)  # JSON has no infinity
    if id(value) in above:
        return "(itself)"
    inner = functools.partial(_describe, above=(*above, id(value)))
    if isinstance(value, Mapping):
        return {str(key): inner(item) for key, item in value.items()}
    if hasattr(value, "__describe__"):
        return inner(value.__describe__())
    if isinstance(value, list | tuple | set | frozenset):
        items = [inner(item) for item in value]
        return sorted(items, key=str) if isinstance(value, set | frozenset) else items
    if isinstance(value, type):
        return _code(value, inner)
    if is_config(value):
        code = {"code": _digest(value)} if _is_users(type(value)) else {}
        return {"type": type(value).__name__, **code, **{name: inner(child) for name, child in fields(value).items()}}
    if isinstance(value, functools.partial):
        arguments = {"arguments": inner(value.args)} if value.args else {}
        return {"partial": inner(value.func), **arguments, **inner(value.keywords)}
    if isinstance(value, types.MethodType):
        return {"method": value.__name__, "of": inner(value.__self__)}
    if isinstance(value, types.FunctionType):
        return _code(value, inner)
    if hasattr(value, "__array__") and hasattr(value, "dtype"):
        return {"array": f"{value.dtype}{list(value.shape)}", "sha256": _sha256(_bytes(value))}
    if isinstance(value, bytes):
        return {"bytes": len(value), "sha256": _sha256(value)}
    if isinstance(value, Path):
        return str(value)
    if callable(value) and hasattr(value, "__qualname__"):  # a builtin
        return name_of(value)
    state = {} if isinstance(value, types.ModuleType) else getattr(value, "__dict__", {})
    if hasattr(value, "__wrapped__"):  # jax.jit, functools.cache
        return inner(value.__wrapped__)
    code = {"code": _digest(value)} if _is_users(type(value)) else {}
    return {"type": name_of(type(value)), **code, **inner(state)}


def fields(config: Any) -> dict[str, Any]:
    """The values of a config's fields by name; the keywords of a partial."""
    if isinstance(config, functools.partial):
        return dict(config.keywords)
    if not is_config(config):
        return {}
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.init}


def name_of(function: Any) -> str:
    """`module:function`; of what an experiment file defines the name alone, since copies of the file have other paths."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", repr(function))
    return name if module is None or _of_experiment_file(function) else f"{module}:{name}"


def _of_experiment_file(function: Any) -> bool:
    import sys

    return hasattr(sys.modules.get(str(getattr(function, "__module__", None))), "__experiment_file__")


def _is_users(function: Any) -> bool:
    """Whether a function or class is the user's own code: neither of this library nor of an installed one."""
    try:
        path = inspect.getsourcefile(function)
    except TypeError:  # of C
        return False
    if path is None or str(getattr(function, "__module__", "")).split(".")[0] == "jaxformer":
        return False
    return is_users_file(Path(path))


def is_users_file(path: Path) -> bool:
    """Whether a Python file belongs neither to this library, nor to an installed package, nor to Python."""
    import sysconfig

    parts = path.resolve().parts
    library = Path(__file__).resolve().parents[1]
    installed = "site-packages" in parts or "dist-packages" in parts
    standard = Path(sysconfig.get_path("stdlib")).resolve()
    return not (installed or path.resolve().is_relative_to(standard) or path.resolve().is_relative_to(library))


def _code(function: Any, inner) -> Any:
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    closure = {}
    for name, cell in zip(names, cells, strict=True):
        try:
            closure[name] = inner(cell.cell_contents)
        except ValueError:  # not yet assigned
            closure[name] = None
    described = {"code": _digest(function)} if _is_users(function) else {}
    if closure:
        described["closure"] = closure
    if described and getattr(function, "__defaults__", None):
        described["defaults"] = inner(function.__defaults__)
    return {"function": name_of(function), **described} if described else name_of(function)


# The code of a user's function


def _digest(function: Any) -> str:
    """Eight hex digits of what a user's function or object does: its source without comments, and the globals it uses."""
    found: dict[str, str] = {}
    _collect(function if inspect.isroutine(function) or isinstance(function, type) else type(function), found)
    return _sha256(json.dumps(found, sort_keys=True).encode())[:8]


def _collect(function: Any, found: dict[str, str]) -> None:
    """Puts the source of a function, and of the user's functions and constants that it names, into `found`."""
    key = name_of(function)
    if key in found:
        return
    node = _syntax(function)
    found[key] = "" if node is None else ast.unparse(node)
    names = {leaf.id for leaf in ast.walk(node) if isinstance(leaf, ast.Name)} if node is not None else set()
    for name in sorted(names):
        value = _globals(function).get(name, MISSING)
        if (inspect.isfunction(value) or isinstance(value, type)) and _is_users(value):
            _collect(value, found)
        elif isinstance(value, bool | int | float | str | tuple):
            found[f"{key}.{name}"] = json.dumps(describe(value))


def _globals(function: Any) -> dict[str, Any]:
    import sys

    if isinstance(function, type):
        return vars(sys.modules.get(function.__module__, types.ModuleType("")))
    return getattr(function, "__globals__", {})


def _syntax(function: Any) -> ast.AST | None:
    """The syntax tree of a function or class, from its file."""
    try:
        lines, first = inspect.findsource(function)
        tree = _tree("".join(lines))
    except (OSError, TypeError, SyntaxError):
        return None
    if isinstance(function, type):
        kinds, line, columns = (ast.ClassDef,), first + 1, None
    else:
        code = function.__code__
        kinds, line = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda), code.co_firstlineno
        columns = [at for at in code.co_positions() if None not in at and at[0] >= line]
    for node in ast.walk(tree):
        if not isinstance(node, kinds):
            continue
        decorators = getattr(node, "decorator_list", [])
        begin = min([node.lineno, *(decorator.lineno for decorator in decorators)])
        if line not in (begin, node.lineno):
            continue
        if isinstance(node, ast.Lambda) and columns:  # several may stand on a line: the one around the instructions
            at = columns[-1]
            inside = (node.body.lineno, node.body.col_offset) <= (at[0], at[2])
            if not (inside and (at[1], at[3]) <= (node.body.end_lineno, node.body.end_col_offset)):
                continue
        if isinstance(node, ast.Lambda) == (getattr(function, "__name__", "") == "<lambda>"):
            return node
    return None


@functools.lru_cache(maxsize=64)
def _tree(text: str) -> ast.Module:
    return ast.parse(text)


def _bytes(array: Any) -> bytes:
    import numpy as np

    return np.asarray(array).tobytes()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# Comparison


def fingerprint(config: Any) -> str:
    """Eight hex digits over what differs from the defaults, without the fields that decide no number.

    A field that is added with a default changes no old fingerprint.
    """
    return _sha256(json.dumps(changes(config), sort_keys=True).encode())[:8]


def changes(config: Any, default: Any = MISSING) -> dict[str, Any]:
    """The description of what a config does not share with `default`, or with its class's defaults.

    Fields made by `execution` are left out.
    """
    same = default is not MISSING and type(default) is type(config)
    described = describe(config)
    found = {} if same else {name: described[name] for name in ("type", "code") if name in described}
    usual = fields(default) if same else defaults(type(config))
    for field in dataclasses.fields(config):
        if not field.init or field.metadata.get("execution"):
            continue
        value, other = getattr(config, field.name), usual[field.name]
        if is_config(value) and not hasattr(value, "__describe__"):
            part = changes(value, other)
            if part:
                found[field.name] = part
        elif other is MISSING or described[field.name] != describe(other):
            found[field.name] = described[field.name]
    return found


def defaults(cls: type) -> dict[str, Any]:
    """The default of each field of a config class, MISSING where it has none."""
    return {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in dataclasses.fields(cls)
        if field.init
    }


def flat(description: Any, prefix: str = "") -> dict[str, Any]:
    """A description by dotted path: `{"optimizer": "AdamW", "optimizer.learning_rate": 0.001}`."""
    if not isinstance(description, Mapping):
        return {prefix: description}
    found = {prefix: description[kind] for kind in ("type", "function", "partial") if kind in description and prefix}
    for name, value in description.items():
        if name not in ("type", "function"):
            found |= flat(value, f"{prefix}.{name}" if prefix else name)
    return found


def diff(old: Mapping, new: Mapping) -> dict[str, tuple[Any, Any]]:
    """What two descriptions differ in, by dotted path: `{"optimizer.learning_rate": (old, new)}`; None where one has no such."""
    before, after = flat(old), flat(new)
    pairs = {name: (before.get(name), after.get(name)) for name in before | after}
    return {name: (a, b) for name, (a, b) in pairs.items() if a != b or type(a) is not type(b)}


def execution_fields(config: Any, prefix: str = "") -> set[str]:
    """The dotted paths of the fields that decide no number, with all below them."""
    found = set()
    for field in dataclasses.fields(config) if is_config(config) else ():
        path, value = prefix + field.name, getattr(config, field.name, None)
        if field.metadata.get("execution"):
            found |= {path} | {f"{path}.{name}" for name in flat(describe(value)) if name}
        else:
            found |= execution_fields(value, f"{path}.")
    return found
