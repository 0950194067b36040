"""The lower bounds of pyproject.toml as constraints for pip: `python tests/oldest.py >
dist/oldest.txt`.

`make test OLDEST=1` installs these versions, so every bound is one that was tested.
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
# a package, its lower bound, and perhaps the Pythons that it is for
BOUND = re.compile(r"([\w.-]+)(?:\[[\w,-]+\])?>=([\w.]+)(?:; python_version >= '[\d.]+')?")


def bounds(pyproject: dict) -> dict[str, str]:
    """The lower bound of every package that the library, its extras or its tests name."""
    project = pyproject["project"]
    extras = project["optional-dependencies"]
    texts = [
        *project["dependencies"],
        *(text for name in sorted(extras) for text in extras[name]),
        *pyproject["dependency-groups"]["dev"],
    ]
    found = [BOUND.fullmatch(text) for text in texts]
    return {match[1]: match[2] for match in found if match}


if __name__ == "__main__":
    for name, version in bounds(tomllib.loads((ROOT / "pyproject.toml").read_text())).items():
        print(f"{name}=={version}")
