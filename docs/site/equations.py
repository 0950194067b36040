"""Equations of the book: LaTeX in the pages becomes MathML when the book is built.

A block of code called `math` is an equation on a line of its own, and `$...$` is one in a sentence.
The site shows both so, and the built book needs neither a network nor a script for them.
"""

import html
import re

from latex2mathml.converter import convert

# pymdownx.arithmatex marks the equations: it knows what is code and what is text
BLOCK = re.compile(r'<div class="arithmatex">\\\[(.*?)\\\]</div>', flags=re.DOTALL)
INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', flags=re.DOTALL)
FUNCTION = "<mi>(?:log|ln|tanh)</mi>"


def on_page_content(content, page, config, files):
    """mkdocs calls it with the page as HTML."""
    content = BLOCK.sub(lambda found: display(html.unescape(found[1])), content)
    return INLINE.sub(lambda found: mathml(html.unescape(found[1]), "inline"), content)


def display(latex: str) -> str:
    """An equation on a line of its own, which scrolls where the screen is too narrow."""
    return f'<div class="equation">{mathml(latex, "block")}</div>'


def mathml(latex: str, place: str) -> str:
    """The MathML of an equation. Raises ValueError for a command that stays as it was."""
    latex = " ".join(latex.split())
    # the package numbers the lines of `aligned`, which it does not know, but not those of `align*`
    for word in ("begin", "end"):
        latex = latex.replace(rf"\{word}{{aligned}}", rf"\{word}{{align*}}")
    found = convert(latex, display=place)
    if unknown := re.search(r"<m\w+[^>]*>\s*\\\w+", found):
        raise ValueError(f"{unknown[0]!r} in the equation {latex}")
    # w log p: a browser puts no space between two names
    space = '<mspace width="0.167em" />'
    found = re.sub(rf"({FUNCTION})(?=<m(?:i|sub)\b)", rf"\1{space}", found)
    return re.sub(rf"(</m(?:i|n|sub)>)(?={FUNCTION})", rf"\1{space}", found)
