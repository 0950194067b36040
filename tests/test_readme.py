"""Every Python block of the README runs, and says what it says it says."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
PAGES = ("decoding", "evaluation", "looking-inside")


def run(code, name, names, capsys):
    exec(compile(code, name, "exec"), names)
    for said in re.findall(r"print\(.*?\)\s+# (.*)", code):
        assert said in capsys.readouterr().out


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_blocks_run(index, capsys):
    run(BLOCKS[index], f"README block {index}", {"__name__": "__readme__"}, capsys)


@pytest.mark.parametrize("page", PAGES)
def test_pages_run(page, capsys):
    """One block after the other, as they are read."""
    names = {"__name__": "__page__"}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / f"docs/{page}.md").read_text(), flags=re.DOTALL):
        run(block, page, names, capsys)


def test_it_stays_short():
    assert README.count("\n") < 250
