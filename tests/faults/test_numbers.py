"""Row 8: numbers that go bad in a real run: nothing is changed by them, they are counted, kept,
replayed and named."""

import json
import sys

import pytest

from tests.faults.harness import Process, Training
from tests.tiny import EXPERIMENT, TEXT

BAD = "\x01"  # an objective of the user's own goes wrong where a batch has this byte
FILE = (
    EXPERIMENT
    + """
import dataclasses
import jax.numpy as jnp
from jaxformer.training import Spikes, TokenCrossEntropy


def objective(model, params, batch, context):
    sums = TokenCrossEntropy()(model, params, batch, context)
    return sums._replace(loss=sums.loss * jnp.where((batch["tokens"] == 1).any(), FACTOR, 1.0))


experiment = dataclasses.replace(
    experiment,
    objective=objective,
    steps=80,
    max_skipped=4,
    log_every=1,
    eval_every=80,
    spikes=Spikes(window=16),
)
"""
)
SOME = TEXT[:1000] + BAD + TEXT[1001:1500] + BAD + TEXT[1501:]


def train(folder, factor, text):
    training = Training(folder, experiment=FILE.replace("FACTOR", factor))
    (folder / "text.txt").write_text(text)
    return training


def skipped(training):
    lines = map(json.loads, (training.run / "metrics.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if line.get("skipped")]


@pytest.mark.fault
@pytest.mark.parametrize(
    ("factor", "words"),
    [("jnp.nan", "loss nan"), ("jnp.inf", "loss inf"), ("30", "far above the steps before")],
)
def test_some_bad_steps_change_nothing_and_are_counted(factor, words, tmp_path, report):
    training = train(tmp_path, factor, SOME)
    said = training.finish()
    assert 0 < said.count("changed nothing") <= len(skipped(training)) + 1 and words in said
    validation = json.loads((training.run / "result.json").read_text())["validation"]
    assert validation["loss"] < 5  # it learned from the others: 5.5 at the start
    count = said.count("changed nothing")
    report(
        8, f"some steps have a loss times {factor}", trials=count, detected=count, recovered=count
    )


@pytest.mark.fault
def test_steps_that_stay_bad_end_the_run_with_a_reproduction(tmp_path, report):
    training = train(tmp_path, "jnp.nan", TEXT.replace(" ", BAD))
    said = training.finish(code=3)
    assert "not finite for 4 steps in a row, up to step 3" in said and "Traceback" not in said
    assert "step 3: loss nan" in said and "gradient of" in said and "--replay" in said
    command = [sys.executable, "-m", "jaxformer", "evaluate", str(training.run), "--replay"]
    with Process(command, tmp_path, tmp_path / "replay") as process:
        assert process.end() == 0, process.said()
    found = json.loads(process.said().splitlines()[-1])
    assert (
        found["step"] == 3
        and found["loss"] == "NaN"
        and found["found"][0].startswith("gradient of")
    )
    report(
        8,
        "steps that stay bad",
        trials=1,
        detected=1,
        recovered=1,
        note="step, places and a replay",
    )
