"""jaxformer: transformers as pure functions in JAX.

Submodules load on first use: `from jaxformer import masks, models, ops` imports only what they
need. `jaxformer.open_run("runs/quickstart-1a2b3c4d")` opens a trained run.
"""

import importlib
from pathlib import Path

__version__ = "1.0.0"

_PARTS = sorted(
    {path.stem for path in Path(__file__).parent.iterdir() if not path.name.startswith("_")}
    - {"cli", "builtin"}
)


def __getattr__(name: str):
    if name in _PARTS:
        return importlib.import_module(f"jaxformer.{name}")
    if name == "open_run":
        return importlib.import_module("jaxformer.runs.run").open_run
    raise AttributeError(f"module 'jaxformer' has no attribute {name!r}")


def __dir__():
    return [*globals(), *_PARTS, "open_run"]
