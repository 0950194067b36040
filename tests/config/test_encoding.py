"""Where the locale has no UTF-8, a command reads paths and texts as UTF-8 all the same."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.thorough
def test_a_command_in_an_ascii_locale(tmp_path):
    folder = tmp_path / "modèles 火"
    folder.mkdir()
    environment = os.environ | ASCII | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "jaxformer", "show", "missing 火.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True)
    assert done.returncode == 2
    assert done.stderr.decode() == "jaxformer: no file missing 火.py\n"
