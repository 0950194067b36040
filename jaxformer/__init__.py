"""jaxformer: transformers as pure functions in JAX.

Submodules load on first use: `from jaxformer import masks, models, ops` costs what they need and no more.
`jaxformer.open_run("runs/quickstart-1a2b3c4d")` opens what was trained.
"""

import importlib

__version__ = "0.1.0"

_SUBMODULES = (
    "analysis",
    "config",
    "data",
    "decoding",
    "errors",
    "evaluation",
    "interop",
    "masks",
    "models",
    "ops",
    "parallel",
    "params",
    "planning",
    "sharding",
    "training",
)


def __getattr__(name: str):
    if name in _SUBMODULES:
        return importlib.import_module(f"jaxformer.{name}")
    if name == "open_run":
        return importlib.import_module("jaxformer.training.run").open_run
    raise AttributeError(f"module 'jaxformer' has no attribute {name!r}")


def __dir__():
    return [*globals(), *_SUBMODULES, "open_run"]
