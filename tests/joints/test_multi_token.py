"""The page about multi-token prediction: its file trains, and its module drafts."""

import pytest

from jaxformer import decoding, open_run
from jaxformer.models import spec
from jaxformer.objectives.multi_token import drafter
from jaxformer.params import paths
from tests.joints import harness

PAGE = harness.read_page("multi-token")


def test_the_page_is_short_and_names_what_is_public():
    assert list(PAGE) == ["ahead"]
    harness.assert_short(PAGE)


@pytest.mark.thorough
def test_the_modules_train_beside_the_model_and_draft(tmp_path, capsys):
    whole = harness.assert_resumes_to_the_same_bits(PAGE, tmp_path)
    folder = harness.run_of(whole, "ahead")
    saved = [name for name in harness.leaves(folder) if name.startswith("params/objective/")]
    assert "params/objective/modules/0/embedding/join/map/kernel" in saved
    assert not [name for name in saved if "tokens" in name]  # the table is the model's
    run = open_run(folder)
    assert set(paths(run.params)) == set(paths(spec(run.experiment.model)))
    scores = run.evaluate()
    assert scores["perplexity"] > 1 and scores["module_1_loss"] > 0
    model = run.experiment.model
    draft = drafter(model, run.params, run.checkpoint[1]["objective"])
    prompts = [list(b"def f(x):"), list(b"import ")]
    greedy = decoding.Sampling(temperature=0.0)
    found = decoding.speculate(model, run.params, prompts, 12, draft=draft, sampling=greedy)
    assert found.tokens == decoding.generate(model, run.params, prompts, 12, sampling=greedy)
    assert harness.answer(whole, "ahead", "def ", capsys, "--tokens=4").startswith("def ")
    harness.assert_same_on_eight_devices(PAGE, tmp_path, whole=whole)
