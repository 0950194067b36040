"""Scores of runs stand side by side only with a word about text, tokenizer and unit."""

import json

import numpy as np
import pytest
from etils import epath

from jaxformer.cli import sweep_report
from jaxformer.cli.trials import Trial
from jaxformer.data import sources
from jaxformer.data.tasks import Reverse
from jaxformer.models import ModelConfig
from jaxformer.runs import comparison
from jaxformer.runs.comparison import incomparable, incomparable_curves, split_digest
from jaxformer.runs.run_folder import RunFolder
from jaxformer.tools.analysis import report

SCORES = {"loss": 1.0, "tokens": 92, "examples": 23, "scored": "all 23 examples", "unit": "tokens"}
DIGESTS = {"data_digest": "a", "validation_digest": "b", "tokenizer_digest": "c"}


@pytest.fixture
def folder(tmp_path):
    """Makes a run's folder with these scores and digests."""

    def make(name, scores=(), records=(), **digests):
        run = RunFolder(epath.Path(tmp_path / name))
        run.path.mkdir()
        run.config.write_text(json.dumps({"name": name}))
        run.result.write_text(json.dumps({"validation": SCORES | dict(scores)}))
        run.environment.write_text(json.dumps(DIGESTS | digests))
        run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
        return run

    return make


def test_equal_text_tokenizer_and_unit_are_compared(folder):
    assert incomparable([folder("one"), folder("two")]) == ""
    # other training data, the same text that is scored
    assert incomparable([folder("three"), folder("four", data_digest="other")]) == ""


@pytest.mark.parametrize(
    "scores, digests, word",
    [
        ({"unit": "pairs"}, {}, "units"),
        ({}, {"tokenizer_digest": "other"}, "tokenizers"),
        ({"tokens": 40}, {"tokenizer_digest": "other"}, "tokenizers"),  # the cause, not the count
        ({"tokens": 40, "scored": "the first 10 of 23 examples"}, {}, "text"),
        ({}, {"validation_digest": "other"}, "validation splits"),
        ({}, {"validation_digest": "", "data_digest": "other"}, "different data"),  # an older run
    ],
)
def test_what_cannot_be_compared_is_marked_everywhere(folder, monkeypatch, scores, digests, word):
    runs = [folder("one"), folder("two"), folder("Other", scores, **digests)]
    warning = incomparable(runs)
    assert word in warning and "Other" in warning
    assert warning[0].isupper() and warning[-1] == "."
    page = report.report(runs, [{}, {}, {}], runs[0].path / "figures")
    assert word in page
    trials = [Trial({"seed": "0"}, None, run, run.last_scores()) for run in runs]
    monkeypatch.setattr(sweep_report, "run_folder", lambda experiment, runs: experiment)
    assert warning in sweep_report.table(trials, "runs")


def test_curves_of_other_parts_are_marked(folder):
    def record(examples):
        return {"step": 3, "validation_loss": 1.0} | ({"validation_examples": examples})

    eighty, forty = folder("a", records=[record(80)]), folder("b", records=[record(40)])
    whole = folder("c", records=[{"step": 3, "validation_loss": 1.0}])
    without = folder("d", records=[{"step": 3, "loss": 1.0}])
    assert incomparable_curves([eighty, without]) == ""
    for pair in ([eighty, forty], [whole, forty]):
        assert incomparable(pair) == "" and "first 40 examples" in incomparable_curves(pair)
        assert "first 40 examples" in report.report(pair, [{}, {}], eighty.path / "figures")


def windows(tokens, length=8):
    return sources.Windows(tokens, length, stride=length)


def test_a_split_has_the_digest_of_its_text():
    tokens = np.random.default_rng(0).integers(0, 200, 1000)
    digest = split_digest(windows(tokens))
    # neither the window nor the type of the file changes the text
    assert digest == split_digest(windows(tokens.astype(np.uint8), 16))
    for place in (0, 500, 999):
        changed = tokens.copy()
        changed[place] += 1
        assert split_digest(windows(changed)) != digest
    assert split_digest(windows(tokens[:-1])) != digest


def test_a_split_of_examples_has_the_digest_of_its_examples():
    rng = np.random.default_rng(0)
    images = rng.normal(size=(20, 4, 4)).astype(np.float32)
    examples = [{"image": image, "weights": np.float32(1)} for image in images]
    digest = split_digest(examples)
    assert digest == split_digest([dict(reversed(example.items())) for example in examples])
    for place in (0, 7, 19):
        changed = [*examples]
        changed[place] = examples[place] | {"image": images[place] + 1}
        assert split_digest(changed) != digest
    assert split_digest(examples[:-1]) != digest


def test_of_a_large_split_evenly_spaced_parts_are_read(monkeypatch):
    monkeypatch.setattr(comparison, "MOST_ROWS", 5)
    read = []

    class Split(list):
        def take_rows(self, indices):
            read.extend(indices.tolist())
            return {"weights": np.ones(len(indices), np.float32)}

    assert split_digest(Split(range(101)))
    assert read == [0, 0, 25, 50, 75, 100]


def test_an_unreadable_example_leaves_its_error_to_the_evaluation():
    class Broken(list):
        def take_rows(self, indices):
            raise OSError("no such image")

    assert split_digest(Broken(range(3))) == ""


def test_every_data_set_says_what_it_validates_on(tmp_path, monkeypatch):
    """A later start of the run with the same data reads no example for it."""
    model = ModelConfig(vocab_size=12, num_layers=1, d_model=8, num_heads=1, context_length=8)
    folder = RunFolder(epath.Path(tmp_path))
    task = Reverse(vocab_size=11, length=4, examples=64, validation_examples=23).open(model)
    found = comparison.digests_of(task, folder)
    assert found["data_digest"] == task.digest and len(found["validation_digest"]) == 64
    assert found["tokenizer_digest"] == ""
    folder.write(folder.environment, json.dumps(found))
    monkeypatch.setattr(comparison, "split_digest", lambda split: "read again")
    assert comparison.digests_of(task, folder) == found
    other = Reverse(vocab_size=11, length=3, examples=64, validation_examples=23).open(model)
    assert comparison.digests_of(other, folder)["validation_digest"] == "read again"
