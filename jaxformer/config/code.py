"""The code of a function or class as JSON: its source without comments, and what it uses from around it.

The source comes from the file's syntax tree, so formatting does not matter. A function of an installed library is only
a name.
"""

import ast
import functools
import linecache
import symtable
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(unit: Any) -> str:
    """`module:name`; only the name where an experiment file defines it, since its copies are other modules."""
    module, name = getattr(unit, "__module__", None), getattr(unit, "__qualname__", None) or type(unit).__qualname__
    experiment = "__experiment_text__" in vars(sys.modules.get(str(module), types.SimpleNamespace()))
    return name if module is None or experiment else f"{module}:{name}"


@functools.lru_cache(maxsize=1024)
def is_users_file(path: Path) -> bool:
    """Whether a Python file belongs neither to this library, nor to an installed package, nor to Python."""
    path = path.resolve()
    folders = (Path(__file__).resolve().parents[1], Path(sysconfig.get_path("stdlib")).resolve())
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    return not installed and not any(path.is_relative_to(folder) for folder in folders)


def in_library(unit: Any) -> bool:
    """Whether a function or class is found by its name in a module that is not the user's, so that the name says all."""
    module = sys.modules.get(str(unit.__module__))
    found: Any = module
    for part in unit.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is unit and not _is_users_module(module)


def is_users(unit: Any) -> bool:
    """Whether the user wrote a function or class."""
    if "__experiment_text__" in _globals(unit):
        return True
    file = _file(unit)
    return file is not None and not file.startswith("<frozen") and is_users_file(Path(file))


def _is_users_module(module: Any) -> bool:
    file = getattr(module, "__file__", None)
    return hasattr(module, "__experiment_text__") or (file is not None and is_users_file(Path(file)))


def functions(unit: Any) -> list[types.FunctionType]:
    """The function itself; the methods that the user wrote in a class, without those that `dataclass` generates."""
    if isinstance(unit, types.FunctionType):
        return [unit]
    members = [getattr(member, "fget", None) or getattr(member, "__func__", member) for member in vars(unit).values()]
    return [
        member
        for member in members
        if isinstance(member, types.FunctionType) and member.__code__.co_filename != "<string>" and is_users(member)
    ]


def closure(unit: Any) -> dict[str, Any]:
    """The values that a function, or the methods of a class, take from the function around them."""
    found = {}
    for function in functions(unit):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                found[name] = cell.cell_contents
            except ValueError:  # not yet assigned
                found[name] = None
    found.pop("__class__", None)  # of super()
    return found


def default_arguments(unit: Any) -> dict[str, Any]:
    """The default values of a function's parameters, by name."""
    if isinstance(unit, type):
        return {}
    values = unit.__defaults__ or ()
    positional = unit.__code__.co_varnames[: unit.__code__.co_argcount]
    return dict(zip(positional[len(positional) - len(values) :], values, strict=True)) | (unit.__kwdefaults__ or {})


def source(unit: Any, describe: Callable[[Any], Any]) -> Any:
    """The text of a user's function or class, and the globals that it uses as `describe` describes them."""
    node = syntax(unit)
    if node is None and isinstance(unit, type):  # made by a call, such as make_dataclass
        own = [member for member in functions(unit) if syntax(member) is not None]
        return {member.__name__: describe(member) for member in own}
    if node is None:
        return _instructions(unit.__code__)
    return {"text": ast.unparse(node), "uses": {name: describe(value) for name, value in _uses(node, _globals(unit))}}


def _instructions(code: types.CodeType) -> list:
    """What a function does where its text is unknown, as in `python -c`."""
    constants = [_instructions(value) if isinstance(value, types.CodeType) else repr(value) for value in code.co_consts]
    return [code.co_code.hex(), code.co_names, constants]


def _globals(unit: Any) -> dict[str, Any]:
    if isinstance(unit, types.FunctionType):
        return unit.__globals__
    return vars(sys.modules.get(unit.__module__, types.SimpleNamespace()))


