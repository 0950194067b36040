"""What to do about a folder whose tensors are not those of its config.json."""

import re
from collections.abc import Callable, Collection
from types import SimpleNamespace

from jaxformer.families.family import Family
from jaxformer.families.tensors import Tensor
from jaxformer.families.tied_head import names_in_file
from jaxformer.params import Spec

# {prefix that training code puts before all names: where the model with the right names is}
WRAPPERS = {"module.": "model.module", "_orig_mod.": "model._orig_mod"}
# modules that training code puts around others
AROUND = (
    "_fsdp_wrapped_module.",
    "_checkpoint_wrapped_module.",
    "_forward_module.",
    "_orig_module.",
    *WRAPPERS,
)
OF_ADAPTER = re.compile(r"\.(base_layer|lora_[AB])\.")


def _renaming(file, family: Family, absent: Collection[str], unexpected: list[str]) -> str | None:
    """The rename that gives the file the `absent` tensors; None if there is none."""

    def completes(rename: Callable[[str], str]) -> bool:
        renamed = SimpleNamespace(names=[rename(name) for name in file.names])
        return names_in_file(renamed, family, absent).keys() >= set(absent)

    first = unexpected[0]
    for dot in (i for i, letter in enumerate(first) if letter == "."):
        prefix = first[: dot + 1]
        if not all(name.startswith(prefix) for name in unexpected):
            break
        if completes(lambda name, prefix=prefix: name.removeprefix(prefix)):
            inner = WRAPPERS.get(prefix)
            other = f", or save {inner} instead of model" if inner else ""
            return (
                f"names begin with {prefix!r}: rename each to name.removeprefix({prefix!r}){other}"
            )
    around = [module for module in AROUND if any(module in name for name in unexpected)]

    def without(name: str) -> str:
        for module in around:
            name = name.replace(module, "")
        return name

    if around and completes(without):
        calls = "".join(f".replace({module!r}, '')" for module in around)
        return f"training code put modules around others: rename each to name{calls}"
    return None


def advice_for(
    file,
    family: Family,
    tensors: dict[str, Tensor],
    source: dict[str, str],
    unexpected: list[str],
    leaves: dict[str, Spec],
) -> str:
    """What to do about weights that are not those of config.json."""
    if any(map(OF_ADAPTER.search, unexpected)):
        return (
            "they have an adapter of PEFT that is not merged: save "
            "model.merge_and_unload() instead of model"
        )
    absent = tensors.keys() - source.keys()
    if absent and unexpected and (rename := _renaming(file, family, absent, unexpected)):
        return rename
    for planned, name in source.items():
        if planned not in tensors or not tensors[planned].parts:
            continue
        spec = leaves[tensors[planned].parts[0].path]
        rows, expected = file.names[name][0], tensors[planned].shape
        if "vocab" in spec.axes and rows[1:] == expected[1:] and rows != expected:
            return (
                f"set vocab_size={rows[0]} in config.json; then "
                "models.adaptation.resize_vocabulary gives the model another size"
            )
    if absent and not file.config.get("architectures"):
        return (
            "config.json does not name the class that wrote the file: set architectures, "
            "or give heads=() for the stack alone"
        )
    return "see allow_missing, allow_unexpected and heads of families.load"
