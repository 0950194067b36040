"""Runs that go on: what users of other projects reported, tried on ours."""

import json

import pytest

from tests.runs.test_continued import first, runs_named, train  # noqa: F401 (a fixture)

pytestmark = pytest.mark.thorough  # each trains a run, some seconds long


def rates(folder):
    """{step: learning rate} of a run's record."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["learning_rate"] for line in lines if "learning_rate" in line}


@pytest.mark.report(
    "deepinsight/insightface#2143",
    "mlfoundations/open_clip#413",
    "ultralytics/yolov5#292",
    right="the rate of each step is that of the new schedule, over all steps",
)
@pytest.mark.report(
    "XPixelGroup/BasicSR#327",
    right="another rate takes effect, and the optimizer keeps its moments",
)
def test_the_schedule_is_the_new_one(first):  # noqa: F811 (the fixture)
    schedule = "--schedule=Linear(warmup=2)"
    assert train("--steps=12", schedule, "--optimizer.learning-rate=0.5", "--name=whole")[0] == 0
    options = "--steps=12", schedule, "--optimizer.learning-rate=0.5", "--name=more"
    assert train(*options, f"--continue-from={first}")[0] == 0
    (whole,), (more,) = runs_named(first, "whole"), runs_named(first, "more")
    expected, found = rates(whole), rates(more)
    assert found and found == {step: expected[step] for step in found}


@pytest.mark.report(
    "kohya-ss/sd-scripts#1559",
    "kohya-ss/sd-scripts#1999",
    "67372a/LoRA_Easy_Training_Scripts#66",
    right="steps are those of all runs together, also when it goes on twice",
)
def test_steps_add_up_over_several_runs(first):  # noqa: F811 (the fixture)
    assert train("--steps=9", "--name=second", f"--continue-from={first}")[0] == 0
    (second,) = runs_named(first, "second")
    code, said = train("--steps=12", "--name=third", f"--continue-from={second}")
    assert code == 0 and "after step 9" in said
    (third,) = runs_named(first, "third")
    assert min(rates(third)) >= 9 and max(rates(third)) == 11
