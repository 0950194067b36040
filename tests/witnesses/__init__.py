"""Other people's implementations, run on small random inputs: what they answered is kept in
tests/fixtures.

Each module here has a `witness() -> {name: array}` that needs torch or the like. Ordinary tests
`load` what it wrote; `make parity` runs it again. `python -m tests.witnesses [NAME ...]` writes the
fixtures anew.
"""

from pathlib import Path

import numpy as np

FIXTURES = Path(__file__).parents[1] / "fixtures"
NAMES = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))


def load(name: str) -> dict[str, np.ndarray]:
    """The arrays of tests/fixtures/NAME.npz."""
    with np.load(FIXTURES / f"{name}.npz") as arrays:
        return dict(arrays)
