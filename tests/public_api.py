"""The public functions and classes, with the names of their arguments: one line each.

`python -m tests.public_api` writes tests/fixtures/public_api.txt anew. Do so when you change the
interface on purpose, and write the change into docs/changelog.md.
"""

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KEPT = Path(__file__).parent / "fixtures" / "public_api.txt"
# packages that offer what they import
PACKAGES = ("ops", "masks", "models", "zoo", "families", "objectives", "training", "decoding")
# files, each with the names that are public; None: all of its own
FILES = {
    "params": None,
    "data.arrays": None,
    "data.drawn": None,
    "data.sources": ("Dataset", "Question", "Stdlib", "Text", "Windows"),
    "evaluation.generation": ("Generated", "answers"),
    "evaluation.metric": ("Evaluation",),
    "evaluation.perplexity": ("StridedPerplexity",),
    "evaluation.text_metrics": ("bleu", "chrf", "exact_match", "rouge", "token_f1"),
    "runs.loop": ("Result", "train"),
    "runs.run": ("Run", "open_run"),
}


def lines() -> list[str]:
    """A line for each public name: ops.rms_norm(x, scale, eps=...)."""
    return [f"{name}{arguments(value)}" for name, value in public()]


def public() -> Iterator[tuple[str, Any]]:
    """(name, function or class)."""
    for package in PACKAGES:
        module = importlib.import_module(f"jaxformer.{package}")
        for name in sorted({*dir(module), *getattr(module, "OFFERED", ())}):
            value = getattr(module, name, None)  # a preset of zoo has no function
            if is_ours(value, "jaxformer") and not name.startswith("_"):
                yield f"{package}.{name}", value
    for file, names in FILES.items():
        module = importlib.import_module(f"jaxformer.{file}")
        for name in sorted(names or dir(module)):
            value = getattr(module, name)
            if is_ours(value, module.__name__) and not name.startswith("_"):
                yield f"{file}.{name}", value


def is_ours(value: Any, home: str) -> bool:
    """Whether a value is a function or class of this library, from the module `home`."""
    is_callable = callable(value) and not inspect.ismodule(value)
    return is_callable and str(getattr(value, "__module__", "")).startswith(home)


def arguments(value: Any) -> str:
    """The names of the arguments; `=...` behind those that may be left out."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return ""
    shown = []
    is_named_alone = False
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and not is_named_alone:
            shown.append("*")
        is_named_alone = each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        shown.append(stars + each.name + ("" if each.default is each.empty else "=..."))
    return f"({', '.join(shown)})"


if __name__ == "__main__":
    KEPT.write_text("\n".join(lines()) + "\n", encoding="utf-8")
    print(f"{len(lines())} names: {KEPT}")
