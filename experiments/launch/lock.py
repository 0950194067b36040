"""The versions that hosts install, as a constraints file for pip and uv.

    python -m experiments.launch.lock                        writes dist/constraints.txt

They are the versions of this environment: those of our dependencies and of the extras `hosts`,
`tpu` and `cuda`, and of all packages that these need. A package that is not installed here (libtpu
on a laptop) gets no version; jax itself pins libtpu and the CUDA plugin.
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
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"  # the Python of the hosts, too
EXTRAS = ("hosts", "tpu", "cuda")


@cache
def versions() -> tuple[dict[str, str], list[str]]:
    """({name: version}, names of packages without one: not installed here, or from a folder)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *(f"{project['name']}[{extra}]" for extra in EXTRAS)]
    todo, seen = [Requirement(text) for text in requirements], set()
    installed, absent = {}, set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras} - {extra for other, extra in seen if other == name}:
            seen.add((name, extra))
            if name == project["name"]:  # an extra of this project may name its other extras
                todo += map(Requirement, project["optional-dependencies"].get(extra, []))
                continue
            try:
                distribution = metadata.distribution(name)
            except metadata.PackageNotFoundError:
                absent.add(name)
                continue
            origin = json.loads(distribution.read_text("direct_url.json") or "{}")
            if "dir_info" in origin or "+" in distribution.version:
                absent.add(name)  # no package index has this version
            else:
                installed[name] = distribution.version
            needed = map(Requirement, distribution.requires or [])
            todo += [
                one for one in needed if one.marker is None or one.marker.evaluate({"extra": extra})
            ]
    return dict(sorted(installed.items())), sorted(absent)


def text() -> str:
    """The constraints file."""
    installed, absent = versions()
    lines = [
        f"# Python {PYTHON}; not installed here and so without a version: "
        f"{' '.join(absent) or 'nothing'}"
    ]
    return "\n".join([*lines, *(f"{name}=={version}" for name, version in installed.items()), ""])


def write() -> None:
    write_atomically(ROOT / FILE, text())


def summary() -> str:
    """The constraints in one line of words."""
    installed, absent = versions()
    words = (
        f"Python {PYTHON}, jax {installed['jax']} and {len(installed) - 1} more in the versions of "
        "this environment"
    )
    return words + (
        f"; not installed here, so in one that fits: {', '.join(absent)}" if absent else ""
    )


if __name__ == "__main__":
    write()
    print(f"{FILE}: {summary()}")
