"""Texts for pictures: short numbers, and text in the form that matplotlib draws literally."""

import unicodedata


def short(count: int | float) -> str:
    """The number with three digits and a unit: 7,087,872 is 7.09 M."""
    units = (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")
    size, unit = next((pair for pair in units if count >= pair[0]), (1, ""))
    return f"{count / size:.3g} {unit}".strip()


def plain(text: str) -> str:
    r"""The text in the form that matplotlib draws literally.

    Matplotlib reads text between two $ as a formula: a $ becomes \$. It raises an error for control
    characters and halves of surrogate pairs: these become escapes.
    """
    return "".join(map(_drawable, text)).replace("$", r"\$")


def _drawable(letter: str) -> str:
    """The letter, or its escape if matplotlib cannot draw it."""
    if letter == "\n" or unicodedata.category(letter) not in ("Cc", "Cs"):
        return letter
    return repr(letter)[1:-1]
