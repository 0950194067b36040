"""How a mask is printed, described and drawn."""

import textwrap
from dataclasses import replace
from typing import Any

import numpy as np

from jaxformer.masks import rules

SYMBOLS = {rules.and_: " & ", rules.or_: " | "}


def array_text(array: Any) -> str:
    """An array by its type and shape."""
    return f"<{array.dtype}{list(array.shape)}>"


def mask_text(mask: Any) -> str:
    """The calls that build the mask: the text of `repr(mask)`.

    An array is shown by its type and shape, a user's rule as `Mask(name)`.
    """
    if mask.offset is not None:
        text = mask_text(replace(mask, offset=None))
        text = f"({text})" if mask.rule in (*SYMBOLS, rules.not_) else text
        offset = mask.offset if isinstance(mask.offset, int) else array_text(mask.offset)
        return f"{text}.at({offset})"
    if mask.rule in SYMBOLS:
        return SYMBOLS[mask.rule].join(_operand_text(mask, operand) for operand in mask.parts)
    if mask.rule is rules.not_:
        (operand,) = mask.parts
        return f"~({operand})" if operand.rule in SYMBOLS else f"~{operand}"
    args = mask.args
    if mask.rule is rules.block_sparse and mask.static:
        block, shape, packed = args
        args = (array_text(rules.layout_of(shape, packed)), block)
    arrays = [array_text(array) for array in mask.arrays if array is not None]
    arguments = [*mask.parts, *args, *arrays]
    # a user's rule may have the name of a rule of ours
    is_ours = mask.rule is getattr(rules, mask.name, None)
    if is_ours:
        return f"{mask.name}({', '.join(map(str, arguments))})"
    return f"Mask({', '.join(map(str, [mask.name, *arguments]))})"


def _operand_text(mask: Any, operand: Any) -> str:
    """An operand of `&` or `|`, in brackets if it is the other of the two."""
    needs_brackets = operand.rule in SYMBOLS and operand.rule is not mask.rule
    return f"({operand})" if needs_brackets else str(operand)


def description(mask: Any) -> Any:
    """The mask as `jaxformer.config` describes it: its text, and users' rules and arrays.

    The text alone does not show these two in full.
    """
    masks = _with_parts(mask)
    users = [(each.rule, each.args) for each in masks if each.rule.__module__ != rules.__name__]
    hidden = [each.args for each in masks if each.rule is rules.block_sparse]
    hidden += [each.arrays for each in masks if each.arrays]
    if users or hidden:
        return {"mask": str(mask), "rules": users, "hidden": hidden}
    return str(mask)


def _with_parts(mask: Any) -> list[Any]:
    """The mask, its parts, their parts, and so on."""
    masks = [mask]
    for part in mask.parts:
        masks += _with_parts(part)
    return masks


def figure(mask: Any, q_length: int, kv_length: int) -> Any:
    """A matplotlib figure of the first batch row's mask: one panel a head, at most four."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    dense = np.asarray(mask.dense(q_length, kv_length))
    count = min(4, dense.shape[1])
    height = 0.9 + 3 * float(np.clip(q_length / kv_length, 0.3, 2))
    figure = Figure(figsize=(0.6 + 3.4 * count, height), dpi=150, layout="constrained")
    colors = ListedColormap(["#ffffff", "#1f5d8c"])
    for head, axes in enumerate(figure.subplots(1, count, squeeze=False)[0]):
        axes.imshow(dense[0, head], cmap=colors, vmin=0, vmax=1, interpolation_stage="rgba")
        axes.set(xlabel="key", ylabel="query" if head == 0 else None)
        axes.set_title(f"head {head}" if count > 1 else "", fontsize=8)
    title = f"{mask}: {dense.mean():.1%} visible"
    # matplotlib reads the text between two dollar signs as a formula
    title = "\n".join(textwrap.wrap(title, 55 * count)).replace("$", r"\$")
    figure.suptitle(title, fontsize=8)
    return figure
