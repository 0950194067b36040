"""The versions that hosts install: those of the environment at hand, as a constraints file for pip and uv.

    python -m experiments.launch.lock                        writes dist/constraints.txt

The closure of our dependencies and of the extras `hosts`, `tpu` and `cuda` is read from the packages that are installed here.
What is not installed here (libtpu on a laptop) is not in it; jax itself pins libtpu and the CUDA plugin.
"""

import json
import sys
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from jaxformer.config import write_atomically

ROOT = Path(__file__).parents[2]
FILE = "dist/constraints.txt"  # relative to the checkout
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"  # hosts run this one, too
EXTRAS = ("hosts", "tpu", "cuda")


@cache
def versions() -> tuple[dict[str, str], list[str]]:
    """(versions by name, names without one: not installed here, or installed from a folder)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *(f"{project['name']}[{extra}]" for extra in EXTRAS)]
    todo, seen = [Requirement(text) for text in requirements], set()
    found, absent = {}, set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras} - {extra for other, extra in seen if other == name}:
            seen.add((name, extra))
            if name == project["name"]:  # an extra of ours may name others of ours
                todo += map(Requirement, project["optional-dependencies"].get(extra, []))
                continue
            try:
                distribution = metadata.distribution(name)
            except metadata.PackageNotFoundError:
                absent.add(name)
                continue
            if "dir_info" in json.loads(distribution.read_text("direct_url.json") or "{}") or "+" in distribution.version:
                absent.add(name)  # no index has it
            else:
                found[name] = distribution.version
            needed = map(Requirement, distribution.requires or [])
            todo += [one for one in needed if one.marker is None or one.marker.evaluate({"extra": extra})]
    return dict(sorted(found.items())), sorted(absent)


def text() -> str:
    """The constraints file."""
    found, absent = versions()
    lines = [f"# Python {PYTHON}; not installed here and so without a version: {' '.join(absent) or 'nothing'}"]
    return "\n".join([*lines, *(f"{name}=={version}" for name, version in found.items()), ""])


def write() -> None:
    write_atomically(ROOT / FILE, text())


def summary() -> str:
    """The lock in a line."""
    found, absent = versions()
    words = f"Python {PYTHON}, jax {found['jax']} and {len(found) - 1} more in the versions of this environment"
    return words + (f"; not installed here, so in one that fits: {', '.join(absent)}" if absent else "")


if __name__ == "__main__":
    write()
    print(f"{FILE}: {summary()}")
