"""The pages about objectives, frozen models and variables: their files do what the pages say."""

import json

import numpy as np
import pytest

from jaxformer import open_run
from jaxformer.models import spec
from jaxformer.params import init as random, paths, random_key
from tests.joints import harness

PAGES = {
    stem: harness.read_page(stem) for stem in ("your-own-objective", "preferences", "variables")
}


@pytest.mark.parametrize("stem", PAGES)
def test_a_page_is_short_and_names_what_is_public(stem):
    harness.assert_short(PAGES[stem])


@pytest.mark.thorough
def test_parameters_of_an_objective_train_and_are_none_of_the_model(tmp_path, capsys):
    files = PAGES["your-own-objective"]
    whole = harness.assert_resumes_to_the_same_bits(files, tmp_path)
    folder = harness.run_of(whole, "two-tokens")
    saved = [name for name in harness.leaves(folder) if "objective/" in name]
    assert {"params/objective/map/kernel"} < set(saved)  # beside the optimizer's moments of it
    run = open_run(folder)
    assert set(paths(run.params)) == set(paths(spec(run.experiment.model)))
    start = random(run.recipe.spec, random_key(run.experiment.seed))["objective"]["map"]["kernel"]
    assert (np.asarray(run.checkpoint[1]["objective"]["map"]["kernel"]) != np.asarray(start)).all()
    said = capsys.readouterr().out
    assert (
        "parameters and 1,024 of the objective" in said
        and "tokens/s" in said
        and "perplexity" in said
    )
    assert harness.answer(whole, "two-tokens", "def ", capsys, "--tokens=8").startswith("def ")
    result = json.loads((folder / "result.json").read_text())
    assert run.evaluate()["loss"] == pytest.approx(result["validation"]["loss"], rel=1e-6)
    harness.assert_same_on_eight_devices(files, tmp_path, whole=whole)


@pytest.mark.thorough
def test_preferences_with_a_reference_and_with_the_base_of_an_adaptation(tmp_path, capsys):
    files = PAGES["preferences"]
    whole = harness.assert_resumes_to_the_same_bits(files, tmp_path)
    said = capsys.readouterr().out
    # above, the last file alone was killed
    without_factors = {name: files[name] for name in ("copies", "reversals")}
    harness.assert_resumes_to_the_same_bits(without_factors, tmp_path / "reference")
    for name in ("reversals", "reversals-lora"):
        folder = harness.run_of(whole, name)
        first, *_, last = (line["loss"] for line in harness.records(folder) if "loss" in line)
        # nothing is preferred at first
        assert first == pytest.approx(np.log(2), rel=1e-5) and last < first
        assert not [leaf for leaf in harness.leaves(folder) if "before" in leaf]
        scores = open_run(folder).evaluate()
        assert scores["unit"] == "pairs" and not {"perplexity", "bits", "tokens"} & set(scores)
        assert not [
            key
            for line in harness.records(folder)
            for key in line
            if "perplexity" in key or "bits" in key
        ]
    assert (
        "pairs/s" in said
        and "reference before: " in said
        and " a pair (all 32 examples, 32 pairs)" in said
    )
    harness.assert_same_on_eight_devices(files, tmp_path, whole=whole)


@pytest.mark.thorough
def test_the_bias_of_a_router_is_a_variable_of_the_model(tmp_path, capsys):
    files = {"balanced": PAGES["variables"]["balanced"]}
    whole = harness.assert_resumes_to_the_same_bits(files, tmp_path)
    folder = harness.run_of(whole, "balanced")
    saved = [name for name in harness.leaves(folder) if name.endswith("/feedforward/bias")]
    assert saved == ["params/layers/feedforward/bias"]  # no optimizer state
    bias = np.asarray(open_run(folder).params["layers"]["feedforward"]["bias"])
    np.testing.assert_allclose(bias, np.round(bias, 2), atol=1e-6)  # steps of 0.01, up or down
    assert bias.any() and np.abs(bias).max() <= 0.12 + 1e-6
    assert harness.answer(whole, "balanced", "def ", capsys, "--tokens=8").startswith("def ")
    harness.assert_same_on_eight_devices(files, tmp_path, whole=whole)


@pytest.mark.thorough
def test_a_code_book_of_the_objective_is_a_variable(tmp_path, capsys):
    files = {"codes": PAGES["variables"]["codes"]}
    whole = harness.assert_resumes_to_the_same_bits(files, tmp_path)
    folder = harness.run_of(whole, "codes")
    saved = [name for name in harness.leaves(folder) if "objective/" in name]
    assert sorted(saved) == ["params/objective/sum", "params/objective/uses"]  # no optimizer state
    uses = np.asarray(open_run(folder).checkpoint[1]["objective"]["uses"])
    # each state is nearest to one code
    np.testing.assert_allclose(uses.sum(), 16 * 0.9**12 + (1 - 0.9**12), rtol=1e-3)
    assert harness.answer(whole, "codes", "def ", capsys, "--tokens=8").startswith("def ")
    harness.assert_same_on_eight_devices(files, tmp_path, whole=whole)
