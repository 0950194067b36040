"""The code of a function or class as JSON: its source without comments, and the globals it uses.

The source comes from the file's syntax tree, so formatting does not matter. A function of an
installed library, or one without a file, is described by its name alone.
"""

import ast
import functools
import inspect
import linecache
import os
import re
import symtable
import sys
import sysconfig
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxformer.config import moved

INSTALLED = r"[/\\](site|dist)-packages[/\\]"
MODULE_TEXT = "__users_text__"  # of a module beside an experiment file: the text that was run
# the folders of this library and of Python
NOT_USERS = tuple(
    str(path.resolve()) + os.sep
    for path in (Path(__file__).parents[1], Path(sysconfig.get_path("stdlib")))
)
_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda


def positional_names(function: Callable) -> list[str]:
    """The names of a function's positional parameters; empty if it has no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [
        each.name
        for each in parameters
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]


def name_of(unit: Any) -> str:
    """`module:name`, or `name` alone for a definition of an experiment file.

    The copies of an experiment file are other modules.
    """
    module = getattr(unit, "__module__", None)
    name = getattr(unit, "__qualname__", None) or type(unit).__qualname__
    in_experiment = hasattr(sys.modules.get(str(module)), "__experiment_text__")
    if module is None or in_experiment:
        return name
    return ":".join(moved.first_name(plain_name(str(module)), name))


def plain_name(module: str) -> str:
    """A module's name in an import statement: `helper` for `helper@1a2b3c4d` (`config.imports`)."""
    return re.sub("@[0-9a-f]{8}", "", module)


@functools.cache
def is_users_file(file: str | None) -> bool:
    """Whether a file is the user's: not of this library, of an installed package or of Python."""
    if file is None or file.startswith("<frozen") or re.search(INSTALLED, file):
        return False
    path = os.path.realpath(file)
    return not re.search(INSTALLED, path) and not path.startswith(NOT_USERS)


def users_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost line of the user's code that an error passed through; None if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    # code that `dataclass` generates has the file name <string>
    return next(
        (f for f in reversed(frames) if f.filename != "<string>" and is_users_file(f.filename)),
        None,
    )


def is_users_module(module: Any) -> bool:
    """Whether a module is the user's."""
    return hasattr(module, "__experiment_text__") or is_users_file(
        getattr(module, "__file__", None)
    )


def in_library(unit: Any) -> bool:
    """Whether a module that is not the user's has this function or class under its own name.

    Then the name alone identifies it.
    """
    module = sys.modules.get(str(unit.__module__))
    value: Any = module
    for name in unit.__qualname__.split("."):
        value = getattr(value, name, None)
    return value is unit and not is_users_module(module)


def is_users(unit: Any) -> bool:
    """Whether the user wrote a function or class."""
    return "__experiment_text__" in _globals(unit) or is_users_file(_file(unit))


def _globals(unit: Any) -> dict[str, Any]:
    if isinstance(unit, types.FunctionType):
        return unit.__globals__
    return vars(sys.modules.get(unit.__module__, types.SimpleNamespace()))


def _file(unit: Any) -> str | None:
    if isinstance(unit, types.FunctionType):
        return unit.__code__.co_filename
    if file := _globals(unit).get("__file__"):
        return file
    return next((each.__code__.co_filename for each in _functions(unit)), None)


def source(unit: Any, describe: Callable[[Any], Any]) -> Any:
    """{"text": source, "uses": {global: describe(its value)}} of a function or class of the user.

    None if its source is not known.
    """
    node = syntax(unit)
    if node is None:
        return None
    text, names, attributes = _read(node)
    values = _globals(unit)
    used = {name: values[name] for name in sorted(names & values.keys())}
    for name in sorted(attributes):
        value = _attribute(name, values)
        if value is not None:
            used[name] = value
    return {"text": text, "uses": {name: describe(value) for name, value in used.items()}}


def closure(unit: Any) -> dict[str, Any]:
    """The values that a function, or the methods of a class, take from the enclosing function."""
    values = {}
    for function in _functions(unit):
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            try:
                values[name] = cell.cell_contents
            except ValueError:  # not yet assigned
                values[name] = None
    values.pop("__class__", None)  # of super()
    return values


