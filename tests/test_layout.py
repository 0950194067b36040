"""The house: no import runs upstairs, the front door is light, and configs answer fast."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "jaxformer"
FLOORS = {
    0: ["mask_rules", "mask_blocks", "masks", "params", "config"],
    1: ["ops", "kernels", "parallel"],
    2: ["models"],
    3: ["decoding", "interop", "data"],
    4: ["training", "evaluation", "analysis"],
    5: ["cli", "__main__"],
}
FLOOR = {name: floor for floor, names in FLOORS.items() for name in names}


def imported(node):
    """Parts of jaxformer that an import statement names."""
    if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "jaxformer":
        rest = node.module.split(".")[1:]
        return rest[:1] if rest else [alias.name for alias in node.names]
    if isinstance(node, ast.Import):
        return [alias.name.split(".")[1] for alias in node.names if alias.name.startswith("jaxformer.")]
    return []


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_stay_on_their_floor_or_below(path):
    here = FLOOR.get(path.relative_to(ROOT).parts[0].removesuffix(".py"))
    for node in ast.walk(ast.parse(path.read_text())):
        for part in imported(node):
            if here is not None and part in FLOOR:
                assert FLOOR[part] <= here, f"{path}:{node.lineno} imports {part}"


def loaded_after(statement, *modules):
    code = f"{statement}; import sys; print([m for m in {modules} if m in sys.modules])"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_the_front_door_is_light():
    assert loaded_after("import jaxformer", "jax", "flax", "orbax", "grain", "tyro") == "[]"
    assert loaded_after("import jaxformer.config", "jax", "tyro", "cattrs") == "[]"
    heavy = ("orbax", "grain", "matplotlib", "tyro", "torch", "tokenizers")
    assert loaded_after("from jaxformer import masks, models, ops", *heavy) == "[]"
