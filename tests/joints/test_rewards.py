"""The page about rewards: a user's own reward, in a file outside of the repository."""

import pytest

from tests.joints import harness

PAGE = harness.read_page("rewards")


def test_the_page_is_short_and_names_what_is_public():
    assert list(PAGE) == ["digits"]
    harness.assert_short(PAGE)


@pytest.mark.thorough
def test_a_reward_of_ones_own_is_resumed_and_answers(tmp_path, capsys):
    whole = harness.assert_resumes_to_the_same_bits(PAGE, tmp_path)
    records = harness.records(harness.run_of(whole, "digits"))
    assert all(0 <= line["reward"] <= 1 for line in records if "reward" in line)
    assert harness.answer(whole, "digits", "one", capsys, "--tokens=4")