def _file(unit: Any) -> str | None:
    if isinstance(unit, types.FunctionType):
        return unit.__code__.co_filename
    return _globals(unit).get("__file__") or next((each.__code__.co_filename for each in functions(unit)), None)


# The syntax tree


def text_of(unit: Any) -> str:
    """The text of the file that a function or class comes from; of an experiment file as it was when it ran."""
    text = _globals(unit).get("__experiment_text__")
    if text is not None:
        return text
    file = _file(unit) or ""
    linecache.checkcache(file)  # the file may have been edited and imported again
    return "".join(linecache.getlines(file))


def syntax(unit: Any) -> Any:
    """The syntax tree of a function or class, None where there is no text."""
    try:
        definitions = _definitions(text_of(unit))
    except SyntaxError:
        return None
    if isinstance(unit, type):
        name = unit.__qualname__.replace(".<locals>", "")
        return next((node for path, node in definitions if path == name and isinstance(node, ast.ClassDef)), None)
    code = unit.__code__
    if code.co_name == "<lambda>":
        return _lambda([node for _, node in definitions if isinstance(node, ast.Lambda)], code)
    for _, node in definitions:
        if isinstance(node, _FUNCTIONS) and node.name == code.co_name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    return None


@functools.lru_cache(maxsize=64)
def _definitions(text: str) -> list[tuple[str, Any]]:
    """(dotted name, tree) of every class, function and lambda in a text, the last first."""
    found: list[tuple[str, Any]] = []
    queue: list[tuple[str, ast.AST]] = [("", ast.parse(text))]
    for path, node in queue:  # grows while it is read
        for child in ast.iter_child_nodes(node):
            name = f"{path}.{child.name}".lstrip(".") if isinstance(child, _FUNCTIONS | ast.ClassDef) else path
            if name != path or isinstance(child, ast.Lambda):
                found.append((name, child))
            queue.append((name, child))
    return found[::-1]


def _lambda(lambdas: list[ast.Lambda], code: types.CodeType) -> ast.Lambda | None:
    """The lambda whose body holds the last instruction of the code: several may stand on one line."""
    last = [at for at in code.co_positions() if None not in at][-1:]
    found = [node for node in lambdas if node.lineno == code.co_firstlineno]
    if last and len(found) > 1:
        line, end_line, column, end_column = last[0]
        found = [
            node
            for node in found
            if (node.body.lineno, node.body.col_offset) <= (line, column)
            and (end_line, end_column) <= (node.body.end_lineno, node.body.end_col_offset)
        ]
    return max(found, key=lambda node: node.col_offset, default=None)  # the innermost


def _uses(node: ast.AST, names: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(name, value) of every global that the code reads, and of `module.name` in a module of the user's."""
    for name in sorted(_global_names(node) & names.keys()):
        yield name, names[name]
    attributes = {ast.unparse(leaf): leaf for leaf in ast.walk(node) if isinstance(leaf, ast.Attribute)}
    for name, leaf in sorted(attributes.items()):
        value = _attribute(leaf, names)
        if value is not None and not isinstance(value, types.ModuleType):
            yield name, value


def _global_names(node: ast.AST) -> set[str]:
    try:
        tables = [symtable.symtable(ast.unparse(node), "", "exec")]
    except SyntaxError:  # such as nonlocal, alone
        return {leaf.id for leaf in ast.walk(node) if isinstance(leaf, ast.Name)}
    for table in tables:  # grows while it is read
        tables.extend(table.get_children())
    symbols = [symbol for table in tables for symbol in table.get_symbols()]
    return {symbol.get_name() for symbol in symbols if symbol.is_global() and symbol.is_referenced()}


def _attribute(node: ast.AST, names: dict[str, Any]) -> Any:
    """The value of `module.name`; None for an attribute of anything else than a user's module."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    module = _attribute(node.value, names) if isinstance(node, ast.Attribute) else None
    if not isinstance(node, ast.Attribute) or not isinstance(module, types.ModuleType) or not _is_users_module(module):
        return None
    return getattr(module, node.attr, None)
