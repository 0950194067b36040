"""What models of further families are drawn from, one file for each file of `jaxformer.families`.

A file has:
    FAMILIES              {model_type: beginning of the names of its classes in transformers}
    sizes(family, r, common) -> settings that each drawn model has; `common` are those of a BERT
    RANGE (if any)        {field: values}, in addition to those of `documented`
    PAIRS (if any)        families whose models have an encoder and a decoder
    NO_NUMBER (if any)    fields that change no output of a forward pass in evaluation
    arguments (if any)    (class name, config, r, rng) -> (arguments of the model, the mask of its
                          outputs or None)
    SIDES (if any)        where rows are padded: none, left, right
    EXACT (if any)        options of a model that computes everything plainly
"""

import importlib
import pkgutil
from types import ModuleType

_FILES = [
    importlib.import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__)
]
FILES: dict[str, ModuleType] = {family: file for file in _FILES for family in file.FAMILIES}
PAIRS = {family for file in _FILES for family in getattr(file, "PAIRS", ())}
NO_NUMBER = {name for file in _FILES for name in getattr(file, "NO_NUMBER", ())}


def merged(known: dict[str, list]) -> dict[str, list]:
    """`known` and the ranges of all files: {field: values}, each value once."""
    ranges = {name: list(values) for name, values in known.items()}
    for file in _FILES:
        for name, values in getattr(file, "RANGE", {}).items():
            kept = ranges.setdefault(name, [])
            kept += [value for value in values if value not in kept]
    return ranges
