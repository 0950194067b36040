"""A griffe extension: comments beside fields become their documentation.

Docstrings are read as plain text.
"""

import re
from pathlib import Path

import griffe


class Fields(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **kwargs) -> None:
        """Once all is loaded."""
        visit(pkg)


def visit(item) -> None:
    for member in list(item.members.values()):
        if member.is_alias:
            continue
        if member.docstring:
            member.docstring.value = escaped(member.docstring.value)
        if member.is_module or member.is_class:
            visit(member)
        elif (
            item.is_module
            and member.is_attribute
            and not member.docstring
            and (text := comment(member))
        ):
            member.docstring = griffe.Docstring(escaped(text), parent=member)
    if item.is_class:
        add_table(item)


def escaped(text: str) -> str:
    """`[B, T]`, `*`, `_` and `<` outside of code mean themselves."""
    lines = []
    for line in text.splitlines():
        pieces = line.split("`")
        if not line.startswith("    "):
            pieces[::2] = [
                re.sub(r"([\\*_\[\]])", r"\\\1", piece).replace("<", "&lt;")
                for piece in pieces[::2]
            ]
        lines.append("`".join(pieces))
    return "\n".join(lines)


def add_table(item: griffe.Class) -> None:
    """The fields of a class as a table at the end of its docstring."""
    fields = [
        one
        for one in attributes(item)
        if one.annotation is not None and not one.name.startswith("_")
    ]
    if not fields:
        return
    rows = [
        (f"`{one.name}`", code(one.annotation), code(one.value), escaped(comment(one)))
        for one in fields
    ]
    columns = [
        pair
        for pair in zip(("field", "type", "default", " "), zip(*rows, strict=True), strict=True)
        if any(pair[1])
    ]
    heads, cells = zip(*columns, strict=True)
    lines = [heads, ["---"] * len(heads), *zip(*cells, strict=True)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    text = item.docstring.value if item.docstring else ""
    item.docstring = griffe.Docstring(f"{text}\n\n{table}", parent=item)


def attributes(item: griffe.Class) -> list[griffe.Attribute]:
    """Own and inherited ones, first those of the bases."""
    found = {}
    for one in [*reversed(item.mro()), item]:
        found |= {
            name: member
            for name, member in one.members.items()
            if member.is_attribute and not member.is_alias
        }
    return list(found.values())


def code(expression) -> str:
    return "" if expression is None else "`" + " ".join(str(expression).split()) + "`"


def comment(field: griffe.Attribute) -> str:
    """What stands behind a field, or above it, or above the lines that it is one of."""
    lines = Path(str(field.filepath)).read_text().splitlines()
    line = re.sub(r"# (fmt|noqa|pyrefly|type)\b.*", "", lines[field.endlineno - 1])
    beside = line.partition("  # ")[2]
    if beside:
        return beside.strip().replace("|", "\\|")
    above = field.lineno - 2
    while field.parent.is_module and re.match(r"[a-z]\w* = ", lines[above]):
        above -= 1
    found = []
    while (line := lines[above].strip()).startswith("# "):
        found, above = [line.removeprefix("# "), *found], above - 1
    return " ".join(found).replace("|", "\\|")
