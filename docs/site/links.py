"""Names of the library in the text of a page become links to the API.

`ops.rope` and `jaxformer.ops.rope(x)` lead to the function, `ModelConfig.block` to its class, and
`jaxformer.zoo` to the page of the package. Names are read from the source, which is not imported.
mkdocs calls `on_page_markdown`; tests/test_book.py asks `target` for each name of a page.
"""

import ast
import os
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[2] / "jaxformer"
# what the API has no page of, as in hooks.py
HIDDEN = ("jaxformer.cli", "jaxformer.config.", "jaxformer.builtin")
# pages name these packages without their parent, as in `blocks.post_norm`
PARENTS = ("", "models.", "tools.")
NAME = re.compile(r"`((?:[A-Za-z]\w*\.)*[A-Za-z]\w*)(?:\([^`\n]*\))?`")
# blocks of code, headings, comments, links and code in two backticks stay as they are
SKIPPED = re.compile(
    r"^```.*?^```|^#+ .*?$|<!--.*?-->|!?\[[^\]]*\][(\[][^)\]]*[)\]]|``.*?``",
    flags=re.DOTALL | re.MULTILINE,
)
EITHER = re.compile(f"{SKIPPED.pattern}|{NAME.pattern}", flags=re.DOTALL | re.MULTILINE)


class Names(NamedTuple):
    """The names of the package, each with its whole path."""

    modules: set[str]  # that the API shows
    packages: set[str]
    defined: set[str]  # functions, classes and values that the API describes
    aliases: dict[str, str]  # a name that a module imports -> where it comes from
    classes: dict[str, set[str]]  # the name of a class alone -> all classes of this name


def on_page_markdown(markdown, page, config, files):
    """mkdocs calls it with the text of each page."""
    where = page.file.src_uri
    return markdown if where.startswith("api/") else linked(markdown, os.path.dirname(where))


def linked(markdown: str, folder: str = "") -> str:
    """The text of a page in `folder` with links."""

    def link(found: re.Match) -> str:
        span, name = found[0], found[1]
        place = target(name) if name else None
        if place is None:
            return span
        if place.endswith(".md"):
            return f"[{span}]({os.path.relpath(place, folder or '.')})"
        return f"[{span}][{place}]"

    return EITHER.sub(link, markdown)


def target(name: str) -> str | None:
    """The anchor of the API that a name leads to, or the page of a package; None: there is none."""
    names = read()
    if "." not in name:
        found = names.classes.get(name, set())
        return next(iter(found)) if len(found) == 1 else None
    if name.startswith("jaxformer."):
        return place(name)
    first = name.partition(".")[0]
    if first in names.classes:
        return target(first)
    places = (place(f"jaxformer.{parent}{name}") for parent in PARENTS)
    return next((found for found in places if found), None)


def place(path: str, followed: tuple[str, ...] = ()) -> str | None:
    """As `target`, of a whole path; `followed` are the aliases that led to it."""
    names = read()
    if path in names.defined:
        return path
    if path in names.aliases and path not in followed:
        found = place(names.aliases[path], (*followed, path))
        if found:
            return found
    if path in names.packages:
        return f"api/{path.removeprefix('jaxformer.')}.md"
    if path in names.modules:
        return path
    home = path.rpartition(".")[0]
    if not home or home in names.modules | names.packages:
        return None
    owner = place(home, followed)  # an attribute leads to its class
    return owner if owner and owner.rpartition(".")[2][:1].isupper() else None


@cache
def read() -> Names:
    names = Names(set(), set(), set(), {}, defaultdict(set))
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        is_hidden = module.startswith(HIDDEN) or "._" in module
        if not is_hidden and module != "jaxformer":
            # the page of the package `jaxformer` shows this one as a module
            shown_as_package = is_package and module != "jaxformer.config"
            (names.packages if shown_as_package else names.modules).add(module)
        add_names(names, module, file.read_text(), is_hidden)
    return names


def add_names(names: Names, module: str, source: str, is_hidden: bool) -> None:
    """The names of one module; what it imports has another home."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom) and f"{node.module}".startswith("jaxformer"):
            for alias in node.names:
                path = f"{module}.{alias.asname or alias.name}"
                names.aliases[path] = f"{node.module}.{alias.name}"
        elif is_hidden:
            continue
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            path = f"{module}.{node.name}"
            if ast.get_docstring(node) and not node.name.startswith("_"):
                names.defined.add(path)
                if isinstance(node, ast.ClassDef):
                    names.classes[node.name].add(path)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            add_value(names, module, source.splitlines(), node)


def add_value(names: Names, module: str, lines: list[str], node: ast.Assign | ast.AnnAssign):
    """A name of a module: the API shows it if a comment says what it is (fields.py)."""
    name = node.targets[0] if isinstance(node, ast.Assign) else node.target
    if not isinstance(name, ast.Name) or name.id.startswith("_"):
        return
    if name.id == "OFFERED":  # {name: file} of a package that imports a file when it is used
        for offered, file in ast.literal_eval(node.value).items():
            names.aliases[f"{module}.{offered}"] = f"{module}.{file}.{offered}"
        return
    above = node.lineno - 2
    while re.match(r"[a-z]\w* = ", lines[above]):
        above -= 1
    beside = re.sub(r"# (fmt|noqa|pyrefly|type)\b.*", "", lines[node.end_lineno - 1])
    if "  # " in beside or lines[above].startswith("# "):
        names.defined.add(f"{module}.{name.id}")
