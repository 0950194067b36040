"""Runs a notebook in percent format and writes a page: its text, code, output and figures.

    python docs/site/notebook.py docs/notebooks/masks.py FOLDER

A cell begins with `# %%`, a cell of text with `# %% [markdown]`. A cell that ends with a matplotlib
figure shows it.
"""

import ast
import contextlib
import io
import re
import sys
from pathlib import Path


def cells(source: str) -> list[tuple[bool, str]]:
    """(is text, content) of each cell."""
    parts = re.split(r"^# %%(.*)\n", source, flags=re.MULTILINE)
    pairs = zip(parts[1::2], parts[2::2], strict=True)
    return [("[markdown]" in head, body.strip("\n")) for head, body in pairs if body.strip()]


def text(cell: str) -> str:
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in cell.splitlines())


def execute(code: str, names: dict) -> tuple[str, object]:
    """(what a cell printed, the value of its last line or None)."""
    tree, printed, value = ast.parse(code), io.StringIO(), None
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, names["__name__"], "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), names["__name__"], "eval"), names)
    return printed.getvalue(), value


def page(source: str, stem: str, folder: Path) -> str:
    """The Markdown of a notebook; its pictures are written into `folder`."""
    names, lines, pictures = {"__name__": f"notebook {stem}"}, [], 0
    for is_text, cell in cells(source):
        if is_text:
            lines += [text(cell), ""]
            continue
        printed, value = execute(cell, names)
        lines += ["```python", cell, "```", ""]
        if printed.strip():
            lines += ["```text", printed.rstrip(), "```", ""]
        if hasattr(value, "savefig"):
            pictures += 1
            value.savefig(folder / f"{stem}-{pictures}.png", dpi=120, facecolor="white")
            lines += [f"![]({stem}-{pictures}.png)", ""]
    return "\n".join([*lines, f"*The script of this page: [`{stem}.py`]({stem}.py).*", ""])


if __name__ == "__main__":
    path, folder = map(Path, sys.argv[1:])
    partial = folder.with_suffix(".part")
    partial.mkdir(parents=True, exist_ok=True)
    (partial / f"{path.stem}.md").write_text(page(path.read_text(), path.stem, partial))
    partial.rename(folder)
