"""The page about distillation: a teacher, a student with a projection of its own, and a student
that learns from its own texts."""

import numpy as np
import pytest

from jaxformer import open_run
from jaxformer.models import spec
from jaxformer.params import paths
from tests.joints import harness

PAGE = harness.read_page("distillation")


def test_the_page_is_short_and_names_what_is_public():
    assert list(PAGE) == ["teacher", "student", "on-policy"]
    harness.assert_short(PAGE)


@pytest.mark.thorough
def test_a_student_is_resumed_and_split(tmp_path, capsys):
    files = {name: PAGE[name] for name in ("teacher", "student")}
    whole = harness.assert_resumes_to_the_same_bits(files, tmp_path)
    said = capsys.readouterr().out
    assert "reference teacher: " in said and "perplexity" in said
    folder = harness.run_of(whole, "student")
    saved = [name for name in harness.leaves(folder) if "objective/" in name]
    assert "params/objective/hidden/kernel" in saved
    assert not [name for name in harness.leaves(folder) if "teacher" in name]
    records = [line for line in harness.records(folder) if "divergence" in line]
    assert all(np.isfinite(line["hidden_error"]) and line["teacher_loss"] > 0 for line in records)
    run = open_run(folder)
    assert set(paths(run.params)) == set(paths(spec(run.experiment.model)))
    scores = run.evaluate()
    assert scores["unit"] == "tokens" and scores["perplexity"] == pytest.approx(
        np.exp(scores["loss"]), rel=1e-5
    )
    assert harness.answer(whole, "student", "def ", capsys, "--tokens=4").startswith("def ")
    harness.assert_same_on_eight_devices(files, tmp_path, whole=whole)


@pytest.mark.thorough
def test_a_student_of_its_own_texts_is_resumed(tmp_path):
    whole = harness.assert_resumes_to_the_same_bits(PAGE, tmp_path)
    first, *_, last = (
        line["loss"]
        for line in harness.records(harness.run_of(whole, "on-policy"))
        if "loss" in line
    )
    assert 0 < last < np.inf and 0 < first < np.inf
