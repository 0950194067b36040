"""The page docs/your-own-family.md: a run begins from a folder of one's own family, and its weights
go back into one."""

import contextlib

import jax
import numpy as np
import pytest

from jaxformer import families, open_run
from jaxformer.families import Checkpoint
from tests.joints.harness import (
    answer,
    assert_resumes_to_the_same_bits,
    assert_same_on_eight_devices,
    assert_short,
    read_page,
    run_of,
)

PAGE = read_page("your-own-family")


def test_the_page_is_short():
    assert_short(PAGE)


@pytest.mark.thorough
def test_the_page_survives_a_kill_runs_on_eight_devices_and_goes_back(tmp_path, capsys):
    folder = assert_resumes_to_the_same_bits(PAGE, tmp_path)
    names = {"__name__": "mine"}
    exec(compile(PAGE["mine"], "mine.py", "exec"), names)
    with contextlib.chdir(folder):
        start = names["their_weights"](None, None)  # the folder is there: nothing is drawn
        run = open_run(run_of(folder, "mine"))
        checkpoint = Checkpoint(run.experiment.model, run.params, model_type="mine")
        families.save("trained", checkpoint, family=names["mine"])
        found = families.load("trained", family=names["mine"])
    assert found.config == run.experiment.model
    jax.tree.map(np.testing.assert_array_equal, found.params, run.params)
    moved = jax.tree.map(lambda new, old: np.abs(np.asarray(new - old)).max(), run.params, start)
    assert 0 < max(jax.tree.leaves(moved)) < 0.02  # 8 steps of Adam of at most 1e-3: it began there
    assert answer(folder, "mine", "def ", capsys, "--tokens=4").startswith("def ")
    assert_same_on_eight_devices(PAGE, tmp_path, whole=folder)
