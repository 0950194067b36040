"""Pages of the book that fill the joints of data and scores: data from the model, scores and
pictures of one's own."""

import contextlib
import json

import pytest

from jaxformer import cli
from tests.joints import harness

COUNT = harness.read_page("data-from-the-model")
STRIPES = harness.read_page("your-own-scores")
SHORT = "--steps=10", "--eval-every=5"


@pytest.mark.parametrize("page", [COUNT, STRIPES], ids=["data-from-the-model", "your-own-scores"])
def test_the_page_is_short(page):
    harness.assert_short(page)


@pytest.mark.thorough
@pytest.mark.parametrize("page", [COUNT, STRIPES], ids=["data-from-the-model", "your-own-scores"])
def test_the_page_resumes_to_the_same_bits_and_trains_the_same_on_eight_devices(page, tmp_path):
    whole = harness.assert_resumes_to_the_same_bits(page, tmp_path, *SHORT)
    harness.assert_same_on_eight_devices(page, tmp_path, *SHORT, whole=whole)


@pytest.mark.thorough
def test_a_model_learns_to_count_from_its_own_answers(tmp_path, capsys):
    harness.train(tmp_path, COUNT)
    lines = harness.records(harness.run_of(tmp_path, "count"))
    rewards = [line["reward"] for line in lines if "reward" in line]
    assert rewards[0] < 0.3 and rewards[-1] > 0.9, rewards  # by chance 0.1
    said = harness.answer(tmp_path, "count", "3", capsys, "--temperature=0", "--tokens=4")
    assert said.splitlines()[-1] == "34567"


@pytest.mark.thorough
def test_pictures_of_a_metric_and_of_generate_lie_in_the_runs_folder(tmp_path, capsys):
    harness.train(tmp_path, STRIPES)
    run = harness.run_of(tmp_path, "stripes")
    scores = json.loads((run / "result.json").read_text())["validation"]
    assert scores["stripes"] > 0.5  # by chance 2^-12
    assert {path.name for path in run.glob("*.png")} == {
        f"samples-{step}.png" for step in (40, 80, 120)
    }
    said = capsys.readouterr().out
    assert "and the 1 of highest stripes" in said
    # without --prompt
    assert said.rstrip().endswith(f"python -m jaxformer generate runs/{run.name}")
    with contextlib.chdir(tmp_path):
        assert cli.main(["generate", "stripes"]) == 0
        assert capsys.readouterr().out == f"8 pictures\nwrote runs/{run.name}/answer.png\n"
        first = (run / "answer.png").read_bytes()
        assert cli.main(["generate", "stripes", "--seed=1"]) == 0
        # again, with other bytes
        assert capsys.readouterr().out.endswith(f"wrote runs/{run.name}/answer.png\n")
        assert first != (run / "answer.png").read_bytes()
        assert cli.main(["generate", "stripes"]) == 0 and first == (run / "answer.png").read_bytes()
        assert cli.main(["evaluate", "stripes"]) == 0
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert found["stripes"] == scores["stripes"]
