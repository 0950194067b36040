"""Names of this library that moved: the experiment file in the folder of an older run imports them from where they were.

`import_from` serves such imports and warns with the new place. `first_module` tells where a name was first: descriptions use
that, because a run keeps its name when the library moves a file.
"""

import functools
import importlib
import logging
from types import SimpleNamespace
from typing import Any

log = logging.getLogger("jaxformer")

# module, before and now
MODULES = {
    "jaxformer.analysis": "jaxformer.tools.analysis",
    "jaxformer.planning": "jaxformer.tools.planning",
    "jaxformer.training.augment": "jaxformer.data.augment",
    "jaxformer.training.corruption": "jaxformer.objectives",
    "jaxformer.training.objectives": "jaxformer.objectives",
    "jaxformer.training.checkpoint": "jaxformer.runs.checkpoint",
    "jaxformer.training.goodput": "jaxformer.runs.goodput",
    "jaxformer.training.initial": "jaxformer.runs.initial",
    "jaxformer.training.loop": "jaxformer.runs.loop",
    "jaxformer.training.manifest": "jaxformer.runs.manifest",
    "jaxformer.training.memory": "jaxformer.runs.memory",
    "jaxformer.training.metrics": "jaxformer.runs.metrics",
    "jaxformer.training.names": "jaxformer.runs.names",
    "jaxformer.training.run": "jaxformer.runs.run",
    "jaxformer.training.run_folder": "jaxformer.runs.run_folder",
    "jaxformer.training.start": "jaxformer.runs.start",
}

# single names that left a module, or whose module was divided: the full name before, the module now
NAMES = {
    "jaxformer.training.FromRun": "jaxformer.runs.initial",
    "jaxformer.training.HuggingFace": "jaxformer.runs.initial",
    "jaxformer.training.run.continues_text": "jaxformer.models.heads",
    "jaxformer.training.metrics.numbers": "jaxformer.evaluation.metric",
    "jaxformer.training.objectives.Batch": "jaxformer.objectives.objective",
    "jaxformer.training.objectives.model_inputs": "jaxformer.objectives.objective",
    "jaxformer.training.objectives.with_reports": "jaxformer.objectives.objective",
    "jaxformer.training.objectives.head_cross_entropy": "jaxformer.objectives.tokens",
    "jaxformer.training.objectives.best_spans": "jaxformer.objectives.spans",
    "jaxformer.training.objectives.is_in_passage": "jaxformer.objectives.spans",
    "jaxformer.training.corruption.hide_tokens": "jaxformer.objectives.masked",
    "jaxformer.training.corruption.corrupt_spans": "jaxformer.objectives.corruption",
    "jaxformer.training.corruption.span_counts": "jaxformer.objectives.corruption",
}
RENAMED = {"jaxformer.training.metrics.numbers": "as_numbers"}


def import_from(module: str, names: tuple[str, ...]) -> Any:
    """What `from module import names` binds, if one of the names moved; None: nothing moved, import it as usual."""
    moved = [name for name in names if _now(module, name) is not None]
    if not moved:
        return None
    for name in moved:
        home, new_name = _now(module, name) or (module, name)
        log.warning("%s.%s is now %s.%s; change the import", module, name, home, new_name)
    return SimpleNamespace(**{name: _get(*(_now(module, name) or (module, name))) for name in names})


def first_module(module: str, name: str) -> str:
    """The module that first had this function or class."""
    return _first_modules().get(f"{module}.{name}") or _first_modules().get(module, module)


def _now(module: str, name: str) -> tuple[str, str] | None:
    """(module, name) of what was `module.name`; None where it did not move."""
    full = f"{module}.{name}"
    if full in NAMES:
        return NAMES[full], RENAMED.get(full, name)
    if full in MODULES:
        parent, _, last = MODULES[full].rpartition(".")
        return parent, last
    for old, new in MODULES.items():
        if module == old or module.startswith(f"{old}."):
            return new + module.removeprefix(old), name
    return None


def _get(module: str, name: str) -> Any:
    """`from module import name`."""
    found = importlib.import_module(module)
    try:
        return getattr(found, name)
    except AttributeError:
        if hasattr(found, "__path__"):
            return importlib.import_module(f"{module}.{name}")
        raise ImportError(f"cannot import name {name!r} from {module!r}", name=module) from None


@functools.cache
def _first_modules() -> dict[str, str]:
    """Module before, by module now and by full name now."""
    found = {new: old for old, new in MODULES.items()}
    for full, home in NAMES.items():
        module, _, name = full.rpartition(".")
        found[f"{home}.{RENAMED.get(full, name)}"] = module
    return found
