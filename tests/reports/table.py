"""Counts the reports that tests/reports holds, for the table of docs/checks.md: `python
tests/reports/table.py`."""

import ast
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
HEADER = ("part", "listed", "hit", "found by our own search", "hit")


class Report(NamedTuple):
    """One report: the part, its name, the right behaviour, the fault there was, and the list that
    it came from."""

    part: str
    names: tuple[str, ...]
    right: str
    hit: str | None
    listed: str | None


def reports(folder: Path = HERE) -> list[Report]:
    """Every `@pytest.mark.report(...)` of the folder, read from the syntax trees: nothing is
    imported."""
    found = []
    for path in sorted(folder.glob("test_*.py")):
        part = path.stem.removeprefix("test_").replace("_", " ")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for call in getattr(node, "decorator_list", ()):
                if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("mark.report"):
                    found.append(report(part, call))
    return found


def report(part: str, call: ast.Call) -> Report:
    """One decorator's literal arguments."""
    names = tuple(ast.literal_eval(argument) for argument in call.args)
    words = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    return Report(part, names, words["right"], words.get("hit"), words.get("listed"))


def row(part: str, of_part: list[Report]) -> str:
    """One line of the table."""
    listed = [one for one in of_part if one.listed]
    own = [one for one in of_part if not one.listed]
    counts = [
        len(listed),
        sum(one.hit is not None for one in listed),
        len(own),
        sum(one.hit is not None for one in own),
    ]
    return f"| {part} | " + " | ".join(str(n) for n in counts) + " |"


def table() -> str:
    """The table of docs/checks.md: one line a part, and their sum."""
    every = reports()
    lines = ["| " + " | ".join(HEADER) + " |", "|---|---|---|---|---|"]
    for part in sorted({one.part for one in every}):
        lines.append(row(part, [one for one in every if one.part == part]))
    lines.append(row("all", every))
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
