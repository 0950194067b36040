import importlib
import sys

import numpy as np

from tests.witnesses import FIXTURES, NAMES

for name in sys.argv[1:] or NAMES:
    arrays = importlib.import_module(f"tests.witnesses.{name}").witness()
    np.savez_compressed(FIXTURES / f"{name}.npz", **arrays)
    print(f"{name}: {len(arrays)} arrays, {(FIXTURES / f'{name}.npz').stat().st_size:,} bytes")
