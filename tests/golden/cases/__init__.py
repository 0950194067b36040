"""Golden models of further families: each file has `CASES`, {name: Case}."""

import importlib
import pkgutil


def cases() -> dict:
    """The cases of all files, by name."""
    found: dict = {}
    for file in pkgutil.iter_modules(__path__):
        found |= importlib.import_module(f"{__name__}.{file.name}").CASES
    return found
