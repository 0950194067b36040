"""A run that version 0.1.0 wrote on 2026-11-23.

Every later version must open it, and compute what it computed.

`python tests/runs/test_golden_run.py FOLDER` writes another one: beside this one, never in its
place.
"""

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxformer import cli, config, open_run
from jaxformer.config import files
from jaxformer.runs.manifest import fingerprints
from jaxformer.runs.run_folder import run_folder
from tests.tiny import EXPERIMENT, furnish

GOLDEN = Path(__file__).parents[1] / "fixtures" / "golden_run"
FILE = EXPERIMENT.replace("num_layers=1, d_model=16", "num_layers=2, d_model=8").replace(
    "steps=6", "ema_decay=0.9, steps=6"
)
# float32 on another machine: sums in another order, through two layers
TOLERANCE = 2e-5


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A copy of the run, beside the text that it was trained on."""
    monkeypatch.chdir(furnish(tmp_path, FILE))
    shutil.copytree(GOLDEN, tmp_path / "runs" / "golden")
    return tmp_path / "runs" / "golden"


@pytest.mark.thorough
def test_the_golden_run_is_opened_and_scores_as_it_did(folder, capsys):
    assert cli.main(["evaluate", str(folder)]) == 2  # another machine wrote it
    assert "--trust" in capsys.readouterr().err
    assert cli.main(["evaluate", str(folder), "--trust"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    expected = json.loads((folder / "result.json").read_text())["validation"]
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=TOLERANCE)


def test_every_number_of_the_golden_checkpoint_is_what_it_was(folder):
    """The fingerprints were written down outside of the checkpoint, too."""
    run = open_run(folder, trust=True)
    assert run.checkpoint[0] == 6
    assert fingerprints(jax.tree.leaves(run.params)) == json.loads(
        (GOLDEN.parent / "golden_run.json").read_text()
    )


# what version 0.1.0 called the runs of experiments that have not changed since then; a name here
# changes only with the experiment's own file
NAMES = {
    "finetune_lora": "178bb2f5",
    "gpt2_small": "5a7e19fc",
    "llama_7b": "197cc7c0",
    "masked_bytes": "02d1aeb5",
    "quickstart": "8f4b12de",
    "reverse": "f9dbb8b8",
    "shakespeare_char": "79b61953",
    "t5_span": "1809ebe5",
    "translate": "04b1cdcd",
    "vit_digits": "45987126",
    "vit_imagenet": "eedfb880",
}


def test_runs_have_the_names_that_they_had(folder):
    """A run that has another name now would start again beside the old one."""
    name = json.loads((GOLDEN.parent / "golden_run.name.json").read_text())
    assert run_folder(files.load("tiny"), "runs").path.name == name
    repository = GOLDEN.parents[2] / "experiments"
    found = {each: config.fingerprint(files.load(str(repository / f"{each}.py"))) for each in NAMES}
    assert found == NAMES


@pytest.mark.thorough
def test_the_golden_run_goes_on(folder, capsys):
    """From its checkpoint of step 4, to the loss that it had after step 6."""
    record = (folder / "metrics.jsonl").read_text()
    (path,) = (folder.parent.parent / "runs").iterdir()
    name = json.loads((GOLDEN.parent / "golden_run.name.json").read_text())
    path = path.rename(path.with_name(name))
    shutil.rmtree(path / "checkpoints" / "6")
    assert cli.main(["train", "tiny"]) == 0
    assert "resuming after step 4" in capsys.readouterr().out
    lines = [
        [json.loads(line) for line in text.splitlines()]
        for text in ((path / "metrics.jsonl").read_text(), record)
    ]
    losses = [[line.get("loss", line.get("validation_loss")) for line in found] for found in lines]
    np.testing.assert_allclose(*losses, rtol=TOLERANCE)


def write(folder: Path) -> None:
    """Trains the run and writes it there, with the fingerprints of its parameters beside it."""
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(furnish(Path(place), FILE)):
        subprocess.run([sys.executable, "-m", "jaxformer", "train", "tiny"], check=True)
        (run,) = Path("runs").glob("tiny-*")
        for name in ("report.html", "figures", "goodput.json"):
            path = run / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        prints = fingerprints(jax.tree.leaves(open_run(run).params))
        shutil.copytree(run, folder)
    folder.with_suffix(".json").write_text(json.dumps(prints))
    folder.with_suffix(".name.json").write_text(json.dumps(run.name))


if __name__ == "__main__":
    write(Path(sys.argv[1]).absolute())
