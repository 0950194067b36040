"""The code of a function or class as JSON: its source without comments, and what it uses from around it.

The source comes from the file's syntax tree, so formatting does not matter. A function of an installed library is only
a name, and so is one without a file.
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
NOT_USERS = tuple(str(path.resolve()) + os.sep for path in (Path(__file__).parents[1], Path(sysconfig.get_path("stdlib"))))
_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda


def positional_names(function: Callable) -> list[str]:
    """The names of a function's positional parameters; none where it does not tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]


def name_of(unit: Any) -> str:
    """`module:name`; only the name where an experiment file defines it, since its copies are other modules."""
    module, name = getattr(unit, "__module__", None), getattr(unit, "__qualname__", None) or type(unit).__qualname__
    in_experiment = hasattr(sys.modules.get(str(module)), "__experiment_text__")
    if module is None or in_experiment:
        return name
    return ":".join(moved.first_name(plain_name(str(module)), name))


def plain_name(module: str) -> str:
    """The name of a module as an import statement has it: `helper` of `helper@1a2b3c4d` (see `config.imports`)."""
    return re.sub("@[0-9a-f]{8}", "", module)


@functools.cache
def is_users_file(file: str | None) -> bool:
    """Whether a file belongs neither to this library, nor to an installed package, nor to Python."""
    if file is None or file.startswith("<frozen") or re.search(INSTALLED, file):
        return False
    path = os.path.realpath(file)
    return not re.search(INSTALLED, path) and not path.startswith(NOT_USERS)


def users_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost line of the user's code through which an error came. The code that `dataclass` makes is in no file."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((f for f in reversed(frames) if f.filename != "<string>" and is_users_file(f.filename)), None)


def is_users_module(module: Any) -> bool:
    """`is_users_file` of a module."""
    return hasattr(module, "__experiment_text__") or is_users_file(getattr(module, "__file__", None))


def in_library(unit: Any) -> bool:
    """Whether a function or class is found by its name in a module that is not the user's, so that the name says all."""
    module = sys.modules.get(str(unit.__module__))
    found: Any = module
    for part in unit.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is unit and not is_users_module(module)


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
    return _globals(unit).get("__file__") or next((each.__code__.co_filename for each in _functions(unit)), None)


def source(unit: Any, describe: Callable[[Any], Any]) -> Any:
    """The text of a user's function or class, and the globals that it uses as `describe` describes them; None without text."""
    node = syntax(unit)
    if node is None:
        return None
    text, names, attributes = _read(node)
    values = _globals(unit)
    used = {name: values[name] for name in sorted(names & values.keys())}
    used |= {name: value for name in sorted(attributes) if (value := _attribute(name, values)) is not None}
    return {"text": text, "uses": {name: describe(value) for name, value in used.items()}}


def closure(unit: Any) -> dict[str, Any]:
    """The values that a function, or the methods of a class, take from the function around them."""
    found = {}
    for function in _functions(unit):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                found[name] = cell.cell_contents
            except ValueError:  # not yet assigned
                found[name] = None
    found.pop("__class__", None)  # of super()
    return found


def _functions(unit: Any) -> list[types.FunctionType]:
    """The function itself; the methods that the user wrote in a class, without those that `dataclass` generates."""
    if isinstance(unit, types.FunctionType):
        return [unit]
    members = [getattr(member, "fget", None) or getattr(member, "__func__", member) for member in vars(unit).values()]
    functions = [member for member in members if isinstance(member, types.FunctionType)]
    return [each for each in functions if each.__code__.co_filename != "<string>" and is_users(each)]


def text_of(unit: Any) -> str:
    """The text of the file that a function or class comes from; of an experiment file, and of those beside it, as it ran."""
    names = _globals(unit)
    text = names.get("__experiment_text__", names.get(MODULE_TEXT))
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
    named = [node for path, node in definitions if path.rpartition(".")[2] == code.co_name]

    def first_line(node):
        return min(each.lineno for each in (node, *getattr(node, "decorator_list", ())))

    found = [node for node in named if first_line(node) == code.co_firstlineno]
    # of every instruction (line, end line, column, end column); in Python 3.11 a return has no width
    positions = [position for position in code.co_positions() if None not in position and position[::2] != position[1::2]]
    if len(found) > 1 and positions:  # lambdas on one line: those whose bodies hold the last instruction
        line, end_line, column, end_column = positions[-1]

        def begins(body):
            return (body.lineno, body.col_offset) <= (line, column)

        def ends(body):
            return (end_line, end_column) <= (body.end_lineno, body.end_col_offset)

        found = [node for node in found if begins(node.body) and ends(node.body)]
    return max(found, key=lambda node: node.col_offset, default=None)  # the innermost


@functools.lru_cache(maxsize=64)
def _definitions(text: str) -> list[tuple[str, Any]]:
    """(dotted name, tree) of every class, function and lambda in a text, the last first."""
    found: list[tuple[str, Any]] = []
    queue: list[tuple[str, ast.AST]] = [("", ast.parse(text))]
    for path, node in queue:  # grows while it is read
        for child in ast.iter_child_nodes(node):
            name = path
            if isinstance(child, _DEFINITIONS):
                name = f"{path}.{getattr(child, 'name', '<lambda>')}".lstrip(".")
                found.append((name, child))
            queue.append((name, child))
    return found[::-1]


@functools.lru_cache(maxsize=1024)
def _read(node: ast.AST) -> tuple[str, set[str], set[str]]:
    """Of a syntax tree: its text without comments, the globals that it reads, and the text of every `a.b`."""
    text, leaves = ast.unparse(node), list(ast.walk(node))
    attributes = {ast.unparse(leaf) for leaf in leaves if isinstance(leaf, ast.Attribute)}
    try:
        tables = [symtable.symtable(text, "", "exec")]
    except SyntaxError:  # such as nonlocal, alone
        return text, {leaf.id for leaf in leaves if isinstance(leaf, ast.Name)}, attributes
    for table in tables:  # grows while it is read
        tables.extend(table.get_children())
    symbols = [symbol for table in tables for symbol in table.get_symbols()]
    return text, {each.get_name() for each in symbols if each.is_global() and each.is_referenced()}, attributes


def _attribute(path: str, names: dict[str, Any]) -> Any:
    """The value of `module.name`; None for an attribute of anything else than a user's module."""
    first, *others = path.split(".")
    value = names.get(first)
    for name in others:
        of_users = isinstance(value, types.ModuleType) and is_users_module(value)
        value = getattr(value, name, None) if of_users else None
    return None if isinstance(value, types.ModuleType) else value
