"""Whatever an experiment's file defines is trained, stopped, resumed to the same bits, and scored.
The file is docs' own."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxformer
from jaxformer import cli
from jaxformer.runs.reporter import Reporter
from tests.joints.harness import install_wheel

ROOT = Path(__file__).parents[2]
OWN, PAIR = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs" / "your-own-everything.md").read_text(), re.DOTALL
)
FILES = {"own": OWN, "pair": PAIR}


def outcome(folder):
    """(every trained number, the record) of the only run in a folder, as bytes and text."""
    (path,) = (folder / "runs").glob("*-*")
    run = jaxformer.open_run(path)
    leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(run.params)]
    return leaves, run.folder.metrics.read_text()


def test_the_page_is_short():
    assert len((OWN + PAIR).splitlines()) <= 120


@pytest.mark.thorough
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_ones_own_is_trained_stopped_and_resumed_to_the_same_bits(
    name, tmp_path, monkeypatch, capsys
):
    folders = tmp_path / "undisturbed", tmp_path / "stopped"
    for folder in folders:
        folder.mkdir()
        (folder / f"{name}.py").write_text(FILES[name])
    options = ["--checkpoints.every=10", "--log-every=1"]
    with monkeypatch.context() as patch:
        patch.chdir(folders[0])
        assert cli.main(["train", f"{name}.py", *options]) == 0

    class Stopped(BaseException):
        """Nothing in the library catches it, as nothing catches SIGKILL."""

    later = Reporter.later

    def stop(self, step, metrics, work):
        if step == 33:
            raise Stopped
        later(self, step, metrics, work)

    with monkeypatch.context() as patch:
        patch.chdir(folders[1])
        with pytest.raises(Stopped), patch.context() as inner:
            inner.setattr(Reporter, "later", stop)
            cli.main(["train", f"{name}.py", *options])
        assert cli.main(["train", f"{name}.py", *options]) == 0
        assert "resuming after step 30" in capsys.readouterr().out
        assert outcome(folders[0]) == outcome(folders[1])
        assert cli.main(["evaluate", name]) == 0
        scores = json.loads(capsys.readouterr().out.splitlines()[-1])
        # ln 16 and ln 17 are those of guessing
        assert ("top3" in scores) == (name == "own") and scores["loss"] < 2.8
        (folders[1] / f"{name}.py").unlink()  # the run folder keeps a copy
        assert cli.main(["evaluate", name]) == 0


@pytest.mark.thorough
def test_an_edited_part_is_another_run_and_an_edited_comment_is_not(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = []
    for change in (
        (),
        ("(step + 1) / 10", "(step + 1) / 20"),
        ("    def open", "    # a comment\n    def open"),
    ):
        Path("own.py").write_text(OWN.replace(*change) if change else OWN)
        assert cli.main(["show", "own.py"]) == 0
        names.append(capsys.readouterr().out.splitlines()[-1])
    assert names[0] == names[2] != names[1]


HELPER = "def rate(step):\n    return {rate}\n"
USES_HELPER = """
from helper import rate
from jaxformer import training
from jaxformer.data.tasks import Reverse
from jaxformer.models import ModelConfig

experiment = training.Experiment(
    name="helped",
    model=ModelConfig(vocab_size=17, num_layers=1, d_model=16, num_heads=2, context_length=16),
    data=Reverse(),
    schedule=lambda experiment: rate,
    steps=2,
    batch_size=4,
    eval_batches=1,
)
"""


@pytest.mark.thorough
def test_a_run_whose_imports_changed_is_refused_with_the_field_and_the_file(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("helper.py").write_text(HELPER.format(rate="0.1"))
    Path("helped.py").write_text(USES_HELPER)
    assert cli.main(["train", "helped.py"]) == 0
    Path("helper.py").write_text(HELPER.format(rate="0.2 + 0"))
    monkeypatch.delitem(sys.modules, "helper")
    capsys.readouterr()
    assert cli.main(["evaluate", "helped"]) == 2
    error = capsys.readouterr().err
    assert (
        "schedule" in error
        and "helper.py changed since this run began" in error
        and error.count("\n") == 1
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The package from its wheel, without the checkout: a folder for PYTHONPATH."""
    return install_wheel(tmp_path_factory.mktemp("wheel"))


def jaxformer_in(installed, folder, *words):
    environment = os.environ | {"PYTHONPATH": str(installed), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "jaxformer", *words]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.mark.slow
def test_the_wheel_brings_its_experiments(installed, tmp_path):
    out, _ = jaxformer_in(
        installed, tmp_path, "train", "quickstart", "--steps=60", "--eval-batches=2"
    ).communicate()
    assert "validation loss" in out and "next: " in out, out
    out, _ = jaxformer_in(installed, tmp_path, "evaluate", "quickstart").communicate()
    assert json.loads(out.splitlines()[-1])["step"] == 60
    out, _ = jaxformer_in(installed, tmp_path, "list").communicate()
    assert "shakespeare_char_gpu" in out and "llama_7b" in out


@pytest.mark.fault
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_ones_own_outside_the_checkout_survives_kills(name, installed, tmp_path):
    folders = tmp_path / "undisturbed", tmp_path / "killed"
    for folder in folders:
        folder.mkdir()
        (folder / f"{name}.py").write_text(FILES[name])
    words = [
        "train",
        f"{name}.py",
        "--checkpoints.every=5",
        "--log-every=1",
        "--steps=200",
        "--eval-every=50",
    ]
    out, _ = jaxformer_in(installed, folders[0], *words).communicate(timeout=600)
    assert "validation loss" in out, out
    rng = random.Random(0)
    for reached in (20, 60, 120):
        process = jaxformer_in(installed, folders[1], *words)
        for line in process.stdout:
            step = re.match(r"step +(\d+)/200 loss", line)
            if step and int(step[1]) >= reached:
                break
        time.sleep(rng.uniform(0, 0.5))
        process.kill()
        process.communicate()
    out, _ = jaxformer_in(installed, folders[1], *words).communicate(timeout=600)
    assert "resuming after step" in out and "validation loss" in out, out
    assert outcome(folders[0]) == outcome(folders[1])
    out, _ = jaxformer_in(installed, folders[1], "evaluate", name).communicate(timeout=600)
    assert '"loss"' in out
    shutil.rmtree(folders[1])
