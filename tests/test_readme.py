"""Every Python block of the README runs, and says what it says it says."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README, *PAGES = ((ROOT / name).read_text() for name in ("README.md", "docs/decoding.md", "docs/evaluation.md"))
BLOCKS = re.findall(r"```python\n(.*?)```", "".join([README, *PAGES]), flags=re.DOTALL)


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_blocks_run(index, capsys):
    exec(compile(BLOCKS[index], f"README block {index}", "exec"), {"__name__": "__readme__"})
    for said in re.findall(r"print\(.*?\)\s+# (.*)", BLOCKS[index]):
        assert said in capsys.readouterr().out


def test_it_stays_short():
    assert README.count("\n") < 250
