"""Rows 6 and 7: what changed between two starts of a run: its options, its file, its data, its
tokenizer."""

import json
import shutil

import pytest

from tests.faults.harness import Training, assert_same
from tests.tiny import EXPERIMENT, TEXT

OPTIONS = ("--steps=4", "--checkpoints.every=2", "--eval-every=4")


def runs(training):
    return sorted(path.name for path in (training.folder / "runs").glob("*-*") if path.is_dir())


def stopped(folder, *options, experiment=EXPERIMENT):
    """A run that was stopped after step 2 of 4."""
    training = Training(folder, *OPTIONS, *options, experiment=experiment)
    training.finish()
    shutil.rmtree(training.checkpoints / "4")
    return training


@pytest.mark.fault
def test_options_that_changed(tmp_path, report):
    """What decides numbers names another run, which says what differs; what does not changes in the
    same run."""
    training = stopped(tmp_path / "work")
    (first,) = runs(training)
    # logging, intervals, the folder of the runs: the same run, which says what changed
    said = training.finish("--log-every=1", "--checkpoints.every=1")
    assert runs(training) == [first] and "resuming after step 2" in said
    assert "changed since the last start: log_every: 2 -> 1" in said
    shutil.copytree(training.folder / "runs", training.folder / "moved")
    assert "this run is finished" in training.finish("--runs=moved")
    # numbers, and the length of the schedule: another run
    for option, field in (
        ("--optimizer.learning-rate=2e-3", "optimizer.learning_rate"),
        ("--steps=3", "steps"),
    ):
        before = runs(training)
        said = training.finish(option)
        assert len(runs(training)) == len(before) + 1
        assert f"a new run: runs/{first} differs in {field}" in said
    # shapes: the parameters that do not fit are named, with both shapes
    said = training.finish("--model.d-model=32", f"--initial=runs/{first}", "--name=wide", code=2)
    assert (
        "params/" in said
        and "float32[256,16]" in said
        and "float32[256,32]" in said
        and "Traceback" not in said
    )
    report(6, "options changed", trials=5, detected=5, recovered=5)


@pytest.mark.fault
def test_an_experiment_file_that_changed(tmp_path, report):
    """A comment changes nothing; a number is another run, and the first one opens as it was, by its
    copy of the file."""
    training = stopped(tmp_path / "work")
    (first,) = runs(training)
    file = training.folder / "experiments" / "tiny.py"
    file.write_text(EXPERIMENT.replace("batch_size=4", "batch_size=2") + "# edited\n")
    training.finish()
    assert len(runs(training)) == 2
    file.write_text(EXPERIMENT + "# edited\n")
    assert "resuming after step 2" in training.finish() and len(runs(training)) == 2
    described = training.folder / "runs" / first / "config.json"
    description = json.loads(described.read_text())
    described.write_text(json.dumps(description | {"seed": 1}))
    training.finish()  # its description is written again
    assert json.loads(described.read_text()) == description
    report(6, "experiment file changed", trials=3, detected=3, recovered=3)


DAMAGE = {
    "changed": lambda text: text.replace("quick", "quack", 1), "shortened": lambda text: text[:-20],
    "replaced": lambda text: "another text altogether. " * 100,
}  # fmt: skip


@pytest.mark.fault
def test_data_that_changed(tmp_path, report):
    """Refused by digest before anything is written; restored, the same command ends as if nothing
    had been."""
    training = Training(tmp_path / "undisturbed", *OPTIONS)
    training.finish()
    expected = training.ending()
    training = stopped(tmp_path / "work")
    text = training.folder / "text.txt"
    before = {path: path.read_bytes() for path in training.checkpoints.rglob("*") if path.is_file()}
    for damage in DAMAGE.values():
        text.write_text(damage(TEXT))
        said = training.finish(code=2)
        assert (
            "the data changed since this run began (digest" in said
            and f"--initial=runs/{training.run.name}" in said
        )
        assert "Traceback" not in said and all(
            path.read_bytes() == data for path, data in before.items() if "metrics" not in path.name
        )
    # on purpose: the advice of the message, as another run
    name = training.run.name
    said = training.finish(f"--initial=runs/{name}", "--name=onward")
    assert "validation loss" in said and len(list((training.folder / "runs").glob("onward-*"))) == 1
    text.write_text(TEXT)
    text.touch()
    assert "resuming after step 2" in training.finish()
    assert_same(training.ending(), expected)
    report(
        7,
        "data changed",
        trials=len(DAMAGE),
        detected=len(DAMAGE),
        recovered=len(DAMAGE),
        note="on purpose: --initial=RUN",
    )


@pytest.mark.fault
def test_a_tokenizer_that_changed(tmp_path, report):
    data = (
        'Corpus(path="text.txt", tokenizer="tokenizer.json", validation_fraction=0.1, '
        'cache="cache")'
    )
    experiment = EXPERIMENT.replace('Text(path="text.txt")', data)
    experiment = experiment.replace(
        "from jaxformer.data.sources import Text", "from jaxformer.data.corpus import Corpus"
    )
    work, state = tmp_path / "work", {"type": "bytes"}
    work.mkdir()
    (work / "tokenizer.json").write_text(json.dumps(state))
    training = stopped(work, experiment=experiment)
    for more in ("", "#"):
        changed = {"type": "characters", "characters": "".join({*TEXT, "\n"}) + more}
        (work / "tokenizer.json").write_text(json.dumps(changed))
        said = training.finish(code=2)
        assert "the data changed since this run began" in said and "Traceback" not in said
    (work / "tokenizer.json").write_text(json.dumps(state))
    assert "resuming after step 2" in training.finish()
    report(7, "tokenizer changed", trials=2, detected=2, recovered=2)
