"""The house: no import runs upstairs, no files form a circle, the front door is light, and configs
answer fast."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "jaxformer"
FLOORS = [
    ["errors", "config", "params", "sharding", "masks"],
    ["ops"],
    ["models"],
    ["zoo"],
    ["families", "decoding", "interop", "data", "parallel"],
    ["objectives", "training", "evaluation"],
    ["runs"],
    ["tools"],
    ["cli", "__main__"],
]
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}
FILES = sorted(ROOT.rglob("*.py"))
# may import by a string: lazy doors, experiment files
BY_STRING = [
    *("__init__.py", "interop/__init__.py", "runs/__init__.py", "zoo/__init__.py"),
    *("config/imports.py", "config/moved.py", "config/offered.py"),
]


def module_name(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}
FACES = {name for name, path in MODULES.items() if path.name == "__init__.py"}


def imported(source):
    """(line, module of ours) for every import of a file: in functions and under TYPE_CHECKING
    too."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"line {node.lineno}: a relative import; name the module in full"
            )
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
    return [
        (line, nearest_module(name)) for line, name in found if name.split(".")[0] == "jaxformer"
    ]


def nearest_module(name):
    while name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def imports_by_string(source):
    """Lines that import a module by a string."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    names = ("import_module", "__import__")
    return [c.lineno for c in calls if getattr(c.func, "attr", getattr(c.func, "id", "")) in names]


def circles(edges):
    """The strongly connected sets of files: those that can be reached from each other."""

    def reachable(start):
        seen, todo = set(), [start]
        while todo:
            new = edges.get(todo.pop(), set()) - seen
            seen |= new
            todo += new
        return seen

    reach = {name: reachable(name) for name in edges}
    sets = {
        tuple(sorted(other for other in reach[name] if name in reach.get(other, ())))
        for name in edges
    }
    return sorted(list(names) for names in sets if len(names) > 1)


def upstairs(part, source):
    """(line, part) for every import of a file of `part` that names a higher floor."""
    parts = [(line, name.split(".")[1]) for line, name in imported(source) if "." in name]
    return [(line, other) for line, other in parts if FLOOR[other] > FLOOR[part]]


@pytest.mark.thorough_after(113)
@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_stay_on_their_floor_or_below(path):
    relative = path.relative_to(ROOT)
    part = relative.parts[0].removesuffix(".py")
    source = path.read_text()
    if part != "__init__":
        assert part in FLOOR, f"{part}: no floor knows it; add it to FLOORS and to the design"
        found = upstairs(part, source)
        assert not found, f"{relative} imports from higher floors: {found}"
    if str(relative) not in BY_STRING:
        assert not imports_by_string(source), (
            f"{relative} imports by a string; import the module plainly"
        )


@pytest.mark.thorough
def test_no_circle_of_files():
    """Package faces (`__init__.py`) only hand on names, so they are no part of a circle."""
    edges = {
        name: {other for _, other in imported(path.read_text())} - FACES - {name}
        for name, path in MODULES.items()
        if name not in FACES
    }
    assert circles(edges) == []


# what the trunk does without; `cli` takes them inside a command
LEAVES = (
    "zoo",
    "families",
    "interop",
    "tools",
)


@pytest.mark.thorough
def test_the_trunk_imports_no_leaf():
    """No file of the trunk names one, and a process that trains loads none of a paper, a family or
    a tool."""
    for path in FILES:
        part = path.relative_to(ROOT).parts[0].removesuffix(".py")
        named = {name.split(".")[1] for _, name in imported(path.read_text()) if "." in name}
        assert part in (*LEAVES, "cli", "__main__") or not named & set(LEAVES), path
    parts = (
        "models, ops, objectives, training, evaluation, decoding; from jaxformer.runs import "
        "loop, names, run"
    )
    leaves = [f"jaxformer.{name}" for name in LEAVES]
    assert loaded_after(f"from jaxformer import {parts}", *leaves) == "[]"


def test_hidden_imports_are_seen():
    hidden = (
        "def f():\n    from jaxformer import training\n"
        "if TYPE_CHECKING:\n    import jaxformer.cli\n"
        "importlib.import_module('jaxformer.models')\n"
    )
    assert upstairs("ops", hidden) == [(2, "training"), (4, "cli")]
    assert imports_by_string(hidden) == [5]
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def loaded_after(statement, *modules):
    code = f"{statement}; import sys; print([m for m in {modules} if m in sys.modules])"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.thorough
def test_the_front_door_is_light():
    assert loaded_after("import jaxformer", "jax", "flax", "orbax", "grain", "chex") == "[]"
    assert loaded_after("import jaxformer.config", "jax", "numpy") == "[]"
    heavy = ("orbax", "grain", "matplotlib", "torch", "tokenizers")
    assert loaded_after("from jaxformer import masks, models, ops", *heavy) == "[]"