def _functions(unit: Any) -> list[types.FunctionType]:
    """The function itself, or the methods of a class that the user wrote.

    Methods that `dataclass` generates are left out.
    """
    if isinstance(unit, types.FunctionType):
        return [unit]
    members = [
        getattr(member, "fget", None) or getattr(member, "__func__", member)
        for member in vars(unit).values()
    ]
    functions = [member for member in members if isinstance(member, types.FunctionType)]
    return [
        each for each in functions if each.__code__.co_filename != "<string>" and is_users(each)
    ]


def text_of(unit: Any) -> str:
    """The text of the file that defines a function or class.

    For an experiment file, and for a file beside it, this is the text that was run.
    """
    names = _globals(unit)
    text = names.get("__experiment_text__", names.get(MODULE_TEXT))
    if text is not None:
        return text
    file = _file(unit) or ""
    linecache.checkcache(file)  # the file may have been edited and imported again
    return "".join(linecache.getlines(file))


def syntax(unit: Any) -> Any:
    """The syntax tree of a function or class; None if its source is not known."""
    try:
        definitions = _definitions(text_of(unit))
    except SyntaxError:
        return None
    if isinstance(unit, type):
        name = unit.__qualname__.replace(".<locals>", "")
        return next(
            (node for path, node in definitions if path == name and isinstance(node, ast.ClassDef)),
            None,
        )
    code = unit.__code__
    named = [node for path, node in definitions if path.rpartition(".")[2] == code.co_name]
    nodes = [node for node in named if _first_line(node) == code.co_firstlineno]
    if len(nodes) > 1:
        nodes = _with_last_instruction(nodes, code)
    return max(nodes, key=lambda node: node.col_offset, default=None)  # the innermost


def _first_line(node: Any) -> int:
    """The first line of a definition, with its decorators."""
    return min(each.lineno for each in (node, *getattr(node, "decorator_list", ())))


def _with_last_instruction(nodes: list[Any], code: types.CodeType) -> list[Any]:
    """Of several lambdas on one line, those whose body holds the last instruction of `code`."""
    # (line, end line, column, end column) of each instruction; in Python 3.11 a return has no width
    positions = [
        position
        for position in code.co_positions()
        if None not in position and position[::2] != position[1::2]
    ]
    if not positions:
        return nodes
    line, end_line, column, end_column = positions[-1]
    inside = []
    for node in nodes:
        body = node.body
        begins = (body.lineno, body.col_offset) <= (line, column)
        ends = (end_line, end_column) <= (body.end_lineno, body.end_col_offset)
        if begins and ends:
            inside.append(node)
    return inside


@functools.lru_cache(maxsize=64)
def _definitions(text: str) -> list[tuple[str, Any]]:
    """(dotted name, tree) of every class, function and lambda in a text, in reverse order."""
    definitions: list[tuple[str, Any]] = []
    queue: list[tuple[str, ast.AST]] = [("", ast.parse(text))]
    for path, node in queue:  # grows while it is read
        for child in ast.iter_child_nodes(node):
            name = path
            if isinstance(child, _DEFINITIONS):
                name = f"{path}.{getattr(child, 'name', '<lambda>')}".lstrip(".")
                definitions.append((name, child))
            queue.append((name, child))
    return definitions[::-1]


@functools.lru_cache(maxsize=1024)
def _read(node: ast.AST) -> tuple[str, set[str], set[str]]:
    """(text without comments, global names it reads, text of every `a.b`) of a syntax tree."""
    text = ast.unparse(node)
    leaves = list(ast.walk(node))
    attributes = {ast.unparse(leaf) for leaf in leaves if isinstance(leaf, ast.Attribute)}
    try:
        tables = [symtable.symtable(text, "", "exec")]
    except SyntaxError:  # such as `nonlocal` without its enclosing function
        return text, {leaf.id for leaf in leaves if isinstance(leaf, ast.Name)}, attributes
    for table in tables:  # grows while it is read
        tables.extend(table.get_children())
    symbols = [symbol for table in tables for symbol in table.get_symbols()]
    names = {each.get_name() for each in symbols if each.is_global() and each.is_referenced()}
    return text, names, attributes


def _attribute(path: str, names: dict[str, Any]) -> Any:
    """The value of `module.name`; None unless `module` is the user's."""
    first, *others = path.split(".")
    value = names.get(first)
    for name in others:
        of_users = isinstance(value, types.ModuleType) and is_users_module(value)
        value = getattr(value, name, None) if of_users else None
    return None if isinstance(value, types.ModuleType) else value
