"""What an experiment file imports from its own folder is found in every command, from any current
folder."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxformer import cli

ROOT = Path(__file__).parents[2]
HELPER = """
import jax

def names(evaluation):
    import deeper  # when it is called, not when the file is read
    return {"deeper": deeper.VALUE}
"""
FILE = """
import importlib
from helper import names
from jaxformer import training
from jaxformer.data.tasks import Copy
from jaxformer.models import ModelConfig


class Data:
    def open(self, model):
        importlib.import_module("late")  # not by a statement of this file
        return Copy(vocab_size=8, length=4, examples=16, validation_examples=4).open(model)

    def generate(self, run, key, folder):
        from package.inner import answer

        return answer(run)


experiment = training.Experiment(
    name="beside",
    model=ModelConfig(vocab_size=9, num_layers=1, d_model=8, num_heads=2, context_length=8),
    data=Data(),
    metrics=(names,),
    steps=4,
    batch_size=4,
    log_every=1,
    checkpoints=training.Checkpoints(every=2),
)
"""


@pytest.fixture
def there(tmp_path, monkeypatch):
    """The folder of an experiment with its modules. Afterwards the path of imports and the modules
    are as before."""
    folder = tmp_path / "there"
    (folder / "package").mkdir(parents=True)
    (folder / "beside.py").write_text(FILE)
    (folder / "helper.py").write_text(HELPER)
    (folder / "deeper.py").write_text("VALUE = 7.0\n")
    (folder / "late.py").write_text("")
    (folder / "package" / "__init__.py").write_text("")
    (folder / "package" / "inner.py").write_text(
        "def answer(run):\n    return f'step {run.checkpoint[0]}'\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        del sys.modules[name]


def forget(names=("helper", "deeper", "late", "package", "package.inner")):
    """As in a new process: no module of the user's is loaded, and no folder of theirs is on the
    path."""
    for name in names:
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


@pytest.mark.thorough
def test_modules_beside_the_file_are_found_by_every_command_from_any_folder(
    there, tmp_path, monkeypatch, capsys
):
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
    runs = f"--runs={tmp_path / 'runs'}"
    monkeypatch.chdir(tmp_path / "one")
    assert cli.main(["train", os.path.relpath(there / "beside.py"), runs, "--steps=4"]) == 0
    (run,) = (tmp_path / "runs").glob("beside-*")
    assert json.loads((run / "result.json").read_text())["validation"]["deeper"] == 7.0
    for place in (tmp_path / "two", there, tmp_path):
        monkeypatch.chdir(place)
        forget()
        assert cli.main(["generate", str(run)]) == 0
        assert capsys.readouterr().out.endswith("step 4\n")
        forget()
        assert cli.main(["evaluate", str(run)]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["deeper"] == 7.0
    # as one that was killed after step 2: it goes on, from another folder
    shutil.rmtree(run / "checkpoints" / "4")
    monkeypatch.chdir(tmp_path / "two")
    forget()
    assert cli.main(["train", str(there / "beside.py"), runs, "--steps=4"]) == 0
    assert "resuming after step 2" in capsys.readouterr().out


@pytest.mark.slow
def test_a_new_process_finds_them(there, tmp_path):
    """By the command that users type, with the current folder first on the path and nothing of an
    earlier command."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    (tmp_path / "here").mkdir()
    for words in (["train", "../there/beside.py"], ["generate", "beside"], ["evaluate", "beside"]):
        command = [sys.executable, "-m", "jaxformer", *words]
        done = subprocess.run(
            command, cwd=tmp_path / "here", env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        if words[0] == "generate":
            assert done.stdout == "step 4\n"
