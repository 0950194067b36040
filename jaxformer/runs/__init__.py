"""A run: its loop, and everything that it writes and that survives it.

`from jaxformer.runs import open_run, train, FromRun`; each module loads on first use.
"""

import importlib

_HOMES = {"open_run": "run", "train": "loop", "FromRun": "initial"}


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(f"jaxformer.runs.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'jaxformer.runs' has no attribute {name!r}")
